// Blocks of 256 float32 elements as one float32 scale and a byte for each element, in one of two codes: qi8 (int8, scale =
// largest magnitude / 127) or qf8 (E4M3, scale = largest magnitude / 448).
#pragma once

#include "instruction_sets.h"
#include "types.h"

namespace commsched {

// Writes wire_bytes(wire, n) bytes that stand for in[i] * scale + residual[i], and leaves in `residual` what rounding lost.
// A block that is not finite becomes NaN, except its zeros, and keeps its residual. Without a residual (nullptr) the loss is
// forgotten.
void quantise(const float* in, size_t n, double scale, float* residual, void* out, DType wire,
              Instructions set = best_instructions());

// out[i] = (parts[0][i] + parts[1][i] + ...) * scale of n quantised elements each, added in float32 in the order of `parts`.
void sum_quantised(const void* const* parts, int num_parts, DType wire, float* out, size_t n, double scale,
                   Instructions set = best_instructions());

}  // namespace commsched
