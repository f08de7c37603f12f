#include "row_transport.h"

#include <numeric>

namespace commsched {

RowTransport::RowTransport(std::shared_ptr<Channel> channel, int rank, int size, size_t segment_bytes, int depth)
    : ExchangeTransport(std::move(channel), rank, size, segment_bytes, depth),
      via_(size),
      sends_(static_cast<size_t>(size) * depth),
      receives_(static_cast<size_t>(size) * depth),
      parts_(size),
      packed_rows_(size),
      received_rows_(size),
      row_counts_(size) {
  std::iota(via_.begin(), via_.end(), 0);
}

void RowTransport::prepare(const BucketSpec& bucket) {
  ExchangeTransport::prepare(bucket);
  if (bucket.row == 0) return;
  if (!bucket.gathers_gradients() || bucket.needs_update || bucket.count / bucket.row > INT32_MAX) {
    throw EngineError(ErrorKind::usage, "only gradients of fewer than 2^31 rows travel by rows, but bucket '" + bucket.name +
                                            "' has " + std::to_string(bucket.count / bucket.row) +
                                            " rows, or gathers parameters; add it without row=");
  }
  if (in_blocks(bucket.wire_dtype)) {
    throw EngineError(ErrorKind::usage, "rows have no blocks, but bucket '" + bucket.name +
                                            "' has wire_dtype=torch.int8 or torch.float8_e4m3fn; add it without row=");
  }
}

EngineError RowTransport::strange(int peer, uint32_t number) {
  return EngineError(ErrorKind::mismatch,
                     "rank " + std::to_string(peer) + " sent row " + std::to_string(number) +
                         ", which is out of order or belongs to another rank; do all ranks run the same plan?",
                     peer);
}

void RowTransport::wait_for(std::vector<Request>& all, int peer, size_t k) {
  Request& slot = request(all, peer, k);
  channel_->wait(slot);
  slot = Request{};
}

void RowTransport::finish_sends(size_t segments) {
  for (size_t k = segments > static_cast<size_t>(depth_) ? segments - depth_ : 0; k < segments; ++k) {
    for (int d = 1; d < size_; ++d) wait_for(sends_, (rank_ + d) % size_, k);
  }
}

// Exchanges the counts of rows, which say how long the messages are, then the messages in segments. Sends each peer the rows that
// are packed for it, or the same ones `to_all`.
void RowTransport::exchange_rows(const Work& work, Round round, const Peers& peers, size_t row_bytes, RowMessage* to_all) {
  const MessageTag counts = message(work.tag, kRounds + round, 0);
  for (const int from : peers.from) {
    if (from != rank_) request(receives_, from, 0) = channel_->irecv(&row_counts_[from], sizeof(uint64_t), from, counts);
  }
  size_t all = 1;  // the counts are one segment of sends
  for (const int to : peers.to) {
    if (to == rank_) continue;
    const RowMessage& rows = to_all ? *to_all : packed_rows_[to];
    request(sends_, to, 0) = channel_->isend(rows.count_address(), sizeof(uint64_t), to, counts);
    if (peers.counted) row_bytes_ += static_cast<int64_t>(sizeof(uint64_t) + rows.bytes());
    all = std::max(all, Cut{0, rows.bytes(), segment_bytes_}.segments());
  }
  for (const int from : peers.from) {
    if (from == rank_) continue;
    wait_for(receives_, from, 0);
    const uint64_t most = work.bucket.count / work.bucket.row;
    if (row_counts_[from] > most) {
      throw EngineError(ErrorKind::mismatch,
                        "rank " + std::to_string(from) + " sends " + std::to_string(row_counts_[from]) + " rows of a bucket of " +
                            std::to_string(most) + "; do all ranks run the same plan?",
                        from);
    }
    received_rows_[from].reset(row_counts_[from], row_bytes);
    all = std::max(all, Cut{0, received_rows_[from].bytes(), segment_bytes_}.segments());
  }
  size_t posted = 0;
  for (size_t k = 0; k < all; ++k) {
    for (; posted < std::min(all, k + ahead()); ++posted) post_rows(work, round, peers, to_all, posted);
    for (const int from : peers.from) wait_for(receives_, from, k);
  }
  finish_sends(all);
}

void RowTransport::post_rows(const Work& work, Round round, const Peers& peers, RowMessage* to_all, size_t k) {
  const MessageTag tag = message(work.tag, round, k);
  for (const int from : peers.from) {
    if (from == rank_) continue;
    RowMessage& rows = received_rows_[from];
    const Cut cut{0, rows.bytes(), segment_bytes_};
    if (cut.size(k) > 0) request(receives_, from, k) = channel_->irecv(rows.data() + cut.begin(k), cut.size(k), from, tag);
  }
  for (const int to : peers.to) {
    if (to == rank_) continue;
    wait_for(sends_, to, k);  // the previous use of this slot
    RowMessage& rows = to_all ? *to_all : packed_rows_[to];
    const Cut cut{0, rows.bytes(), segment_bytes_};
    if (cut.size(k) == 0) continue;
    if (peers.counted) pass_gate(cut.size(k));
    request(sends_, to, k) = channel_->isend(rows.data() + cut.begin(k), cut.size(k), to, tag);
  }
}

// Of a correction, the rows in `changed`.
void RowTransport::find_rows_to_send(const Work& work) {
  const BucketSpec& b = work.bucket;
  if (b.corrects()) return read_changes(b);
  find_touched(static_cast<const char*>(b.reduce_ptr), b.count / b.row, b.row * dtype_size(b.dtype), 0, 1, touched_);
}

void RowTransport::read_changes(const BucketSpec& b) { touched_.assign(b.changed + 1, b.changed + 1 + b.changed[0]); }

void RowTransport::write_changes(const BucketSpec& b) const {
  b.changed[0] = static_cast<int32_t>(touched_.size());
  std::copy(touched_.begin(), touched_.end(), b.changed + 1);
}

// Sends the numbers of rows to send, of `parts` parts only one, and adds the numbers that arrive to them.
void RowTransport::unite(const Work& work, Round round, const Peers& peers, uint32_t parts, uint32_t part) {
  const auto rows = static_cast<uint32_t>(work.bucket.count / work.bucket.row);
  const auto is_sent = [&](uint32_t number) { return number % parts == part; };
  RowMessage& mine = packed_rows_[rank_];
  mine.reset(std::count_if(touched_.begin(), touched_.end(), is_sent), 0);
  uint64_t sent = 0;
  for (const uint32_t number : touched_) {
    if (is_sent(number)) mine.set_number(sent++, number);
  }
  exchange_rows(work, round, peers, 0, &mine);
  for (const int from : peers.from) {
    if (from == rank_) continue;
    const RowMessage& theirs = received_rows_[from];
    for (uint64_t k = 0; k < theirs.count(); ++k) {
      const bool ascends = k == 0 || theirs.number(k) > theirs.number(k - 1);
      if (theirs.number(k) >= rows || !ascends) throw strange(from, theirs.number(k));
      touched_.push_back(theirs.number(k));
    }
  }
  std::sort(touched_.begin(), touched_.end());
  touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
}

// Packs the scaled rows to send by the rank to which they go. Touched rows of other owners are cleared: the all-gather writes
// touched sums only.
void RowTransport::pack_rows(const Work& work, DType wire) {
  const BucketSpec& b = work.bucket;
  std::fill(row_counts_.begin(), row_counts_.end(), 0);
  for (const uint32_t number : touched_) ++row_counts_[via(number)];
  for (int rank = 0; rank < size_; ++rank) packed_rows_[rank].reset(row_counts_[rank], b.row * dtype_size(wire));
  std::fill(row_counts_.begin(), row_counts_.end(), 0);
  for (const uint32_t number : touched_) {
    RowMessage& rows = packed_rows_[via(number)];
    const uint64_t k = row_counts_[via(number)]++;
    char* row = at(b.reduce_ptr, b.dtype, number * b.row);
    rows.set_number(k, number);
    convert(row, b.dtype, rows.row(k), wire, b.row, b.prescale);
    if (owner(number) != rank_ && !b.corrects()) std::memset(row, 0, b.row * dtype_size(b.dtype));
  }
}

// Packs the sums of this rank's rows, for everyone.
void RowTransport::pack_sums(const Work& work) {
  const BucketSpec& b = work.bucket;
  if (b.corrects()) {
    read_changes(b);
    const auto is_other = [&](uint32_t number) { return owner(number) != rank_; };
    touched_.erase(std::remove_if(touched_.begin(), touched_.end(), is_other), touched_.end());
  } else {
    find_touched(static_cast<const char*>(b.reduce_ptr), b.count / b.row, b.row * dtype_size(work.type), rank_, size_, touched_);
  }
  RowMessage& mine = packed_rows_[rank_];
  mine.reset(touched_.size(), b.row * dtype_size(work.wire));
  for (size_t k = 0; k < touched_.size(); ++k) {
    mine.set_number(k, touched_[k]);
    convert(at(b.reduce_ptr, work.type, touched_[k] * b.row), work.type, mine.row(k), work.wire, b.row, 1.0);
    if (work.wire == work.type && !b.corrects()) continue;
    // As the others receive it.
    convert(mine.row(k), work.wire, at(b.gather_ptr, work.type, touched_[k] * b.row), work.type, b.row, 1.0);
  }
}

// Writes the sums that arrived from their owners, or from those who handed them on.
void RowTransport::place_rows(const Work& work, const std::vector<int>& from) {
  const BucketSpec& b = work.bucket;
  for (const int peer : from) {
    if (peer == rank_) continue;
    const RowMessage& rows = received_rows_[peer];
    for (uint64_t k = 0; k < rows.count(); ++k) {
      const uint32_t number = rows.number(k);
      if (number >= b.count / b.row || (owner(number) != peer && via(number) != peer)) throw strange(peer, number);
      convert(rows.row(k), work.wire, at(b.gather_ptr, work.type, number * b.row), work.type, b.row, 1.0);
    }
  }
}

// Of ranks that did not touch a row, merge_rows() adds zeros of this type.
void RowTransport::zero_is(const Work& work, DType wire) {
  const BucketSpec& b = work.bucket;
  zero_row_.assign(b.row * sizeof(double), 0);
  convert(zero_row_.data(), wire, zero_row_.data(), wire, b.row, b.prescale);
}

}  // namespace commsched
