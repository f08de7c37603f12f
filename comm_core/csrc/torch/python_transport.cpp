#include "python_transport.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "dtypes.h"
#include "engine/link_gate.h"

namespace commsched {
namespace {

at::Tensor view(void* data, size_t count, DType dtype) {
  return at::from_blob(data, {static_cast<int64_t>(count)}, scalar_type(dtype));
}

at::Tensor gradients(const BucketSpec& b) { return view(b.reduce_ptr, b.count, b.dtype); }

void scale(const at::Tensor& values, double factor) {
  if (factor != 1.0) values.mul_(factor);
}

std::string operation_name(const char* op, const BucketSpec& b, const OpTag& tag) {
  return std::string(op) + "." + std::to_string(tag.bucket) + "." + b.name;
}

}  // namespace

PythonTransport::PythonTransport(py::object collectives)
    : collectives_(std::move(collectives)),
      rank_(collectives_.attr("rank").cast<int>()),
      size_(collectives_.attr("size").cast<int>()) {}

PythonTransport::~PythonTransport() { release(); }

void PythonTransport::release() noexcept {
  if (!collectives_) return;
  if (!Py_IsInitialized()) {
    collectives_.release();  // the interpreter has ended and cannot take the reference back
    return;
  }
  const py::gil_scoped_acquire gil;
  collectives_ = py::object();
}

void PythonTransport::prepare(const BucketSpec& bucket) {
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
void PythonTransport::call(const char* method, const Args&... args) {
  if (aborted_) throw EngineError(ErrorKind::aborted, "the engine was aborted");
  const py::gil_scoped_acquire gil;
  try {
    collectives_.attr(method)(args...);
  } catch (py::error_already_set& error) {
    const std::string text = error.what();  // needs the GIL, as does dropping the exception
    throw EngineError(ErrorKind::aborted, text);
  }
}

void PythonTransport::wait_for_gate(size_t count, DType type) const {
  LinkGate::of_process().pass(Traffic::gradient, static_cast<int64_t>(count * dtype_size(type)), aborted_);
}

at::Tensor PythonTransport::shard_of(const at::Tensor& full) const {
  const int64_t length = full.numel() / size_;
  return full.narrow(0, rank_ * length, length);
}

// The gradients, scaled, as they travel: the bucket itself unless its type changes on the way.
at::Tensor PythonTransport::outgoing(const BucketSpec& b) const {
  const at::Tensor full = gradients(b);
  scale(full, b.prescale);
  return full.to(scalar_type(b.wire_dtype));
}

void PythonTransport::reduce_scatter(const BucketSpec& b, const OpTag& tag) {
  const at::NoGradGuard no_grad;
  wait_for_gate(b.count, b.wire_dtype);
  const at::Tensor full = outgoing(b);
  const at::Tensor mine = at::empty({full.numel() / size_}, full.options());
  call("scatter_sum", full, mine, operation_name("rs", b, tag));
  const at::Tensor shard = shard_of(gradients(b));
  shard.copy_(mine);
  scale(shard, b.postscale);
}

void PythonTransport::all_gather(const BucketSpec& b, const OpTag& tag) {
  const at::NoGradGuard no_grad;
  wait_for_gate(b.count, b.gathers_gradients() ? b.wire_dtype : b.gather_dtype);
  const bool cast = b.gathers_gradients() && b.wire_dtype != b.dtype;
  const at::Tensor full = view(b.gather_ptr, b.count, b.gather_dtype);
  const at::Tensor mine = shard_of(full).to(scalar_type(cast ? b.wire_dtype : b.gather_dtype), false, /*copy=*/true);
  const at::Tensor all = cast ? at::empty({full.numel()}, mine.options()) : full;
  call("gather", mine, all, operation_name("ag", b, tag));
  if (cast) full.copy_(all);
}

void PythonTransport::all_reduce(const BucketSpec& b, const OpTag& tag) {
  if (!b.gathers_gradients()) return Transport::all_reduce(b, tag);
  const at::NoGradGuard no_grad;
  wait_for_gate(b.count, b.wire_dtype);
  const at::Tensor full = outgoing(b);
  call("sum", full, operation_name("ar", b, tag));
  const at::Tensor result = gradients(b);
  if (!full.is_alias_of(result)) result.copy_(full);
  scale(result, b.postscale);
}

void PythonTransport::abort(const std::string&) noexcept {
  aborted_ = true;
  LinkGate::of_process().wake();
}

}  // namespace commsched
