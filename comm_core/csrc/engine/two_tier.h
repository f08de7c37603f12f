// Exchange for several ranks on each host: memory inside a host, messages between hosts. The slow link between hosts carries what
// one rank for each host would send.
#pragma once

#include "host_board.h"
#include "row_transport.h"

namespace commsched {

// [Note: two tiers]
//
// Host g's *deputy* for shard r is the rank of g whose place is r's own place modulo g's number of ranks; on r's own host it is r.
// Two hosts with ranks {0, 1} and {2, 3}: rank 2 is the deputy for shard 0 on the second host, and rank 0 the one for shard 2 on
// the first. One segment of shard 0:
//
//   reduce-scatter   rank 0  keeps its slice ------------------+
//                    rank 1  copies its slice to its board --> rank 0 adds 0 + 1 -----------------> adds the hosts' sums in
//                    rank 2  keeps its slice ------------------+                            +-----> host order, scales: done
//                    rank 3  copies its slice to its board --> rank 2 adds 2 + 3 == link ===+
//
//   all-gather       rank 0  copies its shard to its board --> rank 1 copies it from there
//                       +=== link ===> the board of rank 2 --> ranks 2 and 3 copy it from there
//
// A board's counter says how many segments lie on it. A rank whose neighbour is not so far leaves a wish on its own board and
// sleeps in the channel, until the neighbour has published the segment and answers the wish with an empty message. So one thread
// waits for memory and for messages at once, which move all the time: a thread asleep on a counter in memory (a futex) would move
// no bytes meanwhile, and rings of hosts that wait for each other's bytes would stand still. Time-outs, lost ranks, farewells and
// abort() are the channel's for both tiers. Ranks that are level with each other send no message: with one host, each would cost
// as much as the copy of its segment.
//
// No message says that a slot may be written again. Segments are counted over all operations, and each rank announces every
// segment to every neighbour, also an empty one. A rank announces segment s only after it has read all boards for segment
// s - depth, so whoever has got the neighbours' announcements up to s - depth knows that they have read up to s - 2 * depth: with
// 2 * depth slots, it may write segment s.
//
// [Note: buckets in shared memory]
//
// With one host, buckets that travel in their own type need no board, if all ranks took their memory from take(). Each rank says
// where its bucket lies, and where one lies elsewhere, all ranks use the boards for this operation:
//
//   reduce-scatter   all ranks meet;  each rank adds its shard's slices where they lie, in rank order, into its own;  all settle
//   all-gather       all ranks meet;  each rank copies the others' shards from where they lie;                        all settle
//
// To meet and to settle is to announce a segment without bytes and to wait for those of all neighbours. A rank announces the
// first when its bucket holds what the others are to read, and the second when it has read what it needs. So no rank's operation
// ends, and none of its gradients is overwritten, before all have read them. A reduce-scatter need not settle if an all-gather
// follows it and nobody writes to the gradients before that (BucketSpec::gathered): in RS only the shard's owner reads a slice,
// in AG it is overwritten after its owner has announced that AG.
//
// A rank that fails does not wait, and its user may write to its buckets. So it says on its board that it has left before anybody
// hears of the failure, and whoever has read its bucket looks there before it announces that it has. The memory of a killed
// process stays as it was.
//
// [Note: time-outs in two tiers]
//
// A peer that does not come may be waiting for a third rank, and only those who wait for the rank at fault itself know its name.
// So whose time is up asks first whether the peer waits, too. A neighbour that does writes the time on its board: a stopped
// process or one that has not begun the operation does not. The wait for a neighbour that waits goes on, because its own wait
// ends sooner. About a peer on another host nothing is known: the wait goes on once. Until then, the neighbours of the rank at
// fault have found it standing still, and the farewell of each rank that gives up tells all others the name.
//
// [Note: order of sums in two tiers]
//
// Gradients are scaled by `prescale` in their own type. A host's sum is formed in rank order (16-bit types: in float) and rounded
// once to the wire type, on the owner's host too: else a sum would depend on which rank owns its shard, and so on the buckets.
// In float16 it could become infinite where the mean of all ranks does not: it is divided by the least power of two that is not
// less than the ranks of any host, and the sum over the hosts multiplied by it, which changes no other bits above subnormals.
// The hosts' sums are added in host order (16-bit types: in float), scaled by `postscale` and rounded once to the bucket's type.
// With one host, or one rank for each host, the sum has the bits of the direct exchange: with one host, slices lie on the boards in
// the wire type, blocks included, and are added in rank order.
//
// [Note: blocks in two tiers]
//
// With several hosts, only what leaves a host is quantised. With n ranks r of host h, hosts 0 to H-1 and blocks Q:
//
//   sum of host h    V_h = prescale * g_0 + ... + prescale * g_(n-1) + R_h     in float32, in rank order, the residual last
//   sent             Q(V_h), also on the owner's host;  R_h = V_h - Q(V_h)
//   sum              S = (Q(V_0) + ... + Q(V_(H-1))) * postscale               in float32, in host order
//   gathered         Q(S + residual of the sum), as in the direct exchange
//
// So each host has one residual R_h for each element, whatever rank is the deputy for it: `sent_residual` of the deputy holds it,
// and is zero on the other ranks of the host. A bucket that has been added anew may have other shards, or a residual from a
// checkpoint of other hosts: before its first reduce-scatter, place_residual() adds up, over the boards, what the ranks of a host
// hold of each shard, leaves the sum with the deputy and zeros with the others. So sums do not depend on the plan: of a sum of one
// residual and zeros, at most the sign of a zero changes.
//
// [Note: rows in two tiers]
//
// Of a bucket of rows only touched rows travel. Their number is not known beforehand, so they do not use the boards: all messages
// go over the channel, inside a host too. Row n belongs to rank n % size. Each line is one exchange in which every rank takes part:
//
//   reduce-scatter   1. in the host     touched rows, in the bucket's type (with one host, the wire type), to the deputy for their
//                                       owner, which adds them
//                    2. between hosts   the host's sums of rows, in the wire type, to their owners, which add them
//   all-gather       3. between hosts   each owner's rows that are not zero to its deputies on the other hosts
//                    4. in the host     own rows and those from exchange 3 to all neighbours
//
// A rank that did not touch a row that another rank of its host touched counts as zeros, and so does a host that sent no row: the
// sums have the bits of whole buckets. A row leaves its host once, however many of the host's ranks touched it.
//
// Of a correction (BucketSpec::changed), all ranks must send each row that any rank has changed. So before exchange 1, their
// numbers are united: in the host; between hosts, where each rank sends a k-th of its host's numbers, with k ranks on the host;
// and in the host again.
class TwoTierTransport : public RowTransport {
 public:
  // `hosts` has each rank's host, from 0 without gaps. The ranks of this host are the board's places, in rank order.
  TwoTierTransport(std::shared_ptr<Channel> channel, int rank, std::vector<int> hosts, std::unique_ptr<HostBoard> board,
                   size_t segment_bytes, int depth);

