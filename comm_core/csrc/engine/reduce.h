// Sums in rank order, casts and scaling of flat arrays. Half types are added in float and rounded once.
#pragma once

#include <string>

#include "types.h"

namespace commsched {

// out[i] = (parts[0][i] + parts[1][i] + ...) * scale. Every element is added in the order of `parts`, so the result does not
// depend on how a buffer was cut into segments. `parts` have type `from`, `out` has type `to`; out may be one of the parts.
void sum_in_order(const void* const* parts, int num_parts, DType from, void* out, DType to, size_t n, double scale);

// to[i] = from[i] * scale; the arrays may be the same one when the types are. With blocks as `to_type`, `residual` is what rounding
// has lost so far (or none): see quantise().
void convert(const void* from, DType from_type, void* to, DType to_type, size_t n, double scale, float* residual = nullptr);

// Throws EngineError(usage) unless values of `dtype` may travel as `wire`: itself, a smaller floating type, or blocks for float32.
void check_wire(DType dtype, DType wire);

}  // namespace commsched
