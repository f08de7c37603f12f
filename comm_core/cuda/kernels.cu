// The kernels: one block per chunk, so that one launch serves a bucket however many tensors it holds.
//
// They have C names, and every argument is eight bytes (an address, an integer or a double): so the same call works for
// kernels compiled here and for those that CuPy compiles from this file at run time. comm_core/cuda/tables.py knows
// which kernel a pair of types needs; launch.h starts those that were compiled in.
#include "block_codes.h"
#include "copy.h"
#include "list.h"

namespace commsched {

constexpr int kThreads = 256;  // THREADS in comm_core/cuda/tables.py

template <typename From, typename To>
__device__ inline void pack(const Chunk* chunks, const void* const* tensors, void* bucket, double scale) {
  using Math = typename Wider<From, To>::Type;
  pack_chunk<From>(chunks[blockIdx.x], tensors, static_cast<To*>(bucket), static_cast<Math>(scale), threadIdx.x, kThreads);
}

// Quantised blocks: a warp has one, whose lanes are its threads.
constexpr int kLanes = 32, kEach = kBlock / kLanes;

__device__ inline int lane() { return threadIdx.x % kLanes; }
__device__ inline Int64 block_of_warp() { return blockIdx.x * static_cast<Int64>(kThreads / kLanes) + threadIdx.x / kLanes; }

template <typename Code>
__device__ inline void quantise(const float* in, float* residual, Byte* out, Int64 blocks, float scale) {
  const Int64 block = block_of_warp();
  if (block >= blocks) return;
  float values[kEach];
  float* lost = residual == nullptr ? nullptr : residual + block * kBlock;
  int most = load_block<kLanes>(in + block * kBlock, lost, kEach, scale, lane(), values);
  for (int apart = kLanes / 2; apart > 0; apart /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, apart));
  store_block<Code, kLanes>(values, kEach, most, lane(), lost, out + block * kBlockBytes);
}

template <typename Code>
__device__ inline void sum(const Byte* parts, Int64 num_parts, float* out, Int64 blocks, float scale) {
  const Int64 block = block_of_warp();
  if (block >= blocks) return;
  const OneAfterAnother place{parts + block * kBlockBytes, blocks * kBlockBytes};
  sum_block<Code, kLanes>(place, static_cast<int>(num_parts), kEach, scale, lane(), out + block * kBlock);
}

}  // namespace commsched

using namespace commsched;

#define COPY_KERNELS(NAME, FROM, TO)                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads)                                         \
      pack_##NAME(const Chunk* chunks, const void* const* tensors, void* bucket, double scale) { \
    pack<FROM, TO>(chunks, tensors, bucket, scale);                                              \
  }
COMMSCHED_COPIES(COPY_KERNELS)

// `blocks` whole blocks. Parts lie one after the other.
#define CODE_KERNELS(NAME, CODE)                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads)                                         \
      quantise_##NAME(const float* in, float* residual, Byte* out, Int64 blocks, double scale) { \
    quantise<CODE>(in, residual, out, blocks, static_cast<float>(scale));                        \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                                         \
      sum_##NAME(const Byte* parts, Int64 num_parts, float* out, Int64 blocks, double scale) {   \
    sum<CODE>(parts, num_parts, out, blocks, static_cast<float>(scale));                         \
  }
COMMSCHED_CODES(CODE_KERNELS)

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
