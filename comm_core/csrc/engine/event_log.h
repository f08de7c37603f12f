// A ring buffer of the engine's latest operations, allocated once.
#pragma once

#include <cstdint>
#include <vector>

namespace commsched {

// One operation; times are seconds of the steady clock, which is Python's time.monotonic().
struct Event {
  int64_t step;
  int32_t op;
  int32_t bucket;
  double ready;  // when its last dependency was met
  double start;
  double end;
  int64_t bytes;  // sent by this rank
};

// Keeps the last `capacity` events.
class EventLog {
 public:
  explicit EventLog(size_t capacity) : events_(capacity) {}

  void add(const Event& event) {
    if (events_.empty()) return;
    events_[(first_ + count_) % events_.size()] = event;
    if (count_ < events_.size()) {
      ++count_;
    } else {
      first_ = (first_ + 1) % events_.size();
    }
  }

  std::vector<Event> read(bool clear) {
    std::vector<Event> result;
    result.reserve(count_);
    for (size_t i = 0; i < count_; ++i) result.push_back(events_[(first_ + i) % events_.size()]);
    if (clear) first_ = count_ = 0;
    return result;
  }

 private:
  std::vector<Event> events_;
  size_t first_ = 0;
  size_t count_ = 0;
};

}  // namespace commsched
