#include "fusion.h"

#include <ATen/Dispatch.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace commsched {
namespace {

// Sums are formed block by block in a small array of the wider type; this many elements stay in the first-level cache.
constexpr int64_t kBlock = 1024;

// The type that arithmetic between two storage types is done in: double if either is double, else float.
template <typename A, typename B>
using Wide = std::conditional_t<std::is_same_v<A, double> || std::is_same_v<B, double>, double, float>;

#define DISPATCH(TYPE, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND2(at::ScalarType::Half, at::ScalarType::BFloat16, TYPE, "fusion", __VA_ARGS__)

void check_tensor(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), what, " must be on the CPU, but is on ", tensor.device());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, what, " must be dense, but is ", tensor.layout());
  const auto type = tensor.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16, what,
                    " must be float32, float64, float16 or bfloat16, but is ", type);
}

void check_flat(const at::Tensor& tensor, const char* what) {
  check_tensor(tensor, what);
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.is_contiguous(), what, " must be one-dimensional and contiguous, but has sizes ",
                    tensor.sizes(), " and strides ", tensor.strides());
}

int64_t check_fits(const std::vector<at::Tensor>& tensors, const at::Tensor& buffer) {
  check_flat(buffer, "the buffer");
  int64_t total = 0;
  for (const auto& tensor : tensors) {
    check_tensor(tensor, "each tensor");
    total += tensor.numel();
  }
  TORCH_CHECK_VALUE(total <= buffer.numel(), "the tensors have ", total, " elements, but the buffer has room for ",
                    buffer.numel());
  return total;
}

template <typename From, typename To>
void convert(const From* from, To* to, int64_t n, double scale) {
  using Math = Wide<From, To>;
  if (scale == 1.0) {
    if constexpr (std::is_same_v<From, To>) {
      std::memcpy(to, from, n * sizeof(To));
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(static_cast<Math>(from[i]));
    }
    return;
  }
  const Math factor = static_cast<Math>(scale);
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(static_cast<Math>(from[i]) * factor);
}

// Both tensors are contiguous and have the same number of elements.
void convert(const at::Tensor& from, const at::Tensor& to, double scale) {
  DISPATCH(from.scalar_type(), [&] {
    const auto* source = from.const_data_ptr<scalar_t>();
    DISPATCH(to.scalar_type(), [&] { convert(source, to.mutable_data_ptr<scalar_t>(), to.numel(), scale); });
  });
}

template <typename Math, typename T>
void sum_block(const std::vector<const T*>& parts, T* out, int64_t begin, int64_t end, Math scale) {
  Math sums[kBlock];
  const int64_t n = end - begin;
  for (int64_t i = 0; i < n; ++i) sums[i] = static_cast<Math>(parts[0][begin + i]);
  for (size_t p = 1; p < parts.size(); ++p) {
    const T* part = parts[p] + begin;
    for (int64_t i = 0; i < n; ++i) sums[i] += static_cast<Math>(part[i]);
  }
  for (int64_t i = 0; i < n; ++i) out[begin + i] = static_cast<T>(sums[i] * scale);
}

}  // namespace

void pack(const std::vector<at::Tensor>& tensors, const at::Tensor& buffer, double scale) {
  const int64_t total = check_fits(tensors, buffer);
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    convert(tensor.contiguous(), buffer.narrow(0, offset, tensor.numel()), scale);
    offset += tensor.numel();
  }
  const size_t size = buffer.element_size();
  std::memset(static_cast<char*>(buffer.mutable_data_ptr()) + total * size, 0, (buffer.numel() - total) * size);
}

void unpack(const at::Tensor& buffer, const std::vector<at::Tensor>& tensors, double scale) {
  check_fits(tensors, buffer);
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    const auto part = buffer.narrow(0, offset, tensor.numel());
    if (tensor.is_contiguous()) {
      convert(part, tensor, scale);
    } else {
      const auto dense = at::empty(tensor.sizes(), tensor.options());
      convert(part, dense, scale);
      tensor.detach().copy_(dense);
    }
    offset += tensor.numel();
  }
}

void scale_(const at::Tensor& values, double scale) {
  check_flat(values, "the values");
  if (scale != 1.0) convert(values, values, scale);
}

void sum_in_order(const std::vector<at::Tensor>& parts, const at::Tensor& out, double scale) {
  check_flat(out, "the output");
  TORCH_CHECK_VALUE(!parts.empty(), "there must be at least one part to add");
  for (const auto& part : parts) {
    check_flat(part, "each part");
    TORCH_CHECK_VALUE(part.numel() == out.numel() && part.scalar_type() == out.scalar_type(), "each part must have ",
                      out.numel(), " elements of ", out.scalar_type(), " as the output, but one has ", part.numel(), " of ",
                      part.scalar_type());
  }
  DISPATCH(out.scalar_type(), [&] {
    using Math = Wide<scalar_t, scalar_t>;
    std::vector<const scalar_t*> pointers;
    for (const auto& part : parts) pointers.push_back(part.const_data_ptr<scalar_t>());
    auto* target = out.mutable_data_ptr<scalar_t>();
    for (int64_t begin = 0; begin < out.numel(); begin += kBlock) {
      sum_block<Math>(pointers, target, begin, std::min(begin + kBlock, out.numel()), static_cast<Math>(scale));
    }
  });
}

}  // namespace commsched
