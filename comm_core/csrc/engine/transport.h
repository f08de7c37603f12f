// Runs one operation on one bucket. The engine moves bytes through this interface only.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "socket.h"
#include "types.h"

namespace commsched {

// Throws unless every element of the bucket belongs to one of `size` ranks.
inline void check_parts(const BucketSpec& spec, int size) {
  const std::string bucket = "bucket '" + spec.name + "' has " + std::to_string(spec.count) + " elements, but ";
  if (spec.row > 0) {
    if (spec.count % spec.row == 0 && spec.ends.empty()) return;
    throw EngineError(ErrorKind::usage, "a bucket of rows must hold whole rows and no ends of parts: " + bucket + "a row has " +
                                            std::to_string(spec.row));
  }
  if (spec.ends.empty() && spec.count % size != 0) {
    throw EngineError(ErrorKind::usage, "a bucket's elements must divide by the number of ranks: " + bucket + "there are " +
                                            std::to_string(size) + " ranks; pad it");
  }
  if (spec.ends.empty()) return;
  if (spec.ends.size() != static_cast<size_t>(size) || !std::is_sorted(spec.ends.begin(), spec.ends.end()) ||
      spec.ends.back() != spec.count) {
    std::string text;
    for (const size_t end : spec.ends) text += (text.empty() ? "" : ", ") + std::to_string(end);
    throw EngineError(ErrorKind::usage, "the ends of a bucket's parts must ascend to its length, one for each of " +
                                            std::to_string(size) + " ranks: " + bucket + "the ends are " + text);
  }
}

// Throws if the bucket is to travel in blocks.
inline void refuse_blocks(const BucketSpec& spec, const std::string& who) {
  if (!in_blocks(spec.wire_dtype)) return;
  throw EngineError(ErrorKind::usage, "bucket '" + spec.name + "' cannot travel in " + dtype_name(spec.wire_dtype) + " over " +
                                          who + "; use the direct exchange or two tiers");
}

class Transport {
 public:
  // Every thread holds one during an operation, so that close() takes nothing from under it. Throws once closed.
  class Use {
   public:
    explicit Use(Transport& transport) : transport_(transport) { transport_.enter(); }
    ~Use() { transport_.leave(); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Transport& transport_;
  };

  virtual ~Transport() = default;

  // Called between steps when a bucket is added. Allocates everything that operations on it need.
  virtual void prepare(const BucketSpec& bucket) { (void)bucket; }

  // Called before the first reduce-scatter of a bucket: moves `sent_residual` to the ranks that will add it.
  virtual void place_residual(const BucketSpec& bucket, const OpTag& tag) { (void)bucket, (void)tag; }

  // Afterwards this rank's shard of reduce_ptr holds the scaled sum; the other shards are undefined.
  virtual void reduce_scatter(const BucketSpec& bucket, const OpTag& tag) = 0;

  // Afterwards every shard of gather_ptr holds its owner's values.
  virtual void all_gather(const BucketSpec& bucket, const OpTag& tag) = 0;

  virtual void all_reduce(const BucketSpec& bucket, const OpTag& tag) {
    reduce_scatter(bucket, tag);
    all_gather(bucket, tag);
  }

  // Bytes that this rank sends in one operation on a bucket that is not sent by rows.
  virtual int64_t bytes_sent(const BucketSpec& bucket, Op op) const;

  // Bytes sent so far in operations on buckets of rows.
  virtual int64_t row_bytes() const { return 0; }

  // Memory of zeros for a bucket that operations move faster than other memory; null: this transport has none.
  virtual std::shared_ptr<void> take(size_t bytes) { return (void)bytes, nullptr; }

  // From any thread, before it is told that operations have failed: buckets may be written to from then on.
  virtual void withdraw() noexcept {}

  // From any thread: the operation in progress and all later ones throw EngineError.
  virtual void abort(const std::string& reason) noexcept = 0;

  // Ends operations like abort() and gives back connections and memory: at once if no operation is in progress, else when the
  // last one has ended, which this call awaits for up to `patience` seconds. Later operations throw EngineError with the reason.
  void close(const std::string& reason, double patience) noexcept;

  // Seconds without progress after which an operation fails.
  virtual void set_timeout(double seconds) = 0;

  // False if an operation may block without a time-out of its own.
  virtual bool keeps_time() const { return true; }

  virtual int rank() const = 0;
  virtual int size() const = 0;

 protected:
  // Gives back connections and memory. Called once at most, when no operation is in progress and none will begin.
  virtual void release() noexcept {}

 private:
  void enter();
  void leave() noexcept;

  const Owned owned_;
  std::mutex using_;  // guards what follows
  std::condition_variable released_;
  int users_ = 0;
  bool closed_ = false;
  bool is_released_ = false;
  std::string reason_;
};

}  // namespace commsched
