// The Python module comm_core._C: one bind_*() call per area.
#include <torch/csrc/utils/pybind.h>

#include "fusion.h"
#include "torch/bindings_engine.h"
#include "torch/bindings_gate.h"

namespace {

void bind_fusion(py::module_& m) {
  // Tensors are only read and written here, no Python object is touched: the GIL is free while the bytes move.
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("pack", &commsched::pack, py::arg("tensors"), py::arg("buffer"), py::arg("scale") = 1.0, NoGil());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
#ifdef COMMSCHED_WITH_CUDA
  m.attr("CUDA_BUILT") = true;
#else
  m.attr("CUDA_BUILT") = false;
#endif
  bind_fusion(m);
  commsched::bind_engine(m);
  commsched::bind_gate(m);
}
