// How a thread of Python that waits for other ranks learns of a signal, such as that of Ctrl-C.
#pragma once

#include <chrono>
#include <mutex>
#include <utility>

#include "types.h"

namespace commsched {

// A wait wakes after this time, at the latest, to look for signals. And poll() can miss readable bytes when SO_RCVLOWAT changes
// under it.
constexpr auto kLongestSleep = std::chrono::milliseconds(200);

// What a wait of this thread calls to see whether it shall end early, by an exception. None in threads of the engine.
inline thread_local void (*look_for_signals)() = nullptr;

// The waits of this thread call `look` as long as this exists.
class Interruptible {
 public:
  explicit Interruptible(void (*look)()) : before_(std::exchange(look_for_signals, look)) {}
  ~Interruptible() { look_for_signals = before_; }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  void (*const before_)();
};

// When one wait looks for signals: not within its first 200 ms, so that a short wait does nothing for them.
class Interrupts {
 public:
  explicit Interrupts(Clock::time_point begin) : looked_(begin) {}

  bool are_due() const { return look_for_signals != nullptr && Clock::now() >= looked_ + kLongestSleep; }

  // To be called after every sleep. Looks without the lock, because a handler in Python may use what it guards.
  void look(std::unique_lock<std::mutex>& lock) {
    if (!are_due()) return;
    lock.unlock();
    try {
      look_for_signals();
    } catch (...) {
      lock.lock();
      throw;
    }
    looked_ = Clock::now();
    lock.lock();
  }

 private:
  Clock::time_point looked_;
};

}  // namespace commsched
