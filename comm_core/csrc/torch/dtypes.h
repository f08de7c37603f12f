// The engine's types and torch's.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "engine/types.h"

namespace commsched {

inline at::ScalarType scalar_type(DType dtype) {
  constexpr at::ScalarType types[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,     at::kInt,
                                      at::kLong,  at::kByte,   at::kChar, at::kFloat8_e4m3fn};
  return types[static_cast<int>(dtype)];
}

// Throws EngineError(usage) for a type that the engine does not know.
inline DType dtype_of(at::ScalarType type) {
  for (DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i32, DType::i64, DType::u8}) {
    if (scalar_type(dtype) == type) return dtype;
  }
  throw EngineError(ErrorKind::usage, std::string("the engine moves float32, float64, float16, bfloat16, int32, int64 and "
                                                  "uint8, but a tensor has type ") +
                                          c10::toString(type));
}

// The type in which a bucket's gradients travel: blocks for torch's types of one byte.
inline DType wire_of(at::ScalarType type) {
  for (DType dtype : {DType::qi8, DType::qf8}) {
    if (scalar_type(dtype) == type) return dtype;
  }
  return dtype_of(type);
}

}  // namespace commsched
