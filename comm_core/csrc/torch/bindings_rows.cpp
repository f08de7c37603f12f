// Python's view of rows: which of them a gradient has changed since a part of it was sent.
#include "bindings_rows.h"

#include <torch/csrc/utils/pybind.h>

namespace commsched {
namespace {

EngineError usage(const std::string& text) { return EngineError(ErrorKind::usage, text); }

void changed_rows(const at::Tensor& part, const at::Tensor& whole, at::Tensor& changed) {
  const auto fits = [&](const at::Tensor& t) {
    return t.device().is_cpu() && t.dim() == 2 && t.is_contiguous() && t.sizes() == whole.sizes() &&
           t.scalar_type() == whole.scalar_type();
  };
  if (!fits(whole) || !fits(part)) throw usage("rows are compared in two contiguous matrices of one shape and type on the CPU");
  check_changed(changed, whole.size(0));
  auto* found = changed.data_ptr<int32_t>();
  const py::gil_scoped_release no_gil;
  const size_t rows = whole.size(0), row = whole.size(1);
  if (whole.scalar_type() == at::kFloat) {
    found[0] = static_cast<int32_t>(find_changed(part.data_ptr<float>(), whole.data_ptr<float>(), rows, row, found + 1));
  } else if (whole.scalar_type() == at::kDouble) {
    found[0] = static_cast<int32_t>(find_changed(part.data_ptr<double>(), whole.data_ptr<double>(), rows, row, found + 1));
  } else {
    throw usage(std::string("rows of float32 and float64 can be compared, not of ") + c10::toString(whole.scalar_type()));
  }
}

}  // namespace

void check_changed(const at::Tensor& changed, int64_t rows) {
  if (changed.device().is_cpu() && changed.dim() == 1 && changed.is_contiguous() && changed.scalar_type() == at::kInt &&
      changed.numel() == rows + 1) {
    return;
  }
  throw usage("changed= must be a contiguous tensor of int32 on the CPU with 1 + " + std::to_string(rows) +
              " elements: the number of changed rows, then which; but it has " + std::to_string(changed.numel()) + " of " +
              c10::toString(changed.scalar_type()));
}

void take_changed(BucketSpec& spec, const at::Tensor& changed) {
  if (spec.row == 0 || spec.gather_ptr == spec.reduce_ptr || spec.dtype != spec.gather_dtype) {
    throw usage("bucket '" + spec.name +
                "' cannot have changed= without row= and without gather= of its own type: changed rows are"
                " summed, and written over those that another bucket has gathered");
  }
  check_changed(changed, static_cast<int64_t>(spec.count / spec.row));
  spec.changed = changed.data_ptr<int32_t>();
  spec.owner = std::make_shared<std::pair<std::shared_ptr<void>, at::Tensor>>(spec.owner, changed);
}

void bind_rows(py::module_& m) { m.def("changed_rows", &changed_rows, py::arg("part"), py::arg("whole"), py::arg("changed")); }

}  // namespace commsched
