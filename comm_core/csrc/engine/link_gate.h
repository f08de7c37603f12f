// Who may use the host's link now. Halos go before activations, activations before gradients: a less urgent message is not
// started while a more urgent one is on its way.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "types.h"

namespace commsched {

enum class Traffic : int32_t { halo, activation, gradient };

// One message; times are seconds of the steady clock, which is Python's time.monotonic().
struct Passage {
  int32_t traffic;
  int32_t waiting;  // more urgent messages that were on their way when it started: not 0 where patience had run out
  double asked;
  double start;
  double end;  // of a gradient's chunk, whose end nobody reports: its start
  int64_t bytes;
};

class LinkGate {
 public:
  // There is one link and so one gate in a process.
  static LinkGate& of_process();

  // A message starts, once nothing more urgent is on its way. The others let it go first until end() is called with the
  // number returned, but not for longer than `patience` seconds: a message that takes so long waits for its receiver, which
  // may itself wait for what is held back here.
  int64_t begin(Traffic traffic, int64_t bytes, double patience);
  void end(int64_t number);

  // A message starts that nobody has to wait for. `cancelled` ends the wait early, after wake().
  void pass(Traffic traffic, int64_t bytes, const std::atomic<bool>& cancelled);
  void wake();

  // How many messages have asked for the link and wait for more urgent ones.
  int32_t held_back() const;

  // Whether more urgent messages have used the link within the last second.
  bool shared(Traffic traffic) const;

  // Keeps what happens from now on; off forgets it.
  void record(bool on);
  std::vector<Passage> passages(bool clear);

 private:
  struct Message {
    Traffic traffic;
    Deadline patience;
    Passage passage;
  };

  Passage wait_turn(std::unique_lock<std::mutex>& lock, Traffic traffic, int64_t bytes, const std::atomic<bool>& cancelled);
  int32_t waiting(Traffic traffic) const;
  void add(const Passage& passage);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, Message> under_way_;
  std::array<Deadline, 3> last_{};  // by class of traffic: when a message last began
  int64_t next_ = 0;
  int32_t held_back_ = 0;
  bool recording_ = false;
  std::vector<Passage> passages_;
};

}  // namespace commsched
