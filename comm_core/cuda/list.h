// Which kernels there are: to pack, a gradient's type and its bucket's; to quantise and to sum, the code.
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

#define COMMSCHED_CODES(CODE) \
  CODE(qi8, Int8Code)         \
  CODE(qf8, E4m3Code)
