// The kernels' bodies on the CPU: every block and every thread of a launch, one after the other.
//
// A test compiles this to a shared library and puts it in the place of the GPU, so that tables, addresses, the choice
// of the kernel and the arithmetic are those of a real launch.
#include <cstring>

#include "copy.h"
#include "list.h"
#include "update.h"

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

template <typename From, typename To, bool kTally, typename Math>
void pack_block(const Argument* a, long long block, Math scale) {
  double squares = 0, nonfinite = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    Tally<Math> tally;
    pack_chunk<kTally, From>(pointer<const Chunk>(a[0])[block], pointer<const void* const>(a[1]), pointer<To>(a[2]),
                             scale, thread, kThreads, &tally);
    squares += tally.squares;
    nonfinite += tally.nonfinite;
  }
  if (kTally) pointer<Stats>(a[5])[block] = Stats{squares, nonfinite};
}

template <typename From, typename To>
void copy(bool packs, const Argument* a, long long blocks) {
  using Math = typename Wider<From, To>::Type;
  const float* factor = pointer<const float>(a[4]);
  const Math scale = static_cast<Math>(a[3].number) * (factor == nullptr ? Math(1) : static_cast<Math>(*factor));
  for (long long block = 0; block < blocks; ++block) {
    if (packs && a[5].bits != 0) {
      pack_block<From, To, true>(a, block, scale);
    } else if (packs) {
      pack_block<From, To, false>(a, block, scale);
    } else {
      for (int thread = 0; thread < kThreads; ++thread) {
        unpack_chunk<From, To>(pointer<const Chunk>(a[0])[block], pointer<void* const>(a[1]), pointer<const From>(a[2]),
                               scale, thread, kThreads);
      }
    }
  }
}

template <typename Rule, typename Grad, typename Weight>
void update(const Argument* a, long long blocks) {
  const float *factor = pointer<const float>(a[3]), *skip = pointer<const float>(a[4]);
  if (skip != nullptr && *skip != 0.0f) return;
  for (long long block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < kThreads; ++thread) {
      update_chunk<Rule, Grad, Weight>(pointer<const Chunk>(a[0])[block], pointer<const Part>(a[1]),
                                       pointer<const Hyper>(a[2]), factor == nullptr ? 1.0f : *factor, thread, kThreads);
    }
  }
}

}  // namespace

// Returns 0, or 1 where there is no such kernel.
extern "C" int run(const char* kernel, long long blocks, const Argument* arguments) {
#define TRY_COPY(NAME, FROM, TO)                                                            \
  if (std::strcmp(kernel, "pack_" #NAME) == 0) return copy<FROM, TO>(true, arguments, blocks), 0; \
  if (std::strcmp(kernel, "unpack_" #NAME) == 0) return copy<FROM, TO>(false, arguments, blocks), 0;
#define TRY_UPDATE(NAME, GRAD, WEIGHT)                                                             \
  if (std::strcmp(kernel, "sgd_" #NAME) == 0) return update<Sgd, GRAD, WEIGHT>(arguments, blocks), 0; \
  if (std::strcmp(kernel, "adam_" #NAME) == 0) return update<Adam, GRAD, WEIGHT>(arguments, blocks), 0;
  COMMSCHED_COPIES(TRY_COPY)
  COMMSCHED_UPDATES(TRY_UPDATE)
  return 1;
}

extern "C" unsigned short to_half(float value) { return half_bits(value); }
extern "C" float from_half(unsigned short bits) { return half_value(bits); }
extern "C" unsigned short to_bfloat16(float value) { return bfloat16_bits(value); }
