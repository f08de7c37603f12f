// Buckets of rows in two tiers: messages over the channel inside a host, too.
#include "two_tier.h"

namespace commsched {

// Unites the rows that any rank has changed: inside each host, then each rank a part of its host's with other hosts.
void TwoTierTransport::unite_changes(const RowTransport::Work& work) {
  const Peers on_host{neighbours_, neighbours_, one_host()};
  const auto places = static_cast<uint32_t>(members_[host_].size());
  unite(work, kUnite, on_host, 1, 0);
  if (!one_host()) {
    unite(work, kUniteBetween, {deputies_, entrusted_, true}, places, static_cast<uint32_t>(place_[rank_]));
    unite(work, kUniteOnHost, on_host, 1, 0);
  }
  write_changes(work.bucket);
}

// This host's sums of the rows whose deputy this rank is, packed for their owners; with one host, the sums of this rank's rows.
void TwoTierTransport::sum_rows_on_host(const RowTransport::Work& work, DType packed) {
  const BucketSpec& b = work.bucket;
  const std::vector<int>& ranks = members_[host_];
  const auto expected = [&](uint32_t number) { return via(number) == rank_; };
  const auto sum_into = [&](char* sum, DType wire, double scale) {
    sum_in_order(parts_.data(), static_cast<int>(ranks.size()), packed, sum, wire, b.row, scale);
  };
  std::swap(received_rows_[rank_], packed_rows_[rank_]);
  zero_is(work, packed);
  if (one_host()) {
    merge_rows(work, ranks, expected,
               [&](uint32_t number) { sum_into(at(b.reduce_ptr, b.dtype, number * b.row), b.dtype, b.postscale); });
    return;
  }
  std::fill(row_counts_.begin(), row_counts_.end(), 0);
  merge_rows(work, ranks, expected, [&](uint32_t number) { ++row_counts_[owner(number)]; });
  for (const int shard : entrusted_) packed_rows_[shard].reset(row_counts_[shard], b.row * dtype_size(work.wire));
  std::fill(row_counts_.begin(), row_counts_.end(), 0);
  merge_rows(work, ranks, expected, [&](uint32_t number) {
    RowMessage& sums = packed_rows_[owner(number)];
    const uint64_t k = row_counts_[owner(number)]++;
    sums.set_number(k, number);
    sum_into(sums.row(k), work.wire, work.wire == DType::f16 ? 1.0 / room_ : 1.0);
  });
}

// The sums over the hosts of this rank's rows. A host of which no rank touched a row adds zeros.
void TwoTierTransport::sum_rows_of_hosts(const RowTransport::Work& work) {
  const BucketSpec& b = work.bucket;
  const double scale = work.wire == DType::f16 ? b.postscale * room_ : b.postscale;
  std::swap(received_rows_[rank_], packed_rows_[rank_]);
  zero_is(work, work.wire);
  merge_rows(
      work, deputies_, [&](uint32_t number) { return owner(number) == rank_; },
      [&](uint32_t number) {
        char* sum = at(b.reduce_ptr, b.dtype, number * b.row);
        sum_in_order(parts_.data(), static_cast<int>(deputies_.size()), work.wire, sum, work.type, b.row, scale);
      });
}

void TwoTierTransport::reduce_scatter_rows(const RowTransport::Work& work) {
  const BucketSpec& b = work.bucket;
  find_rows_to_send(work);
  if (b.corrects()) unite_changes(work);
  const DType packed = one_host() ? work.wire : work.type;
  pack_rows(work, packed);
  exchange_rows(work, kScatter, {neighbours_, neighbours_, one_host()}, b.row * dtype_size(packed));
  sum_rows_on_host(work, packed);
  if (one_host()) return;
  exchange_rows(work, kScatterBetween, {entrusted_, deputies_, true}, b.row * dtype_size(work.wire));
  sum_rows_of_hosts(work);
}

// Each owner sends its sums to its deputies; then each rank sends its own and those that it has got to its neighbours.
void TwoTierTransport::all_gather_rows(const RowTransport::Work& work) {
  const size_t row_bytes = work.bucket.row * dtype_size(work.wire);
  pack_sums(work);
  exchange_rows(work, kGatherBetween, {deputies_, entrusted_, true}, row_bytes, &packed_rows_[rank_]);
  std::swap(received_rows_[rank_], packed_rows_[rank_]);
  uint64_t count = 0, k = 0;
  for (const int shard : entrusted_) count += received_rows_[shard].count();
  handed_on_.reset(count, row_bytes);
  for (const int shard : entrusted_) {
    const RowMessage& rows = received_rows_[shard];
    for (uint64_t i = 0; i < rows.count(); ++i, ++k) {
      handed_on_.set_number(k, rows.number(i));
      std::memcpy(handed_on_.row(k), rows.row(i), row_bytes);
    }
  }
  exchange_rows(work, kGather, {neighbours_, neighbours_, one_host()}, row_bytes, &handed_on_);
  place_rows(work, entrusted_);
  place_rows(work, neighbours_);
}

}  // namespace commsched
