// Corrections of rows in Python's calls: see BucketSpec::changed.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "engine/rows.h"
#include "engine/types.h"

namespace commsched {

// Throws unless `changed` can hold the numbers of so many rows.
void check_changed(const at::Tensor& changed, int64_t rows);

// Makes a bucket of rows a correction.
void take_changed(BucketSpec& spec, const at::Tensor& changed);

void bind_rows(py::module_& m);

}  // namespace commsched
