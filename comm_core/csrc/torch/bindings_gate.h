#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commsched {

void bind_gate(py::module_& m);

}  // namespace commsched
