// Messages as tagged isend / irecv of a c10d backend (gloo, MPI).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <mutex>
#include <vector>

#include "engine/channel.h"

namespace commsched {

class C10dChannel : public Channel {
 public:
  explicit C10dChannel(c10::intrusive_ptr<c10d::Backend> backend);

  Request isend(const void* data, size_t bytes, int peer, const MessageTag& tag) override;
  Request irecv(void* data, size_t bytes, int peer, const MessageTag& tag) override;
  void wait(const Request& request) override;
  void abort(const std::string& reason) noexcept override;
  void close() noexcept override;  // the group ends with its last reference
  int max_in_flight() const override { return kSlots; }
  void set_timeout(double seconds) override;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  static constexpr int kSlots = 64;

  struct Lane {
    std::vector<Work> works = std::vector<Work>(kSlots);
    uint64_t posted = 0;
  };
  // Messages to one peer, or from one.
  Lane& lane(int peer, bool is_send) { return lanes_[2 * peer + (is_send ? 1 : 0)]; }
  template <typename Post>
  Request post(int peer, bool is_send, Post&& post);

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::chrono::milliseconds timeout_{300000};
  std::vector<Lane> lanes_;
  std::mutex mutex_;
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace commsched
