// Memory that user code may keep: gradients that are parts of a flat buffer, and who refers to them. At the end, the
// mark of parameters whose values have not come.
//
// A tensor consists of two objects with a reference count each:
//
//     p.grad, g, ... --> TensorImpl --+
//                                     +--> StorageImpl --DataPtr--> memory
//     g.view(-1)     --> TensorImpl --+
//
// A slice of the flat buffer has the buffer's StorageImpl, which every slice of every gradient shares: its count says
// nothing about one gradient, and torch.save of a slice writes the whole buffer. alias_of() therefore makes a
// StorageImpl over the slice's bytes alone, and its DataPtr holds a reference to the buffer's StorageImpl:
//
//     alias's TensorImpl --> StorageImpl of the alias --DataPtr--> bytes of the slice
//                                                        |
//                                                        +-- holds --> StorageImpl of the buffer
//
// Before the buffer is written again, the core asks who refers to the alias. If somebody does, move_out() exchanges the
// DataPtr of the alias's StorageImpl for fresh memory with the same bytes. Every tensor on that StorageImpl (views,
// detached tensors, the object that the user kept) reads the address from there, so all of them keep their values and
// none sees what the buffer holds next.
//
// No function here counts its own call: they borrow the tensors inside of Python's objects (THPVariable_Unpack), where
// pybind's conversion to at::Tensor would add a reference.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bindings.h"

namespace commsched {
namespace {

const at::Tensor& borrowed(const py::handle& object) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error("a torch.Tensor is needed, not " + py::repr(py::type::handle_of(object)).cast<std::string>());
  }
  return THPVariable_Unpack(object.ptr());
}

// The storage of a tensor, nullptr for one without memory of its own, such as a sparse tensor.
c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// ------------------------------------------------------------------------------------------------ counting holders
//
// A TensorImpl or StorageImpl and its Python object keep each other alive, in one of two ways:
//
//     torch     Python object is referenced          only C++ refers to it any more
//     < 2.10    it holds a C++ reference             C++ holds it (owns_pyobj), and it holds no C++ reference
//     >= 2.10   it holds a C++ reference; if there are more C++ references, C++ holds one Python reference, too
//
// So p.grad read once and dropped leaves a Python object behind that nobody refers to, and whether it counts in
// use_count() depends on the version. The two functions below count the references of others only. They find out by
// the members of PyObjectSlot which of the two ways the compiled version has.

template <typename Slot, typename = void>
struct Flips : std::false_type {};
template <typename Slot>
struct Flips<Slot, std::void_t<decltype(std::declval<Slot&>().owns_pyobj())>> : std::true_type {};

template <typename Slot, typename = void>
struct Loads : std::false_type {};
template <typename Slot>
struct Loads<Slot, std::void_t<decltype(std::declval<const Slot&>().load_pyobj())>> : std::true_type {};

struct PythonSide {
  bool counted = false;    // the Python object holds one of the C++ references
  Py_ssize_t holders = 0;  // references to the Python object, without C++'s
};

template <typename Slot>
PythonSide python_side(Slot& slot, size_t use_count) {
  PyObject* object;
  if constexpr (Loads<Slot>::value) {
    object = slot.load_pyobj();
  } else {
    object = slot._unchecked_untagged_pyobj();
  }
  if (object == nullptr) return {};
  if constexpr (Flips<Slot>::value) {
    const bool owned = slot.owns_pyobj();
    return {!owned, Py_REFCNT(object) - (owned ? 1 : 0)};
  } else {
    return {true, Py_REFCNT(object) - (use_count > 1 ? 1 : 0)};
  }
}

// Number of C++ and Python references to the object, without those that it and its Python object hold of each other.
template <typename Impl>
int64_t holders(Impl* impl, size_t use_count) {
  const PythonSide python = python_side(*impl->pyobj_slot(), use_count);
  return static_cast<int64_t>(use_count) - (python.counted ? 1 : 0) + static_cast<int64_t>(python.holders);
}

int64_t holders_of_storage(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = storage_of(tensor);
  return storage == nullptr ? 0 : holders(storage, tensor.storage().use_count());
}

int64_t storage_holders(const py::handle& tensor) { return holders_of_storage(borrowed(tensor)); }

std::vector<int64_t> storages_held(const py::list& tensors, const std::vector<int64_t>& expected) {
  if (tensors.size() != expected.size()) {
    throw py::value_error("storages_held() needs one expectation for each tensor, but got " + std::to_string(expected.size()) +
                          " for " + std::to_string(tensors.size()) + " tensors");
  }
  std::vector<int64_t> held;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (holders_of_storage(borrowed(tensors[i])) > expected[i]) held.push_back(static_cast<int64_t>(i));
  }
  return held;
}

