// Quantised blocks: 256 float32 elements as one float32 scale and a byte for each element, in one of two codes.
//
// A code has `kLargest`, the magnitude that a block's largest element gets; `unit`, which `encode` takes beside an element and
// gives its byte and what the byte stands for, in units of the scale; and `decode`, which gives elements times the scale.
// Neither has branches, so that compilers vectorise the loops.
//
// The engine (quantise.cpp) and the kernels compile this text. A block is shared by `kLanes` threads: of an array in memory,
// a thread has the elements `lane`, `lane + kLanes`, ...; its own arrays hold `n` of them. The engine has one lane. Every
// processor must give the same bits: sums and products are those of scalar.h, which are rounded one by one.
#pragma once

#include "scalar.h"

namespace commsched {

using Byte = unsigned char;

constexpr int kBlock = 256;              // elements with one scale
constexpr int kBlockBytes = 4 + kBlock;  // of a whole block: the scale, then the codes

constexpr unsigned kSign = 0x80000000u, kInfinity = 0x7f800000u, kNaN = 0x7fc00000u;
// Blocks of smaller magnitudes are sent as zeros: 127 / magnitude could be infinite, and magnitude / 448 subnormal.
constexpr float kSmallest = 1e-35f;

// Signed whole numbers: uniform steps.
struct Int8Code {
  static constexpr float kLargest = 127.0f;
  // Added to a number of at most 2^22, it leaves the nearest whole number (ties to even) in the low bits of the float.
  static constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

  static COMMSCHED_HD float unit(float magnitude) { return over(kLargest, magnitude); }

  static COMMSCHED_HD unsigned encode(float value, float unit, float* rounded) {
    const float sum = plus(times(value, unit), kRounder);
    *rounded = minus(sum, kRounder);
    return bits_of(sum);
  }

  template <int kLanes>
  static COMMSCHED_HD void decode(const Byte* codes, int n, float scale, float* values) {
    for (int i = 0; i < n; ++i) values[i] = times(static_cast<float>(static_cast<signed char>(codes[i * kLanes])), scale);
  }
};

// OCP's E4M3 (torch.float8_e4m3fn): sign, 4 bits of exponent with bias 7, 3 bits of mantissa, subnormals, no infinity. Its NaN
// (0x7f, 0xff) never occurs: a block that is not finite has NaN as its scale.
struct E4m3Code {
  static constexpr float kLargest = 448.0f;
  static constexpr float kSmallestNormal = 0.015625f;  // 2^-6

  static COMMSCHED_HD float unit(float magnitude) { return over(magnitude, kLargest); }

  static COMMSCHED_HD unsigned encode(float value, float unit, float* rounded) {
    // The inverse would be rounded. The division gives the codes of (values / scale).to(torch.float8_e4m3fn).
    const unsigned bits = bits_of(over(value, unit)), sign = bits & kSign;
    const float size = float_of(bits ^ sign);
    // The largest power of two that is not above `size`. At least 2^-6, because subnormals keep the steps of that.
    const unsigned power = bits_of(size < kSmallestNormal ? kSmallestNormal : size) & kInfinity;
    // Adding 2^20 times the power leaves four bits of `size` in the float, rounded to even. They count steps of an eighth of
    // the power; a count of 16 carries into the code's exponent, as it must.
    const float adder = float_of(power + (20u << 23));
    const float sum = plus(size, adder);
    const unsigned below = (power - bits_of(kSmallestNormal)) >> 20;  // 8 for each power from 2^-6 to this one
    *rounded = float_of(bits_of(minus(sum, adder)) | sign);
    return (sign >> 24) | (below + bits_of(sum) - bits_of(adder));
  }

