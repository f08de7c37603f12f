// 16-byte accesses to ranges that need not be aligned.
#pragma once

#include "scalar.h"

namespace commsched {

// N neighbouring elements, moved in accesses of 16 bytes (or of all of it, where that is less).
template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vector {
  T at[N];
};

COMMSCHED_HD constexpr int larger(int a, int b) { return a > b ? a : b; }
COMMSCHED_HD constexpr int smaller(int a, int b) { return a < b ? a : b; }

template <typename T, int N>
COMMSCHED_HD bool is_aligned(const T* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % alignof(Vector<T, N>) == 0;
}

// How many elements to take one by one until `pointer` is aligned; at most `count`.
template <typename T, int N>
COMMSCHED_HD Int64 unaligned_head(const T* pointer, Int64 count) {
  const unsigned long long beyond = reinterpret_cast<unsigned long long>(pointer) % alignof(Vector<T, N>);
  const Int64 head = beyond == 0 ? 0 : static_cast<Int64>((alignof(Vector<T, N>) - beyond) / sizeof(T));
  return head < count ? head : count;
}

template <typename T, int N>
COMMSCHED_HD Vector<T, N> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

template <typename T, int N>
COMMSCHED_HD void store_vector(T* to, const Vector<T, N>& values) {
  *reinterpret_cast<Vector<T, N>*>(to) = values;
}

}  // namespace commsched
