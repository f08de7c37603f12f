// Carries out one operation on one bucket: the only thing the engine knows about moving bytes.
#pragma once

#include <string>
#include <vector>

#include "types.h"

namespace commsched {

class Transport {
 public:
  virtual ~Transport() = default;

  // Called between steps whenever a bucket is added: everything that steady state needs is allocated here.
  virtual void prepare(const BucketSpec& bucket) { (void)bucket; }

  // Afterwards this rank's shard of reduce_ptr is the scaled sum; what the other shards hold is undefined.
  virtual void reduce_scatter(const BucketSpec& bucket, const OpTag& tag) = 0;

  // Afterwards every shard of gather_ptr is what its owner held.
  virtual void all_gather(const BucketSpec& bucket, const OpTag& tag) = 0;

  virtual void all_reduce(const BucketSpec& bucket, const OpTag& tag) {
    reduce_scatter(bucket, tag);
    all_gather(bucket, tag);
  }

  // From any thread: the operation under way and all later ones throw EngineError.
  virtual void abort(const std::string& reason) noexcept = 0;

  // An operation fails with a time-out when it makes no progress for so long.
  virtual void set_timeout(double seconds) = 0;

  // False where an operation cannot be relied on to end by itself.
  virtual bool keeps_time() const { return true; }

  virtual int rank() const = 0;
  virtual int size() const = 0;
};

}  // namespace commsched
