#include "quantise.h"

#include <algorithm>

#include "block_codes.h"

namespace commsched {
namespace {

static_assert(kBlock == kQuantBlock && kBlockBytes == kQuantBytes);

template <typename Code>
COMMSCHED_INLINE void quantise_all(const float* in, size_t n, float scale, float* residual, char* out) {
  float values[kBlock];
  for (size_t begin = 0; begin < n; begin += kQuantBlock, out += kQuantBytes) {
    const int length = static_cast<int>(std::min(kQuantBlock, n - begin));
    float* lost = residual == nullptr ? nullptr : residual + begin;
    const int most = load_block<1>(in + begin, lost, length, scale, 0, values);
    store_block<Code, 1>(values, length, most, 0, lost, reinterpret_cast<Byte*>(out));
  }
}

struct Addresses {
  const void* const* parts;
  size_t at;
  COMMSCHED_INLINE const Byte* operator()(int part) const { return static_cast<const Byte*>(parts[part]) + at; }
};

template <typename Code>
COMMSCHED_INLINE void sum_all(const void* const* parts, int num_parts, float* out, size_t n, float scale) {
  for (size_t begin = 0, at = 0; begin < n; begin += kQuantBlock, at += kQuantBytes) {
    const int length = static_cast<int>(std::min(kQuantBlock, n - begin));
    sum_block<Code, 1>(Addresses{parts, at}, num_parts, length, scale, 0, out + begin);
  }
}

template <typename Code>
struct Baseline {
  static void quantise(const float* in, size_t n, float scale, float* residual, char* out) {
    quantise_all<Code>(in, n, scale, residual, out);
  }
  static void sum(const void* const* parts, int num_parts, float* out, size_t n, float scale) {
    sum_all<Code>(parts, num_parts, out, n, scale);
  }
};

template <typename Code>
struct Avx2 {
  COMMSCHED_AVX2 static void quantise(const float* in, size_t n, float scale, float* residual, char* out) {
    quantise_all<Code>(in, n, scale, residual, out);
  }
  COMMSCHED_AVX2 static void sum(const void* const* parts, int num_parts, float* out, size_t n, float scale) {
    sum_all<Code>(parts, num_parts, out, n, scale);
  }
};

}  // namespace

void quantise(const float* in, size_t n, double scale, float* residual, void* out, DType wire, Instructions set) {
  const bool avx2 = set == Instructions::avx2;
  const auto all = wire == DType::qi8 ? avx2 ? Avx2<Int8Code>::quantise : Baseline<Int8Code>::quantise
                   : avx2             ? Avx2<E4m3Code>::quantise
                                      : Baseline<E4m3Code>::quantise;
  all(in, n, static_cast<float>(scale), residual, static_cast<char*>(out));
}

void sum_quantised(const void* const* parts, int num_parts, DType wire, float* out, size_t n, double scale, Instructions set) {
  const bool avx2 = set == Instructions::avx2;
  const auto all = wire == DType::qi8 ? avx2 ? Avx2<Int8Code>::sum : Baseline<Int8Code>::sum
                   : avx2             ? Avx2<E4m3Code>::sum
                                      : Baseline<E4m3Code>::sum;
  all(parts, num_parts, out, n, static_cast<float>(scale));
}

}  // namespace commsched
