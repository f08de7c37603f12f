// Memory that user code may keep, and who keeps it, in Python's calls: see bindings_memory.cpp.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commsched {

void bind_memory(py::module_& m);

}  // namespace commsched
