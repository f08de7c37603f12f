// The calls of the engine's users: add buckets, install a plan, mark, wait.
#include "engine.h"

#include <algorithm>

#include "interrupts.h"

namespace commsched {
namespace {

EngineError usage(const std::string& text) { return EngineError(ErrorKind::usage, text); }

std::string in_step(int64_t step) { return " in step " + std::to_string(step); }

}  // namespace

EngineCore::EngineCore(std::shared_ptr<Transport> transport, double timeout_seconds, size_t max_events)
    : transport_(std::move(transport)), timeout_(timeout_seconds), log_(max_events) {
  if (!transport_) throw usage("an engine needs a transport, but got none");
  if (!(timeout_ > 0)) throw usage("timeout_seconds must be positive, but is " + std::to_string(timeout_));
  transport_->set_timeout(timeout_);
}

int EngineCore::add_bucket(const BucketSpec& spec) {
  const Lock lock(mutex_);
  check_idle("add_bucket()");
  check_parts(spec, transport_->size());
  if (spec.count > 0 && (spec.reduce_ptr == nullptr || spec.gather_ptr == nullptr)) {
    throw usage("bucket '" + spec.name + "' has elements but no memory");
  }
  transport_->prepare(spec);
  Bucket bucket;
  bucket.spec = spec;
  bucket.ready = bucket.reduced = bucket.updated = bucket.gathered = bucket.awaited = begun_;
  buckets_.push_back(std::move(bucket));
  return static_cast<int>(buckets_.size()) - 1;
}

void EngineCore::clear_buckets() {
  const Lock lock(mutex_);
  check_idle("clear_buckets()");
  plan_.clear();
  buckets_.clear();
}

void EngineCore::install(const std::vector<PlanOp>& plan) {
  const Lock lock(mutex_);
  check_idle("install()");
  check_plan(plan);
  plan_ = plan;
  for (Bucket& b : buckets_) b.in_plan = b.is_reduced = b.is_gathered = false;
  for (const PlanOp& item : plan) {
    Bucket& b = buckets_[item.bucket];
    b.in_plan = true;
    b.is_reduced |= item.op == Op::RS || item.op == Op::AR;
    b.is_gathered |= item.op == Op::AG || item.op == Op::AR;
    b.spec.gathered = b.is_gathered && !b.spec.needs_update;
    b.ready = b.reduced = b.updated = b.gathered = b.awaited = begun_;  // forget its state under an earlier plan
  }
}

// Every bucket that is in the plan is reduced once, then gathered at most once.
void EngineCore::check_plan(const std::vector<PlanOp>& plan) const {
  std::vector<bool> reduced(buckets_.size()), gathered(buckets_.size());
  for (const PlanOp& item : plan) {
    const std::string what = std::string(op_name(item.op)) + std::to_string(item.bucket);
    checked(item.bucket);
    const bool reduces = item.op == Op::RS || item.op == Op::AR, gathers = item.op == Op::AG || item.op == Op::AR;
    if (reduces && reduced[item.bucket]) throw usage("a plan reduces a bucket once, but " + what + " is a second time");
    if (!reduces && !reduced[item.bucket]) throw usage("RS or AR of a bucket must come before " + what + " in a plan");
    if (gathers && gathered[item.bucket]) throw usage("a plan gathers a bucket once, but " + what + " is a second time");
    if (item.op == Op::AR && buckets_[item.bucket].spec.needs_update) {
      throw usage("bucket " + name(item.bucket) + " is updated between RS and AG, so the plan cannot have " + what);
    }
    reduced[item.bucket] = reduced[item.bucket] || reduces;
    gathered[item.bucket] = gathered[item.bucket] || gathers;
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (buckets_[b].spec.needs_update && reduced[b] && !gathered[b]) {
      throw usage("bucket " + name(static_cast<int>(b)) + " is updated in shards, so the plan must gather it");
    }
  }
}

int64_t EngineCore::begin_step() {
  const Lock lock(mutex_);
  throw_if_failed();
  if (begun_ - finished_ >= 2) {
    throw usage("at most two steps may be under way, but step " + std::to_string(finished_ + 1) + " is not finished and step " +
                std::to_string(begun_) + " has begun");
  }
  ++begun_;
  progress_ = Clock::now();
  thread_wakes_.notify_one();
  return begun_;
}

void EngineCore::mark_ready(int bucket) {
  const Lock lock(mutex_);
  throw_if_failed();
  Bucket& b = checked(bucket);
  if (!b.in_plan) throw usage("bucket " + name(bucket) + " is not in the installed plan, so it cannot be marked ready");
  if (b.ready >= begun_) throw usage("bucket " + name(bucket) + " is marked ready twice" + in_step(begun_));
  // Whoever does not wait is told so in every run, not only in those in which the bucket still travels.
  if (b.awaited < b.ready || b.reached(b.last()) < b.ready) {
    throw usage("bucket " + name(bucket) + " is marked ready" + in_step(begun_) + ", but nothing has waited for it" +
                in_step(b.ready) + ": wait for it before its gradients are written");
  }
  b.ready = begun_;
  b.ready_at = progress_ = Clock::now();
  if (awaited_ == bucket) thread_wakes_.notify_one();
}

void EngineCore::mark_updated(int bucket) {
  const Lock lock(mutex_);
  throw_if_failed();
  Bucket& b = checked(bucket);
  if (!b.spec.needs_update) throw usage("bucket " + name(bucket) + " was not declared with needs_update");
  if (b.updated >= b.reduced) {
    throw usage("bucket " + name(bucket) + " is marked updated" + in_step(begun_) + ", but its RS is not done");
  }
  b.updated = b.reduced;
  b.updated_at = progress_ = Clock::now();
  if (awaited_ == bucket) thread_wakes_.notify_one();
}

EngineCore::Bucket& EngineCore::staged(int bucket, Stage stage) {
  Bucket& b = checked(bucket);
  if (!(stage == Stage::reduced ? b.is_reduced : b.is_gathered)) {
    throw usage("the installed plan never " + std::string(stage == Stage::reduced ? "reduces" : "gathers") + " bucket " +
                name(bucket));
  }
  return b;
}

bool EngineCore::done(int bucket, Stage stage) {
  const Lock lock(mutex_);
  Bucket& b = staged(bucket, stage);
  if (b.reached(stage) < begun_) {
    throw_if_failed();
    return false;
  }
  if (stage == b.last()) b.awaited = begun_;
  return true;
}

void EngineCore::wait(int bucket, Stage stage) {
  Lock lock(mutex_);
  Bucket& b = staged(bucket, stage);
  const int64_t wanted = begun_;
  if (stage == b.last()) b.awaited = wanted;
  // Do not look up `bucket` again after waiting: another thread may replace the buckets once the step has finished.
  const auto reached = [&] { return finished_ >= wanted || buckets_[bucket].reached(stage) >= wanted; };
  // A bucket that arrived stays readable after a failure: its flags may say why the others gave up.
  if (reached()) return;
  throw_if_failed();
  wait_until(lock, reached, (stage == Stage::reduced ? "RS of bucket " : "AG of bucket ") + name(bucket) + in_step(wanted));
}

void EngineCore::wait_all() {
  Lock lock(mutex_);
  throw_if_failed();
  const int64_t wanted = begun_;
  for (Bucket& b : buckets_) b.awaited = wanted;
  wait_until(lock, [&] { return finished_ >= wanted; }, "the end of step " + std::to_string(wanted));
}

// While the transport is busy its own time-out applies, whose error names the peer.
Deadline EngineCore::patience(Clock::time_point since) const {
  if (busy_ && transport_->keeps_time()) return Clock::now() + to_duration(1e9);
  return std::max(since, progress_) + to_duration(timeout_);
}

void EngineCore::wait_until(Lock& lock, const Condition& reached, const std::string& what) {
  const Clock::time_point start = Clock::now();
  Interrupts interrupts(start);
  while (!reached()) {
    throw_if_failed();  // before the wait, not after it: results that arrived before the failure are valid
    const Deadline deadline = patience(start), now = Clock::now();
    if (now >= deadline) {
      const EngineError error = stuck(what);
      lock.unlock();
      fail(error);
      throw error;
    }
    changed_.wait_until(lock, std::min<Deadline>(deadline, now + kLongestSleep));
    interrupts.look(lock);
  }
}

EngineError EngineCore::stuck(const std::string& what) const {
  std::string text = "rank " + std::to_string(transport_->rank()) + ": timed out while waiting for " + what;
  EngineError error(ErrorKind::timeout, text);
  if (finished_ < begun_ && position_ < static_cast<int>(plan_.size())) {
    const PlanOp& at = plan_[position_];
    text += std::string("; the engine is at ") + op_name(at.op) + " of bucket " + name(at.bucket) + in_step(finished_ + 1) +
            (busy_             ? ", under way"
             : at.op == Op::AG ? ", which is not marked updated"
                               : ", which is not marked ready");
    error = EngineError(ErrorKind::timeout, text);
    error.bucket = at.bucket;
    error.step = finished_ + 1;
    error.op = op_name(at.op);
    error.name = buckets_[at.bucket].spec.name;
  }
  error.rank = transport_->rank();
  return error;
}

}  // namespace commsched
