// Operations as whole collectives of a Python object (Horovod's operations), called on the engine's thread with the GIL.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <string>

#include "dtypes.h"
#include "engine/link_gate.h"
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

inline at::Tensor memory_as_tensor(void* data, size_t count, DType dtype) {
  return at::from_blob(data, {static_cast<int64_t>(count)}, scalar_type(dtype));
}

inline at::Tensor gradients_of(const BucketSpec& b) { return memory_as_tensor(b.reduce_ptr, b.count, b.dtype); }

inline void scale_in_place(const at::Tensor& values, double factor) {
  if (factor != 1.0) values.mul_(factor);
}

inline std::string operation_name(const char* op, const BucketSpec& b, const OpTag& tag) {
  return std::string(op) + "." + std::to_string(tag.bucket) + "." + b.name;
}

inline PythonTransport::PythonTransport(py::object collectives)
    : collectives_(std::move(collectives)),
      rank_(collectives_.attr("rank").cast<int>()),
      size_(collectives_.attr("size").cast<int>()) {}

inline PythonTransport::~PythonTransport() { release(); }

inline void PythonTransport::release() noexcept {
  if (!collectives_) return;
  if (!Py_IsInitialized()) {
    collectives_.release();  // the interpreter has ended and cannot take the reference back
    return;
  }
  const py::gil_scoped_acquire gil;
  collectives_ = py::object();
}

inline void PythonTransport::prepare(const BucketSpec& bucket) {
  if (bucket.row > 0) {
    throw EngineError(ErrorKind::usage, "a Python transport sends whole buckets, but bucket '" + bucket.name +
                                            "' shall travel by rows; use the direct exchange, or add the bucket without row=");
  }
  refuse_blocks(bucket, "a Python transport");
  if (bucket.ends.empty()) return;
  throw EngineError(ErrorKind::usage, "a Python transport reduces and gathers parts of equal length, but those of bucket '" +
                                          bucket.name + "' differ; use the direct or the ring exchange");
}

template <typename... Args>
inline void PythonTransport::call(const char* method, const Args&... args) {
  if (aborted_) throw EngineError(ErrorKind::aborted, "the engine was aborted");
  const py::gil_scoped_acquire gil;
  try {
    collectives_.attr(method)(args...);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // Ctrl-C, if the main thread runs the operation
    const std::string text = error.what();       // needs the GIL, as does dropping the exception
    throw EngineError(ErrorKind::aborted, text);
  }
}

inline void PythonTransport::wait_for_gate(size_t count, DType type) const {
  LinkGate::of_process().pass(Traffic::gradient, static_cast<int64_t>(count * dtype_size(type)), aborted_);
}

inline at::Tensor PythonTransport::shard_of(const at::Tensor& full) const {
  const int64_t length = full.numel() / size_;
  return full.narrow(0, rank_ * length, length);
}

// The gradients, scaled, as they travel: the bucket itself unless its type changes on the way.
inline at::Tensor PythonTransport::outgoing(const BucketSpec& b) const {
  const at::Tensor full = gradients_of(b);
  scale_in_place(full, b.prescale);
  return full.to(scalar_type(b.wire_dtype));
}

inline void PythonTransport::reduce_scatter(const BucketSpec& b, const OpTag& tag) {
  const at::NoGradGuard no_grad;
  wait_for_gate(b.count, b.wire_dtype);
  const at::Tensor full = outgoing(b);
  const at::Tensor mine = at::empty({full.numel() / size_}, full.options());
  call("scatter_sum", full, mine, operation_name("rs", b, tag));
  const at::Tensor shard = shard_of(gradients_of(b));
  shard.copy_(mine);
  scale_in_place(shard, b.postscale);
}

inline void PythonTransport::all_gather(const BucketSpec& b, const OpTag& tag) {
  const at::NoGradGuard no_grad;
  wait_for_gate(b.count, b.gathers_gradients() ? b.wire_dtype : b.gather_dtype);
  const bool cast = b.gathers_gradients() && b.wire_dtype != b.dtype;
  const at::Tensor full = memory_as_tensor(b.gather_ptr, b.count, b.gather_dtype);
  const at::Tensor mine = shard_of(full).to(scalar_type(cast ? b.wire_dtype : b.gather_dtype), false, /*copy=*/true);
  const at::Tensor all = cast ? at::empty({full.numel()}, mine.options()) : full;
  call("gather", mine, all, operation_name("ag", b, tag));
  if (cast) full.copy_(all);
}

inline void PythonTransport::all_reduce(const BucketSpec& b, const OpTag& tag) {
  if (!b.gathers_gradients()) return Transport::all_reduce(b, tag);
  const at::NoGradGuard no_grad;
  wait_for_gate(b.count, b.wire_dtype);
  const at::Tensor full = outgoing(b);
  call("sum", full, operation_name("ar", b, tag));
  const at::Tensor result = gradients_of(b);
  if (!full.is_alias_of(result)) result.copy_(full);
  scale_in_place(result, b.postscale);
}

inline void PythonTransport::abort(const std::string&) noexcept {
  aborted_ = true;
  LinkGate::of_process().wake();
}

}  // namespace commsched
