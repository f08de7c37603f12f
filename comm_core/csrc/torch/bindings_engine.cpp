// Python's view of the engine, its channels and its transports.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <pybind11/numpy.h>

#include "bindings.h"
#include "dtypes.h"
#include "engine/direct.h"
#include "engine/engine.h"
#include "engine/ring.h"
#include "engine/rows.h"
#include "engine/tcp_channel.h"
#include "engine/two_tier.h"
#include "python_transport.h"

namespace commsched {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Stage = EngineCore::Stage;
constexpr size_t kSegmentBytes = 256 << 10;
constexpr size_t kTierSegmentBytes = 128 << 10;  // a board has a slot for each rank, twice `depth` times
constexpr int kDepth = 4;
constexpr double kPatience = 5.0;  // seconds for aborted operations to end

// --- rows: which of them a gradient has changed since a part of it was sent -----------------------------------------------

EngineError usage(const std::string& text) { return EngineError(ErrorKind::usage, text); }

// Throws unless `changed` can hold the numbers of so many rows.
void check_changed(const at::Tensor& changed, int64_t rows) {
  if (changed.device().is_cpu() && changed.dim() == 1 && changed.is_contiguous() && changed.scalar_type() == at::kInt &&
      changed.numel() == rows + 1) {
    return;
  }
  throw usage("changed= must be a contiguous tensor of int32 on the CPU with 1 + " + std::to_string(rows) +
              " elements: the number of changed rows, then which; but it has " + std::to_string(changed.numel()) + " of " +
              c10::toString(changed.scalar_type()));
}

void changed_rows(const at::Tensor& part, const at::Tensor& whole, at::Tensor& changed) {
  const auto fits = [&](const at::Tensor& t) {
    return t.device().is_cpu() && t.dim() == 2 && t.is_contiguous() && t.sizes() == whole.sizes() &&
           t.scalar_type() == whole.scalar_type();
  };
  if (!fits(whole) || !fits(part)) throw usage("rows are compared in two contiguous matrices of one shape and type on the CPU");
  check_changed(changed, whole.size(0));
  auto* found = changed.data_ptr<int32_t>();
  const py::gil_scoped_release no_gil;
  const size_t rows = whole.size(0), row = whole.size(1);
  if (whole.scalar_type() == at::kFloat) {
    found[0] = static_cast<int32_t>(find_changed(part.data_ptr<float>(), whole.data_ptr<float>(), rows, row, found + 1));
  } else if (whole.scalar_type() == at::kDouble) {
    found[0] = static_cast<int32_t>(find_changed(part.data_ptr<double>(), whole.data_ptr<double>(), rows, row, found + 1));
  } else {
    throw usage(std::string("rows of float32 and float64 can be compared, not of ") + c10::toString(whole.scalar_type()));
  }
}

// Makes a bucket of rows a correction: see BucketSpec::changed.
void take_changed(BucketSpec& spec, const at::Tensor& changed) {
  const bool gathers = spec.gather_ptr != spec.reduce_ptr || spec.count == 0;  // torch: nothing has no address
  if (spec.row == 0 || !gathers || spec.dtype != spec.gather_dtype) {
    throw usage("bucket '" + spec.name +
                "' cannot have changed= without row= and without gather= of its own type: changed rows are"
                " summed, and written over those that another bucket has gathered");
  }
  check_changed(changed, static_cast<int64_t>(spec.count / spec.row));
  spec.changed = changed.data_ptr<int32_t>();
  spec.owner = std::make_shared<std::pair<std::shared_ptr<void>, at::Tensor>>(spec.owner, changed);
}

// --- channels, transports, the engine ---------------------------------------------------------------------------------------

std::shared_ptr<Channel> as_channel(const py::object& object) {
  if (py::isinstance<Channel>(object)) return object.cast<std::shared_ptr<Channel>>();
  throw EngineError(ErrorKind::usage, "a channel is needed, not " + py::repr(py::type::of(object)).cast<std::string>());
}

void check_flat(const at::Tensor& tensor, const char* what) {
  if (tensor.device().is_cpu() && tensor.dim() == 1 && tensor.is_contiguous()) return;
  throw EngineError(ErrorKind::usage, std::string(what) + " must be a one-dimensional contiguous tensor on the CPU");
}

float* residual_of(const at::Tensor& residual, size_t length, const BucketSpec& spec, const char* what) {
  check_flat(residual, what);
  if (in_blocks(spec.wire_dtype) && residual.scalar_type() == at::kFloat && residual.numel() == static_cast<int64_t>(length)) {
    return residual.data_ptr<float>();
  }
  throw EngineError(ErrorKind::usage, std::string(what) + " of bucket '" + spec.name + "' must be " + std::to_string(length) +
                                          " elements of float32, for wire_dtype=torch.int8 or torch.float8_e4m3fn, but has " +
                                          std::to_string(residual.numel()) + " of " + c10::toString(residual.scalar_type()));
}

// What rounding in blocks has lost so far, which the engine adds to the next values.
struct Residuals {
  std::optional<at::Tensor> sent, sums;

