// The engine's thread: runs one operation after the other, in the order of the plan.
#include "engine.h"

#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace commsched {
namespace {

// Requests short time slices with low latency. The engine's thread runs for microseconds at a time, and the link is idle while
// the thread waits for a core that computes. Does nothing on kernels without this setting.
void prefer_short_turns() noexcept {
#ifdef __linux__
  // The first version of the kernel's struct sched_attr, which only some C libraries declare.
  struct {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime;  // time slice in nanoseconds, for ordinary threads since Linux 6.12
    uint64_t deadline;
    uint64_t period;
  } attributes{};
  attributes.size = sizeof(attributes);
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0 || attributes.policy != SCHED_OTHER) return;
  attributes.runtime = 100'000;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

}  // namespace

void EngineCore::run() {
  prefer_short_turns();
  Lock lock(mutex_);
  for (int64_t step = 1; !stopping_ && !error_; ++step) {
    thread_wakes_.wait(lock, [&] { return begun_ >= step || stopping_ || error_; });
    if (stopping_ || error_ || !run_step(lock, step)) break;
  }
  if (stopping_) release_buckets(lock);
  stopped_ = true;
  changed_.notify_all();
}

bool EngineCore::run_step(Lock& lock, int64_t step) {
  for (size_t i = 0; i < plan_.size(); ++i) {
    position_ = static_cast<int>(i);
    if (!run_op(lock, {step, position_, plan_[i].op, plan_[i].bucket})) return false;
  }
  finished_ = step;
  progress_ = Clock::now();
  changed_.notify_all();
  return true;
}

bool EngineCore::run_op(Lock& lock, const OpTag& tag) {
  awaited_ = tag.bucket;
  thread_wakes_.wait(lock, [&] { return may_start(tag) || stopping_ || error_; });
  awaited_ = -1;
  if (stopping_ || error_) return false;

  const Clock::time_point ready = could_start_at(tag), start = Clock::now();
  const int64_t row_bytes = transport_->row_bytes();
  const BucketSpec& spec = buckets_[tag.bucket].spec;  // safe to keep: buckets change between steps only
  busy_ = true;
  progress_ = start;
  std::optional<EngineError> failure;
  lock.unlock();
  try {
    if (spec.count > 0) {
      const Transport::Use use(*transport_);
      if (!std::exchange(buckets_[tag.bucket].is_placed, true)) transport_->place_residual(spec, tag);
      if (tag.op == Op::RS) transport_->reduce_scatter(spec, tag);
      if (tag.op == Op::AG) transport_->all_gather(spec, tag);
      if (tag.op == Op::AR) transport_->all_reduce(spec, tag);
    }
  } catch (const EngineError& error) {
    failure = located(error, tag);
  } catch (const std::exception& error) {
    failure = located(EngineError(ErrorKind::aborted, error.what()), tag);
  }
  if (failure) fail(*failure);
  lock.lock();
  busy_ = false;
  if (failure) return false;
  finish_op(tag, ready, start, spec.row > 0 ? transport_->row_bytes() - row_bytes : transport_->bytes_sent(spec, tag.op));
  return true;
}

bool EngineCore::may_start(const OpTag& tag) const {
  const Bucket& b = buckets_[tag.bucket];
  if (tag.op != Op::AG) return b.ready >= tag.step;
  return b.reduced >= tag.step && (!b.spec.needs_update || b.updated >= tag.step);
}

Clock::time_point EngineCore::could_start_at(const OpTag& tag) const {
  const Bucket& b = buckets_[tag.bucket];
  if (tag.op != Op::AG) return b.ready_at;
  return b.spec.needs_update ? b.updated_at : b.reduced_at;
}

void EngineCore::finish_op(const OpTag& tag, Clock::time_point ready, Clock::time_point start, int64_t sent) {
  Bucket& b = buckets_[tag.bucket];
  const Clock::time_point end = Clock::now();
  if (tag.op != Op::AG) {
    b.reduced = tag.step;
    b.reduced_at = end;
  }
  if (tag.op != Op::RS) b.gathered = tag.step;
  log_.add({tag.step, static_cast<int32_t>(tag.op), tag.bucket, seconds(ready), seconds(start), seconds(end), sent});
  progress_ = end;
  changed_.notify_all();
}

// Adds the operation, the bucket and advice to a channel's error.
EngineError EngineCore::located(EngineError error, const OpTag& tag) const {
  const BucketSpec& spec = buckets_[tag.bucket].spec;
  std::string text = "rank " + std::to_string(transport_->rank()) + ": " + op_name(tag.op) + " of bucket " +
                     std::to_string(tag.bucket) + " (" + spec.name + ") in step " + std::to_string(tag.step) +
                     " failed: " + error.what();
  if (error.kind == ErrorKind::timeout) {
    text += "; is rank " + std::to_string(error.peer) + " alive, and has it come to the same step? The time-out is " +
            std::to_string(timeout_) + " s";
  } else if (error.kind == ErrorKind::peer_lost) {
    const std::string advice = "; look at the output of rank " + std::to_string(error.peer) + " for why it ended";
    if (text.find(advice) == std::string::npos) text += advice;  // a relayed error has it already
  }
  EngineError result(error.kind, text, error.peer);
  result.rank = transport_->rank();
  result.bucket = tag.bucket;
  result.step = tag.step;
  result.op = op_name(tag.op);
  result.name = spec.name;
  return result;
}

}  // namespace commsched
