// The exchange in two tiers; see the notes in two_tier.h.
#include "two_tier.h"

#include <cstring>

#include "connection.h"

namespace commsched {
namespace {

constexpr auto kPulse = 10 * kLongestSleep;  // a neighbour that has not written the time for so long does not wait

std::vector<std::vector<int>> members_of(const std::vector<int>& hosts) {
  std::vector<std::vector<int>> members;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const int host = hosts[rank];
    if (host < 0 || host >= static_cast<int>(hosts.size())) {
      throw EngineError(ErrorKind::usage, "hosts are numbered from 0 to at most " + std::to_string(hosts.size() - 1) +
                                              ", but rank " + std::to_string(rank) + " is on host " + std::to_string(host));
    }
    if (members.size() <= static_cast<size_t>(host)) members.resize(host + 1);
    members[host].push_back(static_cast<int>(rank));
  }
  for (size_t host = 0; host < members.size(); ++host) {
    if (!members[host].empty()) continue;
    throw EngineError(ErrorKind::usage, "hosts are numbered without gaps, but no rank is on host " + std::to_string(host) + " of " +
                                            std::to_string(members.size()));
  }
  return members;
}

}  // namespace

TwoTierTransport::TwoTierTransport(std::shared_ptr<Channel> channel, int rank, std::vector<int> hosts,
                                   std::unique_ptr<HostBoard> board, size_t segment_bytes, int depth)
    : RowTransport(std::move(channel), rank, static_cast<int>(hosts.size()), segment_bytes, depth),
      hosts_(std::move(hosts)),
      members_(members_of(hosts_)),
      place_(hosts_.size()),
      host_(hosts_[rank]),
      board_(std::move(board)) {
  received_.reserve(static_cast<int>(members_.size()), depth_, segment_bytes_);  // a row for each host
  for (const auto& ranks : members_) {
    for (size_t place = 0; place < ranks.size(); ++place) place_[ranks[place]] = static_cast<int>(place);
    while (room_ < static_cast<double>(ranks.size())) room_ *= 2;
  }
  for (int shard = 0; shard < size_; ++shard) {
    via_[shard] = deputy(shard, host_);
    if (shard != rank_ && deputy(shard, host_) == rank_) entrusted_.push_back(shard);
  }
  for (int host = 0; host < static_cast<int>(members_.size()); ++host) deputies_.push_back(deputy(rank_, host));
  entrusted_.push_back(rank_);  // last: sums for other hosts are sent while this one is formed
  for (int other : members_[host_]) {
    if (other != rank_) neighbours_.push_back(other);
  }
  const HostBoard::Shape needed = board_shape(size_, segment_bytes, depth);
  if (!board_ || board_->places() != static_cast<int>(members_[host_].size()) || board_->place() != place_[rank_] ||
      board_->shape().shards != needed.shards || board_->shape().slots != needed.slots ||
      board_->shape().slot_bytes != needed.slot_bytes) {
    throw EngineError(ErrorKind::usage, "rank " + std::to_string(rank_) + " needs the boards of the " +
                                            std::to_string(members_[host_].size()) + " ranks of its host, of which it is number " +
                                            std::to_string(place_[rank_]) + ", made for " + std::to_string(size_) +
                                            " ranks, segments of " + std::to_string(segment_bytes) + " bytes and depth " +
                                            std::to_string(depth));
  }
  where_.resize(board_->places());
  channel_->beat(board_->pulse());
}

void TwoTierTransport::prepare(const BucketSpec& bucket) {
  constexpr size_t whole = kQuantBlock * sizeof(float);
  if (!one_host() && in_blocks(bucket.wire_dtype) && segment_bytes_ % whole != 0) {
    throw EngineError(ErrorKind::usage, "segment_bytes must be a multiple of " + std::to_string(whole) +
                                            ", a block in float32, for a bucket that travels in blocks between hosts, but is " +
                                            std::to_string(segment_bytes_));
  }
  RowTransport::prepare(bucket);
}

void TwoTierTransport::abort(const std::string& reason) noexcept {
  withdraw();
  RowTransport::abort(reason);
}

// The channel first, as the base says; only then nothing arrives on the board any more.
void TwoTierTransport::release() noexcept {
  RowTransport::release();
  board_->release();
}

bool TwoTierTransport::may_be_waiting(int peer) const {
  return hosts_[peer] != host_ || board_->since_waiting(place_[peer]) < kPulse;
}

