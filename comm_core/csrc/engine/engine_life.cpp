// How an engine begins, fails and ends.
#include "engine.h"

namespace commsched {
namespace {

constexpr double kPatience = 5.0;  // seconds for the thread, then for operations of other threads, to end once they are aborted

}  // namespace

const EngineCore::Bucket& EngineCore::checked(int bucket) const {
  if (bucket < 0 || bucket >= static_cast<int>(buckets_.size())) {
    throw EngineError(ErrorKind::usage, "there is no bucket " + std::to_string(bucket) + ": the engine has " +
                                            std::to_string(buckets_.size()) + " buckets");
  }
  return buckets_[bucket];
}

std::string EngineCore::name(int bucket) const { return std::to_string(bucket) + " (" + buckets_[bucket].spec.name + ")"; }

void EngineCore::throw_if_failed() const {
  if (stopping_) {
    if (!error_) throw EngineError(ErrorKind::aborted, closed_because_);
    EngineError error(error_->kind, closed_because_ + "; before that: " + error_->what(), error_->peer);
    error.rank = error_->rank;
    error.bucket = error_->bucket;
    error.step = error_->step;
    error.op = error_->op;
    error.name = error_->name;
    throw error;
  }
  if (error_) throw *error_;
}

void EngineCore::check_idle(const char* what) const {
  throw_if_failed();
  if (finished_ == begun_) return;
  throw EngineError(ErrorKind::usage, std::string(what) + " is for between steps, but step " + std::to_string(finished_ + 1) +
                                          " is not finished: call wait_all() first");
}

// Keeps the first failure. Aborts the transport without holding the lock, because aborting may take the GIL.
void EngineCore::fail(EngineError error) {
  transport_->withdraw();
  {
    const Lock lock(mutex_);
    if (error_ || stopping_) return;
    if (error.rank < 0) error.rank = transport_->rank();
    error_ = std::move(error);
    thread_wakes_.notify_all();
    changed_.notify_all();
  }
  transport_->abort(error_->what());
}

void EngineCore::stop(const std::string& because) {
  std::string reason = "the engine was closed";
  transport_->withdraw();
  {
    const Lock lock(mutex_);
    stopping_ = true;
    closed_because_ = because;
    if (error_) reason = error_->what();  // fail() may not have aborted the transport yet
    thread_wakes_.notify_all();
    changed_.notify_all();
  }
  transport_->abort(reason);
}

bool EngineCore::wait_stopped(double seconds) {
  Lock lock(mutex_);
  return changed_.wait_for(lock, to_duration(seconds), [&] { return stopped_; });
}

// Drops the owners of the buckets' memory, without the lock: a tensor that ends may take the GIL. Waiting threads may still ask
// whether a bucket has arrived, so its other fields stay.
void EngineCore::release_buckets(Lock& lock) noexcept {
  std::vector<std::shared_ptr<void>> owners;
  for (Bucket& bucket : buckets_) owners.push_back(std::move(bucket.spec.owner));
  lock.unlock();
  owners.clear();
  lock.lock();
}

void EngineCore::let_go() noexcept {
  Lock lock(mutex_);
  if (stopped_) release_buckets(lock);  // else the thread does so when it ends
}

std::optional<EngineError> EngineCore::error() const {
  const Lock lock(mutex_);
  return error_;
}

std::vector<Event> EngineCore::events(bool clear) {
  const Lock lock(mutex_);
  return log_.read(clear);
}

int64_t EngineCore::begun() const {
  const Lock lock(mutex_);
  return begun_;
}

Engine::Engine(std::shared_ptr<Transport> transport, double timeout_seconds, size_t max_events)
    : core_(std::make_shared<EngineCore>(std::move(transport), timeout_seconds, max_events)),
      thread_([core = core_] { core->run(); }) {}

EngineCore* Engine::operator->() {
  if (owned_.here()) return core_.get();
  throw EngineError(ErrorKind::usage, "this process was forked from the one that made the engine of rank " +
                                          std::to_string(core_->transport().rank()) +
                                          ": the engine works only there; make another one here, or start the process with spawn");
}

void Engine::abort(const std::string& reason) { (*this)->fail(EngineError(ErrorKind::aborted, reason)); }

void Engine::close(const std::string& reason) noexcept {
  if (!owned_.here()) {
    // In a forked child the thread does not exist, and destroying a joinable std::thread would terminate the process.
    new std::thread(std::move(thread_));
    return;
  }
  const std::lock_guard lock(closing_);
  if (!thread_.joinable()) return;
  core_->stop(reason);
  const bool from_within = thread_.get_id() == std::this_thread::get_id();
  const bool ended = !from_within && core_->wait_stopped(kPatience);
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
  core_->let_go();
  core_->transport().close(reason, ended ? kPatience : 0);
}

}  // namespace commsched
