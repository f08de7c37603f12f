#include "quantise.h"

#include <algorithm>
#include <cstring>

#include "block_codes.h"

namespace commsched {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kNaN = 0x7fc00000u;
// Blocks of smaller magnitudes are sent as zeros: 127 / magnitude could be infinite, and magnitude / 448 subnormal.
constexpr float kSmallest = 1e-35f;

// The bits of the largest magnitude; of NaN or infinity if there is one, whose bits are larger than any number's. Compilers
// vectorise a maximum of integers, but not one of floats.
COMMSCHED_INLINE uint32_t largest(const float* values, size_t n) {
  int32_t most = 0;
  for (size_t i = 0; i < n; ++i) most = std::max(most, static_cast<int32_t>(bits_of(values[i]) & 0x7fffffffu));
  return static_cast<uint32_t>(most);
}

template <typename Code>
COMMSCHED_INLINE void quantise_block(const float* values, size_t n, float* residual, char* out) {
  const uint32_t most = largest(values, n);
  const bool finite = most < kInfinity;
  const float magnitude = from_bits(most);
  const bool zero = finite && magnitude < kSmallest;
  const float scale = !finite ? from_bits(kNaN) : zero ? 0.0f : magnitude / Code::kLargest;
  std::memcpy(out, &scale, sizeof(scale));
  auto* codes = reinterpret_cast<uint8_t*>(out + sizeof(scale));
  if (!finite) {
    for (size_t i = 0; i < n; ++i) codes[i] = values[i] == 0.0f ? 0 : 1;
    return;
  }
  float rounded[kQuantBlock] = {};
  if (zero) {
    std::memset(codes, 0, n);
  } else {
    Code::encode(values, n, magnitude, codes, rounded);
  }
  for (size_t i = 0; residual != nullptr && i < n; ++i) residual[i] = values[i] - rounded[i] * scale;
}

template <typename Code>
COMMSCHED_INLINE void restore_block(const char* bytes, size_t n, float* values) {
  float scale;
  std::memcpy(&scale, bytes, sizeof(scale));
  const auto* codes = reinterpret_cast<const uint8_t*>(bytes + sizeof(scale));
  Code::decode(codes, n, scale, values);
  if (scale == scale) return;
  // Zeros stay zeros in a block that is not finite: among them is the padding of buckets, which nobody overwrites.
  for (size_t i = 0; i < n; ++i) values[i] = codes[i] == 0 ? 0.0f : scale;
}

template <typename Code>
COMMSCHED_INLINE void quantise_all(const float* in, size_t n, float scale, float* residual, char* out) {
  float values[kQuantBlock];
  for (size_t begin = 0; begin < n; begin += kQuantBlock, out += kQuantBytes) {
    const size_t length = std::min(kQuantBlock, n - begin);
    float* kept = residual == nullptr ? nullptr : residual + begin;
    for (size_t i = 0; i < length; ++i) values[i] = in[begin + i] * scale;
    for (size_t i = 0; kept != nullptr && i < length; ++i) values[i] += kept[i];
    quantise_block<Code>(values, length, kept, out);
  }
}

template <typename Code>
COMMSCHED_INLINE void sum_all(const void* const* parts, int num_parts, float* out, size_t n, float scale) {
  float sums[kQuantBlock], part[kQuantBlock];
  for (size_t begin = 0, at = 0; begin < n; begin += kQuantBlock, at += kQuantBytes) {
    const size_t length = std::min(kQuantBlock, n - begin);
    restore_block<Code>(static_cast<const char*>(parts[0]) + at, length, sums);
    for (int p = 1; p < num_parts; ++p) {
      restore_block<Code>(static_cast<const char*>(parts[p]) + at, length, part);
      for (size_t i = 0; i < length; ++i) sums[i] += part[i];
    }
    for (size_t i = 0; i < length; ++i) out[begin + i] = sums[i] * scale;
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
