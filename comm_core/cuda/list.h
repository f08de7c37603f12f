// Which pairs of types there are kernels for: a gradient's and its bucket's.
#pragma once

#define COMMSCHED_COPIES(DO)        \
  DO(f32_f32, float, float)         \
  DO(f64_f64, double, double)       \
  DO(f16_f16, Half, Half)           \
  DO(bf16_bf16, BFloat16, BFloat16) \
  DO(f32_f16, float, Half)          \
  DO(f32_bf16, float, BFloat16)     \
  DO(f64_f16, double, Half)         \
  DO(f64_bf16, double, BFloat16)
