// Pack: one thread's part of moving one chunk of a tensor into a bucket.
#pragma once

#include "vectors.h"

namespace commsched {

// A stretch of one tensor and its place in the bucket; comm_core/cuda/tables.py makes these.
struct Chunk {
  Int64 tensor;  // its place among the pointers
  Int64 offset;  // elements from the tensor's start
  Int64 at;      // elements from the bucket's start
  Int64 count;
};

template <typename From, typename To, typename Math>
COMMSCHED_HD void copy_one(const From& from, To* to, Math scale) {
  store_value(to, static_cast<Math>(load_value(from)) * scale);
}

// to[i] = scale * from[i]: each thread copies every `threads`-th piece. The ranges are the same or apart.
template <typename From, typename To, typename Math>
COMMSCHED_HD void copy_range(const From* from, To* to, Int64 count, Math scale, int thread, int threads) {
  // The smaller type fills 16 bytes, the larger one takes two or more accesses.
  constexpr int kWidth = 16 / smaller(sizeof(From), sizeof(To));
  constexpr int kUnroll = larger(1, 8 / larger(1, larger(sizeof(From), sizeof(To)) / smaller(sizeof(From), sizeof(To))));
  const Int64 head = unaligned_head<To, kWidth>(to, count);
  Int64 done = 0;
  if (is_aligned<From, kWidth>(from + head)) {
    for (Int64 i = thread; i < head; i += threads) copy_one(from[i], to + i, scale);
    const Int64 step = static_cast<Int64>(threads) * kWidth;
    Int64 i = head + static_cast<Int64>(thread) * kWidth;
    // All loads of a round are under way before the first one is used.
    for (; i + (kUnroll - 1) * step + kWidth <= count; i += kUnroll * step) {
      Vector<From, kWidth> loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) loaded[u] = load_vector<From, kWidth>(from + i + u * step);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        Vector<To, kWidth> stored;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) copy_one(loaded[u].at[k], stored.at + k, scale);
        store_vector<To, kWidth>(to + i + u * step, stored);
      }
    }
    for (; i + kWidth <= count; i += step) {
      const auto loaded = load_vector<From, kWidth>(from + i);
      Vector<To, kWidth> stored;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) copy_one(loaded.at[k], stored.at + k, scale);
      store_vector<To, kWidth>(to + i, stored);
    }
    done = head + (count - head) / kWidth * kWidth;
  }
  for (Int64 i = done + thread; i < count; i += threads) copy_one(from[i], to + i, scale);
}

template <typename To>
COMMSCHED_HD void zero_range(To* to, Int64 count, int thread, int threads) {
  for (Int64 i = thread; i < count; i += threads) store_value(to + i, 0.0f);
}

// One thread's part of one chunk, into the bucket. A tensor that is not there (null) counts as zeros.
template <typename From, typename To, typename Math>
COMMSCHED_HD void pack_chunk(const Chunk& chunk, const void* const* tensors, To* bucket, Math scale, int thread, int threads) {
  const From* from = static_cast<const From*>(tensors[chunk.tensor]);
  To* to = bucket + chunk.at;
  if (from == nullptr) {
    zero_range(to, chunk.count, thread, threads);
  } else {
    copy_range(from + chunk.offset, to, chunk.count, scale, thread, threads);
  }
}

}  // namespace commsched
