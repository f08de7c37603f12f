// Channels between threads of one process, for tests: messages can be delayed, dropped and cut off.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "channel.h"

namespace commsched {

// Faults that a test injects into the messages of one sender.
struct HubFaults {
  double delay_seconds = 0;       // largest delay of a message
  uint64_t seed = 0;              // 0: every message takes delay_seconds; else a random time up to it
  int64_t drop_after = -1;        // messages from this number on are lost
  int64_t disconnect_after = -1;  // this message breaks the sender's connections
};

// The message queues of all ranks. A send completes when the receiver has taken the message: nothing is buffered.
class Hub {
 public:
  explicit Hub(int size);

  int size() const { return size_; }
  void set_faults(int sender, const HubFaults& faults);
  void disconnect(int rank);  // as if the process had been killed

 private:
  friend class HubChannel;

  struct Message {
    const void* data;
    size_t bytes;
    MessageTag tag;
    Clock::time_point arrives;
    bool lost;
  };
  // Messages of one direction, first in first out.
  struct Lane {
    std::deque<Message> messages;
    uint64_t posted = 0;
    uint64_t taken = 0;
  };
  struct Sender {
    HubFaults faults;
    uint64_t random = 0;
    int64_t sent = 0;
    bool gone = false;
  };

  Lane& lane(int from, int to) { return lanes_[from * size_ + to]; }
  Clock::time_point arrival(Sender& sender);

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Lane> lanes_;
  std::vector<Sender> senders_;
};

class HubChannel : public Channel {
 public:
  HubChannel(std::shared_ptr<Hub> hub, int rank);
  ~HubChannel() override;

  Request isend(const void* data, size_t bytes, int peer, const MessageTag& tag) override;
  Request irecv(void* data, size_t bytes, int peer, const MessageTag& tag) override;
  void wait(const Request& request) override;
  void abort(const std::string& reason) noexcept override;
  int max_in_flight() const override { return 1 << 20; }
  void set_timeout(double seconds) override { timeout_ = to_duration(seconds); }

 private:
  struct Receive {
    void* data;
    size_t bytes;
    MessageTag tag;
  };
  struct Inbox {
    std::deque<Receive> receives;
    uint64_t posted = 0;
    uint64_t done = 0;
  };

  bool done(const Request& request);
  bool take_one(int peer);
  Clock::time_point next_arrival(int peer) const;
  void check_alive(int peer) const;

  std::shared_ptr<Hub> hub_;
  const int rank_;
  Clock::duration timeout_ = to_duration(300);
  std::vector<Inbox> inboxes_;
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace commsched
