// Priorities on the host's link: halos before activations before gradients. A less urgent message does not start while a more
// urgent one is in flight.
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
  int32_t waiting;  // more urgent messages in flight when it started: not 0 if patience had run out
  double asked;
  double start;
  double end;  // equals `start` for chunks of gradients, whose end is not reported
  int64_t bytes;
};

class LinkGate {
 public:
  // There is one link and so one gate in a process.
  static LinkGate& of_process();

  // Starts a message once no more urgent one is in flight. Less urgent messages wait until end() is called with the returned
  // number, at most `patience` seconds: a message that takes longer waits for its receiver, which may itself be waiting for a
  // message held back here.
  int64_t begin(Traffic traffic, int64_t bytes, double patience);
  void end(int64_t number);

  // Starts a message that others need not wait for. Set `cancelled` and call wake() to end the wait early.
  void pass(Traffic traffic, int64_t bytes, const std::atomic<bool>& cancelled);
  void wake();

  // The number of messages that wait for more urgent ones.
  int32_t held_back() const;

  // Whether more urgent messages have used the link within the last second.
  bool shared(Traffic traffic) const;

  // Starts (true) or clears (false) the record of messages.
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
