#include "quantise.h"

#include <algorithm>
#include <cstring>

namespace commsched {
namespace {

constexpr float kLargestCode = 127.0f;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kNaN = 0x7fc00000u;
// Blocks of smaller magnitudes are sent as zeros: 127 / magnitude could be infinite.
constexpr float kSmallest = 1e-35f;
// Added to a number of at most 2^22, it leaves the nearest whole number (ties to even) in the low bits of the float.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The bits of the largest magnitude; of NaN or infinity if there is one, whose bits are larger than any number's. Compilers
// vectorise a maximum of integers, but not one of floats.
uint32_t largest(const float* values, size_t n) {
  int32_t most = 0;
  for (size_t i = 0; i < n; ++i) most = std::max(most, static_cast<int32_t>(bits_of(values[i]) & 0x7fffffffu));
  return static_cast<uint32_t>(most);
}

void quantise_block(const float* values, size_t n, float* residual, char* out) {
  const uint32_t most = largest(values, n);
  const bool finite = most < kInfinity;
  const float magnitude = from_bits(most);
  const bool zero = finite && magnitude < kSmallest;
  const float scale = !finite ? from_bits(kNaN) : zero ? 0.0f : magnitude / kLargestCode;
  std::memcpy(out, &scale, sizeof(scale));
  auto* codes = reinterpret_cast<int8_t*>(out + sizeof(scale));
  if (!finite) {
    for (size_t i = 0; i < n; ++i) codes[i] = values[i] == 0.0f ? 0 : 1;
    return;
  }
  const float inverse = zero ? 0.0f : kLargestCode / magnitude;
  for (size_t i = 0; i < n; ++i) {
    codes[i] = static_cast<int8_t>(static_cast<uint8_t>(bits_of(values[i] * inverse + kRounder)));
  }
  if (residual == nullptr) return;
  for (size_t i = 0; i < n; ++i) {
    const float code = (values[i] * inverse + kRounder) - kRounder;
    residual[i] = values[i] - code * scale;
  }
}

void restore_block(const char* bytes, size_t n, float* values) {
  float scale;
  std::memcpy(&scale, bytes, sizeof(scale));
  const auto* codes = reinterpret_cast<const int8_t*>(bytes + sizeof(scale));
  for (size_t i = 0; i < n; ++i) values[i] = static_cast<float>(codes[i]) * scale;
  if (scale == scale) return;
  // Zeros stay zeros in a block that is not finite: among them is the padding of buckets, which nobody overwrites.
  for (size_t i = 0; i < n; ++i) values[i] = codes[i] == 0 ? 0.0f : scale;
}

}  // namespace

void quantise(const float* in, size_t n, double scale, float* residual, char* out) {
  const auto factor = static_cast<float>(scale);
  float values[kQuantBlock];
  for (size_t begin = 0; begin < n; begin += kQuantBlock) {
    const size_t length = std::min(kQuantBlock, n - begin);
    float* kept = residual == nullptr ? nullptr : residual + begin;
    for (size_t i = 0; i < length; ++i) values[i] = in[begin + i] * factor;
    for (size_t i = 0; kept != nullptr && i < length; ++i) values[i] += kept[i];
    quantise_block(values, length, kept, out + wire_bytes(DType::q8, begin));
  }
}

void sum_quantised(const void* const* parts, int num_parts, float* out, size_t n, double scale) {
  const auto factor = static_cast<float>(scale);
  float sums[kQuantBlock], part[kQuantBlock];
  for (size_t begin = 0; begin < n; begin += kQuantBlock) {
    const size_t length = std::min(kQuantBlock, n - begin);
    const size_t at = wire_bytes(DType::q8, begin);
    restore_block(static_cast<const char*>(parts[0]) + at, length, sums);
    for (int p = 1; p < num_parts; ++p) {
      restore_block(static_cast<const char*>(parts[p]) + at, length, part);
      for (size_t i = 0; i < length; ++i) sums[i] += part[i];
    }
    for (size_t i = 0; i < length; ++i) out[begin + i] = sums[i] * factor;
  }
}

}  // namespace commsched
