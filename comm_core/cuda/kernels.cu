// The kernels: one block per chunk, so that one launch serves a bucket however many tensors it holds.
//
// They have C names, and every argument is eight bytes (an address, an integer or a double): so the same call works for
// kernels compiled here and for those that CuPy compiles from this file at run time. comm_core/cuda/kernels.py knows
// which kernel a pair of types needs; launch.h starts those that were compiled in.
#include "copy.h"
#include "list.h"
#include "update.h"

namespace commsched {

constexpr int kThreads = 256;  // THREADS in comm_core/cuda/kernels.py

// The sum over the block, in its first thread; always in the same order.
__device__ inline double block_sum(double value) {
  __shared__ double of_warps[kThreads / 32];
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_down_sync(0xffffffffu, value, apart);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += of_warps[warp];
  }
  __syncthreads();  // before of_warps is used again
  return sum;
}

template <typename From, typename To>
__device__ inline void pack(const Chunk* chunks, const void* const* tensors, void* bucket, double scale,
                            const float* factor, Stats* stats) {
  using Math = typename Wider<From, To>::Type;
  const Chunk chunk = chunks[blockIdx.x];
  const Math by = static_cast<Math>(scale) * (factor == nullptr ? Math(1) : static_cast<Math>(*factor));
  Tally<Math> tally;
  To* to = static_cast<To*>(bucket);
  if (stats == nullptr) {
    pack_chunk<false, From>(chunk, tensors, to, by, threadIdx.x, kThreads, &tally);
    return;
  }
  pack_chunk<true, From>(chunk, tensors, to, by, threadIdx.x, kThreads, &tally);
  const double squares = block_sum(static_cast<double>(tally.squares));
  const double nonfinite = block_sum(static_cast<double>(tally.nonfinite));
  if (threadIdx.x == 0) stats[blockIdx.x] = Stats{squares, nonfinite};
}

template <typename From, typename To>
__device__ inline void unpack(const Chunk* chunks, void* const* tensors, const void* bucket, double scale,
                              const float* factor) {
  using Math = typename Wider<From, To>::Type;
  const Math by = static_cast<Math>(scale) * (factor == nullptr ? Math(1) : static_cast<Math>(*factor));
  unpack_chunk<From, To>(chunks[blockIdx.x], tensors, static_cast<const From*>(bucket), by, threadIdx.x, kThreads);
}

template <typename Rule, typename Grad, typename Weight>
__device__ inline void update(const Chunk* chunks, const Part* parts, const Hyper* hypers, const float* factor,
                              const float* skip) {
  if (skip != nullptr && *skip != 0.0f) return;
  update_chunk<Rule, Grad, Weight>(chunks[blockIdx.x], parts, hypers, factor == nullptr ? 1.0f : *factor, threadIdx.x,
                                   kThreads);
}

}  // namespace commsched

using namespace commsched;

#define COPY_KERNELS(NAME, FROM, TO)                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) pack_##NAME(                                             \
      const Chunk* chunks, const void* const* tensors, void* bucket, double scale, const float* factor, Stats* stats) { \
    pack<FROM, TO>(chunks, tensors, bucket, scale, factor, stats);                                                \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                          \
      unpack_##NAME(const Chunk* chunks, void* const* tensors, const void* bucket, double scale, const float* factor) { \
    unpack<FROM, TO>(chunks, tensors, bucket, scale, factor);                                                     \
  }
COMMSCHED_COPIES(COPY_KERNELS)

#define UPDATE_KERNELS(NAME, GRAD, WEIGHT)                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads) sgd_##NAME(                                              \
      const Chunk* chunks, const Part* parts, const Hyper* hypers, const float* factor, const float* skip) {      \
    update<Sgd, GRAD, WEIGHT>(chunks, parts, hypers, factor, skip);                                               \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads) adam_##NAME(                                             \
      const Chunk* chunks, const Part* parts, const Hyper* hypers, const float* factor, const float* skip) {      \
    update<Adam, GRAD, WEIGHT>(chunks, parts, hypers, factor, skip);                                              \
  }
COMMSCHED_UPDATES(UPDATE_KERNELS)

// Keeps the stream busy and next to nothing else: stands for a network in emulations.
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
