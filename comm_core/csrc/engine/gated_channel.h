// A channel that asks the link's gate before each message, so that a more urgent message can go between two of its own.
// Messages in flight cannot be recalled, so fewer are in flight while more urgent traffic uses the link.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "channel.h"
#include "link_gate.h"

namespace commsched {

class GatedChannel : public Channel {
 public:
  GatedChannel(std::shared_ptr<Channel> channel, Traffic traffic) : channel_(std::move(channel)), traffic_(traffic) {
    if (!channel_) throw EngineError(ErrorKind::usage, "a gated channel needs a channel, but got none");
  }

  Request isend(const void* data, size_t bytes, int peer, const MessageTag& tag) override {
    LinkGate::of_process().pass(traffic_, static_cast<int64_t>(bytes), aborted_);
    return channel_->isend(data, bytes, peer, tag);
  }
  Request irecv(void* data, size_t bytes, int peer, const MessageTag& tag) override {
    return channel_->irecv(data, bytes, peer, tag);
  }
  void wait(const Request& request) override { channel_->wait(request); }
  void abort(const std::string& reason) noexcept override {
    aborted_ = true;
    channel_->abort(reason);
    LinkGate::of_process().wake();
  }
  int max_in_flight() const override { return channel_->max_in_flight(); }
  int ahead(int depth) const override { return LinkGate::of_process().shared(traffic_) ? 1 : depth; }
  void set_timeout(double seconds) override { channel_->set_timeout(seconds); }

 private:
  const std::shared_ptr<Channel> channel_;
  const Traffic traffic_;
  std::atomic<bool> aborted_{false};
};

}  // namespace commsched
