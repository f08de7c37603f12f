// The kernels' bodies on the CPU: every block and every thread of a launch, one after the other.
//
// A test compiles this to a shared library and puts it in the place of the GPU, so that tables, addresses, the choice
// of the kernel and the arithmetic are those of a real launch.
#include <cstring>

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

}  // namespace

// Returns 0, or 1 where there is no such kernel.
extern "C" int run(const char* kernel, long long blocks, const Argument* arguments) {
#define TRY(NAME, FROM, TO) \
  if (std::strcmp(kernel, "pack_" #NAME) == 0) return pack<FROM, TO>(arguments, blocks), 0;
  COMMSCHED_COPIES(TRY)
  return 1;
}

extern "C" unsigned short to_half(float value) { return half_bits(value); }
extern "C" float from_half(unsigned short bits) { return half_value(bits); }
extern "C" unsigned short to_bfloat16(float value) { return bfloat16_bits(value); }
