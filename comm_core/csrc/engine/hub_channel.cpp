#include "hub_channel.h"

#include <algorithm>
#include <cstring>

namespace commsched {

Hub::Hub(int size) : size_(size), lanes_(static_cast<size_t>(std::max(size, 0)) * std::max(size, 0)), senders_(std::max(size, 0)) {
  if (size < 1) throw EngineError(ErrorKind::usage, "a hub joins at least one rank, but size is " + std::to_string(size));
}

void Hub::set_faults(int sender, const HubFaults& faults) {
  const std::lock_guard lock(mutex_);
  senders_.at(sender) = Sender{faults, faults.seed, 0, false};
}

void Hub::disconnect(int rank) {
  const std::lock_guard lock(mutex_);
  senders_.at(rank).gone = true;
  changed_.notify_all();
}

Clock::time_point Hub::arrival(Sender& sender) {
  double share = 1;
  if (sender.random != 0) {  // xorshift
    sender.random ^= sender.random << 13;
    sender.random ^= sender.random >> 7;
    sender.random ^= sender.random << 17;
    share = static_cast<double>(sender.random >> 11) / static_cast<double>(1ull << 53);
  }
  return Clock::now() + to_duration(sender.faults.delay_seconds * share);
}

HubChannel::HubChannel(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank), inboxes_(hub_->size()) {
  if (rank < 0 || rank >= hub_->size()) {
    throw EngineError(ErrorKind::usage, "rank must be in [0, " + std::to_string(hub_->size()) + "), but is " + std::to_string(rank));
  }
}

HubChannel::~HubChannel() {
  const std::lock_guard lock(hub_->mutex_);
  hub_->senders_[rank_].gone = true;  // its messages are in memory that may be freed now
  hub_->changed_.notify_all();
}

Request HubChannel::isend(const void* data, size_t bytes, int peer, const MessageTag& tag) {
  const std::lock_guard lock(hub_->mutex_);
  check_alive(peer);
  Hub::Sender& me = hub_->senders_[rank_];
  const HubFaults& faults = me.faults;
  if (faults.disconnect_after >= 0 && me.sent >= faults.disconnect_after) me.gone = true;
  const bool lost = faults.drop_after >= 0 && me.sent >= faults.drop_after;
  ++me.sent;
  Hub::Lane& lane = hub_->lane(rank_, peer);
  lane.messages.push_back({data, bytes, tag, hub_->arrival(me), lost});
  hub_->changed_.notify_all();
  return {peer, true, lane.posted++};
}

Request HubChannel::irecv(void* data, size_t bytes, int peer, const MessageTag& tag) {
  const std::lock_guard lock(hub_->mutex_);
  check_alive(peer);
  inboxes_[peer].receives.push_back({data, bytes, tag});
  return {peer, false, inboxes_[peer].posted++};
}

void HubChannel::check_alive(int peer) const {
  if (aborted_) throw EngineError(ErrorKind::aborted, reason_);
  if (hub_->senders_[rank_].gone) throw EngineError(ErrorKind::peer_lost, "this rank was disconnected", rank_);
  if (hub_->senders_[peer].gone) {
    throw EngineError(ErrorKind::peer_lost, "rank " + std::to_string(peer) + " closed the connection", peer);
  }
}

bool HubChannel::done(const Request& request) {
  return request.is_send ? hub_->lane(rank_, request.peer).taken > request.sequence
                         : inboxes_[request.peer].done > request.sequence;
}

Clock::time_point HubChannel::next_arrival(int peer) const {
  const auto& messages = hub_->lane(peer, rank_).messages;
  const bool expected = !messages.empty() && !messages.front().lost && !inboxes_[peer].receives.empty();
  return expected && !hub_->senders_[peer].gone ? messages.front().arrives : Clock::time_point::max();
}

// Copies the first message that has arrived from `peer` into the first posted receive.
bool HubChannel::take_one(int peer) {
  Hub::Lane& lane = hub_->lane(peer, rank_);
  Inbox& inbox = inboxes_[peer];
  // Messages of a rank that is gone may be in freed memory.
  if (lane.messages.empty() || inbox.receives.empty() || hub_->senders_[peer].gone) return false;
  const Hub::Message& message = lane.messages.front();
  if (message.lost || message.arrives > Clock::now()) return false;
  const Receive& receive = inbox.receives.front();
  if (!(message.tag == receive.tag) || message.bytes != receive.bytes) {
    throw EngineError(ErrorKind::mismatch,
                      "rank " + std::to_string(peer) + " sent " + std::to_string(message.bytes) + " bytes for " +
                          describe(message.tag) + ", but this rank expects " + std::to_string(receive.bytes) +
                          " bytes for " + describe(receive.tag) + "; do all ranks run the same plan?",
                      peer);
  }
  if (message.bytes > 0) std::memcpy(receive.data, message.data, message.bytes);
  lane.messages.pop_front();
  inbox.receives.pop_front();
  ++lane.taken;
  ++inbox.done;
  hub_->changed_.notify_all();
  return true;
}

void HubChannel::wait(const Request& request) {
  if (request.peer < 0) return;
  std::unique_lock lock(hub_->mutex_);
  Deadline deadline = Clock::now() + timeout_;
  for (;;) {
    if (aborted_) throw EngineError(ErrorKind::aborted, reason_);
    bool moved = false;
    Clock::time_point wake = deadline;
    for (int peer = 0; peer < hub_->size(); ++peer) {  // take messages from any peer, as poll() on sockets does
      while (take_one(peer)) moved = true;
      wake = std::min(wake, next_arrival(peer));
    }
    if (done(request)) return;
    check_alive(request.peer);
    if (moved) {
      deadline = Clock::now() + timeout_;
    } else if (Clock::now() >= deadline) {
      throw EngineError(ErrorKind::timeout, std::string("nothing moved ") + (request.is_send ? "to" : "from") + " rank " +
                                                std::to_string(request.peer) + " in time", request.peer);
    }
    hub_->changed_.wait_until(lock, wake);
  }
}

void HubChannel::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(hub_->mutex_);
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
  hub_->senders_[rank_].gone = true;  // the others see a closed connection
  hub_->changed_.notify_all();
}

}  // namespace commsched
