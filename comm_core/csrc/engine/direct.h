// Direct exchange: every rank sends each other rank its shard in one hop; sums are in rank order.
#pragma once

#include "exchange.h"
#include "rows.h"

namespace commsched {

class DirectTransport : public ExchangeTransport {
 public:
  DirectTransport(std::shared_ptr<Channel> channel, int rank, int size, size_t segment_bytes, int depth);

  void prepare(const BucketSpec& bucket) override;
  void reduce_scatter(const BucketSpec& bucket, const OpTag& tag) override;
  void all_gather(const BucketSpec& bucket, const OpTag& tag) override;
  int64_t row_bytes() const override { return row_bytes_; }

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

  // Buckets of rows: direct_rows.cpp.
  void reduce_scatter_rows(const Work& work);
  void all_gather_rows(const Work& work);
  void find_rows_to_send(const Work& work);
  void unite_changes(const Work& work);
  void pack_for_owners(const Work& work);
  void sum_rows(const Work& work);
  void exchange_rows(const Work& work, int round, size_t row_bytes);
  void post_rows(const Work& work, int round, size_t k);
  RowMessage& outgoing_rows(int round, int to);

  std::vector<Request> sends_;                           // [peer][slot]
  std::vector<Request> receives_;                        // [peer][slot]
  std::vector<const void*> parts_;                       // by rank, for one sum
  std::vector<RowMessage> packed_rows_, received_rows_;  // by rank
  std::vector<uint64_t> row_counts_;                     // by rank
  std::vector<uint32_t> touched_;
  std::vector<char> zero_row_;
  int64_t row_bytes_ = 0;
};

}  // namespace commsched
