// Ring exchange: every rank sends to the next one only, in N-1 rounds. A segment is forwarded as soon as it is added, so the
// rounds of different segments overlap. The order of the sum differs from shard to shard (it starts at
// the shard's owner + 1) but never from run to run.
#pragma once

#include "exchange.h"

namespace commsched {

class RingTransport : public ExchangeTransport {
 public:
  RingTransport(std::shared_ptr<Channel> channel, int rank, int size, size_t segment_bytes, int depth);

  void prepare(const BucketSpec& bucket) override;
  void reduce_scatter(const BucketSpec& bucket, const OpTag& tag) override;
  void all_gather(const BucketSpec& bucket, const OpTag& tag) override;

 private:
  // The operation in progress. Message m is segment m % segments of round m / segments.
  struct Work {
    const BucketSpec& bucket;
    const OpTag& tag;
    DType type;
    DType wire;
    bool reducing;
    size_t segments;

    size_t round(size_t m) const { return m / segments; }
    size_t segment(size_t m) const { return m % segments; }
    bool cast() const { return wire != type; }
  };

  void run(const Work& work);
  void receive(const Work& work, size_t m);
  void send(const Work& work, size_t m);
  void accept(const Work& work, size_t m);
  void add(const Work& work, size_t m, char* data);

  int shard_sent(const Work& work, size_t m) const;
  int shard_received(const Work& work, size_t m) const { return (shard_sent(work, m) + size_ - 1) % size_; }
  char* data(const Work& work, int shard, size_t m) const;
  size_t elements(const Work& work, int shard, size_t m) const;

  std::vector<Request> sends_;
  std::vector<Request> receives_;
};

}  // namespace commsched
