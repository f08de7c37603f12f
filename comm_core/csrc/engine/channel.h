// Point-to-point messages between the ranks of one engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "types.h"

namespace commsched {

// Identifies the operation a message belongs to. Messages between two ranks match in the order in which they were posted; the
// tag is a check.
struct MessageTag {
  uint32_t step = 0;
  uint16_t position = 0;
  uint8_t op = 0;
  uint8_t round = 0;
  uint32_t bucket = 0;
  uint32_t segment = 0;

  bool operator==(const MessageTag& o) const {
    return step == o.step && position == o.position && op == o.op && round == o.round && bucket == o.bucket && segment == o.segment;
  }
};

inline std::string describe(const MessageTag& tag) {
  const std::string place = static_cast<int32_t>(tag.step) < 0 ? "between steps"
                                                               : "step " + std::to_string(tag.step) + ", position " +
                                                                     std::to_string(tag.position) + " of the plan";
  return std::string(op_name(static_cast<Op>(tag.op))) + " of bucket " + std::to_string(tag.bucket) + " (" + place + ")";
}

// A posted message: plain numbers, so posting one allocates nothing.
struct Request {
  int peer = -1;  // -1: nothing to wait for
  bool is_send = false;
  uint64_t sequence = 0;  // counts this channel's messages to / from this peer
};

// One thread posts and waits; abort() may be called from any other.
class Channel {
 public:
  virtual ~Channel() = default;

  virtual Request isend(const void* data, size_t bytes, int peer, const MessageTag& tag) = 0;
  virtual Request irecv(void* data, size_t bytes, int peer, const MessageTag& tag) = 0;

  // Returns when the message's buffer may be used again. Throws EngineError when no byte arrived or left within the channel's
  // time-out, when the peer is gone, when its message has another tag, and after abort().
  virtual void wait(const Request& request) = 0;

  // Makes every current and later call throw EngineError(aborted, reason).
  virtual void abort(const std::string& reason) noexcept = 0;

  // Gives back the connections, after abort(). No thread may be inside a call, and none may follow but abort().
  virtual void close() noexcept = 0;

  // The largest number of messages per peer and direction that may be posted before waiting.
  virtual int max_in_flight() const = 0;

  virtual void set_timeout(double seconds) = 0;

  // While this rank waits, its channel writes the time of Clock here, at least every kLongestSleep; nullptr: nowhere. So others
  // can tell a rank that waits from one that stands still.
  virtual void beat(std::atomic<int64_t>* pulse) noexcept = 0;
};

}  // namespace commsched
