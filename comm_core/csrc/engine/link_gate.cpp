#include "link_gate.h"

#include <algorithm>
#include <utility>

#include "interrupts.h"

namespace commsched {
namespace {

constexpr size_t kMostPassages = 1 << 20;
constexpr auto kRecent = std::chrono::seconds(1);

}  // namespace

LinkGate& LinkGate::of_process() {
  static LinkGate* gate = new LinkGate();  // never destroyed: threads may still use it when the process ends
  return *gate;
}

int64_t LinkGate::begin(Traffic traffic, int64_t bytes, double patience) {
  static const std::atomic<bool> never{false};
  std::unique_lock<std::mutex> lock(mutex_);
  const Passage passage = wait_turn(lock, traffic, bytes, never);
  last_[static_cast<size_t>(traffic)] = Clock::now();
  under_way_.emplace(next_, Message{traffic, Clock::now() + to_duration(patience), passage});
  return next_++;
}

void LinkGate::end(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = under_way_.find(number);
  if (found == under_way_.end()) return;
  found->second.passage.end = seconds(Clock::now());
  add(found->second.passage);
  under_way_.erase(found);
  changed_.notify_all();
}

void LinkGate::pass(Traffic traffic, int64_t bytes, const std::atomic<bool>& cancelled) {
  std::unique_lock<std::mutex> lock(mutex_);
  add(wait_turn(lock, traffic, bytes, cancelled));
}

void LinkGate::wake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

Passage LinkGate::wait_turn(std::unique_lock<std::mutex>& lock, Traffic traffic, int64_t bytes,
                            const std::atomic<bool>& cancelled) {
  const Clock::time_point begin = Clock::now();
  Interrupts interrupts(begin);
  while (!cancelled) {
    const Deadline now = Clock::now();
    Deadline until = now;
    for (const auto& [number, message] : under_way_) {
      if (message.traffic < traffic) until = std::max(until, message.patience);
    }
    if (until <= now) break;
    ++held_back_;
    changed_.wait_until(lock, std::min<Deadline>(until, now + kLongestSleep));
    --held_back_;
    interrupts.look(lock);
  }
  const double start = seconds(Clock::now());
  return {static_cast<int32_t>(traffic), waiting(traffic), seconds(begin), start, start, bytes};
}

bool LinkGate::shared(Traffic traffic) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto end = last_.begin() + static_cast<size_t>(traffic);
  return std::any_of(last_.begin(), end, [now = Clock::now()](Deadline last) { return now < last + kRecent; });
}

int32_t LinkGate::held_back() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_back_;
}

int32_t LinkGate::waiting(Traffic traffic) const {
  return static_cast<int32_t>(
      std::count_if(under_way_.begin(), under_way_.end(), [&](const auto& item) { return item.second.traffic < traffic; }));
}

void LinkGate::add(const Passage& passage) {
  if (recording_ && passages_.size() < kMostPassages) passages_.push_back(passage);
}

void LinkGate::record(bool on) {
  const std::lock_guard<std::mutex> lock(mutex_);
  recording_ = on;
  if (!on) passages_.clear();
}

std::vector<Passage> LinkGate::passages(bool clear) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return clear ? std::exchange(passages_, {}) : passages_;
}

}  // namespace commsched
