// The storage types of tensors and how they are computed with: double with double, everything else with float.
//
// This header and the others that kernels.cu includes are complete in themselves: nvcc, NVRTC (which has no standard
// headers) and a plain C++ compiler (the tests) all read the same text.
#pragma once

#ifdef __CUDACC__
#define COMMSCHED_HD __host__ __device__ __forceinline__
#else
// Always inlined: into functions for an instruction set of their own, too (engine/instruction_sets.h).
#define COMMSCHED_HD inline __attribute__((always_inline))
#endif

namespace commsched {

using Int64 = long long;

struct Half {
  unsigned short bits;
};

struct BFloat16 {
  unsigned short bits;
};

COMMSCHED_HD unsigned bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  unsigned bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

COMMSCHED_HD float float_of(unsigned bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// Four bytes of a message, at a multiple of four bytes on a GPU.
COMMSCHED_HD unsigned load_word(const unsigned char* at) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const unsigned*>(at);
#else
  unsigned word;
  __builtin_memcpy(&word, at, sizeof(word));
  return word;
#endif
}

COMMSCHED_HD void store_word(unsigned char* at, unsigned word) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<unsigned*>(at) = word;
#else
  __builtin_memcpy(at, &word, sizeof(word));
#endif
}

// Each rounded by itself, with subnormal numbers, as the engine's processors do it. The plain operators are not: nvcc fuses a
// product into a sum, and CuPy compiles with -ftz=true, which makes subnormal numbers zero. PTX with .rn and without .ftz does
// neither.
#ifdef __CUDA_ARCH__
#define COMMSCHED_ROUNDED(NAME, PTX, OPERATOR)                      \
  COMMSCHED_HD float NAME(float a, float b) {                       \
    float result;                                                   \
    asm(PTX ".rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b)); \
    return result;                                                  \
  }
#else
#define COMMSCHED_ROUNDED(NAME, PTX, OPERATOR) \
  COMMSCHED_HD float NAME(float a, float b) { return a OPERATOR b; }
#endif
COMMSCHED_ROUNDED(plus, "add", +)
COMMSCHED_ROUNDED(minus, "sub", -)
COMMSCHED_ROUNDED(times, "mul", *)
COMMSCHED_ROUNDED(over, "div", /)

// Round to nearest, ties to even, in integers: what the instructions below do, for where they do not exist.
COMMSCHED_HD unsigned short half_bits(float value) {
  const unsigned bits = bits_of(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<unsigned short>(sign | 0x7e00u);   // NaN
  if (size >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);  // rounds to infinity
  if (size < 0x38800000u) {
    // Subnormal: adding 0.5 puts the last bit that a half has where float rounds.
    return static_cast<unsigned short>(sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000u));
  }
  return static_cast<unsigned short>(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13));
}

COMMSCHED_HD float half_value(unsigned short half) {
  const unsigned sign = (half & 0x8000u) << 16, size = half & 0x7fffu;
  if (size >= 0x7c00u) return float_of(sign | 0x7f800000u | ((size & 0x3ffu) << 13));
  if (size < 0x400u) return float_of(sign | bits_of(static_cast<float>(size) * 5.9604644775390625e-8f));  // 2^-24
  return float_of(sign | ((size << 13) + 0x38000000u));
}

COMMSCHED_HD unsigned short bfloat16_bits(float value) {
  const unsigned bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<unsigned short>((bits >> 16 & 0x8000u) | 0x7fc0u);
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// What arithmetic between two storage types is done in.
template <typename A, typename B>
struct Wider {
  using Type = float;
};
template <typename B>
struct Wider<double, B> {
  using Type = double;
};
template <typename A>
struct Wider<A, double> {
  using Type = double;
};
template <>
struct Wider<double, double> {
  using Type = double;
};

COMMSCHED_HD float load_value(float x) { return x; }
COMMSCHED_HD double load_value(double x) { return x; }
COMMSCHED_HD float load_value(BFloat16 x) { return float_of(static_cast<unsigned>(x.bits) << 16); }
COMMSCHED_HD float load_value(Half x) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#else
  return half_value(x.bits);
#endif
}

COMMSCHED_HD void store_value(float* at, double x) { *at = static_cast<float>(x); }
COMMSCHED_HD void store_value(float* at, float x) { *at = x; }
COMMSCHED_HD void store_value(double* at, double x) { *at = x; }
COMMSCHED_HD void store_value(Half* at, float x) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(at->bits) : "f"(x));
#else
  at->bits = half_bits(x);
#endif
}
COMMSCHED_HD void store_value(BFloat16* at, float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(at->bits) : "f"(x));
#else
  at->bits = bfloat16_bits(x);
#endif
}
COMMSCHED_HD void store_value(Half* at, double x) { store_value(at, static_cast<float>(x)); }
COMMSCHED_HD void store_value(BFloat16* at, double x) { store_value(at, static_cast<float>(x)); }

}  // namespace commsched
