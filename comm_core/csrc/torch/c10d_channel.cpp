#include "c10d_channel.h"

#include <ATen/ops/from_blob.h>

namespace commsched {
namespace {

// c10d's tags are non-negative ints. Messages with one tag match in order, so tags need not be unique, only different enough
// that ranks with different plans do not take each other's messages.
int tag_number(const MessageTag& tag) {
  uint64_t mixed = tag.step;
  for (uint64_t part : {uint64_t{tag.position}, uint64_t{tag.op}, uint64_t{tag.round}, uint64_t{tag.bucket}, uint64_t{tag.segment}}) {
    mixed = (mixed ^ part) * 0x9E3779B97F4A7C15ull;
    mixed ^= mixed >> 29;
  }
  return static_cast<int>(mixed & 0x7fffffff);
}

std::vector<at::Tensor> as_bytes(const void* data, size_t bytes) {
  return {at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte)};
}

// Only the exception's text tells a time-out from a lost peer.
EngineError backend_error(const std::exception& error, int peer) {
  // what_without_backtrace() is c10's; the trace would bury the sentence that matters.
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = c10_error ? c10_error->what_without_backtrace() : error.what();
  const bool late = text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos;
  return EngineError(late ? ErrorKind::timeout : ErrorKind::peer_lost, text, peer);
}

}  // namespace

C10dChannel::C10dChannel(c10::intrusive_ptr<c10d::Backend> backend)
    : backend_(std::move(backend)), lanes_(2 * static_cast<size_t>(backend_->getSize())) {}

void C10dChannel::set_timeout(double seconds) {
  timeout_ = std::chrono::duration_cast<std::chrono::milliseconds>(to_duration(seconds));
}

template <typename Post>
Request C10dChannel::post(int peer, bool is_send, Post&& post) {
  const std::lock_guard lock(mutex_);
  if (aborted_) throw EngineError(ErrorKind::aborted, reason_);
  Lane& messages = lane(peer, is_send);
  const uint64_t sequence = messages.posted++;
  try {
    messages.works[sequence % kSlots] = post();
  } catch (const std::exception& error) {
    throw backend_error(error, peer);
  }
  return {peer, is_send, sequence};
}

Request C10dChannel::isend(const void* data, size_t bytes, int peer, const MessageTag& tag) {
  return post(peer, true, [&] {
    auto tensors = as_bytes(data, bytes);
    return backend_->send(tensors, peer, tag_number(tag));
  });
}

Request C10dChannel::irecv(void* data, size_t bytes, int peer, const MessageTag& tag) {
  return post(peer, false, [&] {
    auto tensors = as_bytes(data, bytes);
    return backend_->recv(tensors, peer, tag_number(tag));
  });
}

void C10dChannel::wait(const Request& request) {
  if (request.peer < 0) return;
  Work work;
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) throw EngineError(ErrorKind::aborted, reason_);
    work = lane(request.peer, request.is_send).works[request.sequence % kSlots];
  }
  bool finished = false;
  try {
    finished = work->wait(timeout_);
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    if (aborted_) throw EngineError(ErrorKind::aborted, reason_);
    throw backend_error(error, request.peer);
  }
  const std::lock_guard lock(mutex_);
  if (aborted_ || !finished) throw EngineError(ErrorKind::aborted, aborted_ ? reason_ : "the message was aborted", request.peer);
  lane(request.peer, request.is_send).works[request.sequence % kSlots].reset();
}

void C10dChannel::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
  for (Lane& messages : lanes_) {
    for (Work& work : messages.works) {
      try {
        if (work) work->abort();
      } catch (const std::exception&) {  // it has ended by itself
      }
    }
  }
}

// The messages first: a pending one ends with its Work, and writes into no memory of ours any more.
void C10dChannel::close() noexcept {
  abort("the engine was closed");
  std::vector<Lane> lanes;
  c10::intrusive_ptr<c10d::Backend> backend;
  {
    const std::lock_guard lock(mutex_);
    lanes.swap(lanes_);
    backend.swap(backend_);
  }
  lanes.clear();
}

}  // namespace commsched
