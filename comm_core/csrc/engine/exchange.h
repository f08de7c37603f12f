// Base of the exchanges over a channel: the channel, the segments of a shard, and staging memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "channel.h"
#include "link_gate.h"
#include "reduce.h"
#include "transport.h"

namespace commsched {

// One rank's part of a bucket, from element `start` on, as segments of `step` elements. Parts may differ in length: a segment
// behind the end of a part has no elements and is not sent.
struct Cut {
  size_t start;
  size_t length;
  size_t step;

  size_t segments() const { return (length + step - 1) / step; }
  size_t begin(size_t k) const { return start + k * step; }
  size_t size(size_t k) const { return k < segments() ? std::min(step, length - k * step) : 0; }
};

// Rows of segment-sized slots, used in turn: segment k of a row lies in slot k % depth.
class Staging {
 public:
  void reserve(int rows, int depth, size_t slot_bytes) {
    const size_t needed = static_cast<size_t>(rows) * depth * slot_bytes;
    if (memory_.size() < needed) memory_.resize(needed);
    depth_ = depth;
    slot_bytes_ = slot_bytes;
  }
  char* slot(int row, size_t k) { return memory_.data() + (static_cast<size_t>(row) * depth_ + k % depth_) * slot_bytes_; }

 private:
  std::vector<char> memory_;
  int depth_ = 1;
  size_t slot_bytes_ = 0;
};

class ExchangeTransport : public Transport {
 public:
  // Up to `depth` segments per peer and direction are in flight at a time; the channel sets the limit.
  ExchangeTransport(std::shared_ptr<Channel> channel, int rank, int size, size_t segment_bytes, int depth);

  void prepare(const BucketSpec& bucket) override;
  void abort(const std::string& reason) noexcept override;
  void set_timeout(double seconds) override { channel_->set_timeout(seconds); }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

 protected:
  void release() noexcept override;

  Cut cut(const BucketSpec& b, int rank, DType wire) const {
    const size_t start = b.part_begin(rank, size_);
    return {start, b.part_end(rank, size_) - start, wire_elements(wire, segment_bytes_)};
  }

  // Of the longest part.
  size_t segments(const BucketSpec& b, DType wire) const {
    size_t most = 0;
    for (int rank = 0; rank < size_; ++rank) most = std::max(most, cut(b, rank, wire).segments());
    return most;
  }
  static char* at(void* base, DType type, size_t element) { return static_cast<char*>(base) + element * dtype_size(type); }

  // The wire type of AG: the bucket's for gradients, the parameters' own type for parameters.
  static DType gather_wire(const BucketSpec& b) { return b.gathers_gradients() ? b.wire_dtype : b.gather_dtype; }
  static DType gather_type(const BucketSpec& b) { return b.gathers_gradients() ? b.dtype : b.gather_dtype; }

  // Scales in place if no cast follows; a cast applies the scale itself.
  void apply_prescale(const BucketSpec& bucket) const;

  // With one rank the sum is the rank's own scaled gradients.
  void scale_alone(const BucketSpec& bucket) const;

  // Every segment asks the link's gate before it is sent: between two of them something more urgent can go first. Beside
  // more urgent messages one segment at a time is in flight, because a segment in flight cannot be called back.
  void pass_gate(size_t bytes) { LinkGate::of_process().pass(Traffic::gradient, static_cast<int64_t>(bytes), aborted_); }
  size_t ahead() const { return LinkGate::of_process().shared(Traffic::gradient) ? 1 : depth_; }

  static MessageTag message(const OpTag& tag, size_t round, size_t segment);

  std::shared_ptr<Channel> channel_;
  const int rank_;
  const int size_;
  const size_t segment_bytes_;
  const int depth_;
  std::atomic<bool> aborted_{false};
  Staging received_;  // rows as the exchange needs them
  Staging outgoing_;  // one row per rank, for casts before sending
};

}  // namespace commsched
