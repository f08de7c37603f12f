// Direct exchange: every rank sends each other rank its shard in one hop; sums are in rank order.
#pragma once

#include "exchange.h"

namespace commsched {

class DirectTransport : public ExchangeTransport {
 public:
  DirectTransport(std::shared_ptr<Channel> channel, int rank, int size, size_t segment_bytes, int depth);

  void reduce_scatter(const BucketSpec& bucket, const OpTag& tag) override;
  void all_gather(const BucketSpec& bucket, const OpTag& tag) override;

 private:
  // The operation in progress.
  struct Work {
    const BucketSpec& bucket;
    const OpTag& tag;
    DType type;  // in the buffer
    DType wire;  // in messages
  };

  Cut part(const Work& work, int rank) const { return cut(work.bucket, rank, work.wire); }
  int peer(int distance) const { return (rank_ + distance) % size_; }
  Request& request(std::vector<Request>& all, int peer, size_t k) { return all[peer * depth_ + k % depth_]; }
  void wait_for(std::vector<Request>& all, int peer, size_t k);
  void finish_sends(size_t segments);

  void post_scatter(const Work& work, size_t k);
  void reduce(const Work& work, size_t k);
  void post_gather(const Work& work, size_t k);
  void place(const Work& work, size_t k);

  std::vector<Request> sends_;     // [peer][slot]
  std::vector<Request> receives_;  // [peer][slot]
  std::vector<const void*> parts_;  // by rank, for one sum
};

}  // namespace commsched
