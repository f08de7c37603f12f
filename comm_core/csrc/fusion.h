// The fusion kernel for the CPU: many tensors into one flat buffer, with scaling and change of type on the way.
//
// It runs on the calling thread alone: more threads would take cores from the backward that it should hide behind.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace commsched {

// buffer[0:n] = scale * concat(flatten(t) for t in tensors), converted to the buffer's type; the rest becomes zero, so
// that a buffer padded to a multiple of the world size carries no old values.
void pack(const std::vector<at::Tensor>& tensors, const at::Tensor& buffer, double scale);

}  // namespace commsched
