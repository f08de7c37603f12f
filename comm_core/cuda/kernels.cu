// The kernels: one block per chunk, so that one launch serves a bucket however many tensors it holds.
//
// They have C names, and every argument is eight bytes (an address, an integer or a double): so the same call works for
// kernels compiled here and for those that CuPy compiles from this file at run time. comm_core/cuda/tables.py knows
// which kernel a pair of types needs; launch.h starts those that were compiled in.
#include "copy.h"
#include "list.h"

namespace commsched {

constexpr int kThreads = 256;  // THREADS in comm_core/cuda/tables.py

template <typename From, typename To>
__device__ inline void pack(const Chunk* chunks, const void* const* tensors, void* bucket, double scale) {
  using Math = typename Wider<From, To>::Type;
  pack_chunk<From>(chunks[blockIdx.x], tensors, static_cast<To*>(bucket), static_cast<Math>(scale), threadIdx.x, kThreads);
}

}  // namespace commsched

using namespace commsched;

#define COPY_KERNELS(NAME, FROM, TO)                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads)                                         \
      pack_##NAME(const Chunk* chunks, const void* const* tensors, void* bucket, double scale) { \
    pack<FROM, TO>(chunks, tensors, bucket, scale);                                              \
  }
COMMSCHED_COPIES(COPY_KERNELS)

// Keeps the stream busy for a while: stands for a network in emulations.
extern "C" __global__ void hold(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
#if __CUDA_ARCH__ >= 700
    __nanosleep(500);
#endif
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

#ifndef __CUDACC_RTC__
#include "launch.inl"
#endif
