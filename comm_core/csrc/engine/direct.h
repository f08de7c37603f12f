// Direct exchange: every rank sends each other rank its shard in one hop; sums are in rank order.
#pragma once

#include "row_transport.h"

namespace commsched {

class DirectTransport : public RowTransport {
 public:
  DirectTransport(std::shared_ptr<Channel> channel, int rank, int size, size_t segment_bytes, int depth);

  void reduce_scatter(const BucketSpec& bucket, const OpTag& tag) override;
  void all_gather(const BucketSpec& bucket, const OpTag& tag) override;

 private:
  Cut part(const Work& work, int rank) const { return cut(work.bucket, rank, work.wire); }
  int peer(int distance) const { return (rank_ + distance) % size_; }

  void post_scatter(const Work& work, size_t k);
  void reduce(const Work& work, size_t k);
  void post_gather(const Work& work, size_t k);
  void place(const Work& work, size_t k);

  // Buckets of rows: direct_rows.cpp.
  void reduce_scatter_rows(const Work& work);
  void all_gather_rows(const Work& work);

  std::vector<int> ranks_;  // all of them
  std::vector<int> peers_;  // the others, in the order in which this rank sends to them
};

}  // namespace commsched
