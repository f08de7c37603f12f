#include "fusion.h"

#include <ATen/Dispatch.h>

#include <cstring>
#include <type_traits>

namespace commsched {
namespace {

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

}  // namespace commsched