// The parameter itself accounts for one reference to its gradient's TensorImpl, and that for one to its StorageImpl.
bool gradient_held(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return false;
  return holders(gradient.unsafeGetTensorImpl(), gradient.use_count()) > 1 || holders_of_storage(gradient) > 1;
}

std::vector<int64_t> gradients_held(const py::list& parameters) {
  std::vector<int64_t> held;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (gradient_held(borrowed(parameters[i]))) held.push_back(static_cast<int64_t>(i));
  }
  return held;
}

// A parameter's own references are that of its Python object and, while a graph or a hook keeps its AccumulateGrad node
// alive, that node's. All others stem from code that can read the parameter without Python's attribute access: a module
// of TorchScript, a view (its base is the parameter), a graph that saved it for backward.
int64_t uses_of(const at::Tensor& parameter) {
  const auto count = static_cast<int64_t>(parameter.use_count());
  if (count <= 1) return 0;
  const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  const auto* const accumulator = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  const bool held = accumulator != nullptr && accumulator->variable.is_same(parameter);
  return count - 1 - (held ? 1 : 0);
}

int64_t foreign_uses(const py::handle& parameter) { return uses_of(borrowed(parameter)); }

std::vector<int64_t> foreign_users(const py::list& parameters) {
  std::vector<int64_t> used;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (uses_of(borrowed(parameters[i])) > 0) used.push_back(static_cast<int64_t>(i));
  }
  return used;
}

// ------------------------------------------------------------------------------------------------------- addresses

bool shares_storage(const py::handle& one, const py::handle& other) {
  c10::StorageImpl* const storage = storage_of(borrowed(one));
  return storage != nullptr && storage == storage_of(borrowed(other));
}

uintptr_t address_of(const at::Tensor& tensor) {
  return storage_of(tensor) == nullptr ? 0 : reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
}

// Packing asks this of every gradient of every step, so that a Python loop would cost more than the launch.
std::optional<std::vector<uintptr_t>> source_addresses(const py::list& tensors, const std::vector<int64_t>& needed,
                                                       const at::Tensor& like) {
  if (tensors.size() != needed.size()) return std::nullopt;
  std::vector<uintptr_t> addresses;
  addresses.reserve(needed.size());
  for (size_t i = 0; i < needed.size(); ++i) {
    if (tensors[i].is_none()) {
      addresses.push_back(0);
      continue;
    }
    const at::Tensor& tensor = borrowed(tensors[i]);
    const bool fits = tensor.scalar_type() == like.scalar_type() && tensor.device() == like.device();
    if (!fits || tensor.numel() < needed[i]) return std::nullopt;
    addresses.push_back(address_of(tensor));
  }
  return addresses;
}

// Where tensors begin and end, in order: neighbours that meet share memory.
std::vector<int64_t> overlapping(const py::list& tensors) {
  struct Span {
    uintptr_t begin, end;
    int64_t place;
  };
  std::vector<Span> spans;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = borrowed(tensors[i]);
    const uintptr_t begin = address_of(tensor);
    if (begin == 0 || tensor.numel() == 0) continue;
    int64_t last = 0;
    for (int64_t axis = 0; axis < tensor.dim(); ++axis) last += (tensor.size(axis) - 1) * tensor.stride(axis);
    spans.push_back({begin, begin + static_cast<uintptr_t>(last + 1) * tensor.itemsize(), static_cast<int64_t>(i)});
  }
  std::sort(spans.begin(), spans.end(), [](const Span& one, const Span& other) { return one.begin < other.begin; });
  std::set<int64_t> shared;
  const Span* farthest = nullptr;
  for (const Span& span : spans) {
    if (farthest != nullptr && span.begin < farthest->end) shared.insert({farthest->place, span.place});
    if (farthest == nullptr || span.end > farthest->end) farthest = &span;
  }
  return {shared.begin(), shared.end()};
}

// --------------------------------------------------------------------------------------------- gradients into slots

constexpr size_t kSmall = 1 << 16;  // bytes up to which starting torch's copy takes longer than copying

// Whether both read memory in the same way. p.grad = p.grad.t() and p.grad = p.grad.conj() begin at the slot's address
// and are other values.
bool reads_alike(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() && one.strides() == other.strides() &&
         one.is_conj() == other.is_conj() && one.is_neg() == other.is_neg();
}

