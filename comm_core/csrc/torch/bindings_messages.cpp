// Python's view of the channel of messages. The GIL is free while a call may block.
#include "bindings_messages.h"

#include "engine/message_channel.h"

namespace commsched {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
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

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void bind_messages(py::module_& m) {
  py::class_<PendingMessages>(m, "PendingMessages")
      .def(
          "wait", [](const PendingMessages& p) { p.channel->wait(p.pending, check_signals); }, NoGil())
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
            const py::gil_scoped_release no_gil;
            return PendingMessages{channel, channel->start(std::move(exchange))};
          },
          py::arg("sends"), py::arg("receives"), py::arg("lane"), py::arg("operation"), py::arg("traffic") = py::none())
      .def("set_timeout", &MessageChannel::set_timeout, py::arg("seconds"), NoGil())
      .def("abort", &MessageChannel::abort, py::arg("reason"), NoGil())
      .def("close", &MessageChannel::close, NoGil())
      .def_property_readonly_static("SHORT", [](const py::object&) { return MessageChannel::kShort; })
      .def_property_readonly_static("TURN_PATIENCE", [](const py::object&) { return MessageChannel::kTurnPatience; });
}

}  // namespace commsched