  ~TwoTierTransport() override { channel_->beat(nullptr); }

  // Of the board that every rank needs.
  static HostBoard::Shape board_shape(int size, size_t segment_bytes, int depth) { return {size, 2 * depth, segment_bytes}; }

  void prepare(const BucketSpec& bucket) override;
  void place_residual(const BucketSpec& bucket, const OpTag& tag) override;
  void reduce_scatter(const BucketSpec& bucket, const OpTag& tag) override;
  void all_gather(const BucketSpec& bucket, const OpTag& tag) override;
  std::shared_ptr<void> take(size_t bytes) override { return board_->take(bytes); }
  void withdraw() noexcept override { board_->leave(); }
  void abort(const std::string& reason) noexcept override;
  int64_t bytes_sent(const BucketSpec& bucket, Op op) const override;

 protected:
  void release() noexcept override;

 private:
  // The operation in progress.
  struct Work : RowTransport::Work {
    DType board;         // of what lies on the boards
    uint64_t form;       // of its segments there
    uint64_t where = 0;  // of the bucket in the shared memory
  };

  Work work(const BucketSpec& bucket, const OpTag& tag, DType type, DType wire, DType board) const;

  bool one_host() const { return members_.size() == 1; }
  int deputy(int shard, int host) const { return members_[host][place_[shard] % members_[host].size()]; }
  Cut part(const Work& work, int shard) const { return cut(work.bucket, shard, work.board); }
  HostBoard::Note note(const Work& work, int round, size_t k) const { return {message(work.tag, round, k), work.form, work.where}; }
  bool may_be_waiting(int peer) const;
  void wait_for(std::vector<Request>& all, int peer, size_t k) override;

  void announce(const Work& work, int round, size_t k);
  void await_announcements(const Work& work, int round, size_t k);

  using Move = void (TwoTierTransport::*)(const Work& work);
  bool move_in_place(Work& work, void* data, Move move, bool settles);
  void settle(const Work& work);
  const char* neighbours(int rank, DType type, size_t element) const {
    return board_->shared(place_[rank], where_[place_[rank]]) + element * dtype_size(type);
  }
  void sum_in_place(const Work& work);
  void gather_in_place(const Work& work);

  void write_slice(const Work& work, int shard, size_t k, char* to) const;
  void lay_out_slices(const Work& work, int round, size_t k);
  void add_slices(const Work& work, int shard, size_t k, char* mine, char* sum, DType to, double scale);
  void sum_on_host(const Work& work, size_t k);
  void sum_of_hosts(const Work& work, size_t k);

  void send_shard(const Work& work, size_t k);
  void lay_out_shards(const Work& work, size_t k);
  void take_shards(const Work& work, size_t k);

  // Buckets of rows: two_tier_rows.cpp.
  void reduce_scatter_rows(const RowTransport::Work& work);
  void all_gather_rows(const RowTransport::Work& work);
  void unite_changes(const RowTransport::Work& work);
  void sum_rows_on_host(const RowTransport::Work& work, DType packed);
  void sum_rows_of_hosts(const RowTransport::Work& work);

  const std::vector<int> hosts_;           // by rank
  std::vector<std::vector<int>> members_;  // by host: its ranks, ascending
  std::vector<int> place_;                 // by rank: its number among its host's ranks
  const int host_;                         // this rank's
  double room_ = 1.0;                      // by which a host's sum in float16 is divided
  std::vector<int> entrusted_;             // the shards whose deputy on this host is this rank; its own is the last
  std::vector<int> deputies_;              // by host: the deputy for this rank's shard; on this host it is this rank
  std::vector<int> neighbours_;            // the other ranks of this host
  const std::unique_ptr<HostBoard> board_;
  uint64_t sequence_ = 0;        // segments of all finished operations
  std::vector<uint64_t> where_;  // by place: the bucket of the operation in progress in the shared memory
  RowMessage handed_on_;         // to the neighbours: own sums and those from other hosts
};

}  // namespace commsched
