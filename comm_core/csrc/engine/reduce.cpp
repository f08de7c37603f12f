#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "quantise.h"

namespace commsched {
namespace {

constexpr size_t kBlock = 1024;  // elements; the sums of a block stay in the first-level cache

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

template <typename To, typename From>
To bit_copy(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Both conversions are written without branches so that the compiler vectorises the loops around them.
inline float widen(Half h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h.bits & 0x7fffu) << 13;
  // Multiplying by 2^112 moves the exponent's bias from 15 to 127 and makes subnormal halves normal.
  const uint32_t finite = bit_copy<uint32_t>(bit_copy<float>(magnitude) * bit_copy<float>(0x77800000u));
  const uint32_t special = magnitude | 0x7f800000u;
  return bit_copy<float>(sign | (magnitude >= (0x7c00u << 13) ? special : finite));
}

inline float widen(BFloat b) { return bit_copy<float>(static_cast<uint32_t>(b.bits) << 16); }

template <typename T>
T widen(T value) {
  return value;
}

template <typename To, typename From>
struct Narrow {
  static To apply(From value) { return static_cast<To>(value); }
};

template <typename From>
struct Narrow<Half, From> {
  static Half apply(From value) {
    const uint32_t bits = bit_copy<uint32_t>(static_cast<float>(value));
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Round to nearest even by adding just under half a unit, plus one where the kept part is odd.
    const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14: adding 0.5 lets the float adder round at the place where a subnormal half ends.
    const uint32_t subnormal = bit_copy<uint32_t>(bit_copy<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    return {static_cast<uint16_t>(sign | (magnitude >= (143u << 23) ? special : finite))};
  }
};

template <typename From>
struct Narrow<BFloat, From> {
  static BFloat apply(From value) {
    const float wide = static_cast<float>(value);
    const uint32_t bits = bit_copy<uint32_t>(wide);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>(wide != wide ? 0x7fc0u : rounded)};
  }
};

template <typename T>
constexpr bool is_half = std::is_same_v<T, Half> || std::is_same_v<T, BFloat>;

// The type that a sum of `From`, stored as `To`, is formed in.
template <typename From, typename To>
using Sum = std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double,
                               std::conditional_t<is_half<From> || std::is_same_v<From, float>, float, From>>;

// Each element of `out` lies in the place of the same element of a part, or in none: the loops have no order.
#define COMMSCHED_NO_ORDER _Pragma("GCC ivdep")

// Reads each part once, and writes nothing but `out` where there are one or two parts.
template <typename From, typename To, typename Finish>
void sum_blocks(const void* const* parts, int num_parts, To* out, size_t n, Finish finish) {
  using S = Sum<From, To>;
  S sums[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock, out += kBlock) {
    const size_t length = std::min(kBlock, n - begin);
    const auto part = [&](int p) { return static_cast<const From*>(parts[p]) + begin; };
    const From *const first = part(0), *const last = part(num_parts - 1);
    if (num_parts == 1) {
      COMMSCHED_NO_ORDER for (size_t i = 0; i < length; ++i) out[i] = finish(static_cast<S>(widen(first[i])));
      continue;
    }
    const auto add = [](S sum, From next) { return static_cast<S>(sum + static_cast<S>(widen(next))); };
    if (num_parts == 2) {
      COMMSCHED_NO_ORDER for (size_t i = 0; i < length; ++i) out[i] = finish(add(static_cast<S>(widen(first[i])), last[i]));
      continue;
    }
    const From* const second = part(1);
    for (size_t i = 0; i < length; ++i) sums[i] = add(static_cast<S>(widen(first[i])), second[i]);
    for (int p = 2; p + 1 < num_parts; ++p) {
      const From* const next = part(p);
      for (size_t i = 0; i < length; ++i) sums[i] = add(sums[i], next[i]);
    }
    COMMSCHED_NO_ORDER for (size_t i = 0; i < length; ++i) out[i] = finish(add(sums[i], last[i]));
  }
}

template <typename From, typename To>
void sum_scaled(const void* const* parts, int num_parts, void* out, size_t n, double scale) {
  using S = Sum<From, To>;
  To* const to = static_cast<To*>(out);
  if (scale == 1.0) {
    sum_blocks<From>(parts, num_parts, to, n, [](S sum) { return Narrow<To, S>::apply(sum); });
  } else if constexpr (std::is_integral_v<S>) {
    sum_blocks<From>(parts, num_parts, to, n, [=](S sum) { return static_cast<To>(static_cast<double>(sum) * scale); });
  } else {
    sum_blocks<From>(parts, num_parts, to, n,
                     [factor = static_cast<S>(scale)](S sum) { return Narrow<To, S>::apply(sum * factor); });
  }
}

template <typename T>
struct Type {
  using type = T;
};

template <typename F>
void with_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(Type<float>{});
    case DType::f64:
      return f(Type<double>{});
    case DType::f16:
      return f(Type<Half>{});
    case DType::bf16:
      return f(Type<BFloat>{});
    default:
      throw EngineError(ErrorKind::usage, std::string("a floating type is needed here, not ") + dtype_name(dtype));
  }
}

template <typename F>
void with_integer(DType dtype, F&& f) {
  switch (dtype) {
    case DType::i32:
      return f(Type<int32_t>{});
    case DType::i64:
      return f(Type<int64_t>{});
    default:
      return f(Type<uint8_t>{});
  }
}

bool is_floating(DType dtype) { return dtype <= DType::bf16; }

}  // namespace

void sum_in_order(const void* const* parts, int num_parts, DType from, void* out, DType to, size_t n, double scale) {
  if (in_blocks(from)) return sum_quantised(parts, num_parts, from, static_cast<float*>(out), n, scale);
  if (from == to && !is_floating(from)) {
    return with_integer(from, [&](auto t) {
      using T = typename decltype(t)::type;
      sum_scaled<T, T>(parts, num_parts, out, n, scale);
    });
  }
  with_floating(from, [&](auto f) {
    with_floating(
        to, [&](auto t) { sum_scaled<typename decltype(f)::type, typename decltype(t)::type>(parts, num_parts, out, n, scale); });
  });
}

void convert(const void* from, DType from_type, void* to, DType to_type, size_t n, double scale, float* residual) {
  if (in_blocks(to_type)) return quantise(static_cast<const float*>(from), n, scale, residual, to, to_type);
  if (from_type == to_type && scale == 1.0) {
    if (from != to && n > 0) std::memcpy(to, from, n * dtype_size(to_type));
    return;
  }
  sum_in_order(&from, 1, from_type, to, to_type, n, scale);
}

void check_wire(DType dtype, DType wire) {
  if (wire == dtype || (in_blocks(wire) && dtype == DType::f32)) return;
  if (is_floating(dtype) && is_floating(wire) && dtype_size(wire) < dtype_size(dtype)) return;
  throw EngineError(ErrorKind::usage, std::string("a bucket of ") + dtype_name(dtype) + " cannot travel as " + dtype_name(wire) +
                                          ": use the same type, a smaller floating type, or for float32 blocks of int8 or fp8");
}

}  // namespace commsched
