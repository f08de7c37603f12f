// Fusion kernels for the CPU: many tensors to one flat buffer and back, with scaling and change of type on the way.
//
// They run on the calling thread alone. The caller is usually the communication thread, and a kernel that took more
// cores would take them from the backward it is meant to hide behind.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace commsched {

// buffer[0:n] = scale * concat(flatten(t) for t in tensors), converted to the buffer's type; the rest becomes zero, so
// that a buffer padded to a multiple of the world size carries no old values.
void pack(const std::vector<at::Tensor>& tensors, const at::Tensor& buffer, double scale);

// The inverse: each tensor = scale * its part of the buffer, converted to the tensor's type.
void unpack(const at::Tensor& buffer, const std::vector<at::Tensor>& tensors, double scale);

// values *= scale, in place.
void scale_(const at::Tensor& values, double scale);

// out = scale * (parts[0] + parts[1] + ...), always added in this order, so that the sum does not depend on who arrived first.
// Half types are added in float and rounded once. `out` may be one of the parts.
void sum_in_order(const std::vector<at::Tensor>& parts, const at::Tensor& out, double scale);

}  // namespace commsched
