// Quantised blocks in Python's calls, for tests and measurements: see quantise.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commsched {

void bind_blocks(py::module_& m);

}  // namespace commsched
