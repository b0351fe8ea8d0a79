#include "entry/torch_api.hpp"

#include <cxxabi.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <utility>

namespace stagehand::entry {

namespace {

nb::object owned(PyObject* object) {
  if (object == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(object);
}

PyObject* leak(nb::object object) { return object.release().ptr(); }

// Whole numbers of less than a byte, which come back as int8 and uint8. By name: a torch may not
// have all of them. Other kinds that DLPack does not know it refuses by itself.
nb::object not_in_dlpack(const nb::module_& torch) {
  const nb::object found = nb::steal(PySet_New(nullptr));
  const auto add = [&](const std::string& name) {
    if (nb::hasattr(torch, name.c_str()) &&
        PySet_Add(found.ptr(), torch.attr(name.c_str()).ptr()) != 0) {
      throw nb::python_error();
    }
  };
  for (const char* bits : {"1", "2", "3", "4", "5", "6", "7"}) {
    add(std::string("int") + bits);
    add(std::string("uint") + bits);
  }
  return found;
}

TorchApi* load() {
  nb::module_ torch = nb::module_::import_("torch");
  auto* api = new TorchApi;
  nb::object tensor = torch.attr("Tensor");
  nb::object capsule = tensor.attr("__dlpack_c_exchange_api__");
  api->exchange = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (api->exchange == nullptr) {
    throw nb::python_error();
  }
  api->parameter_type = leak(torch.attr("nn").attr("Parameter"));
  // A shape that no default dtype or device setting of the user changes: no storage either way.
  api->empty = leak(torch.attr("empty")(0, nb::arg("device") = "cpu"));
  api->not_in_dlpack = leak(not_in_dlpack(torch));
  api->out_of_memory = leak(torch.attr("OutOfMemoryError"));
  api->storage_address = leak(torch.attr("_C").attr("_storage_address"));
  api->use_count = leak(torch.attr("_C").attr("_storage_Use_Count"));
  api->tensor_type = leak(std::move(tensor));
  const auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
  api->dtype = name("dtype");
  api->is_leaf = name("is_leaf");
  api->requires_grad = name("requires_grad");
  api->base = name("_base");
  api->version = name("_version");
  api->data = name("data");
  api->detach = name("detach");
  api->is_conj = name("is_conj");
  api->is_neg = name("is_neg");
  return api;
}

// One tensor through the whole table: what a torch unknown to us may do otherwise shows here.
std::string try_out(const core::TensorSide& side, const TorchApi& api) {
  std::string wrong;
  const auto expect = [&](bool right, const char* what) {
    if (!right && wrong.empty()) {
      wrong = what;
    }
  };
  const nb::module_ torch = nb::module_::import_("torch");
  const nb::object whole =
      torch.attr("arange")(24, nb::arg("device") = "cpu", nb::arg("dtype") = torch.attr("int32"));
  const nb::object tensor = whole.attr("view")(4, 6).attr("t")().attr("narrow")(0, 2, 3);
  core::SeenTensor seen;
  side.look(tensor.ptr(), api.parameter_type, &seen);
  expect(seen.kind == core::SeenTensor::plain && seen.leaf && seen.ndim == 2 &&
             seen.shape[0] == 3 && seen.shape[1] == 4 && seen.strides[0] == 1 &&
             seen.strides[1] == 6 && seen.code == 0 && seen.bits == 32 && seen.lanes == 1 &&
             seen.device_type == dlpack::kCpu &&
             reinterpret_cast<std::uintptr_t>(seen.data) ==
                 nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()),
         "a tensor is not as torch says it is");
  const nb::object weight = nb::borrow(api.parameter_type)(
      torch.attr("zeros")(2, 2, nb::arg("device") = "cpu"), nb::arg("requires_grad") = false);
  core::SeenTensor frozen;
  side.look(weight.attr("t")().ptr(), api.parameter_type, &frozen);
  expect(frozen.kind == core::SeenTensor::view_of_leaf,
         "a view of a weight does not look like one");
  std::array<std::int32_t, 24> numbers{};
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<std::int32_t>(i);
  }
  int dropped = 0;
  void* storage =
      side.storage(numbers.data() + 2, sizeof(numbers) - 2 * sizeof(std::int32_t), dlpack::kCpu, 0,
                   &dropped, [](void* count) { ++*static_cast<int*>(count); });
  if (storage == nullptr) {
    return "there was no memory";
  }
  expect(side.use_count(storage) == 1, "a new storage has other references than ours");
  {
    const core::TensorPlace place{0, seen.shape, seen.strides, seen.ndim, seen.dtype};
    const nb::object view = owned(static_cast<PyObject*>(side.view(storage, &place)));
    const nb::object copy = owned(static_cast<PyObject*>(side.detached(tensor.ptr())));
    expect(side.use_count(storage) == 2, "a view does not hold its storage");
    expect(nb::cast<bool>(torch.attr("equal")(view, tensor)) &&
               nb::cast<bool>(torch.attr("equal")(copy, tensor)),
           "a tensor over a storage reads other values");
    core::FollowedVersion counter;
    side.follow(tensor.ptr(), &counter);
    side.share(view.ptr(), &counter);
    expect(side.current(&counter) == seen.version, "a version is not as torch says it is");
    tensor.attr("zero_")();
    const std::uint32_t newer = side.current(&counter);
    expect(newer == seen.version + 1, "a version does not follow its tensor");
    expect(api.version_of(view.ptr()) == static_cast<long>(newer) &&
               api.version_of(copy.ptr()) == static_cast<long>(newer),
           "tensors do not share a version");
    side.unfollow(&counter);
    expect(counter.counter == nullptr, "a version is followed for good");
  }
  expect(side.use_count(storage) == 1 && dropped == 0, "a view outlived its tensor");
  side.drop(storage);
  expect(dropped == 1, "a storage outlived its last reference");
  return wrong;
}

}  // namespace

