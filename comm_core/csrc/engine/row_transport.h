// Base of the exchanges that can send buckets by rows: of a bucket of an embedding's gradients, only touched rows travel.
#pragma once

#include "exchange.h"
#include "rows.h"

namespace commsched {

// Row k belongs to rank k % size: vocabularies are often sorted by frequency, and neighbouring rows would load one rank with most
// of the traffic. Each exchange begins with the counts of rows, zeros too, to the same peers whatever rows a rank has touched. The
// counts tell both sides how many segments follow.
class RowTransport : public ExchangeTransport {
 public:
  void prepare(const BucketSpec& bucket) override;
  int64_t row_bytes() const override { return row_bytes_; }

 protected:
  // The operation in progress.
  struct Work {
    const BucketSpec& bucket;
    const OpTag& tag;
    DType type;  // in the buffer
    DType wire;  // in messages
  };

  // The ranks that take part in one exchange of rows; this rank itself is skipped.
  struct Peers {
    const std::vector<int>& to;
    const std::vector<int>& from;
    bool counted;  // whether what is sent there passes the link's gate, and counts as sent
  };

  // Rounds of messages. The direct exchange has the first three; two tiers have all, of which "Between" is between hosts.
  enum Round : size_t {
    kScatter,
    kGather,
    kUnite,
    kScatterBetween,
    kGatherBetween,
    kUniteBetween,
    kUniteOnHost,
    kPlace,
    kBegin,
    kEnd,
    kRounds
  };

  RowTransport(std::shared_ptr<Channel> channel, int rank, int size, size_t segment_bytes, int depth);

  Request& request(std::vector<Request>& all, int peer, size_t k) { return all[peer * depth_ + k % depth_]; }
  virtual void wait_for(std::vector<Request>& all, int peer, size_t k);
  void finish_sends(size_t segments);

  int owner(uint32_t row) const { return static_cast<int>(row % size_); }
  int via(uint32_t row) const { return via_[owner(row)]; }

  void find_rows_to_send(const Work& work);
  void unite(const Work& work, Round round, const Peers& peers, uint32_t parts, uint32_t part);
  void read_changes(const BucketSpec& bucket);
  void write_changes(const BucketSpec& bucket) const;
  void pack_rows(const Work& work, DType wire);
  void pack_sums(const Work& work);
  void exchange_rows(const Work& work, Round round, const Peers& peers, size_t row_bytes, RowMessage* to_all = nullptr);
  void place_rows(const Work& work, const std::vector<int>& from);
  void zero_is(const Work& work, DType wire);

  // Calls use(number) for each row in the messages that were received from these ranks, ascending. Until it returns, parts_ has
  // the row of each message, or zeros where a message does not have it. Throws if a row is not expected(number).
  template <typename Expected, typename Use>
  void merge_rows(const Work& work, const std::vector<int>& from, Expected expected, Use use) {
    const auto rows = static_cast<uint32_t>(work.bucket.count / work.bucket.row);
    merged_.assign(size_, 0);
    for (uint32_t least = 0;;) {
      uint32_t next = rows;
      for (const int r : from) {
        if (merged_[r] == received_rows_[r].count()) continue;
        const uint32_t number = received_rows_[r].number(merged_[r]);
        if (number < least || number >= rows || !expected(number)) throw strange(r, number);
        next = std::min(next, number);
      }
      if (next == rows) return;
      for (size_t i = 0; i < from.size(); ++i) {
        const RowMessage& message = received_rows_[from[i]];
        uint64_t& k = merged_[from[i]];
        const bool touched = k < message.count() && message.number(k) == next;
        parts_[i] = touched ? message.row(k++) : zero_row_.data();
      }
      use(next);
      least = next + 1;
    }
  }

  static EngineError strange(int peer, uint32_t number);

  // By owner: the rank to which this rank sends touched rows, and from which it gets sums: the owner, or its deputy on this host.
  std::vector<int> via_;
  std::vector<Request> sends_;                           // [peer][slot]
  std::vector<Request> receives_;                        // [peer][slot]
  std::vector<const void*> parts_;                       // of one sum
  std::vector<RowMessage> packed_rows_, received_rows_;  // by rank
  std::vector<uint64_t> row_counts_;                     // by rank

 private:
  void post_rows(const Work& work, Round round, const Peers& peers, RowMessage* to_all, size_t k);

  std::vector<uint64_t> merged_;  // by rank: rows of its message that were merged
  std::vector<uint32_t> touched_;
  std::vector<char> zero_row_;
  int64_t row_bytes_ = 0;
};

}  // namespace commsched
