// The channel of messages, in Python's calls.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commsched {

void bind_messages(py::module_& m);

}  // namespace commsched
