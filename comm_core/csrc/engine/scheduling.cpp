#include "scheduling.h"

#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdint>

namespace commsched {

#ifdef __linux__
namespace {

// The first version of the kernel's struct sched_attr, which only some C libraries declare.
struct Attributes {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime;  // time slice in nanoseconds, for ordinary threads since Linux 6.12
  uint64_t deadline;
  uint64_t period;
};

constexpr uint64_t kShortestTurn = 100'000;

}  // namespace

void prefer_short_turns() noexcept {
  Attributes attributes{};
  attributes.size = sizeof(attributes);
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0 || attributes.policy != SCHED_OTHER) return;
  attributes.runtime = kShortestTurn;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}
#else
void prefer_short_turns() noexcept {}
#endif

}  // namespace commsched
