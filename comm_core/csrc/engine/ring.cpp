// The ring exchange: every rank sends to the next and receives from the one before, in size - 1 rounds for each operation.
#include "ring.h"

namespace commsched {
namespace {
// Rows of the staging memory.
constexpr int kIncoming = 0;
constexpr int kOutgoing = 0;
constexpr int kOwn = 1;
}  // namespace

RingTransport::RingTransport(std::shared_ptr<Channel> channel, int rank, int size, size_t segment_bytes, int depth)
    : ExchangeTransport(std::move(channel), rank, size, segment_bytes, depth), sends_(depth), receives_(depth) {
  received_.reserve(1, depth_, segment_bytes_);
}

void RingTransport::prepare(const BucketSpec& bucket) {
  if (bucket.row > 0) {
    throw EngineError(ErrorKind::usage, "the ring sends whole buckets, but bucket '" + bucket.name +
                                            "' shall travel by rows; use the direct exchange, or add the bucket without row=");
  }
  refuse_blocks(bucket, "a ring, which would round the sum at every hop");
  ExchangeTransport::prepare(bucket);
}

// Reducing, round 0 sends shard rank-1; the shard received in a round is sent in the next one, until the own shard arrives.
// Gathering, round 0 sends the own shard.
int RingTransport::shard_sent(const Work& work, size_t m) const {
  const int back = static_cast<int>(work.round(m)) + (work.reducing ? 1 : 0);
  return (rank_ + 2 * size_ - back) % size_;
}

char* RingTransport::data(const Work& work, int shard, size_t m) const {
  void* base = work.reducing ? work.bucket.reduce_ptr : work.bucket.gather_ptr;
  return at(base, work.type, cut(work.bucket, shard, work.wire).begin(work.segment(m)));
}

size_t RingTransport::elements(const Work& work, int shard, size_t m) const {
  return cut(work.bucket, shard, work.wire).size(work.segment(m));
}

void RingTransport::receive(const Work& work, size_t m) {
  const int from = (rank_ + size_ - 1) % size_;
  const bool in_place = !work.reducing && !work.cast();
  const int shard = shard_received(work, m);
  const size_t n = elements(work, shard, m);
  if (n == 0) return;
  char* place = in_place ? data(work, shard, m) : received_.slot(kIncoming, m);
  receives_[m % depth_] =
      channel_->irecv(place, n * dtype_size(work.wire), from, message(work.tag, work.round(m), work.segment(m)));
}

void RingTransport::send(const Work& work, size_t m) {
  channel_->wait(sends_[m % depth_]);  // the previous use of this slot
  sends_[m % depth_] = Request{};
  const size_t n = elements(work, shard_sent(work, m), m);
  if (n == 0) return;
  char* from = data(work, shard_sent(work, m), m);
  if (work.cast()) {
    char* staged = outgoing_.slot(kOutgoing, m);
    // A sum is rounded here, once per hop; its parts were scaled when they were added.
    const bool first = work.round(m) == 0;
    convert(from, work.type, staged, work.wire, n, work.reducing && first ? work.bucket.prescale : 1.0);
    if (!work.reducing && first) convert(staged, work.wire, from, work.type, n, 1.0);  // as the others get it
    from = staged;
  }
  pass_gate(n * dtype_size(work.wire));
  sends_[m % depth_] =
      channel_->isend(from, n * dtype_size(work.wire), (rank_ + 1) % size_, message(work.tag, work.round(m), work.segment(m)));
}

// Adds this rank's part to a received segment: a partial sum, except in the last round, when the own shard becomes complete
// and is scaled.
void RingTransport::add(const Work& work, size_t m, char* data) {
  const size_t n = elements(work, shard_received(work, m), m);
  const bool last = work.round(m) + 2 == static_cast<size_t>(size_);
  const char* own = data;
  if (work.cast()) {
    char* staged = outgoing_.slot(kOwn, m);
    convert(data, work.type, staged, work.wire, n, work.bucket.prescale);
    own = staged;
  }
  const void* parts[] = {received_.slot(kIncoming, m), own};
  sum_in_order(parts, 2, work.wire, data, work.type, n, last ? work.bucket.postscale : 1.0);
}

void RingTransport::accept(const Work& work, size_t m) {
  channel_->wait(receives_[m % depth_]);
  receives_[m % depth_] = Request{};
  const size_t n = elements(work, shard_received(work, m), m);
  if (n == 0) return;
  char* place = data(work, shard_received(work, m), m);
  if (work.reducing) {
    add(work, m, place);
  } else if (work.cast()) {
    convert(received_.slot(kIncoming, m), work.wire, place, work.type, n, 1.0);
  }
}

// After m messages were taken in, those up to m + segments - 1 can be sent, and at most ahead() are under way. A rank waits for
// a send only when the next rank has at least that one's receive posted or is ahead, so the slowest rank can always go on.
void RingTransport::run(const Work& work) {
  const size_t segments = work.segments;
  const size_t messages = segments * (size_ - 1);
  size_t received = 0, sent = 0;
  for (; received < std::min<size_t>(depth_, messages); ++received) receive(work, received);
  for (size_t m = 0; m < messages; ++m) {
    for (; sent < std::min({messages, m + ahead(), m + segments}); ++sent) send(work, sent);
    accept(work, m);
    if (received < messages) receive(work, received++);
  }
  for (Request& request : sends_) {
    channel_->wait(request);
    request = Request{};
  }
}

void RingTransport::reduce_scatter(const BucketSpec& b, const OpTag& tag) {
  if (size_ == 1) return scale_alone(b);
  apply_prescale(b);
  run({b, tag, b.dtype, b.wire_dtype, true, segments(b, b.wire_dtype)});
}

void RingTransport::all_gather(const BucketSpec& b, const OpTag& tag) {
  if (size_ == 1) return;
  run({b, tag, gather_type(b), gather_wire(b), false, segments(b, gather_wire(b))});
}

}  // namespace commsched
