#include "exchange.h"

namespace commsched {

ExchangeTransport::ExchangeTransport(std::shared_ptr<Channel> channel, int rank, int size, size_t segment_bytes, int depth)
    : channel_(std::move(channel)), rank_(rank), size_(size), segment_bytes_(segment_bytes), depth_(depth) {
  const auto refuse = [](const std::string& text) { throw EngineError(ErrorKind::usage, text); };
  if (!channel_) refuse("a transport needs a channel, but got none");
  if (size < 1 || rank < 0 || rank >= size) {
    refuse("rank must be in [0, size), but rank is " + std::to_string(rank) + " and size is " + std::to_string(size));
  }
  if (segment_bytes < 8 || segment_bytes % 8 != 0) {
    refuse("segment_bytes must be a positive multiple of 8, but is " + std::to_string(segment_bytes));
  }
  if (depth < 1 || depth > channel_->max_in_flight()) {
    refuse("depth must be in [1, " + std::to_string(channel_->max_in_flight()) + "], but is " + std::to_string(depth));
  }
}

void ExchangeTransport::prepare(const BucketSpec& bucket) {
  check_wire(bucket.dtype, bucket.wire_dtype);
  if (wire_elements(bucket.wire_dtype, segment_bytes_) == 0) {
    throw EngineError(ErrorKind::usage, "segment_bytes must hold a block of " + std::to_string(kQuantBytes) +
                                            " bytes for a bucket that travels in blocks, but is " + std::to_string(segment_bytes_));
  }
  if (bucket.wire_dtype != bucket.dtype) outgoing_.reserve(size_, depth_, segment_bytes_);
}

void ExchangeTransport::abort(const std::string& reason) noexcept {
  aborted_ = true;
  channel_->abort(reason);
  LinkGate::of_process().wake();
}

// The channel first: until it is closed, messages that were aborted may still arrive in the staging memory.
void ExchangeTransport::release() noexcept {
  channel_->close();
  received_ = Staging();
  outgoing_ = Staging();
}

void ExchangeTransport::apply_prescale(const BucketSpec& b) const {
  if (b.wire_dtype == b.dtype) convert(b.reduce_ptr, b.dtype, b.reduce_ptr, b.dtype, b.count, b.prescale);
}

void ExchangeTransport::scale_alone(const BucketSpec& b) const {
  convert(b.reduce_ptr, b.dtype, b.reduce_ptr, b.dtype, b.count, b.prescale * b.postscale);
}

MessageTag ExchangeTransport::message(const OpTag& tag, size_t round, size_t segment) {
  return {static_cast<uint32_t>(tag.step), static_cast<uint16_t>(tag.position), static_cast<uint8_t>(tag.op),
          static_cast<uint8_t>(round),     static_cast<uint32_t>(tag.bucket),   static_cast<uint32_t>(segment)};
}

}  // namespace commsched