  void hand_over(BucketSpec& spec, int rank, int size) const {
    if (sent) spec.sent_residual = residual_of(*sent, spec.count, spec, "the residual of gradients");
    if (sums) {
      const size_t part = spec.part_end(rank, size) - spec.part_begin(rank, size);
      spec.sum_residual = residual_of(*sums, part, spec, "the residual of sums");
    }
    spec.owner = std::make_shared<std::pair<std::shared_ptr<void>, Residuals>>(spec.owner, *this);
  }
};

BucketSpec make_spec(const at::Tensor& reduce, const std::optional<at::Tensor>& gather, const py::object& wire_dtype,
                     double prescale, double postscale, bool needs_update, std::string name, std::vector<size_t> ends, size_t row) {
  const at::Tensor& gathered = gather.value_or(reduce);
  check_flat(reduce, "the gradient buffer");
  check_flat(gathered, "the gathered buffer");
  if (gathered.numel() != reduce.numel()) {
    throw EngineError(ErrorKind::usage, "both buffers of a bucket must have the same number of elements, but they have " +
                                            std::to_string(reduce.numel()) + " and " + std::to_string(gathered.numel()));
  }
  BucketSpec spec;
  spec.name = std::move(name);
  spec.reduce_ptr = reduce.data_ptr();
  spec.gather_ptr = gathered.data_ptr();
  spec.count = reduce.numel();
  spec.row = row;
  spec.ends = std::move(ends);
  spec.dtype = dtype_of(reduce.scalar_type());
  spec.gather_dtype = dtype_of(gathered.scalar_type());
  spec.wire_dtype = wire_dtype.is_none() ? spec.dtype : wire_of(wire_dtype.cast<at::ScalarType>());
  spec.prescale = prescale;
  spec.postscale = postscale;
  spec.needs_update = needs_update;
  spec.owner = std::make_shared<std::pair<at::Tensor, at::Tensor>>(reduce, gathered);
  return spec;
}

std::vector<PlanOp> as_plan(const std::vector<std::pair<std::string, int>>& items) {
  std::vector<PlanOp> plan;
  for (const auto& [text, bucket] : items) {
    bool known = false;
    for (Op op : {Op::RS, Op::AG, Op::AR}) {
      if (text != op_name(op)) continue;
      plan.push_back({op, bucket});
      known = true;
    }
    if (!known) throw EngineError(ErrorKind::usage, "a plan is made of RS, AG and AR, not of '" + text + "'");
  }
  return plan;
}

// One operation outside of any engine, for measuring and for values that no bucket holds.
void run_alone(Transport& transport, Op op, const at::Tensor& tensor, double postscale, int64_t step, std::vector<size_t> ends) {
  BucketSpec spec = make_spec(tensor, std::nullopt, py::none(), 1.0, postscale, false, "alone", std::move(ends), 0);
  check_parts(spec, transport.size());
  spec.gathered = op == Op::AR;
  const WaitsWithoutGil waits;
  const Transport::Use use(transport);
  const OpTag tag{step, 0, op, 0};
  transport.prepare(spec);
  try {
    if (op == Op::RS) transport.reduce_scatter(spec, tag);
    if (op == Op::AG) transport.all_gather(spec, tag);
    if (op == Op::AR) transport.all_reduce(spec, tag);
  } catch (const py::error_already_set&) {
    // The rest of the operation would be taken for the next one, and read into memory that may be gone.
    transport.abort("rank " + std::to_string(transport.rank()) + " was interrupted by a signal");
    throw;
  }
}

std::shared_ptr<TcpChannel> make_tcp_channel(int rank, const std::vector<std::tuple<int, int, std::string>>& descriptors) {
  std::vector<Connection> connections;
  for (const auto& [data, keepalive, host] : descriptors) connections.push_back({Socket(data), Socket(keepalive), host});
  return std::make_shared<TcpChannel>(rank, std::move(connections));
}

void bind_channels(py::module_& m) {
  py::class_<Channel, std::shared_ptr<Channel>>(m, "Channel");
  py::class_<TcpChannel, Channel, std::shared_ptr<TcpChannel>>(m, "TcpChannel")
      .def(py::init(&make_tcp_channel), py::arg("rank"), py::arg("connections"));
  m.def("lost_host", &lost_host, py::arg("descriptor"), py::arg("address"));
  m.def("set_warning", [](double seconds) { given_warning = seconds; }, py::arg("seconds"));
}

template <typename T>
void bind_exchange(py::module_& m, const char* name) {
  py::class_<T, Transport, std::shared_ptr<T>>(m, name).def(
      py::init([](const py::object& channel, int rank, int size, size_t segment_bytes, int depth) {
        return std::make_shared<T>(as_channel(channel), rank, size, segment_bytes, depth);
      }),
      py::arg("channel"), py::arg("rank"), py::arg("size"), py::arg("segment_bytes") = kSegmentBytes, py::arg("depth") = kDepth);
}

// `boards` are open files, one for each rank of this rank's host, in rank order: see comm_core/boards.py. They stay the caller's.
std::shared_ptr<TwoTierTransport> make_two_tiers(const py::object& channel, int rank, std::vector<int> hosts,
                                                 const std::vector<int>& boards, size_t segment_bytes, int depth,
                                                 const std::vector<int>& memory) {
  const int size = static_cast<int>(hosts.size());
  if (rank < 0 || rank >= size) {
    throw EngineError(ErrorKind::usage, "rank must be in [0, " + std::to_string(size) + "), the number of hosts given, but is " +
                                            std::to_string(rank));
  }
  const int place = static_cast<int>(std::count(hosts.begin(), hosts.begin() + rank, hosts[rank]));
  const auto shape = TwoTierTransport::board_shape(size, segment_bytes, depth);
  auto board = std::make_unique<HostBoard>(boards, place, shape);
  board->share(memory);
  return std::make_shared<TwoTierTransport>(as_channel(channel), rank, std::move(hosts), std::move(board), segment_bytes, depth);
}

// A flat tensor in the transport's own memory, if it has any.
at::Tensor zeros(Transport& transport, int64_t count, const py::object& dtype) {
  const Transport::Use use(transport);
  const auto type = dtype.cast<at::ScalarType>();
  std::shared_ptr<void> memory = transport.take(count * c10::elementSize(type));
  if (!memory) return at::zeros({count}, type);
  void* const data = memory.get();
  at::Tensor flat = at::from_blob(data, {count}, [memory = std::move(memory)](void*) mutable { memory.reset(); }, type);
  flat.storage().unsafeGetStorageImpl()->set_allocator(c10::GetCPUAllocator());  // which alias_of() hands on
  return flat;
}

void bind_transports(py::module_& m) {
  py::class_<Transport, std::shared_ptr<Transport>> transport(m, "Transport");
  transport.def_property_readonly("rank", &Transport::rank)
      .def_property_readonly("size", &Transport::size)
      .def("set_timeout", &Transport::set_timeout, py::arg("seconds"), NoGil())
      .def("zeros", &zeros, py::arg("count"), py::arg("dtype"))
      .def("abort", &Transport::abort, py::arg("reason"), NoGil())
      .def(
          "close", [](Transport& transport, const std::string& reason) { transport.close(reason, kPatience); },
          py::arg("reason") = "the transport is closed", NoGil());
  for (const auto& [name, op] : {std::pair("reduce_scatter", Op::RS), {"all_gather", Op::AG}, {"all_reduce", Op::AR}}) {
    transport.def(
        name,
        [op = op](Transport& t, const at::Tensor& tensor, double postscale, int64_t step, std::vector<size_t> ends) {
          run_alone(t, op, tensor, postscale, step, std::move(ends));
        },
        py::arg("tensor"), py::arg("postscale") = 1.0, py::arg("step") = 0, py::arg("ends") = std::vector<size_t>());
  }
  bind_exchange<DirectTransport>(m, "DirectTransport");
  bind_exchange<RingTransport>(m, "RingTransport");
  py::class_<TwoTierTransport, Transport, std::shared_ptr<TwoTierTransport>>(m, "TwoTierTransport")
      .def(py::init(&make_two_tiers), py::arg("channel"), py::arg("rank"), py::arg("hosts"), py::arg("boards"),
           py::arg("segment_bytes") = kTierSegmentBytes, py::arg("depth") = kDepth, py::arg("memory") = std::vector<int>())
      .def_static(
          "board_bytes",
          [](int size, size_t segment_bytes, int depth) {
            return TwoTierTransport::board_shape(size, segment_bytes, depth).bytes();
          },
          py::arg("size"), py::arg("segment_bytes") = kTierSegmentBytes, py::arg("depth") = kDepth);
  py::class_<PythonTransport, Transport, std::shared_ptr<PythonTransport>>(m, "PythonTransport")
      .def(py::init<py::object>(), py::arg("collectives"));
}

// The GIL is free while an engine ends: its thread may be inside a Python transport.
struct CloseWithoutGil {
  void operator()(Engine* engine) const {
    const py::gil_scoped_release no_gil;
    delete engine;
  }
};

std::shared_ptr<Engine> make_engine(std::shared_ptr<Transport> transport, int rank, int size, double timeout, size_t events) {
  if (!transport || rank != transport->rank() || size != transport->size()) {
    throw EngineError(ErrorKind::usage,
                      "the engine's rank and size, " + std::to_string(rank) + " of " + std::to_string(size) +
                          ", must be the transport's" +
                          (transport ? ", " + std::to_string(transport->rank()) + " of " + std::to_string(transport->size()) : ""));
  }
  const py::gil_scoped_release no_gil;
  return std::shared_ptr<Engine>(new Engine(std::move(transport), timeout, events), CloseWithoutGil());
}

void bind_marks_and_waits(py::class_<Engine, std::shared_ptr<Engine>>& engine) {
  engine.def(
            "begin_step", [](Engine& e) { return e->begin_step(); }, NoGil())
      .def(
          "mark_ready", [](Engine& e, int bucket) { e->mark_ready(bucket); }, py::arg("bucket"), NoGil())
      .def(
          "mark_updated", [](Engine& e, int bucket) { e->mark_updated(bucket); }, py::arg("bucket"), NoGil())
      .def(
          "ag_done", [](Engine& e, int b) { return e->done(b, Stage::gathered); }, py::arg("bucket"), NoGil())
      .def(
          "wait_rs", [](Engine& e, int b) { e->wait(b, Stage::reduced); }, py::arg("bucket"), MayWait())
      .def(
          "wait_ag", [](Engine& e, int b) { e->wait(b, Stage::gathered); }, py::arg("bucket"), MayWait())
      .def("wait_all", [](Engine& e) { e->wait_all(); }, MayWait());
}

void bind_the_engine(py::module_& m) {
  PYBIND11_NUMPY_DTYPE(Event, step, op, bucket, ready, start, end, bytes);
  py::class_<Engine, std::shared_ptr<Engine>> engine(m, "Engine");
  engine
      .def(py::init(&make_engine), py::arg("transport"), py::arg("rank"), py::arg("size"), py::arg("timeout_seconds") = 300.0,
           py::arg("max_events") = 1 << 15)
      .def(
          "add_bucket",
          [](Engine& e, const at::Tensor& reduce, const std::optional<at::Tensor>& gather, const py::object& wire_dtype,
             double prescale, double postscale, bool needs_update, const std::string& name, std::vector<size_t> ends, size_t row,
             const std::optional<at::Tensor>& sent_residual, const std::optional<at::Tensor>& sum_residual,
             const std::optional<at::Tensor>& changed) {
            BucketSpec spec = make_spec(reduce, gather, wire_dtype, prescale, postscale, needs_update, name, std::move(ends), row);
            check_parts(spec, e->transport().size());
            Residuals{sent_residual, sum_residual}.hand_over(spec, e->transport().rank(), e->transport().size());
            if (changed) take_changed(spec, *changed);
            const py::gil_scoped_release no_gil;
            return e->add_bucket(spec);
          },
          py::arg("reduce"), py::arg("gather") = py::none(), py::arg("wire_dtype") = py::none(), py::arg("prescale") = 1.0,
          py::arg("postscale") = 1.0, py::arg("needs_update") = false, py::arg("name") = "",
          py::arg("ends") = std::vector<size_t>(), py::arg("row") = 0, py::arg("sent_residual") = py::none(),
          py::arg("sum_residual") = py::none(), py::arg("changed") = py::none())
      .def(
          "clear_buckets", [](Engine& e) { e->clear_buckets(); }, NoGil())
      .def(
          "install",
          [](Engine& e, const std::vector<std::pair<std::string, int>>& plan) {
            const auto ops = as_plan(plan);
            const py::gil_scoped_release no_gil;
            e->install(ops);
          },
          py::arg("plan"))
      .def("abort", &Engine::abort, py::arg("reason"), NoGil())
      .def("close", &Engine::close, py::arg("reason") = "the engine is closed", NoGil())
      .def(
          "error",
          [](Engine& e) {
            const auto error = e->error();
            return error ? std::optional<std::string>(error->what()) : std::nullopt;
          },
          NoGil())
      .def(
          "events",
          [](Engine& e, bool clear) {
            std::vector<Event> events;
            {
              const py::gil_scoped_release no_gil;
              events = e->events(clear);
            }
            return py::array_t<Event>(static_cast<py::ssize_t>(events.size()), events.data());
          },
          py::arg("clear") = true)
      .def_property_readonly("step", [](Engine& e) { return e->begun(); });
  bind_marks_and_waits(engine);
}

void raise_engine_error(const EngineError& error) {
  const py::object type = py::module_::import("comm_core.errors").attr("EngineError");
  const py::object instance = type(error.what(), py::arg("kind") = kind_name(error.kind), py::arg("rank") = error.rank,
                                   py::arg("op") = error.op, py::arg("bucket") = error.bucket, py::arg("name") = error.name,
                                   py::arg("step") = error.step, py::arg("peer") = error.peer);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

}  // namespace

void bind_engine(py::module_& m) {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const EngineError& error) {
      raise_engine_error(error);
    }
  });
  bind_channels(m);
  bind_transports(m);
  bind_the_engine(m);
  m.def("changed_rows", &changed_rows, py::arg("part"), py::arg("whole"), py::arg("changed"));
}

}  // namespace commsched
