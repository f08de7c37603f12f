// Python's view of the link's gate. After bind_engine(), which knows Channel.
#include "bindings_gate.h"

#include <pybind11/numpy.h>

#include "engine/link_gate.h"

namespace commsched {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

const std::atomic<bool> kNever{false};

}  // namespace

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
          "passing", [](LinkGate& gate, Traffic traffic, int64_t bytes) { gate.pass(traffic, bytes, kNever); },
          py::arg("traffic"), py::arg("bytes"), NoGil())
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

}  // namespace commsched
