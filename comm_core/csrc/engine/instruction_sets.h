// Functions that are compiled for several instruction sets, of which the processor's best is chosen at run time.
//
// Every set must give the same bits, because the ranks of a job may have different processors. So none may have a fused
// multiply-add, which rounds once instead of twice; AVX2 has none (that is FMA3, another set).
#pragma once

#include <cstdint>

// COMMSCHED_INLINE: into each function that is compiled for a set, so that it is compiled for that set, too.
#define COMMSCHED_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#define COMMSCHED_AVX2 __attribute__((target("avx2")))
#else
#define COMMSCHED_AVX2
#endif

namespace commsched {

enum class Instructions : uint8_t { baseline, avx2 };

// The best set of this processor.
inline Instructions best_instructions() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  return has_avx2 ? Instructions::avx2 : Instructions::baseline;
#else
  return Instructions::baseline;
#endif
}

}  // namespace commsched
