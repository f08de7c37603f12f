// Operations as whole collectives of something else: a c10d backend (NCCL, gloo), or a Python object (Horovod's operations).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <string>

#include "engine/transport.h"

namespace commsched {

at::ScalarType scalar_type(DType dtype);
DType dtype_of(at::ScalarType type);  // throws EngineError(usage) for a type that the engine does not know

// Scales and casts around three plain collectives, which a subclass provides. Each is one message for the link's gate: halos and
// activations go before it, not within it.
class CollectiveTransport : public Transport {
 public:
  CollectiveTransport(int rank, int size) : rank_(rank), size_(size) {}

  void reduce_scatter(const BucketSpec& bucket, const OpTag& tag) override;
  void all_gather(const BucketSpec& bucket, const OpTag& tag) override;
  void all_reduce(const BucketSpec& bucket, const OpTag& tag) override;
  int rank() const override { return rank_; }
  int size() const override { return size_; }

 protected:
  // `name` is unique among the operations of a step and the same on all ranks. Sums all ranks' `full`, of which this rank
  // gets its part in `shard`, memory of its own.
  virtual void scatter_sum(const at::Tensor& full, const at::Tensor& shard, const std::string& name) = 0;
  virtual void gather(const at::Tensor& shard, const at::Tensor& full, const std::string& name) = 0;
  virtual void sum(const at::Tensor& full, const std::string& name) = 0;

  // Waits for the link's gate.
  void pass(size_t count, DType type) const;

  const int rank_;
  const int size_;
  std::atomic<bool> aborted_{false};  // ends the wait for the gate, after LinkGate::wake()

 private:
  at::Tensor outgoing(const BucketSpec& bucket) const;
  at::Tensor shard_of(const at::Tensor& full) const;
};

class C10dTransport : public CollectiveTransport {
 public:
  explicit C10dTransport(c10::intrusive_ptr<c10d::Backend> backend);

  void abort(const std::string& reason) noexcept override;
  void set_timeout(double seconds) override;

 protected:
  void scatter_sum(const at::Tensor& full, const at::Tensor& shard, const std::string& name) override;
  void gather(const at::Tensor& shard, const at::Tensor& full, const std::string& name) override;
  void sum(const at::Tensor& full, const std::string& name) override;

 private:
  template <typename Start>
  void finish(Start&& start);

  const c10::intrusive_ptr<c10d::Backend> backend_;
  std::chrono::milliseconds timeout_{300000};
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Work> work_;
  std::string reason_;
};

}  // namespace commsched