// Most gradients are small, and this is called for each in every step.
void write_into(const py::handle& slot, const py::handle& gradient) {
  const at::Tensor& to = borrowed(slot);
  const at::Tensor& from = borrowed(gradient);
  const bool alike = reads_alike(to, from), in_place = address_of(to) == address_of(from);
  if (alike && in_place) return;
  if (alike && to.is_cpu() && from.is_cpu() && to.is_contiguous() && to.nbytes() <= kSmall) {
    std::memmove(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
    to.unsafeGetTensorImpl()->bump_version();
    return;
  }
  const py::gil_scoped_release released;
  to.copy_(in_place ? from.clone() : from);
}

// ---------------------------------------------------------------------------------------------------------- aliases

// Number of elements from the first to the last of a tensor of this shape.
int64_t extent_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  if (sizes.size() != strides.size()) {
    throw py::value_error("alias_of() needs one stride for each size, but got " + std::to_string(strides.size()) + " strides for " +
                          std::to_string(sizes.size()) + " sizes");
  }
  int64_t extent = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || strides[i] < 0) {
      throw py::value_error("alias_of() needs sizes and strides of at least 0, but dimension " + std::to_string(i) + " has size " +
                            std::to_string(sizes[i]) + " and stride " + std::to_string(strides[i]));
    }
    if (sizes[i] == 0) return 0;
    extent += (sizes[i] - 1) * strides[i];
  }
  return extent;
}

void release_storage(void* storage) {
  // Takes over the reference that alias_of() has released, and gives it back.
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(storage));
}

at::Tensor alias_of(const py::handle& buffer, int64_t offset, const std::vector<int64_t>& sizes,
                    const std::vector<int64_t>& strides, const py::object& dtype) {
  const at::Tensor& flat = borrowed(buffer);
  if (storage_of(flat) == nullptr || flat.dim() != 1 || !flat.is_contiguous()) {
    throw py::value_error("alias_of() needs a one-dimensional contiguous tensor, but the tensor has " + std::to_string(flat.dim()) +
                          " dimensions or is not contiguous");
  }
  const auto type = dtype.is_none() ? flat.scalar_type() : dtype.cast<at::ScalarType>();
  const auto itemsize = static_cast<int64_t>(c10::elementSize(type));
  const auto unit = static_cast<int64_t>(flat.itemsize());
  const int64_t begin = offset * unit, bytes = extent_of(sizes, strides) * itemsize;
  if (offset < 0 || begin + bytes > flat.numel() * unit) {
    throw py::value_error("alias_of() needs elements within the buffer of " + std::to_string(flat.numel() * unit) +
                          " bytes, but bytes " + std::to_string(begin) + " to " + std::to_string(begin + bytes) +
                          " were asked for");
  }
  char* const data = flat.numel() == 0 ? nullptr : static_cast<char*>(flat.mutable_data_ptr()) + begin;
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(itemsize) != 0) {
    throw py::value_error("alias_of() needs an offset where " + std::string(c10::toString(type)) + " may lie, a multiple of " +
                          std::to_string(itemsize) + " bytes, but byte " + std::to_string(begin) + " of the buffer was asked for");
  }
  c10::StorageImpl* const held = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage_of(flat)).release();
  at::DataPtr memory(data, held, &release_storage, flat.device());
  // With the buffer's allocator, so that gradient.resize_(), untyped_storage().resize_() and share_memory_() give the
  // alias other memory, as they do for a tensor that torch has made.
  c10::Allocator* const allocator = held->allocator();
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(bytes),
                                                             std::move(memory), allocator, allocator != nullptr));
  // Ordinary tensors, also if the core makes them within the user's inference_mode.
  const c10::InferenceMode ordinary(false);
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), flat.options().dtype(type).computeDispatchKey(),
                                                              c10::scalarTypeToTypeMeta(type));
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return alias;
}

void move_out(const py::handle& tensor) {
  const at::Tensor& moved = borrowed(tensor);
  c10::StorageImpl* const storage = storage_of(moved);
  if (storage == nullptr) throw py::value_error("move_out() needs a tensor with a storage, but a sparse one has none");
  const c10::InferenceMode ordinary(false);
  const auto bytes = static_cast<int64_t>(storage->nbytes());
  const auto options = at::TensorOptions().dtype(at::kByte).device(storage->device());
  const at::Tensor fresh = at::empty({bytes}, options);
  if (bytes > 0) {
    at::Tensor present = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(moved.storage()), options.computeDispatchKey(),
                                                                  c10::scalarTypeToTypeMeta(at::kByte));
    present.unsafeGetTensorImpl()->set_sizes_contiguous({bytes});
    fresh.copy_(present);  // on a GPU in the current stream
  }
  c10::StorageImpl* const donor = storage_of(fresh);
  c10::Allocator* const allocator = donor->allocator();
  // The old DataPtr that set_data_ptr() returns ends here, and with it the alias's reference to the buffer.
  storage->set_data_ptr(donor->set_data_ptr(at::DataPtr(nullptr, storage->device())));
  storage->set_allocator(allocator);
  storage->set_resizable(allocator != nullptr);
}

