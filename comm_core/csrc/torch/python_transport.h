// Collectives of a Python object, called on the engine's thread with the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "collective_transport.h"

namespace commsched {

// The object has scatter_sum(full, shard, name), gather(shard, full, name), sum(full, name), each blocking until the tensors
// hold the result; rank and size; and, if it likes, abort(reason) and set_timeout(seconds).
class PythonTransport : public CollectiveTransport {
 public:
  explicit PythonTransport(py::object collectives);
  ~PythonTransport() override;

  void abort(const std::string& reason) noexcept override;
  void set_timeout(double seconds) override;
  bool keeps_time() const override { return false; }

 protected:
  void scatter_sum(const at::Tensor& full, const at::Tensor& shard, const std::string& name) override;
  void gather(const at::Tensor& shard, const at::Tensor& full, const std::string& name) override;
  void sum(const at::Tensor& full, const std::string& name) override;

 private:
  template <typename... Args>
  void call(const char* method, const Args&... args);

  py::object collectives_;
};

}  // namespace commsched