// See "time-outs in two tiers".
void TwoTierTransport::wait_for(std::vector<Request>& all, int peer, size_t k) {
  Request& slot = request(all, peer, k);
  for (int more = hosts_[peer] == host_ ? 2 : 1;; --more) {
    try {
      channel_->wait(slot);
      break;
    } catch (const EngineError& error) {
      if (error.kind != ErrorKind::timeout || more == 0 || !may_be_waiting(peer)) throw;
    }
  }
  slot = Request{};
}

// Neighbours whose buckets differ would add other elements: their forms differ, too.
TwoTierTransport::Work TwoTierTransport::work(const BucketSpec& b, const OpTag& tag, DType type, DType wire, DType board) const {
  uint64_t form = static_cast<uint64_t>(type) << 8 | static_cast<uint64_t>(wire);
  for (int shard = 0; shard < size_; ++shard) form = form * 1000003 + b.part_end(shard, size_);
  return {{b, tag, type, wire}, board, form};
}

// Tells the neighbours that segment k lies on this rank's board, and wakes those that sleep until it does.
void TwoTierTransport::announce(const Work& work, int round, size_t k) {
  const HostBoard::Note note = this->note(work, round, k);
  board_->publish(sequence_ + k, note);
  for (const int other : neighbours_) {
    if (!board_->is_awaited(place_[other], sequence_ + k)) continue;
    wait_for(sends_, other, k);  // the previous use of this slot
    request(sends_, other, k) = channel_->isend(nullptr, 0, other, note.tag);
  }
}

void TwoTierTransport::await_announcements(const Work& work, int round, size_t k) {
  const HostBoard::Note expected = note(work, round, k);
  for (const int other : neighbours_) {
    if (board_->must_sleep(place_[other], sequence_ + k)) {
      request(receives_, other, k) = channel_->irecv(nullptr, 0, other, expected.tag);
      wait_for(receives_, other, k);
    }
    // First the counter, whose load makes visible what the neighbour wrote before it, then the note: after a wake-up, only the
    // message has been seen, which orders no memory. An older note would be a mismatch that is none. No order of these two can lose
    // a wake-up: must_sleep() and the message have decided that already.
    const bool published = board_->published(place_[other], sequence_ + k);
    const HostBoard::Note got = board_->note(place_[other], sequence_ + k);
    const bool same = got.tag == expected.tag;
    if (published && same && got.form == expected.form) continue;
    throw EngineError(
        ErrorKind::mismatch,
        rank_name(other) + " announced segment " + std::to_string(sequence_ + k) +
            (same ? ", but not of " + std::to_string(work.bucket.count) + " elements of " + dtype_name(work.type) + " as here"
                  : " for " + describe(got.tag) + ", but this rank expects it for " + describe(expected.tag)) +
            ", or its board is that of another optimizer; use the same plan on all ranks",
        other);
  }
}

// Moves a bucket that lies in shared memory on all ranks, and returns whether it does: see "buckets in shared memory".
bool TwoTierTransport::move_in_place(Work& work, void* data, Move move, bool settles) {
  if (!board_->shares()) return false;
  work.where = board_->where(data);
  announce(work, kBegin, 0);
  await_announcements(work, kBegin, 0);
  bool everywhere = work.where > 0;
  for (const int other : neighbours_) {
    const uint64_t where = where_[place_[other]] = board_->note(place_[other], sequence_).where;
    everywhere = everywhere && where > 0;
  }
  ++sequence_;
  if (!everywhere) return false;
  (this->*move)(work);
  if (settles) settle(work);
  finish_sends(1);
  return true;
}

void TwoTierTransport::settle(const Work& work) {
  for (const int other : neighbours_) {
    if (!board_->has_left(place_[other])) continue;
    request(receives_, other, 0) = channel_->irecv(nullptr, 0, other, message(work.tag, kEnd, 0));
    wait_for(receives_, other, 0);  // its farewell says why
    throw EngineError(ErrorKind::peer_lost, rank_name(other) + " has left in the middle of an operation", other);
  }
  announce(work, kEnd, 0);
  await_announcements(work, kEnd, 0);
  ++sequence_;
}

