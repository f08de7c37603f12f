// Which pairs of types there are kernels for.
#pragma once

// The gradient's type and the parameter's.
#define COMMSCHED_UPDATES(DO)       \
  DO(f32_f32, float, float)         \
  DO(f16_f16, Half, Half)           \
  DO(bf16_bf16, BFloat16, BFloat16) \
  DO(f32_f16, float, Half)          \
  DO(f32_bf16, float, BFloat16)     \
  DO(f16_f32, Half, float)          \
  DO(bf16_f32, BFloat16, float)

// What is copied also comes in double.
#define COMMSCHED_COPIES(DO)     \
  COMMSCHED_UPDATES(DO)          \
  DO(f64_f64, double, double)    \
  DO(f64_f16, double, Half)      \
  DO(f64_bf16, double, BFloat16) \
  DO(f16_f64, Half, double)      \
  DO(bf16_f64, BFloat16, double)