  // Computes the upper halves of floats, eight at once. No intermediate value is a subnormal float: those are slow, and zero
  // where threads flush them.
  template <int kLanes>
  static COMMSCHED_HD void decode(const Byte* codes, int n, float scale, float* values) {
    unsigned short whole[kBlock / kLanes], excess[kBlock / kLanes];
    for (int i = 0; i < n; ++i) {
      const auto size = static_cast<unsigned short>(codes[i * kLanes] & 0x7fu);
      const auto sign = static_cast<unsigned short>((codes[i * kLanes] & 0x80u) << 8);
      // A subnormal m/8 * 2^-6 is decoded as (1 + m/8) * 2^-6, of which 2^-6 is taken away again.
      const auto small = static_cast<unsigned short>(-(static_cast<short>(size) < 8));
      whole[i] = static_cast<unsigned short>(sign | ((size << 4) + (120 << 7) + (small & (1 << 7))));
      excess[i] = static_cast<unsigned short>(small & (sign | (121 << 7)));
    }
    for (int i = 0; i < n; ++i) {
      const unsigned bits = static_cast<unsigned>(whole[i]) << 16;
      const float value = minus(float_of(bits), float_of(static_cast<unsigned>(excess[i]) << 16));
      values[i] = times(float_of(bits_of(value) | (bits & kSign)), scale);  // the sign again, for -0
    }
  }
};

// values[i] = in[i] * scale + residual[i], where there is a residual. Returns the bits of the largest magnitude; of NaN or
// infinity if there is one, whose bits are larger than any number's. Compilers vectorise a maximum of integers, but not one of
// floats.
template <int kLanes>
COMMSCHED_HD int load_block(const float* in, const float* residual, int n, float scale, int lane, float* values) {
  int most = 0;
  for (int i = 0; i < n; ++i) values[i] = times(in[lane + i * kLanes], scale);
  for (int i = 0; residual != nullptr && i < n; ++i) values[i] = plus(values[i], residual[lane + i * kLanes]);
  for (int i = 0; i < n; ++i) {
    const int size = static_cast<int>(bits_of(values[i]) & ~kSign);
    most = most < size ? size : most;
  }
  return most;
}

// Writes a block's bytes, and what rounding lost to `residual`, if there is one. `most` is that of all lanes. A block that is
// not finite becomes NaN, except its zeros, and keeps its residual.
template <typename Code, int kLanes>
COMMSCHED_HD void store_block(const float* values, int n, int most, int lane, float* residual, Byte* out) {
  const bool finite = static_cast<unsigned>(most) < kInfinity;
  const float magnitude = float_of(static_cast<unsigned>(most));
  const bool zero = magnitude < kSmallest;
  const float scale = !finite ? float_of(kNaN) : zero ? 0.0f : over(magnitude, Code::kLargest);
  if (lane == 0) store_word(out, bits_of(scale));
  Byte* codes = out + sizeof(scale) + lane;
  if (!finite) {
    for (int i = 0; i < n; ++i) codes[i * kLanes] = (bits_of(values[i]) & ~kSign) != 0;
    return;
  }
  float rounded[kBlock / kLanes];
  unsigned wide[kBlock / kLanes];
  if (zero) {
    for (int i = 0; i < n; ++i) wide[i] = 0, rounded[i] = 0.0f;
  } else {
    const float unit = Code::unit(magnitude);
    for (int i = 0; i < n; ++i) wide[i] = Code::encode(values[i], unit, rounded + i);
  }
  // Keeps the low bytes. A loop of its own, because loops that mix widths vectorise badly.
  for (int i = 0; i < n; ++i) codes[i * kLanes] = static_cast<Byte>(wide[i]);
  if (residual == nullptr) return;
  for (int i = 0; i < n; ++i) residual[lane + i * kLanes] = minus(values[i], times(rounded[i], scale));
}

// Zeros stay zeros in a block that is not finite: among them is the padding of buckets, which nobody overwrites.
template <typename Code, int kLanes>
COMMSCHED_HD void restore_block(const Byte* bytes, int n, int lane, float* values) {
  const float scale = float_of(load_word(bytes));
  const Byte* codes = bytes + sizeof(scale) + lane;
  Code::template decode<kLanes>(codes, n, scale, values);
  if (scale == scale) return;
  for (int i = 0; i < n; ++i) values[i] = codes[i * kLanes] == 0 ? 0.0f : scale;
}

// out[i] = (part 0 + part 1 + ...)[i] * scale of one block, added in this order; `parts(p)` is the block's address in part p.
template <typename Code, int kLanes, typename Parts>
COMMSCHED_HD void sum_block(Parts parts, int num_parts, int n, float scale, int lane, float* out) {
  float sums[kBlock / kLanes], part[kBlock / kLanes];
  restore_block<Code, kLanes>(parts(0), n, lane, sums);
  for (int p = 1; p < num_parts; ++p) {
    restore_block<Code, kLanes>(parts(p), n, lane, part);
    for (int i = 0; i < n; ++i) sums[i] = plus(sums[i], part[i]);
  }
  for (int i = 0; i < n; ++i) out[lane + i * kLanes] = times(sums[i], scale);
}

// The parts of a block in a buffer where parts of `bytes` bytes lie one after the other; `first` is the block's address in part 0.
struct OneAfterAnother {
  const Byte* first;
  Int64 bytes;
  COMMSCHED_HD const Byte* operator()(int part) const { return first + part * bytes; }
};

}  // namespace commsched