void TwoTierTransport::sum_in_place(const Work& work) {
  const Cut own = part(work, rank_);
  const std::vector<int>& ranks = members_[host_];
  for (size_t k = 0; k < own.segments(); ++k) {
    const size_t n = own.size(k);
    char* slice = at(work.bucket.reduce_ptr, work.type, own.begin(k));
    for (int place = 0; place < board_->places(); ++place) {
      parts_[place] = ranks[place] == rank_ ? slice : neighbours(ranks[place], work.type, own.begin(k));
    }
    pass_gate(wire_bytes(work.wire, n));
    sum_in_order(parts_.data(), board_->places(), work.type, slice, work.type, n, work.bucket.postscale);
  }
}

void TwoTierTransport::gather_in_place(const Work& work) {
  for (int d = 1; d < size_; ++d) {
    const int from = (rank_ + d) % size_;
    const Cut shard = part(work, from);
    for (size_t k = 0; k < shard.segments(); ++k) {
      char* to = at(work.bucket.gather_ptr, work.type, shard.begin(k));
      pass_gate(wire_bytes(work.wire, shard.size(k)));
      convert(neighbours(from, work.type, shard.begin(k)), work.type, to, work.type, shard.size(k), 1.0);
    }
  }
}

// Writes this rank's segment k of a shard as it lies on a board.
void TwoTierTransport::write_slice(const Work& work, int shard, size_t k, char* to) const {
  const BucketSpec& b = work.bucket;
  const Cut cut = part(work, shard);
  const double scale = work.board == work.type ? 1.0 : b.prescale;  // else the bucket has been scaled in place
  convert(at(b.reduce_ptr, work.type, cut.begin(k)), work.type, to, work.board, cut.size(k), scale,
          b.sent_residual_at(cut.begin(k)));
}

// Reduce-scatter, first part: segment k of every shard goes where its deputy on this host can read it.
void TwoTierTransport::lay_out_slices(const Work& work, int round, size_t k) {
  for (int shard = 0; shard < size_; ++shard) {
    const size_t n = part(work, shard).size(k);
    if (deputy(shard, host_) == rank_ || n == 0) continue;
    if (one_host()) pass_gate(wire_bytes(work.board, n));
    write_slice(work, shard, k, board_->own(shard, sequence_ + k));
  }
  announce(work, round, k);
}

// This host's sum of segment k of a shard. `mine`: this rank's slice as those on the boards are.
void TwoTierTransport::add_slices(const Work& work, int shard, size_t k, char* mine, char* sum, DType to, double scale) {
  const auto& ranks = members_[host_];
  for (int place = 0; place < static_cast<int>(ranks.size()); ++place) {
    parts_[place] = ranks[place] == rank_ ? mine : board_->of(place, shard, sequence_ + k);
  }
  sum_in_order(parts_.data(), static_cast<int>(ranks.size()), work.board, sum, to, part(work, shard).size(k), scale);
}

// Second part: this host's sums of segment k of the shards whose deputy this rank is, to their owners.
void TwoTierTransport::sum_on_host(const Work& work, size_t k) {
  const BucketSpec& b = work.bucket;
  const MessageTag tag = message(work.tag, kScatter, k);
  await_announcements(work, kScatter, k);
  const size_t mine = part(work, rank_).size(k);
  for (int host = 0; mine > 0 && host < static_cast<int>(members_.size()); ++host) {
    if (host == host_) continue;
    const int from = deputy(rank_, host);
    request(receives_, from, k) = channel_->irecv(received_.slot(host, k), wire_bytes(work.wire, mine), from, tag);
  }
  for (const int shard : entrusted_) {
    const Cut cut = part(work, shard);
    const size_t n = cut.size(k);
    if (n == 0) continue;
    char* const slice = at(b.reduce_ptr, b.dtype, cut.begin(k));
    char* mine = slice;
    if (work.board != work.type) {  // as the others' slices are: the sum must not depend on who owns the shard
      mine = outgoing_.slot(rank_, k);
      write_slice(work, shard, k, mine);
    }
    if (shard != rank_) wait_for(sends_, shard, k);  // the previous use of this slot
    const bool rounds = !one_host() && in_blocks(work.wire);
    const DType to = one_host() || rounds ? work.type : work.wire;
    char* sum = to == work.type ? slice : outgoing_.slot(shard, k);
    const double scale = one_host() ? b.postscale : work.wire == DType::f16 ? 1.0 / room_ : 1.0;
    add_slices(work, shard, k, mine, sum, to, scale);
    if (rounds) {
      sum = outgoing_.slot(shard, k);
      convert(slice, work.type, sum, work.wire, n, 1.0, b.sent_residual_at(cut.begin(k)));
    }
    if (shard == rank_) continue;
    pass_gate(wire_bytes(work.wire, n));
    request(sends_, shard, k) = channel_->isend(sum, wire_bytes(work.wire, n), shard, tag);
  }
}

