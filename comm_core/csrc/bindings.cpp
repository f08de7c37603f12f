// The Python module comm_core._C: the engine (torch/bindings_engine.cpp), the link's gate, and instances_of.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "engine/link_gate.h"

namespace py = pybind11;

namespace commsched {

void bind_engine(py::module_& m);

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

const std::atomic<bool> kNever{false};

void bind_gate(py::module_& m) {
  PYBIND11_NUMPY_DTYPE(Passage, traffic, waiting, asked, start, end, bytes);
  py::enum_<Traffic>(m, "Traffic")
      .value("halo", Traffic::halo)
      .value("activation", Traffic::activation)
      .value("gradient", Traffic::gradient);
  py::class_<LinkGate, std::unique_ptr<LinkGate, py::nodelete>>(m, "LinkGate")
      .def("begin", &LinkGate::begin, py::arg("traffic"), py::arg("bytes"), py::arg("patience"), NoGil())
      .def("end", &LinkGate::end, py::arg("number"), NoGil())
      .def(
          "passing", [](LinkGate& gate, Traffic traffic, int64_t bytes) { gate.pass(traffic, bytes, kNever); }, py::arg("traffic"),
          py::arg("bytes"), NoGil())
      .def("held_back", &LinkGate::held_back, NoGil())
      .def("record", &LinkGate::record, py::arg("on"), NoGil())
      .def(
          "passages",
          [](LinkGate& gate, bool clear) {
            std::vector<Passage> found;
            {
              const py::gil_scoped_release no_gil;
              found = gate.passages(clear);
            }
            return py::array_t<Passage>(static_cast<py::ssize_t>(found.size()), found.data());
          },
          py::arg("clear") = true);
  m.def("link_gate", &LinkGate::of_process, py::return_value_policy::reference);
}

// Among all objects are tuples that other threads are still building, which fails if anybody else holds them.
// So everything is let go before this returns and another thread can get the interpreter.
py::list instances_of(const py::type& wanted) {
  const py::list all = py::module_::import("gc").attr("get_objects")();
  py::list found;
  for (const py::handle thing : all) {
    // By type: isinstance() would call a proxy's own __class__.
    if (PyType_IsSubtype(Py_TYPE(thing.ptr()), reinterpret_cast<PyTypeObject*>(wanted.ptr())) != 0) {
      found.append(thing);
    }
  }
  return found;
}

}  // namespace
}  // namespace commsched

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
#ifdef COMMSCHED_WITH_CUDA
  m.attr("CUDA_BUILT") = true;
#else
  m.attr("CUDA_BUILT") = false;
#endif
  commsched::bind_engine(m);
  commsched::bind_gate(m);
  m.def("instances_of", &commsched::instances_of, py::arg("type"));
}
