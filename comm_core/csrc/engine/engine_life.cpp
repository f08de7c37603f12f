// How an engine begins, fails and ends.
#include "engine.h"

namespace commsched {

const EngineCore::Bucket& EngineCore::checked(int bucket) const {
  if (bucket < 0 || bucket >= static_cast<int>(buckets_.size())) {
    throw EngineError(ErrorKind::usage, "there is no bucket " + std::to_string(bucket) + ": the engine has " +
                                            std::to_string(buckets_.size()) + " buckets");
  }
  return buckets_[bucket];
}

std::string EngineCore::name(int bucket) const { return std::to_string(bucket) + " (" + buckets_[bucket].spec.name + ")"; }

void EngineCore::throw_if_failed() const {
  if (error_) throw *error_;
  if (stopping_) throw EngineError(ErrorKind::aborted, "the engine is closed");
}

void EngineCore::check_idle(const char* what) const {
  throw_if_failed();
  if (finished_ == begun_) return;
  throw EngineError(ErrorKind::usage, std::string(what) + " is for between steps, but step " +
                                          std::to_string(finished_ + 1) + " is not finished: call wait_all() first");
}

// Keeps the first failure. Aborts the transport without holding the lock, because aborting may take the GIL.
void EngineCore::fail(EngineError error) {
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

void EngineCore::stop() {
  std::string reason = "the engine was closed";
  {
    const Lock lock(mutex_);
    stopping_ = true;
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

void Engine::close() noexcept {
  if (!owned_.here()) {
    // In a forked child the thread does not exist, and destroying a joinable std::thread would terminate the process.
    new std::thread(std::move(thread_));
    return;
  }
  const std::lock_guard lock(closing_);
  if (!thread_.joinable()) return;
  core_->stop();
  const bool from_within = thread_.get_id() == std::this_thread::get_id();
  if (!from_within && core_->wait_stopped(5.0)) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

}  // namespace commsched
