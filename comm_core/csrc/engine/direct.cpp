#include "direct.h"

namespace commsched {

DirectTransport::DirectTransport(std::shared_ptr<Channel> channel, int rank, int size, size_t segment_bytes, int depth)
    : RowTransport(std::move(channel), rank, size, segment_bytes, depth) {
  received_.reserve(size_, depth_, segment_bytes_);  // a row for each peer
  for (int r = 0; r < size_; ++r) ranks_.push_back(r);
  for (int d = 1; d < size_; ++d) peers_.push_back(peer(d));
}

// Reduce-scatter: sends segment k of every peer's part, receives segment k of its own part from every peer.
void DirectTransport::post_scatter(const Work& work, size_t k) {
  const BucketSpec& b = work.bucket;
  const size_t mine = part(work, rank_).size(k);
  const MessageTag tag = message(work.tag, 0, k);
  for (int d = 1; mine > 0 && d < size_; ++d) {
    const int from = peer(d);
    request(receives_, from, k) = channel_->irecv(received_.slot(from, k), wire_bytes(work.wire, mine), from, tag);
  }
  for (int d = 1; d < size_; ++d) {
    const int to = peer(d);
    wait_for(sends_, to, k);  // the previous use of this slot
    const Cut theirs = part(work, to);
    const size_t n = theirs.size(k);
    if (n == 0) continue;
    const char* data = at(b.reduce_ptr, b.dtype, theirs.begin(k));
    if (work.wire != work.type) {
      char* staged = outgoing_.slot(to, k);
      convert(data, work.type, staged, work.wire, n, b.prescale, b.sent_residual_at(theirs.begin(k)));
      data = staged;
    }
    pass_gate(wire_bytes(work.wire, n));
    request(sends_, to, k) = channel_->isend(data, wire_bytes(work.wire, n), to, tag);
  }
}

void DirectTransport::reduce(const Work& work, size_t k) {
  const BucketSpec& b = work.bucket;
  const Cut own = part(work, rank_);
  const size_t n = own.size(k);
  if (n == 0) return;
  for (int d = 1; d < size_; ++d) {
    const int from = peer(d);
    wait_for(receives_, from, k);
    parts_[from] = received_.slot(from, k);
  }
  char* mine = at(b.reduce_ptr, b.dtype, own.begin(k));
  parts_[rank_] = mine;
  if (work.wire != work.type) {
    // Round this rank's own part to the wire type too, so that the sum does not depend on who owns the shard.
    char* staged = outgoing_.slot(rank_, k);
    convert(mine, work.type, staged, work.wire, n, b.prescale, b.sent_residual_at(own.begin(k)));
    parts_[rank_] = staged;
  }
  sum_in_order(parts_.data(), size_, work.wire, mine, work.type, n, b.postscale);
}

void DirectTransport::reduce_scatter(const BucketSpec& b, const OpTag& tag) {
  if (size_ == 1 && !b.corrects()) return scale_alone(b);
  const Work work{b, tag, b.dtype, b.wire_dtype};
  if (b.row > 0) return reduce_scatter_rows(work);
  apply_prescale(b);
  const size_t all = segments(b, work.wire);
  size_t posted = 0;
  for (size_t k = 0; k < all; ++k) {
    for (; posted < std::min(all, k + ahead()); ++posted) post_scatter(work, posted);
    reduce(work, k);
  }
  finish_sends(all);
}

// All-gather: sends segment k of its own part to every peer, receives segment k of every peer's part.
void DirectTransport::post_gather(const Work& work, size_t k) {
  const BucketSpec& b = work.bucket;
  const bool cast = work.wire != work.type;
  const MessageTag tag = message(work.tag, 1, k);
  for (int d = 1; d < size_; ++d) {
    const int from = peer(d);
    const Cut theirs = part(work, from);
    if (theirs.size(k) == 0) continue;
    char* place = cast ? received_.slot(from, k) : at(b.gather_ptr, work.type, theirs.begin(k));
    request(receives_, from, k) = channel_->irecv(place, wire_bytes(work.wire, theirs.size(k)), from, tag);
  }
  for (int d = 1; d < size_; ++d) wait_for(sends_, peer(d), k);
  const Cut own = part(work, rank_);
  const size_t n = own.size(k);
  if (n == 0) return;
  char* data = at(b.gather_ptr, work.type, own.begin(k));
  if (cast) {
    char* staged = outgoing_.slot(rank_, k);
    convert(data, work.type, staged, work.wire, n, 1.0, b.sum_residual_at(own.begin(k) - own.start));
    convert(staged, work.wire, data, work.type, n, 1.0);  // keep the rounded values that the others receive
    data = staged;
  }
  for (int d = 1; d < size_; ++d) {
    pass_gate(wire_bytes(work.wire, n));
    request(sends_, peer(d), k) = channel_->isend(data, wire_bytes(work.wire, n), peer(d), tag);
  }
}

void DirectTransport::place(const Work& work, size_t k) {
  for (int d = 1; d < size_; ++d) {
    const int from = peer(d);
    const Cut theirs = part(work, from);
    if (theirs.size(k) == 0) continue;
    wait_for(receives_, from, k);
    if (work.wire == work.type) continue;
    char* data = at(work.bucket.gather_ptr, work.type, theirs.begin(k));
    convert(received_.slot(from, k), work.wire, data, work.type, theirs.size(k), 1.0);
  }
}

void DirectTransport::all_gather(const BucketSpec& b, const OpTag& tag) {
  if (size_ == 1 && !b.corrects()) return;
  const Work work{b, tag, gather_type(b), gather_wire(b)};
  if (b.row > 0) return all_gather_rows(work);
  const size_t all = segments(b, work.wire);
  size_t posted = 0;
  for (size_t k = 0; k < all; ++k) {
    for (; posted < std::min(all, k + ahead()); ++posted) post_gather(work, posted);
    place(work, k);
  }
  finish_sends(all);
}

}  // namespace commsched