// ------------------------------------------------------------------------------------------------ late parameters
//
// torch's dispatcher takes the kernel of an operator by the keys of its tensors, the highest key first:
//
//     DeferredInit > ... > Autocast > Autograd > ... > CPU, CUDA, ...
//
// Nothing in torch uses DeferredInit, which is there for extensions. A late parameter has it: so every operator that
// takes the parameter, called from Python, from TorchScript or from C++, comes to this kernel first, before autograd
// saves anything. It lets pending.py complete the parameter, whose key goes, and calls the operator again. The kernel
// is not one of Python: torch has those only for operators that are named when modes (FlopCounterMode) are on.

constexpr c10::DispatchKey LATE = c10::DispatchKey::DeferredInit;

struct Keys : c10::TensorImpl {
  using c10::TensorImpl::key_set_;  // torch lets its own classes set it
};

bool set_late(const py::handle& tensor, bool late) {
  c10::DispatchKeySet& keys = borrowed(tensor).unsafeGetTensorImpl()->*(&Keys::key_set_);
  const bool before = keys.has(LATE);
  keys = late ? keys.add(LATE) : keys.remove(LATE);
  return before;
}

// In this thread.
bool ignore_late(bool ignore) {
  const bool before = c10::impl::tls_is_dispatch_key_excluded(LATE);
  c10::impl::tls_set_dispatch_key_excluded(LATE, ignore);
  return before;
}

std::vector<at::Tensor> late_among(const c10::IValue* begin, const c10::IValue* end) {
  std::vector<at::Tensor> late;
  const auto look = [&late](const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().key_set().has(LATE)) late.push_back(value.toTensor());
  };
  for (; begin != end; ++begin) {
    look(*begin);
    if (begin->isList()) {
      for (const c10::IValue& value : begin->toListRef()) look(value);
    }
  }
  return late;
}

// Never destroyed: operators may be called until the process ends.
py::object* complete_late = nullptr;

void operate(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto late = [&] {
    const auto end = stack->data() + stack->size();
    return late_among(end - static_cast<ptrdiff_t>(op.schema().arguments().size()), end);
  };
  const std::vector<at::Tensor> found = late();
  if (!found.empty()) {
    const py::gil_scoped_acquire gil;
    (*complete_late)(found);
  }
  std::optional<c10::impl::ExcludeDispatchKeyGuard> ignored;
  if (found.empty() || !late().empty()) ignored.emplace(LATE);  // some stay marked: no rank has changed them
  op.callBoxed(stack);
}

void complete_late_by(py::object complete) {
  static torch::Library library(torch::Library::IMPL, "_", LATE, __FILE__, __LINE__);
  if (complete_late == nullptr) library.fallback(torch::CppFunction::makeFromBoxedFunction<&operate>());
  complete_late = new py::object(std::move(complete));
}

}  // namespace

void bind_memory(py::module_& m) {
  m.def("alias_of", &alias_of, py::arg("flat"), py::arg("offset"), py::arg("sizes"), py::arg("strides"),
        py::arg("dtype") = py::none());
  m.def("move_out", &move_out, py::arg("tensor"));
  m.def("storage_holders", &storage_holders, py::arg("tensor"));
  m.def("storages_held", &storages_held, py::arg("tensors"), py::arg("expected"));
  m.def("gradients_held", &gradients_held, py::arg("parameters"));
  m.def("shares_storage", &shares_storage, py::arg("one"), py::arg("other"));
  m.def("overlapping", &overlapping, py::arg("tensors"));
  m.def("write_into", &write_into, py::arg("slot"), py::arg("gradient"));
  m.def("source_addresses", &source_addresses, py::arg("tensors"), py::arg("needed"), py::arg("like"));
  m.def("foreign_uses", &foreign_uses, py::arg("parameter"));
  m.def("foreign_users", &foreign_users, py::arg("parameters"));
  m.def("complete_late_by", &complete_late_by, py::arg("complete"));
  m.def("set_late", &set_late, py::arg("tensor"), py::arg("late"));
  m.def("ignore_late", &ignore_late, py::arg("ignore"));
}

}  // namespace commsched