std::string TorchApi::use_tensors(const core::TensorSide* table) {
  if (table->version != core::TensorSide::kVersion || table->size != sizeof(core::TensorSide)) {
    return "it was built for another version of stagehand_alloc";
  }
  std::string wrong = try_out(*table, get());
  if (wrong.empty()) {
    tensors_ = table;
  }
  return wrong;
}

const TorchApi& TorchApi::get() {
  // Guarded by the GIL and nothing else: loading runs Python, which may give the GIL up.
  static const TorchApi* leaked = nullptr;
  if (leaked == nullptr) {
    const TorchApi* made = load();
    leaked = leaked == nullptr ? made : leaked;
  }
  return *leaked;
}

driver::Stream current_stream(const dlpack::Device& device) {
  driver::Stream stream = nullptr;
  if (device.type == dlpack::kCuda &&
      TorchApi::get().exchange->current_work_stream(dlpack::kCuda, device.id, &stream) != 0) {
    throw nb::python_error();
  }
  return stream;
}

bool TorchApi::is_tensor(PyObject* object) const {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == tensor_type;
}

bool TorchApi::is_parameter(PyObject* object) const {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(parameter_type)) != 0;
}

bool TorchApi::flag(PyObject* object, PyObject* name) const {
  const nb::object value = owned(PyObject_GetAttr(object, name));
  return value.ptr() == Py_True;
}

bool TorchApi::flag_call(PyObject* object, PyObject* name) const {
  const nb::object value =
      owned(PyObject_CallMethodObjArgs(object, name, static_cast<PyObject*>(nullptr)));
  return value.ptr() == Py_True;
}

core::SeenTensor TorchApi::look(PyObject* tensor) const {
  if (tensors_ == nullptr) {
    return look_through_python(tensor);
  }
  core::SeenTensor seen;
  tensors_->look(tensor, parameter_type, &seen);
  return seen;
}

core::SeenTensor TorchApi::look_through_python(PyObject* tensor) const {
  using Seen = core::SeenTensor;
  Seen seen;
  seen.leaf = flag(tensor, is_leaf);
  const auto as = [&](Seen::Kind kind) {
    seen.kind = kind;
    return seen;
  };
  if (seen.leaf && flag(tensor, requires_grad)) {
    return as(Seen::saved_leaf);
  }
  const nb::object viewed = nb::steal(PyObject_GetAttr(tensor, base));
  if (viewed.is_valid() && !viewed.is_none() &&
      (is_parameter(viewed.ptr()) ||
       (flag(viewed.ptr(), is_leaf) && flag(viewed.ptr(), requires_grad)))) {
    return as(Seen::view_of_leaf);
  }
  if (flag_call(tensor, is_neg)) {
    return as(Seen::neg_bit);
  }
  if (!same_in_dlpack(tensor)) {
    return as(Seen::layout);
  }
  dlpack::Tensor described{};
  if (exchange->tensor_from_object(tensor, &described) != 0) {
    PyErr_Clear();  // sparse, quantized: DLPack says it cannot carry it
    return as(Seen::layout);
  }
  if (described.dtype.code == dlpack::kComplex && flag_call(tensor, is_conj)) {
    return as(Seen::layout);  // the C interface drops the bit without a word
  }
  bool empty_shape = described.data == nullptr;
  for (std::int32_t i = 0; i < described.ndim; ++i) {
    empty_shape |= described.shape[i] == 0;
  }
  if (empty_shape) {
    return as(Seen::empty);
  }
  seen.device_type = described.device.type;
  seen.device = described.device.id;
  seen.code = described.dtype.code;
  seen.bits = described.dtype.bits;
  seen.lanes = described.dtype.lanes;
  seen.ndim = described.ndim;
  seen.shape = described.shape;
  seen.strides = described.strides;
  seen.data = static_cast<std::byte*>(described.data) + described.byte_offset;
  seen.version = static_cast<std::uint32_t>(version_of(tensor));
  return as(Seen::plain);
}

