#include "python_transport.h"

#include "engine/link_gate.h"

namespace commsched {

PythonTransport::PythonTransport(py::object collectives)
    : CollectiveTransport(collectives.attr("rank").cast<int>(), collectives.attr("size").cast<int>()),
      collectives_(std::move(collectives)) {}

PythonTransport::~PythonTransport() {
  if (!Py_IsInitialized()) {
    collectives_.release();  // there is nobody left to give it back to
    return;
  }
  const py::gil_scoped_acquire gil;
  collectives_ = py::object();
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

void PythonTransport::scatter_sum(const at::Tensor& full, const at::Tensor& shard, const std::string& name) {
  call("scatter_sum", full, shard, name);
}

void PythonTransport::gather(const at::Tensor& shard, const at::Tensor& full, const std::string& name) {
  call("gather", shard, full, name);
}

void PythonTransport::sum(const at::Tensor& full, const std::string& name) { call("sum", full, name); }

void PythonTransport::set_timeout(double seconds) {
  const py::gil_scoped_acquire gil;
  if (py::hasattr(collectives_, "set_timeout")) collectives_.attr("set_timeout")(seconds);
}

void PythonTransport::abort(const std::string& reason) noexcept {
  if (aborted_.exchange(true) || !Py_IsInitialized()) return;
  LinkGate::of_process().wake();
  const py::gil_scoped_acquire gil;
  try {
    if (py::hasattr(collectives_, "abort")) collectives_.attr("abort")(reason);
  } catch (py::error_already_set&) {  // what matters is the failure that led here
  }
}

}  // namespace commsched
