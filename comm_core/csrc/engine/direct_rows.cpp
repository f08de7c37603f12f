// Direct exchange of buckets of rows: each rank sends touched rows to their owners, and each owner the sums to all others.
#include "direct.h"

namespace commsched {

void DirectTransport::reduce_scatter_rows(const Work& work) {
  const BucketSpec& b = work.bucket;
  find_rows_to_send(work);
  if (b.corrects()) {  // all ranks send each row that any of them has changed
    unite(work, kUnite, {peers_, peers_, true}, 1, 0);
    write_changes(b);
  }
  pack_rows(work, work.wire);
  exchange_rows(work, kScatter, {peers_, peers_, true}, b.row * dtype_size(work.wire));
  std::swap(received_rows_[rank_], packed_rows_[rank_]);
  zero_is(work, work.wire);
  merge_rows(
      work, ranks_, [&](uint32_t number) { return owner(number) == rank_; },
      [&](uint32_t number) {
        sum_in_order(parts_.data(), size_, work.wire, at(b.reduce_ptr, b.dtype, number * b.row), b.dtype, b.row, b.postscale);
      });
}

void DirectTransport::all_gather_rows(const Work& work) {
  pack_sums(work);
  exchange_rows(work, kGather, {peers_, peers_, true}, work.bucket.row * dtype_size(work.wire), &packed_rows_[rank_]);
  place_rows(work, peers_);
}

}  // namespace commsched