// Third part: the sum over the hosts of segment k of this rank's shard.
void TwoTierTransport::sum_of_hosts(const Work& work, size_t k) {
  const BucketSpec& b = work.bucket;
  const Cut own = part(work, rank_);
  const size_t n = own.size(k);
  if (n == 0 || one_host()) return;
  char* place = at(b.reduce_ptr, b.dtype, own.begin(k));
  const int hosts = static_cast<int>(members_.size());
  for (int host = 0; host < hosts; ++host) {
    if (host == host_) {
      parts_[host] = work.wire == work.type ? place : outgoing_.slot(rank_, k);
      continue;
    }
    wait_for(receives_, deputy(rank_, host), k);
    parts_[host] = received_.slot(host, k);
  }
  const double scale = work.wire == DType::f16 ? b.postscale * room_ : b.postscale;
  sum_in_order(parts_.data(), hosts, work.wire, place, work.type, n, scale);
}

// Any rank's next step needs only earlier segments of the others, or bytes that are moving, so the slowest rank can always go on.
void TwoTierTransport::reduce_scatter(const BucketSpec& b, const OpTag& tag) {
  if (size_ == 1 && !b.corrects()) return scale_alone(b);
  if (b.row > 0) return reduce_scatter_rows({b, tag, b.dtype, size_ == 1 ? b.dtype : b.wire_dtype});
  Work work = this->work(b, tag, b.dtype, b.wire_dtype, one_host() ? b.wire_dtype : b.dtype);
  if (work.board == work.type) convert(b.reduce_ptr, b.dtype, b.reduce_ptr, b.dtype, b.count, b.prescale);
  if (work.wire == work.type && move_in_place(work, b.reduce_ptr, &TwoTierTransport::sum_in_place, !b.gathered)) return;
  const size_t all = segments(b, work.board);
  size_t laid_out = 0, summed = 0;
  for (size_t k = 0; k < all; ++k) {
    const size_t ahead = this->ahead();
    // Two at first: the link between the hosts waits for the first of them.
    for (; laid_out < std::min(all, k + std::min(ahead, k + 2)); ++laid_out) lay_out_slices(work, kScatter, laid_out);
    sum_on_host(work, k);
    for (; summed + ahead <= k + 1; ++summed) sum_of_hosts(work, summed);
  }
  for (; summed < all; ++summed) sum_of_hosts(work, summed);
  finish_sends(all);
  sequence_ += all;
}

// See "blocks in two tiers". A rank's part of a residual that it will not add goes over its board to the deputy.
void TwoTierTransport::place_residual(const BucketSpec& b, const OpTag& tag) {
  if (one_host() || neighbours_.empty() || b.sent_residual == nullptr) return;
  BucketSpec lost;
  lost.reduce_ptr = b.sent_residual;
  lost.count = b.count;
  lost.ends = b.ends;
  const Work work = this->work(lost, tag, DType::f32, DType::f32, DType::f32);
  const size_t all = segments(lost, DType::f32);
  for (size_t k = 0; k < all; ++k) {
    lay_out_slices(work, kPlace, k);
    await_announcements(work, kPlace, k);
    for (int shard = 0; shard < size_; ++shard) {
      const Cut cut = part(work, shard);
      if (cut.size(k) == 0) continue;
      char* const slice = at(lost.reduce_ptr, work.type, cut.begin(k));
      if (deputy(shard, host_) == rank_) {
        add_slices(work, shard, k, slice, slice, work.type, 1.0);
      } else {
        std::memset(slice, 0, cut.size(k) * sizeof(float));
      }
    }
  }
  finish_sends(all);
  sequence_ += all;
}

