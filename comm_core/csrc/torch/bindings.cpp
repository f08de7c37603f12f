// The Python module comm_core._C: messages, quantised blocks, the link's gate and instances_of. The engine is in
// bindings_engine.cpp, memory that user code may keep in bindings_memory.cpp: three files, as each reads all of torch's headers.
#include "bindings.h"

#include <ATen/ops/empty.h>
#include <pybind11/numpy.h>

#include "dtypes.h"
#include "engine/link_gate.h"
#include "engine/message_channel.h"
#include "engine/quantise.h"

namespace commsched {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// --- the channel of messages; the GIL is free while a call may block ------------------------------------------------------

using Parcels = std::vector<std::pair<int, std::vector<at::Tensor>>>;

// Messages in flight, and their channel, which must not close before them.
struct PendingMessages {
  std::shared_ptr<MessageChannel> channel;
  MessageChannel::Pending pending;
};

// The GIL is free while a channel ends: its thread may let go of a tensor that Python knows.
struct CloseMessages {
  void operator()(MessageChannel* channel) const {
    if (!channel->here()) return;  // in a forked child its locks may be held for ever, and its thread does not exist
    const py::gil_scoped_release no_gil;
    delete channel;
  }
};

std::shared_ptr<MessageChannel> make_message_channel(int rank, const std::vector<std::tuple<int, int, std::string>>& descriptors) {
  std::vector<Connection> connections;
  for (const auto& [data, keepalive, host] : descriptors) connections.push_back({Socket(data), Socket(keepalive), host});
  return {new MessageChannel(rank, std::move(connections)), CloseMessages()};
}

std::vector<MessageChannel::Parcel> parcels_of(const Parcels& messages, const std::string& operation) {
  std::vector<MessageChannel::Parcel> parcels;
  for (const auto& [peer, buffers] : messages) {
    auto& pieces = parcels.emplace_back(MessageChannel::Parcel{peer, {}}).pieces;
    for (const at::Tensor& buffer : buffers) {
      if (!buffer.device().is_cpu() || !buffer.is_contiguous()) {
        throw EngineError(ErrorKind::usage, operation + ": a message is made of contiguous tensors on the CPU");
      }
      pieces.push_back({static_cast<char*>(buffer.data_ptr()), buffer.nbytes()});
    }
  }
  return parcels;
}

void bind_messages(py::module_& m) {
  py::class_<PendingMessages>(m, "PendingMessages")
      .def(
          "wait", [](const PendingMessages& p) { p.channel->wait(p.pending); }, MayWait())
      .def(
          "watch", [](const PendingMessages& p) { p.channel->watch(p.pending); }, NoGil())
      .def("done", [](const PendingMessages& p) { return MessageChannel::done(p.pending); });
  py::class_<MessageChannel, std::shared_ptr<MessageChannel>>(m, "MessageChannel")
      .def(py::init(&make_message_channel), py::arg("rank"), py::arg("connections"))
      .def(
          "exchange",
          [](const std::shared_ptr<MessageChannel>& channel, const Parcels& sends, const Parcels& receives, uint32_t lane,
             const std::string& operation, std::optional<Traffic> traffic) {
            MessageChannel::Exchange exchange{operation,
                                              lane,
                                              traffic,
                                              parcels_of(sends, operation),
                                              parcels_of(receives, operation),
                                              std::make_shared<std::pair<Parcels, Parcels>>(sends, receives)};
            const WaitsWithoutGil waits;
            return PendingMessages{channel, channel->start(std::move(exchange))};
          },
          py::arg("sends"), py::arg("receives"), py::arg("lane"), py::arg("operation"), py::arg("traffic") = py::none())
      .def("set_timeout", &MessageChannel::set_timeout, py::arg("seconds"), NoGil())
      .def("abort", &MessageChannel::abort, py::arg("reason"), NoGil())
      .def("close", &MessageChannel::close, NoGil())
      .def_property_readonly_static("SHORT", [](const py::object&) { return MessageChannel::kShort; })
      .def_property_readonly_static("TURN_PATIENCE", [](const py::object&) { return MessageChannel::kTurnPatience; });
}

// --- quantised blocks, for tests and measurements: the bytes that stand for a tensor, and sums of such bytes --------------

void check_blocks(bool right, const char* needed) {
  if (!right) throw EngineError(ErrorKind::usage, std::string("quantised blocks need ") + needed);
}

bool is_flat(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.device().is_cpu() && tensor.dim() == 1 && tensor.is_contiguous() && tensor.scalar_type() == type;
}

DType blocks_of(const py::object& wire_dtype) {
  const DType wire = wire_of(wire_dtype.cast<at::ScalarType>());
  check_blocks(in_blocks(wire), "wire_dtype=torch.int8 or torch.float8_e4m3fn");
  return wire;
}

Instructions instructions(bool baseline) { return baseline ? Instructions::baseline : best_instructions(); }

at::Tensor quantise_blocks(const at::Tensor& values, const py::object& wire_dtype, const std::optional<at::Tensor>& residual,
                           double scale, bool baseline) {
  const DType wire = blocks_of(wire_dtype);
  check_blocks(is_flat(values, at::kFloat), "a flat contiguous tensor of float32 on the CPU");
  check_blocks(!residual || (is_flat(*residual, at::kFloat) && residual->numel() == values.numel()), "a residual like the values");
  const size_t n = values.numel();
  at::Tensor bytes = at::empty({static_cast<int64_t>(wire_bytes(wire, n))}, at::kByte);
  const py::gil_scoped_release no_gil;
  float* const lost = residual ? residual->data_ptr<float>() : nullptr;
  quantise(values.data_ptr<float>(), n, scale, lost, bytes.data_ptr(), wire, instructions(baseline));
  return bytes;
}

at::Tensor sum_blocks(const std::vector<at::Tensor>& parts, size_t count, const py::object& wire_dtype, double scale,
                      bool baseline) {
  const DType wire = blocks_of(wire_dtype);
  check_blocks(!parts.empty(), "at least one part");
  std::vector<const void*> addresses;
  for (const at::Tensor& part : parts) {
    check_blocks(is_flat(part, at::kByte) && part.numel() == static_cast<int64_t>(wire_bytes(wire, count)),
                 "parts of the same elements");
    addresses.push_back(part.data_ptr());
  }
  at::Tensor sums = at::empty({static_cast<int64_t>(count)}, at::kFloat);
  const py::gil_scoped_release no_gil;
  sum_quantised(addresses.data(), static_cast<int>(addresses.size()), wire, sums.data_ptr<float>(), count, scale,
                instructions(baseline));
  return sums;
}

void bind_blocks(py::module_& m) {
  m.def("quantise_blocks", &quantise_blocks, py::arg("values"), py::arg("wire_dtype"), py::arg("residual") = py::none(),
        py::arg("scale") = 1.0, py::arg("baseline") = false);
  m.def("sum_blocks", &sum_blocks, py::arg("parts"), py::arg("count"), py::arg("wire_dtype"), py::arg("scale") = 1.0,
        py::arg("baseline") = false);
}

// --- the link's gate ------------------------------------------------------------------------------------------------------

const std::atomic<bool> kNever{false};

void bind_gate(py::module_& m) {
  PYBIND11_NUMPY_DTYPE(Passage, traffic, waiting, asked, start, end, bytes);
  py::enum_<Traffic>(m, "Traffic")
      .value("halo", Traffic::halo)
      .value("activation", Traffic::activation)
      .value("gradient", Traffic::gradient);
  py::class_<LinkGate, std::unique_ptr<LinkGate, py::nodelete>>(m, "LinkGate")
      .def("begin", &LinkGate::begin, py::arg("traffic"), py::arg("bytes"), py::arg("patience"), MayWait())
      .def("end", &LinkGate::end, py::arg("number"), NoGil())
      .def(
          "passing", [](LinkGate& gate, Traffic traffic, int64_t bytes) { gate.pass(traffic, bytes, kNever); }, py::arg("traffic"),
          py::arg("bytes"), MayWait())
      .def("held_back", &LinkGate::held_back, NoGil())
      .def("record", &LinkGate::record, py::arg("on"), NoGil())
      .def(
          "passages",
          [](LinkGate& gate, bool clear) {
            std::vector<Passage> found;
            {
              const py::gil_scoped_release no_gil;
              found = gate.passages(clear);
            }
            return py::array_t<Passage>(static_cast<py::ssize_t>(found.size()), found.data());
          },
          py::arg("clear") = true);
  m.def("link_gate", &LinkGate::of_process, py::return_value_policy::reference);
}

// Among all objects are tuples that other threads are still building, which fails if anybody else holds them.
// So everything is let go before this returns and another thread can get the interpreter.
py::list instances_of(const py::type& wanted) {
  const py::list all = py::module_::import("gc").attr("get_objects")();
  py::list found;
  for (const py::handle thing : all) {
    // By type: isinstance() would call a proxy's own __class__.
    if (PyType_IsSubtype(Py_TYPE(thing.ptr()), reinterpret_cast<PyTypeObject*>(wanted.ptr())) != 0) {
      found.append(thing);
    }
  }
  return found;
}

}  // namespace

void run_signal_handlers() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace commsched

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
#ifdef COMMSCHED_WITH_CUDA
  m.attr("CUDA_BUILT") = true;
#else
  m.attr("CUDA_BUILT") = false;
#endif
  commsched::bind_engine(m);
  commsched::bind_memory(m);
  commsched::bind_messages(m);
  commsched::bind_blocks(m);
  commsched::bind_gate(m);
  m.def("instances_of", &commsched::instances_of, py::arg("type"));
}
