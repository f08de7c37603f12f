// What a transport sends, and how it ends: the last operation gives back its connections.
#include "transport.h"

namespace commsched {

int64_t Transport::bytes_sent(const BucketSpec& bucket, Op op) const {
  const auto part = [&](int r, DType wire) {
    return static_cast<int64_t>(wire_bytes(wire, bucket.part_end(r, size()) - bucket.part_begin(r, size())));
  };
  int64_t bytes = 0;
  for (int r = 0; op != Op::AG && r < size(); ++r) bytes += r == rank() ? 0 : part(r, bucket.wire_dtype);
  const DType gathered = bucket.gathers_gradients() ? bucket.wire_dtype : bucket.gather_dtype;
  return bytes + (op == Op::RS ? 0 : (size() - 1) * part(rank(), gathered));
}

void Transport::enter() {
  const std::lock_guard lock(using_);
  if (closed_) throw EngineError(ErrorKind::aborted, reason_);
  ++users_;
}

void Transport::leave() noexcept {
  {
    const std::lock_guard lock(using_);
    if (--users_ > 0 || !closed_) return;
  }
  // Nobody enters any more, so this thread is the only one that comes here. The lock is not held: release() may take the GIL.
  release();
  const std::lock_guard lock(using_);
  is_released_ = true;
  released_.notify_all();
}

void Transport::close(const std::string& reason, double patience) noexcept {
  if (!owned_.here()) return;  // in a forked child the lock may be held for ever, and the connections are the parent's
  abort(reason);
  {
    std::unique_lock lock(using_);
    if (!closed_) {
      closed_ = true;
      reason_ = reason;
      ++users_;  // this call, until it leaves
      lock.unlock();
      leave();
      lock.lock();
    }
    released_.wait_for(lock, to_duration(patience), [&] { return is_released_; });
  }
}

}  // namespace commsched
