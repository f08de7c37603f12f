// Operations as whole collectives of a Python object (Horovod's operations), called on the engine's thread with the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <string>

#include "engine/transport.h"

namespace commsched {

// The object has scatter_sum(full, shard, name), gather(shard, full, name) and sum(full, name). Each returns once the tensors
// hold the result; `name` is the same on all ranks and unique among the operations of a step. It also has `rank` and `size`.
// Each collective is one message for the link's gate: halos and activations go before it, not within it.
class PythonTransport : public Transport {
 public:
  explicit PythonTransport(py::object collectives);
  ~PythonTransport() override;

  void prepare(const BucketSpec& bucket) override;
  void reduce_scatter(const BucketSpec& bucket, const OpTag& tag) override;
  void all_gather(const BucketSpec& bucket, const OpTag& tag) override;
  void all_reduce(const BucketSpec& bucket, const OpTag& tag) override;
  void abort(const std::string& reason) noexcept override;
  void set_timeout(double) override {}  // the collectives have their own
  bool keeps_time() const override { return false; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

 protected:
  void release() noexcept override;

 private:
  template <typename... Args>
  void call(const char* method, const Args&... args);
  void wait_for_gate(size_t count, DType type) const;
  at::Tensor outgoing(const BucketSpec& bucket) const;
  at::Tensor shard_of(const at::Tensor& full) const;

  py::object collectives_;
  const int rank_;
  const int size_;
  std::atomic<bool> aborted_{false};  // ends the wait for the gate, after LinkGate::wake()
};

}  // namespace commsched