// All-gather, first part: segment k of this rank's shard goes to its board and to its deputies on the other hosts, and those for
// which this rank is the deputy arrive on its board.
void TwoTierTransport::send_shard(const Work& work, size_t k) {
  const MessageTag tag = message(work.tag, kGather, k);
  for (const int shard : entrusted_) {
    const size_t n = part(work, shard).size(k);
    if (shard == rank_ || n == 0) continue;
    request(receives_, shard, k) = channel_->irecv(board_->own(shard, sequence_ + k), wire_bytes(work.wire, n), shard, tag);
  }
  const Cut own = part(work, rank_);
  const size_t n = own.size(k);
  if (n == 0) return;
  for (int host = 0; host < static_cast<int>(members_.size()); ++host) {
    if (host != host_) wait_for(sends_, deputy(rank_, host), k);  // the previous use of this slot
  }
  char* shard = at(work.bucket.gather_ptr, work.type, own.begin(k));
  char* slot = board_->own(rank_, sequence_ + k);
  if (one_host()) pass_gate(wire_bytes(work.wire, n));
  convert(shard, work.type, slot, work.wire, n, 1.0, work.bucket.sum_residual_at(own.begin(k) - own.start));
  if (work.wire != work.type) convert(slot, work.wire, shard, work.type, n, 1.0);  // keep the rounded values that the others get
  for (int host = 0; host < static_cast<int>(members_.size()); ++host) {
    if (host == host_) continue;
    const int to = deputy(rank_, host);
    pass_gate(wire_bytes(work.wire, n));
    request(sends_, to, k) = channel_->isend(slot, wire_bytes(work.wire, n), to, tag);
  }
}

// Second part: what arrived from other hosts is on this rank's board now; takes it from there like the neighbours.
void TwoTierTransport::lay_out_shards(const Work& work, size_t k) {
  const auto arrives = [&](int shard) { return shard != rank_ && part(work, shard).size(k) > 0; };
  for (const int shard : entrusted_) {
    if (arrives(shard)) wait_for(receives_, shard, k);
  }
  announce(work, kGather, k);
  for (const int shard : entrusted_) {
    const Cut cut = part(work, shard);
    if (!arrives(shard)) continue;
    convert(board_->own(shard, sequence_ + k), work.wire, at(work.bucket.gather_ptr, work.type, cut.begin(k)), work.type,
            cut.size(k), 1.0);
  }
}

// Third part: copies segment k of the shards on the neighbours' boards.
void TwoTierTransport::take_shards(const Work& work, size_t k) {
  await_announcements(work, kGather, k);
  for (int shard = 0; shard < size_; ++shard) {
    const Cut cut = part(work, shard);
    const int from = deputy(shard, host_);
    if (from == rank_ || cut.size(k) == 0) continue;
    const char* slot = board_->of(place_[from], shard, sequence_ + k);
    convert(slot, work.wire, at(work.bucket.gather_ptr, work.type, cut.begin(k)), work.type, cut.size(k), 1.0);
  }
}

void TwoTierTransport::all_gather(const BucketSpec& b, const OpTag& tag) {
  if (size_ == 1 && !b.corrects()) return;
  if (b.row > 0) return all_gather_rows({b, tag, gather_type(b), size_ == 1 ? gather_type(b) : gather_wire(b)});
  Work work = this->work(b, tag, gather_type(b), gather_wire(b), gather_wire(b));
  const bool gradients = b.gathers_gradients() && work.wire == work.type;  // other memory is never shared
  if (gradients && move_in_place(work, b.gather_ptr, &TwoTierTransport::gather_in_place, true)) return;
  const size_t all = segments(b, work.board);
  size_t sent = 0;
  for (size_t k = 0; k < all; ++k) {
    for (; sent < std::min(all, k + ahead()); ++sent) send_shard(work, sent);
    lay_out_shards(work, k);
    take_shards(work, k);
  }
  finish_sends(all);
  sequence_ += all;
}

// What this rank sends to other hosts; with one host, what its neighbours read of its board.
int64_t TwoTierTransport::bytes_sent(const BucketSpec& b, Op op) const {
  if (one_host()) return RowTransport::bytes_sent(b, op);
  const auto part = [&](int rank, DType wire) {
    return static_cast<int64_t>(wire_bytes(wire, b.part_end(rank, size_) - b.part_begin(rank, size_)));
  };
  int64_t bytes = 0;
  for (int shard = 0; op != Op::AG && shard < size_; ++shard) {
    if (hosts_[shard] != host_ && deputy(shard, host_) == rank_) bytes += part(shard, b.wire_dtype);
  }
  return op == Op::RS ? bytes : bytes + part(rank_, gather_wire(b)) * static_cast<int64_t>(members_.size() - 1);
}

}  // namespace commsched
