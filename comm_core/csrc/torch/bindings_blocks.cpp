// Python's view of quantised blocks: the bytes that stand for a tensor, and sums of such bytes.
#include "bindings_blocks.h"

#include <ATen/ops/empty.h>

#include "dtypes.h"
#include "engine/quantise.h"

namespace commsched {
namespace {

void check(bool right, const char* needed) {
  if (!right) throw EngineError(ErrorKind::usage, std::string("quantised blocks need ") + needed);
}

bool is_flat(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.device().is_cpu() && tensor.dim() == 1 && tensor.is_contiguous() && tensor.scalar_type() == type;
}

DType blocks_of(const py::object& wire_dtype) {
  const DType wire = wire_of(wire_dtype.cast<at::ScalarType>());
  check(in_blocks(wire), "wire_dtype=torch.int8 or torch.float8_e4m3fn");
  return wire;
}

Instructions instructions(bool baseline) { return baseline ? Instructions::baseline : best_instructions(); }

at::Tensor quantise_blocks(const at::Tensor& values, const py::object& wire_dtype, const std::optional<at::Tensor>& residual,
                           double scale, bool baseline) {
  const DType wire = blocks_of(wire_dtype);
  check(is_flat(values, at::kFloat), "a flat contiguous tensor of float32 on the CPU");
  check(!residual || (is_flat(*residual, at::kFloat) && residual->numel() == values.numel()), "a residual like the values");
  const size_t n = values.numel();
  at::Tensor bytes = at::empty({static_cast<int64_t>(wire_bytes(wire, n))}, at::kByte);
  const py::gil_scoped_release no_gil;
  float* const lost = residual ? residual->data_ptr<float>() : nullptr;
  quantise(values.data_ptr<float>(), n, scale, lost, bytes.data_ptr(), wire, instructions(baseline));
  return bytes;
}

at::Tensor sum_blocks(const std::vector<at::Tensor>& parts, size_t count, const py::object& wire_dtype, double scale,
                      bool baseline) {
  const DType wire = blocks_of(wire_dtype);
  check(!parts.empty(), "at least one part");
  std::vector<const void*> addresses;
  for (const at::Tensor& part : parts) {
    check(is_flat(part, at::kByte) && part.numel() == static_cast<int64_t>(wire_bytes(wire, count)), "parts of the same elements");
    addresses.push_back(part.data_ptr());
  }
  at::Tensor sums = at::empty({static_cast<int64_t>(count)}, at::kFloat);
  const py::gil_scoped_release no_gil;
  sum_quantised(addresses.data(), static_cast<int>(addresses.size()), wire, sums.data_ptr<float>(), count, scale,
                instructions(baseline));
  return sums;
}

}  // namespace

void bind_blocks(py::module_& m) {
  m.def("quantise_blocks", &quantise_blocks, py::arg("values"), py::arg("wire_dtype"), py::arg("residual") = py::none(),
        py::arg("scale") = 1.0, py::arg("baseline") = false);
  m.def("sum_blocks", &sum_blocks, py::arg("parts"), py::arg("count"), py::arg("wire_dtype"), py::arg("scale") = 1.0,
        py::arg("baseline") = false);
}

}  // namespace commsched
