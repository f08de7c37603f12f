#include "collective_transport.h"

#include <ATen/ATen.h>

#include "c10d_channel.h"
#include "engine/link_gate.h"

namespace commsched {

at::ScalarType scalar_type(DType dtype) {
  constexpr at::ScalarType types[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte};
  return types[static_cast<int>(dtype)];
}

DType dtype_of(at::ScalarType type) {
  for (DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i32, DType::i64, DType::u8}) {
    if (scalar_type(dtype) == type) return dtype;
  }
  throw EngineError(ErrorKind::usage, std::string("the engine moves float32, float64, float16, bfloat16, int32, int64 and "
                                                  "uint8, but a tensor has type ") + c10::toString(type));
}

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

// Backends can be aborted from torch 2.8 on; before that, a collective ends by its own time-out.
template <class Backend>
auto abort_backend(Backend& backend, int) -> decltype(backend.abort()) {
  backend.abort();
}
template <class Backend>
void abort_backend(Backend&, long) {}

}  // namespace

void CollectiveTransport::pass(size_t count, DType type) const {
  LinkGate::of_process().pass(Traffic::gradient, static_cast<int64_t>(count * dtype_size(type)), aborted_);
}

at::Tensor CollectiveTransport::shard_of(const at::Tensor& full) const {
  const int64_t length = full.numel() / size_;
  return full.narrow(0, rank_ * length, length);
}

// The gradients, scaled, as they travel: the bucket itself unless its type changes on the way.
at::Tensor CollectiveTransport::outgoing(const BucketSpec& b) const {
  const at::Tensor full = gradients(b);
  scale(full, b.prescale);
  return full.to(scalar_type(b.wire_dtype));
}

void CollectiveTransport::reduce_scatter(const BucketSpec& b, const OpTag& tag) {
  const at::NoGradGuard no_grad;
  pass(b.count, b.wire_dtype);
  const at::Tensor full = outgoing(b);
  const at::Tensor mine = at::empty({full.numel() / size_}, full.options());
  scatter_sum(full, mine, operation_name("rs", b, tag));
  const at::Tensor shard = shard_of(gradients(b));
  shard.copy_(mine);
  scale(shard, b.postscale);
}

void CollectiveTransport::all_gather(const BucketSpec& b, const OpTag& tag) {
  const at::NoGradGuard no_grad;
  pass(b.count, b.gathers_gradients() ? b.wire_dtype : b.gather_dtype);
  const bool cast = b.gathers_gradients() && b.wire_dtype != b.dtype;
  const at::Tensor full = view(b.gather_ptr, b.count, b.gather_dtype);
  const at::Tensor mine = shard_of(full).to(scalar_type(cast ? b.wire_dtype : b.gather_dtype), false, /*copy=*/true);
  const at::Tensor all = cast ? at::empty({full.numel()}, mine.options()) : full;
  gather(mine, all, operation_name("ag", b, tag));
  if (cast) full.copy_(all);
}

void CollectiveTransport::all_reduce(const BucketSpec& b, const OpTag& tag) {
  if (!b.gathers_gradients()) return Transport::all_reduce(b, tag);
  const at::NoGradGuard no_grad;
  pass(b.count, b.wire_dtype);
  const at::Tensor full = outgoing(b);
  sum(full, operation_name("ar", b, tag));
  const at::Tensor result = gradients(b);
  if (!full.is_alias_of(result)) result.copy_(full);
  scale(result, b.postscale);
}

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::Backend> backend)
    : CollectiveTransport(backend->getRank(), backend->getSize()), backend_(std::move(backend)) {}

void C10dTransport::set_timeout(double seconds) {
  timeout_ = std::chrono::duration_cast<std::chrono::milliseconds>(to_duration(seconds));
}

template <typename Start>
void C10dTransport::finish(Start&& start) {
  const auto aborted = [&] { return EngineError(ErrorKind::aborted, reason_); };
  if (aborted_) throw aborted();
  try {
    auto work = start();
    {
      const std::lock_guard lock(mutex_);
      work_ = work;
    }
    work->wait(timeout_);
  } catch (const std::exception& error) {
    if (aborted_) throw aborted();
    throw backend_error(error, -1);
  }
  const std::lock_guard lock(mutex_);
  work_.reset();
}

void C10dTransport::scatter_sum(const at::Tensor& full, const at::Tensor& shard, const std::string&) {
  finish([&] {
    at::Tensor output = shard, input = full;
    return backend_->_reduce_scatter_base(output, input, {});
  });
}

void C10dTransport::gather(const at::Tensor& shard, const at::Tensor& full, const std::string&) {
  finish([&] {
    at::Tensor output = full, input = shard;
    return backend_->_allgather_base(output, input, {});
  });
}

void C10dTransport::sum(const at::Tensor& full, const std::string&) {
  finish([&] {
    std::vector<at::Tensor> tensors{full};
    return backend_->allreduce(tensors, {});
  });
}

void C10dTransport::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  reason_ = reason;
  aborted_ = true;
  LinkGate::of_process().wake();
  try {
    if (work_) work_->abort();
    abort_backend(*backend_, 0);
  } catch (const std::exception&) {  // a backend that cannot abort ends by its own time-out
  }
}

}  // namespace commsched
