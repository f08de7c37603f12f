// The kernels' bodies on the CPU: every block and every thread of a launch, one after the other.
//
// A test compiles this to a shared library and puts it in the place of the GPU, so that tables, addresses, the choice
// of the kernel and the arithmetic are those of a real launch.
#include <cstring>

#include "block_codes.h"
#include "copy.h"
#include "list.h"

using namespace commsched;

namespace {

constexpr int kThreads = 256;

union Argument {
  unsigned long long bits;
  double number;
};

template <typename T>
T* pointer(const Argument& argument) {
  return reinterpret_cast<T*>(argument.bits);
}

template <typename From, typename To>
void pack(const Argument* a, long long blocks) {
  const auto scale = static_cast<typename Wider<From, To>::Type>(a[3].number);
  for (long long block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < kThreads; ++thread) {
      pack_chunk<From>(pointer<const Chunk>(a[0])[block], pointer<const void* const>(a[1]), pointer<To>(a[2]), scale, thread,
                       kThreads);
    }
  }
}

constexpr int kLanes = 32, kEach = kBlock / kLanes;

// Of quantised blocks, each warp of the launch has one.
template <typename Act>
void on_blocks(const Argument* a, long long launched, Act act) {
  for (long long warp = 0; warp < launched * kThreads / kLanes; ++warp) {
    if (warp < static_cast<long long>(a[3].bits)) act(warp, static_cast<float>(a[4].number));
  }
}

template <typename Code>
void quantise(const Argument* a, long long launched) {
  on_blocks(a, launched, [&](long long block, float scale) {
    float values[kLanes][kEach];
    float* residual = a[1].bits == 0 ? nullptr : pointer<float>(a[1]) + block * kBlock;
    int most = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      const float* in = pointer<const float>(a[0]) + block * kBlock;
      most = larger(most, load_block<kLanes>(in, residual, kEach, scale, lane, values[lane]));
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      store_block<Code, kLanes>(values[lane], kEach, most, lane, residual, pointer<Byte>(a[2]) + block * kBlockBytes);
    }
  });
}

template <typename Code>
void sum(const Argument* a, long long launched) {
  on_blocks(a, launched, [&](long long block, float scale) {
    const OneAfterAnother place{pointer<const Byte>(a[0]) + block * kBlockBytes, static_cast<Int64>(a[3].bits) * kBlockBytes};
    for (int lane = 0; lane < kLanes; ++lane) {
      sum_block<Code, kLanes>(place, static_cast<int>(a[1].bits), kEach, scale, lane, pointer<float>(a[2]) + block * kBlock);
    }
  });
}

}  // namespace

// Returns 0, or 1 where there is no such kernel.
extern "C" int run(const char* kernel, long long blocks, const Argument* arguments) {
#define TRY(NAME, FROM, TO) \
  if (std::strcmp(kernel, "pack_" #NAME) == 0) return pack<FROM, TO>(arguments, blocks), 0;
  COMMSCHED_COPIES(TRY)
#define TRY_CODE(NAME, CODE)                                                                    \
  if (std::strcmp(kernel, "quantise_" #NAME) == 0) return quantise<CODE>(arguments, blocks), 0; \
  if (std::strcmp(kernel, "sum_" #NAME) == 0) return sum<CODE>(arguments, blocks), 0;
  COMMSCHED_CODES(TRY_CODE)
  return 1;
}

extern "C" unsigned short to_half(float value) { return half_bits(value); }
extern "C" float from_half(unsigned short bits) { return half_value(bits); }
extern "C" unsigned short to_bfloat16(float value) { return bfloat16_bits(value); }
