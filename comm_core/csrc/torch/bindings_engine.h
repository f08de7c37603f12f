#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commsched {

void bind_engine(py::module_& m);

}  // namespace commsched
