// The codes of quantised blocks: one byte for each element, in units of the block's scale.
//
// A code has `kLargest`, the magnitude that a block's largest element gets; `encode`, which also gives the rounded elements; and
// `decode`, which gives them times the scale. Both have no branches, so that compilers vectorise them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "instruction_sets.h"
#include "types.h"

namespace commsched {

COMMSCHED_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

COMMSCHED_INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Keeps the low bytes. A loop of its own, because loops that mix widths vectorise badly.
COMMSCHED_INLINE void narrow(const uint32_t* wide, size_t n, uint8_t* codes) {
  for (size_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
}

// Signed whole numbers: uniform steps.
struct Int8Code {
  static constexpr float kLargest = 127.0f;
  // Added to a number of at most 2^22, it leaves the nearest whole number (ties to even) in the low bits of the float.
  static constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

  static COMMSCHED_INLINE void encode(const float* values, size_t n, float magnitude, uint8_t* codes, float* rounded) {
    const float inverse = kLargest / magnitude;
    uint32_t wide[kQuantBlock];
    for (size_t i = 0; i < n; ++i) {
      const float sum = values[i] * inverse + kRounder;
      wide[i] = bits_of(sum);
      rounded[i] = sum - kRounder;
    }
    narrow(wide, n, codes);
  }

  static COMMSCHED_INLINE void decode(const uint8_t* codes, size_t n, float scale, float* values) {
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
  }
};

// OCP's E4M3 (torch.float8_e4m3fn): sign, 4 bits of exponent with bias 7, 3 bits of mantissa, subnormals, no infinity. Its NaN
// (0x7f, 0xff) never occurs: a block that is not finite has NaN as its scale.
struct E4m3Code {
  static constexpr float kLargest = 448.0f;
  static constexpr float kSmallestNormal = 0.015625f;  // 2^-6
  static constexpr uint32_t kSign = 0x80000000u, kExponent = 0x7f800000u;

  static COMMSCHED_INLINE void encode(const float* values, size_t n, float magnitude, uint8_t* codes, float* rounded) {
    const float scale = magnitude / kLargest;
    uint32_t wide[kQuantBlock];
    for (size_t i = 0; i < n; ++i) {
      // The inverse would be rounded. The division gives the codes of (values / scale).to(torch.float8_e4m3fn).
      const uint32_t bits = bits_of(values[i] / scale), sign = bits & kSign;
      const float size = from_bits(bits ^ sign);
      // The largest power of two that is not above `size`. At least 2^-6, because subnormals keep the steps of that.
      const uint32_t power = bits_of(size < kSmallestNormal ? kSmallestNormal : size) & kExponent;
      // Adding 2^20 times the power leaves four bits of `size` in the float, rounded to even. They count steps of an eighth of
      // the power; a count of 16 carries into the code's exponent, as it must.
      const float adder = from_bits(power + (20u << 23));
      const float sum = size + adder;
      const uint32_t below = (power - bits_of(kSmallestNormal)) >> 20;  // 8 for each power from 2^-6 to this one
      wide[i] = (sign >> 24) | (below + bits_of(sum) - bits_of(adder));
      rounded[i] = from_bits(bits_of(sum - adder) | sign);
    }
    narrow(wide, n, codes);
  }

  // Computes the upper halves of floats, eight at once. No intermediate value is a subnormal float: those are slow, and zero
  // where threads flush them.
  static COMMSCHED_INLINE void decode(const uint8_t* codes, size_t n, float scale, float* values) {
    uint16_t whole[kQuantBlock], excess[kQuantBlock];
    for (size_t i = 0; i < n; ++i) {
      const auto size = static_cast<uint16_t>(codes[i] & 0x7fu);
      const auto sign = static_cast<uint16_t>((codes[i] & 0x80u) << 8);
      // A subnormal m/8 * 2^-6 is decoded as (1 + m/8) * 2^-6, of which 2^-6 is taken away again.
      const auto small = static_cast<uint16_t>(-(static_cast<int16_t>(size) < 8));
      whole[i] = static_cast<uint16_t>(sign | ((size << 4) + (120 << 7) + (small & (1 << 7))));
      excess[i] = static_cast<uint16_t>(small & (sign | (121 << 7)));
    }
    for (size_t i = 0; i < n; ++i) {
      const uint32_t bits = static_cast<uint32_t>(whole[i]) << 16;
      const float value = from_bits(bits) - from_bits(static_cast<uint32_t>(excess[i]) << 16);
      values[i] = from_bits(bits_of(value) | (bits & kSign)) * scale;  // the sign again, for -0
    }
  }
};

}  // namespace commsched
