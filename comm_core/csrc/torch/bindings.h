// The parts of the Python module comm_core._C that other files define.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commsched {

// The engine, its channels and transports, and rows of gradients; translates the engine's exceptions.
void bind_engine(py::module_& m);

// Memory that user code may keep, and who keeps it: see bindings_memory.cpp.
void bind_memory(py::module_& m);

}  // namespace commsched