nb::object TorchApi::detached_plain(PyObject* tensor) const {
  return tensors_ != nullptr ? owned(static_cast<PyObject*>(tensors_->detached(tensor)))
                             : detached(tensor);
}

bool TorchApi::same_in_dlpack(PyObject* tensor) const {
  const nb::object kind = owned(PyObject_GetAttr(tensor, dtype));
  const int found = PySet_Contains(not_in_dlpack, kind.ptr());
  if (found < 0) {
    throw nb::python_error();
  }
  return found == 0;
}

long TorchApi::version_of(PyObject* tensor) const {
  const nb::object value = owned(PyObject_GetAttr(tensor, version));
  const long number = PyLong_AsLong(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  return number;
}

nb::object TorchApi::detached(PyObject* tensor) const {
  return owned(PyObject_CallMethodObjArgs(tensor, detach, static_cast<PyObject*>(nullptr)));
}

nb::object TorchApi::version_probe(PyObject* tensor) const {
  nb::object probe = detached(tensor);
  if (PyObject_SetAttr(probe.ptr(), data, empty) != 0) {
    throw nb::python_error();
  }
  return probe;
}

nb::object TorchApi::with_version_of(PyObject* probe, const nb::object& memory) const {
  nb::object tensor = detached(probe);
  if (PyObject_SetAttr(tensor.ptr(), data, memory.ptr()) != 0) {
    throw nb::python_error();
  }
  return tensor;
}

nb::object TorchApi::storage_of(PyObject* tensor) const {
  return owned(
      PyObject_CallFunctionObjArgs(storage_address, tensor, static_cast<PyObject*>(nullptr)));
}

long TorchApi::storage_use_count(PyObject* address) const {
  const nb::object count =
      nb::steal(PyObject_CallFunctionObjArgs(use_count, address, static_cast<PyObject*>(nullptr)));
  const long number = count.is_valid() ? PyLong_AsLong(count.ptr()) : -1;
  if (number == -1) {
    PyErr_Clear();
  }
  return number;
}

// Followed ----------------------------------------------------------------------------------------

Followed::Followed(PyObject* tensor) {
  if (const core::TensorSide* side = TorchApi::tensors(); side != nullptr) {
    side->follow(tensor, &counter_);
  }
  if (!by_library()) {  // nor where it has no counter: then torch says so when asked
    probe_ = TorchApi::get().version_probe(tensor);
  }
}

Followed::Followed(Followed&& other) noexcept
    : counter_(std::exchange(other.counter_, {})), probe_(std::move(other.probe_)) {}

Followed& Followed::operator=(Followed&& other) noexcept {
  std::swap(counter_, other.counter_);
  std::swap(probe_, other.probe_);
  return *this;
}

Followed::~Followed() {
  if (by_library()) {
    TorchApi::tensors()->unfollow(&counter_);
  }
}

long Followed::current() const {
  return by_library() ? static_cast<long>(TorchApi::tensors()->current(&counter_))
                      : TorchApi::get().version_of(probe_.ptr());
}

nb::object Followed::shared_by(nb::object memory) const {
  if (!by_library()) {
    return TorchApi::get().with_version_of(probe_.ptr(), memory);
  }
  TorchApi::tensors()->share(memory.ptr(), &counter_);
  return memory;
}

std::string op_name(const char* type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> plain(
      abi::__cxa_demangle(type, nullptr, nullptr, &status), &std::free);
  const std::string name = status == 0 ? plain.get() : type;
  const std::size_t colon = name.rfind(':');
  return colon == std::string::npos ? name : name.substr(colon + 1);
}

}  // namespace stagehand::entry
