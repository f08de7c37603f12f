#include "ring.h"

namespace commsched {
namespace {
// Rows of the staging memory.
constexpr int kIncoming = 0;
constexpr int kOutgoing = 0;
constexpr int kOwn = 1;
}  // namespace

RingTransport::RingTransport(std::shared_ptr<Channel> channel, int rank, int size, size_t segment_bytes, int depth)
    : ExchangeTransport(std::move(channel), rank, size, segment_bytes, depth), sends_(depth), receives_(depth) {}

// Reducing, round 0 sends shard rank-1; the shard received in a round is sent in the next one, until the own shard arrives.
// Gathering, round 0 sends the own shard.
size_t RingTransport::shard_sent(const Work& work, size_t m) const {
  const size_t back = work.round(m) + (work.reducing ? 1 : 0);
  return (rank_ + 2 * static_cast<size_t>(size_) - back) % size_;
}

char* RingTransport::data(const Work& work, size_t shard, size_t m) const {
  void* base = work.reducing ? work.bucket.reduce_ptr : work.bucket.gather_ptr;
  return at(base, work.type, shard * work.cut.length + work.cut.begin(work.segment(m)));
}

size_t RingTransport::bytes(const Work& work, size_t m) const {
  return work.cut.size(work.segment(m)) * dtype_size(work.wire);
}

void RingTransport::receive(const Work& work, size_t m) {
  const int from = (rank_ + size_ - 1) % size_;
  const bool in_place = !work.reducing && !work.cast();
  const size_t shard = (shard_sent(work, m) + size_ - 1) % size_;
  char* place = in_place ? data(work, shard, m) : received_.slot(kIncoming, m);
  receives_[m % depth_] =
      channel_->irecv(place, bytes(work, m), from, message(work.tag, work.round(m), work.segment(m)));
}

void RingTransport::send(const Work& work, size_t m) {
  channel_->wait(sends_[m % depth_]);  // the previous use of this slot
  char* from = data(work, shard_sent(work, m), m);
  if (work.cast()) {
    const size_t n = work.cut.size(work.segment(m));
    char* staged = outgoing_.slot(kOutgoing, m);
    // A sum is rounded here, once per hop; its parts were scaled when they were added.
    const bool first = work.round(m) == 0;
    convert(from, work.type, staged, work.wire, n, work.reducing && first ? work.bucket.prescale : 1.0);
    if (!work.reducing && first) convert(staged, work.wire, from, work.type, n, 1.0);  // as the others get it
    from = staged;
  }
  pass_gate(bytes(work, m));
  sends_[m % depth_] = channel_->isend(from, bytes(work, m), (rank_ + 1) % size_,
                                       message(work.tag, work.round(m), work.segment(m)));
}

// Adds this rank's part to a received segment: a partial sum, except in the last round, when the own shard becomes complete
// and is scaled.
void RingTransport::add(const Work& work, size_t m, char* data) {
  const size_t n = work.cut.size(work.segment(m));
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
  char* place = data(work, (shard_sent(work, m) + size_ - 1) % size_, m);
  if (work.reducing) {
    add(work, m, place);
  } else if (work.cast()) {
    convert(received_.slot(kIncoming, m), work.wire, place, work.type, work.cut.size(work.segment(m)), 1.0);
  }
}

// After m messages were taken in, those up to m + segments - 1 can be sent, and at most ahead() are under way. A rank waits for
// a send only when the next rank has at least that one's receive posted or is ahead, so the slowest rank can always go on.
void RingTransport::run(const Work& work) {
  const size_t segments = work.cut.segments();
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
  run({b, tag, cut(shard_size(b), b.wire_dtype), b.dtype, b.wire_dtype, true});
}

void RingTransport::all_gather(const BucketSpec& b, const OpTag& tag) {
  if (size_ == 1) return;
  run({b, tag, cut(shard_size(b), gather_wire(b)), gather_type(b), gather_wire(b), false});
}

}  // namespace commsched
