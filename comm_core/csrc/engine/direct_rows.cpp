// Direct exchange of buckets of rows. Row k belongs to rank k % size: vocabularies are often sorted by frequency, and
// neighbouring rows would load one rank with most of the traffic.
#include <algorithm>

#include "direct.h"

namespace commsched {
namespace {

constexpr int kScatter = 0, kGather = 1, kUnite = 2, kCounts = 3;  // rounds of messages; counts are kCounts rounds behind

EngineError strange(int peer, uint32_t number) {
  return EngineError(ErrorKind::mismatch,
                     "rank " + std::to_string(peer) + " sent row " + std::to_string(number) +
                         ", which is out of order or belongs to another rank; do all ranks run the same plan?",
                     peer);
}

}  // namespace

// Exchanges the counts of rows, which say how long the messages are, then the messages in segments.
void DirectTransport::exchange_rows(const Work& work, int round, size_t row_bytes) {
  const MessageTag counts = message(work.tag, round + kCounts, 0);
  for (int d = 1; d < size_; ++d) {
    const int from = peer(d);
    request(receives_, from, 0) = channel_->irecv(&row_counts_[from], sizeof(uint64_t), from, counts);
  }
  for (int d = 1; d < size_; ++d) {
    const int to = peer(d);
    request(sends_, to, 0) = channel_->isend(outgoing_rows(round, to).count_address(), sizeof(uint64_t), to, counts);
  }
  size_t all = 0;
  for (int d = 1; d < size_; ++d) {
    const int other = peer(d);
    wait_for(receives_, other, 0);
    received_rows_[other].reset(row_counts_[other], row_bytes);
    const size_t sent = outgoing_rows(round, other).bytes();
    row_bytes_ += static_cast<int64_t>(sizeof(uint64_t) + sent);
    all =
        std::max({all, Cut{0, sent, segment_bytes_}.segments(), Cut{0, received_rows_[other].bytes(), segment_bytes_}.segments()});
  }
  size_t posted = 0;
  for (size_t k = 0; k < all; ++k) {
    for (; posted < std::min(all, k + ahead()); ++posted) post_rows(work, round, posted);
    for (int d = 1; d < size_; ++d) wait_for(receives_, peer(d), k);
  }
  finish_sends(std::max<size_t>(all, 1));
}

void DirectTransport::post_rows(const Work& work, int round, size_t k) {
  const MessageTag tag = message(work.tag, round, k);
  for (int d = 1; d < size_; ++d) {
    const int from = peer(d);
    RowMessage& rows = received_rows_[from];
    const Cut cut{0, rows.bytes(), segment_bytes_};
    if (cut.size(k) > 0) request(receives_, from, k) = channel_->irecv(rows.data() + cut.begin(k), cut.size(k), from, tag);
  }
  for (int d = 1; d < size_; ++d) {
    const int to = peer(d);
    wait_for(sends_, to, k);  // the previous use of this slot
    RowMessage& rows = outgoing_rows(round, to);
    const Cut cut{0, rows.bytes(), segment_bytes_};
    if (cut.size(k) == 0) continue;
    pass_gate(cut.size(k));
    request(sends_, to, k) = channel_->isend(rows.data() + cut.begin(k), cut.size(k), to, tag);
  }
}

RowMessage& DirectTransport::outgoing_rows(int round, int to) { return packed_rows_[round == kScatter ? to : rank_]; }

void DirectTransport::find_rows_to_send(const Work& work) {
  const BucketSpec& b = work.bucket;
  if (b.corrects()) return unite_changes(work);
  find_touched(static_cast<const char*>(b.reduce_ptr), b.count / b.row, b.row * dtype_size(b.dtype), 0, 1, touched_);
}

// Tells all ranks which rows any of them has changed: each sends all of these.
void DirectTransport::unite_changes(const Work& work) {
  const auto rows = static_cast<uint32_t>(work.bucket.count / work.bucket.row);
  int32_t* const changed = work.bucket.changed;
  touched_.assign(changed + 1, changed + 1 + changed[0]);
  RowMessage& mine = packed_rows_[rank_];
  mine.reset(touched_.size(), 0);
  for (size_t k = 0; k < touched_.size(); ++k) mine.set_number(k, touched_[k]);
  exchange_rows(work, kUnite, 0);
  for (int d = 1; d < size_; ++d) {
    const RowMessage& theirs = received_rows_[peer(d)];
    for (uint64_t k = 0; k < theirs.count(); ++k) {
      const bool ascends = k == 0 || theirs.number(k) > theirs.number(k - 1);
      if (theirs.number(k) >= rows || !ascends) throw strange(peer(d), theirs.number(k));
      touched_.push_back(theirs.number(k));
    }
  }
  std::sort(touched_.begin(), touched_.end());
  touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
  changed[0] = static_cast<int32_t>(touched_.size());
  std::copy(touched_.begin(), touched_.end(), changed + 1);
}

// Packs the rows to send by owner. Touched rows of other owners are cleared: the all-gather writes touched sums only.
void DirectTransport::pack_for_owners(const Work& work) {
  const BucketSpec& b = work.bucket;
  const size_t row_bytes = b.row * dtype_size(b.dtype);
  std::fill(row_counts_.begin(), row_counts_.end(), 0);
  for (const uint32_t number : touched_) ++row_counts_[number % size_];
  for (int owner = 0; owner < size_; ++owner) packed_rows_[owner].reset(row_counts_[owner], b.row * dtype_size(work.wire));
  std::fill(row_counts_.begin(), row_counts_.end(), 0);
  for (const uint32_t number : touched_) {
    const int owner = static_cast<int>(number % size_);
    const uint64_t k = row_counts_[owner]++;
    char* row = at(b.reduce_ptr, b.dtype, number * b.row);
    packed_rows_[owner].set_number(k, number);
    convert(row, b.dtype, packed_rows_[owner].row(k), work.wire, b.row, b.prescale);
    if (owner != rank_ && !b.corrects()) std::memset(row, 0, row_bytes);
  }
}

// Adds every row that any rank touched, in rank order, with zeros of the ranks that did not touch it.
void DirectTransport::sum_rows(const Work& work) {
  const BucketSpec& b = work.bucket;
  std::swap(received_rows_[rank_], packed_rows_[rank_]);
  zero_row_.assign(b.row * sizeof(double), 0);
  convert(zero_row_.data(), work.wire, zero_row_.data(), work.wire, b.row, b.prescale);
  std::fill(row_counts_.begin(), row_counts_.end(), 0);  // rows of each rank that were added
  const auto rows = static_cast<uint32_t>(b.count / b.row);
  for (uint32_t least = rank_;; least += size_) {
    uint32_t next = rows;
    for (int r = 0; r < size_; ++r) {
      if (row_counts_[r] == received_rows_[r].count()) continue;
      const uint32_t number = received_rows_[r].number(row_counts_[r]);
      if (number < least || number >= rows || static_cast<int>(number % size_) != rank_) throw strange(r, number);
      next = std::min(next, number);
    }
    if (next == rows) return;
    for (int r = 0; r < size_; ++r) {
      const bool touched = row_counts_[r] < received_rows_[r].count() && received_rows_[r].number(row_counts_[r]) == next;
      parts_[r] = touched ? received_rows_[r].row(row_counts_[r]++) : zero_row_.data();
    }
    sum_in_order(parts_.data(), size_, work.wire, at(b.reduce_ptr, b.dtype, next * b.row), b.dtype, b.row, b.postscale);
    least = next;
  }
}

void DirectTransport::reduce_scatter_rows(const Work& work) {
  find_rows_to_send(work);
  pack_for_owners(work);
  exchange_rows(work, kScatter, work.bucket.row * dtype_size(work.wire));
  sum_rows(work);
}

void DirectTransport::all_gather_rows(const Work& work) {
  const BucketSpec& b = work.bucket;
  const size_t rows = b.count / b.row, row_bytes = b.row * dtype_size(work.wire);
  if (b.corrects()) {
    touched_.clear();
    for (int32_t k = 1; k <= b.changed[0]; ++k) {
      if (b.changed[k] % size_ == rank_) touched_.push_back(static_cast<uint32_t>(b.changed[k]));
    }
  } else {
    find_touched(static_cast<const char*>(b.reduce_ptr), rows, b.row * dtype_size(work.type), rank_, size_, touched_);
  }
  RowMessage& mine = packed_rows_[rank_];
  mine.reset(touched_.size(), row_bytes);
  for (size_t k = 0; k < touched_.size(); ++k) {
    mine.set_number(k, touched_[k]);
    convert(at(b.reduce_ptr, work.type, touched_[k] * b.row), work.type, mine.row(k), work.wire, b.row, 1.0);
    if (work.wire == work.type && !b.corrects()) continue;
    // As the others receive it.
    convert(mine.row(k), work.wire, at(b.gather_ptr, work.type, touched_[k] * b.row), work.type, b.row, 1.0);
  }
  exchange_rows(work, kGather, row_bytes);
  for (int d = 1; d < size_; ++d) {
    const int owner = peer(d);
    const RowMessage& theirs = received_rows_[owner];
    for (uint64_t k = 0; k < theirs.count(); ++k) {
      const uint32_t number = theirs.number(k);
      if (number >= rows || static_cast<int>(number % size_) != owner) throw strange(owner, number);
      convert(theirs.row(k), work.wire, at(b.gather_ptr, work.type, number * b.row), work.type, b.row, 1.0);
    }
  }
}

}  // namespace commsched
