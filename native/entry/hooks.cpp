#include "entry/hooks.hpp"

#include <algorithm>
#include <new>

#include "entry/python_side.hpp"
#include "entry/registry.hpp"
#include "entry/torch_error.hpp"
#include "entry/torch_side.hpp"
#include "entry/twins.hpp"

namespace stagehand::entry {

namespace {

using core::Address;
using core::Bytes;

constexpr std::array<const char*, static_cast<std::size_t>(Reason::count)> kReasonNames = {
    "leaf",    "view_of_leaf",  "subclass",        "layout",
    "neg_bit", "empty",         "foreign_storage", "older_than_pool",
    "kept",    "graph_capture", "private_pool",    "small"};

Reason reason_of(core::Refusal refusal) {
  switch (refusal) {
    case core::Refusal::older_than_pool:
      return Reason::older_than_pool;
    case core::Refusal::kept:
      return Reason::kept;
    case core::Refusal::graph_capture:
      return Reason::graph_capture;
    case core::Refusal::private_pool:
      return Reason::private_pool;
    case core::Refusal::small:
      return Reason::small;
    default:
      return Reason::foreign_storage;
  }
}

Reason reason_of(core::SeenTensor::Kind kind) {
  switch (kind) {
    case core::SeenTensor::saved_leaf:
      return Reason::leaf;
    case core::SeenTensor::view_of_leaf:
      return Reason::view_of_leaf;
    case core::SeenTensor::neg_bit:
      return Reason::neg_bit;
    case core::SeenTensor::empty:
      return Reason::empty;
    default:
      return Reason::layout;
  }
}

// Python's own collection of garbage may end handles and storages, which must not happen while a
// call of the core runs Python under its lock: only what stands in for the trigger library does.
class PausedCollection {
 public:
  explicit PausedCollection(bool wanted) : wanted_(wanted) {
    if (wanted_ && depth_++ == 0) {
      was_on_ = PyGC_Disable() == 1;
    }
  }
  ~PausedCollection() {
    if (wanted_ && --depth_ == 0 && was_on_) {
      PyGC_Enable();
    }
  }
  PausedCollection(const PausedCollection&) = delete;
  PausedCollection& operator=(const PausedCollection&) = delete;

 private:
  inline static int depth_ = 0;  // both guarded by the GIL: calls of several threads may overlap
  inline static bool was_on_ = false;
  const bool wanted_;
};

// A reference to a storage of torch's, dropped unless the engine takes it.
class HeldReference {
 public:
  HeldReference(const core::TorchSide& side, void* storage) : side_(side), storage_(storage) {}
  ~HeldReference() {
    if (storage_ != nullptr) {
      side_.drop(storage_);
    }
  }
  void release() { storage_ = nullptr; }
  HeldReference(const HeldReference&) = delete;
  HeldReference& operator=(const HeldReference&) = delete;

 private:
  const core::TorchSide& side_;
  void* storage_;
};

// A tensor over a storage of torch's, exactly as the saved one was. Torch holds the storage from
// then on, and the engine sees that by itself.
nb::object make_view(const Handle& handle, const core::Unpacked& unpacked,
                     driver::Stream consumer) {
  const Geometry& g = handle.geometry;
  const core::TensorPlace place{static_cast<std::int64_t>(unpacked.offset / g.item_bytes()),
                                g.shape(), g.strides(), g.ndim, handle.dtype};
  const core::TorchSide& side = *Registry::get().torch_side();
  const nb::object tensor = nb::steal(static_cast<PyObject*>(side.wrap(unpacked.storage, &place)));
  try {
    if (tensor.is_valid() && unpacked.elsewhere) {
      side.used_on(unpacked.storage, g.device.id, consumer);
    }
  } catch (...) {
    handle.runtime->drop_alias(unpacked.block);
    throw;
  }
  handle.runtime->drop_alias(unpacked.block);
  if (!tensor.is_valid()) {
    throw nb::python_error();
  }
  return tensor;
}

// An alias: what torch's deleter gives back.
struct Alias {
  core::Runtime* runtime;
  core::Block* block;
};

void drop(void* context) {
  const std::unique_ptr<Alias> alias(static_cast<Alias*>(context));
  if (!Registry::get().forked()) {
    alias->runtime->drop_alias(alias->block);
  }
}

Alias* alias_of(const Handle& handle, const core::Unpacked& unpacked) {
  auto* alias = new (std::nothrow) Alias{handle.runtime, unpacked.block};
  if (alias == nullptr) {
    handle.runtime->drop_alias(unpacked.block);
    throw std::bad_alloc();
  }
  return alias;
}

// A tensor over the block, exactly as the saved one was, and one more reference to its storage.
std::pair<nb::object, SharedStorage> make_alias(const Handle& handle,
                                                const core::Unpacked& unpacked) {
  const Geometry& g = handle.geometry;
  const core::TensorSide& side = *TorchApi::tensors();
  void* storage = side.storage(reinterpret_cast<void*>(unpacked.address), g.extent(), g.device.type,
                               g.device.id, alias_of(handle, unpacked), &drop);
  if (storage == nullptr) {
    throw std::bad_alloc();
  }
  SharedStorage shared(storage);
  const core::TensorPlace place{0, g.shape(), g.strides(), g.ndim, handle.dtype};
  nb::object tensor = nb::steal(static_cast<PyObject*>(side.view(storage, &place)));
  if (!tensor.is_valid()) {
    throw nb::python_error();
  }
  return {std::move(tensor), std::move(shared)};
}

// The same by DLPack.
struct ManagedAlias {
  dlpack::ManagedTensor managed;
  std::array<std::int64_t, 2 * Geometry::kInline> dims;
  std::unique_ptr<std::int64_t[]> far_dims;
  void* alias;
};

void drop_managed(dlpack::ManagedTensor* managed) {
  const std::unique_ptr<ManagedAlias> alias(static_cast<ManagedAlias*>(managed->manager_ctx));
  drop(alias->alias);
}

nb::object make_alias_by_dlpack(const Handle& handle, const core::Unpacked& unpacked) {
  const Geometry& g = handle.geometry;
  void* const given_back = alias_of(handle, unpacked);
  // Until torch owns it, this scope gives the block back.
  std::unique_ptr<ManagedAlias, void (*)(ManagedAlias*)> alias(
      new (std::nothrow) ManagedAlias{},
      [](ManagedAlias* unused) { drop_managed(&unused->managed); });
  if (alias == nullptr) {
    drop(given_back);
    throw std::bad_alloc();
  }
  alias->alias = given_back;
  alias->managed.manager_ctx = alias.get();
  std::int64_t* dims = alias->dims.data();
  if (g.ndim > Geometry::kInline) {
    alias->far_dims = std::make_unique<std::int64_t[]>(2 * static_cast<std::size_t>(g.ndim));
    dims = alias->far_dims.get();
  }
  std::copy_n(g.shape(), 2 * g.ndim, dims);
  alias->managed.version = {1, 0};
  alias->managed.deleter = &drop_managed;
  alias->managed.tensor = {
      reinterpret_cast<void*>(unpacked.address), g.device, g.ndim, g.dtype, dims, dims + g.ndim, 0};
  void* tensor = nullptr;
  if (TorchApi::get().exchange->object_from_managed(&alias->managed, &tensor) != 0) {
    throw nb::python_error();
  }
  alias.release();
  return nb::steal(static_cast<PyObject*>(tensor));
}

}  // namespace

void Geometry::set(const core::SeenTensor& tensor) {
  device = {tensor.device_type, tensor.device};
  dtype = {tensor.code, tensor.bits, tensor.lanes};
  ndim = tensor.ndim;
  std::int64_t* dims = near_.data();
  if (ndim > kInline) {
    far_.resize(2 * static_cast<std::size_t>(ndim));
    dims = far_.data();
  }
  std::copy_n(tensor.shape, ndim, dims);
  std::copy_n(tensor.strides, ndim, dims + ndim);
}

core::Bytes Geometry::extent() const {
  core::Bytes reach = 0;
  for (std::int32_t i = 0; i < ndim; ++i) {
    reach += static_cast<core::Bytes>(shape()[i] - 1) * static_cast<core::Bytes>(strides()[i]);
  }
  return (reach + 1) * item_bytes();
}

Handle::Handle(Handle&& other) noexcept
    : runtime(other.runtime),
      ignored_by(other.ignored_by),
      ignored(other.ignored),
      record(other.record),
      offset(other.offset),
      dtype(other.dtype),
      geometry(std::move(other.geometry)),
      followed(std::move(other.followed)),
      recipe(std::move(other.recipe)),
      passed(std::move(other.passed)),
      version(other.version),
      twin(other.twin) {
  other.runtime = other.ignored_by = nullptr;
}

Handle::~Handle() {
  if (ignored_by != nullptr && !Registry::get().forked()) {
    ignored_by->ignored_ended(ignored);
  }
  if (runtime != nullptr && !Registry::get().forked()) {
    runtime->drop_handle(record);
    settle(*runtime);
    // Most often autograd adds up next what the node returned: with the twin gone as plain torch.
    Twins::get().look_at(twin);
    Twins::get().sweep();
  }
}

Hooks::Hooks(int device, nb::object modified, nb::object keep)
    : device_(device), modified_(std::move(modified)), keep_(std::move(keep)) {
  TorchApi::get();
}

void Hooks::begin_step(bool recompute) {
  order_ = 0;
  recompute_ = recompute;
  Twins::get().sweep_all();
}

void Hooks::end_step() { Twins::get().sweep_all(); }

Handle Hooks::pass(nb::object passed, Reason reason, Handle handle) {
  ++passed_[static_cast<std::size_t>(reason)];
  handle.followed = Followed(passed.ptr());
  handle.version = handle.followed.current();
  handle.passed = std::move(passed);
  return handle;
}

// What is passed through: leaves as they are; anything else without its graph, since a saved output
// that holds its own node would keep itself alive for ever (rule A4).
Handle Hooks::pack(nb::handle tensor) {
  Twins::get().sweep();
  const TorchApi& torch = TorchApi::get();
  PyObject* const object = tensor.ptr();
  if (!torch.is_tensor(object)) {
    const bool leaf = torch.flag(object, torch.is_leaf);
    return pass(leaf ? nb::borrow(tensor) : torch.detached(object),
                torch.is_parameter(object) ? Reason::leaf : Reason::subclass);
  }
  const core::SeenTensor seen = torch.look(object);
  if (seen.kind != core::SeenTensor::plain) {
    const bool as_it_is = seen.leaf && seen.kind != core::SeenTensor::view_of_leaf;
    return pass(as_it_is ? nb::borrow(tensor) : torch.detached(object), reason_of(seen.kind));
  }
  const auto pass_plain = [&](Reason reason, Handle handle = {}) {
    return pass(seen.leaf ? nb::borrow(tensor) : torch.detached_plain(object), reason,
                std::move(handle));
  };
  core::Runtime* runtime = Registry::get().find(device_);
  if (runtime == nullptr) {
    return pass_plain(Reason::foreign_storage);
  }
  if (!keep_.is_none() && nb::cast<bool>(keep_(tensor, order_++))) {
    return pass_plain(Reason::kept);
  }
  Handle handle;
  handle.geometry.set(seen);
  handle.dtype = seen.dtype;
  const auto first = reinterpret_cast<Address>(seen.data);
  const Address last = first + handle.geometry.extent();
  if (recompute_) {
    handle.recipe = Recipe::of(tensor);
  }
  const core::Saved saved = runtime->uses_torch()
                                ? save_held(*runtime, tensor, handle, first, last)
                                : runtime->save(first, first, last, true, handle.recipe.made());
  if (saved.refusal != core::Refusal::none) {
    handle.ignored_by = saved.ignored != 0 ? runtime : nullptr;
    handle.ignored = saved.ignored;
    return pass_plain(reason_of(saved.refusal), std::move(handle));
  }
  handle.runtime = runtime;
  handle.record = saved.record;
  handle.offset = saved.offset;
  handle.followed = Followed(object);
  handle.version = handle.followed.current();
  return handle;
}

// The same where torch's own allocator cuts the blocks: the record is over a reference to the
// storage, which is given up at once where there is one already, or the storage is not for us.
core::Saved Hooks::save_held(core::Runtime& runtime, nb::handle tensor, Handle& handle,
                             Address first, Address last) const {
  const core::TorchSide& side = *Registry::get().torch_side();
  if (handle.geometry.device.type != dlpack::kCuda || handle.geometry.device.id != device_) {
    return {core::Refusal::foreign_storage, {}};
  }
  const PausedCollection paused(side.triggers == 0);
  core::HeldStorage held;
  const core::Hold result = side.hold(tensor.ptr(), &held, &handle.dtype);
  if (result != core::Hold::held) {
    const bool capturing = result == core::Hold::capturing;
    return {capturing ? core::Refusal::graph_capture : core::Refusal::foreign_storage, {}};
  }
  HeldReference reference(side, held.storage);
  if (side.triggers == 0) {
    note_usage(device_, last - first);
  }
  const core::Saved saved = runtime.save_held(held, current_stream(handle.geometry.device), first,
                                              first, last, true, handle.recipe.made());
  if (saved.took_reference) {
    reference.release();
  }
  runtime.drop_orphans();
  return saved;
}

void Hooks::raise_modified(const Handle& handle, long version) const {
  const Geometry& g = handle.geometry;
  nb::list shape;
  for (std::int32_t i = 0; i < g.ndim; ++i) {
    shape.append(g.shape()[i]);
  }
  modified_(handle.runtime == nullptr ? handle.passed : nb::none(),
            nb::make_tuple(g.dtype.code, g.dtype.bits, g.dtype.lanes), shape,
            g.device.type == dlpack::kCuda, version, handle.version);
  throw nb::value_error("an in-place change was found, but its error was not raised");
}

void Hooks::raise_failed(const Handle& handle, core::Status status) {
  if (status == core::Status::corrupted) {
    const nb::object type = nb::module_::import_("stagehand_alloc._errors").attr("ChecksumError");
    const std::string what = "The host copy of a saved tensor is not what was written to it: " +
                             handle.runtime->history(handle.record) + ".";
    const nb::object error =
        type(what.c_str(),
             "Nothing was restored from it. Test the machine's memory; if that is sound, look for "
             "code that writes to host memory it does not own.");
    PyErr_SetObject(type.ptr(), error.ptr());
    throw nb::python_error();
  }
  const std::string text =
      explain(*handle.runtime, status, handle.runtime->bytes_of(handle.record));
  PyErr_SetString(
      status == core::Status::out_of_memory ? TorchApi::get().out_of_memory : PyExc_RuntimeError,
      text.c_str());
  throw nb::python_error();
}

core::Unpacked Hooks::find(const Handle& handle, driver::Stream consumer) {
  const core::TorchSide* side = Registry::get().torch_side();
  const bool in_python = side != nullptr && side->triggers == 0;  // for want of the library
  if (in_python) {
    note_usage(device_, handle.runtime->bytes_of(handle.record));
  }
  const PausedCollection paused(in_python);
  if (in_python || handle.runtime->resident(handle.record)) {
    return handle.runtime->unpack(handle.record, handle.offset, consumer);
  }
  const nb::gil_scoped_release unlocked;  // making room may wait
  return handle.runtime->unpack(handle.record, handle.offset, consumer);
}

// A dropped record's storage, made again and given to it. Where its memory is not such as records
// are of, as inside a MemPool of the user's, a tensor over it as the saved one was; the record
// stays dropped.
nb::object Hooks::make_again(const Handle& handle, driver::Stream consumer) {
  core::Runtime& runtime = *handle.runtime;
  const nb::object made =
      handle.recipe.run(*this, [&] { runtime.making(handle.record, consumer); });
  bool taken = false;
  if (runtime.uses_torch()) {
    const core::TorchSide& side = *Registry::get().torch_side();
    core::HeldStorage held;
    std::int32_t dtype = 0;
    if (side.hold(made.ptr(), &held, &dtype) == core::Hold::held) {
      HeldReference reference(side, held.storage);
      bool took = false;
      taken = runtime.refill_held(handle.record, held, consumer, &took);
      if (took) {
        reference.release();
      }
    }
  } else {
    const core::SeenTensor seen = TorchApi::get().look(made.ptr());
    taken = runtime.refill(handle.record, reinterpret_cast<Address>(seen.data), consumer);
  }
  if (taken) {
    return {};
  }
  const Geometry& g = handle.geometry;
  const core::TensorPlace place{static_cast<std::int64_t>(handle.offset / g.item_bytes()),
                                g.shape(), g.strides(), g.ndim, handle.dtype};
  nb::object tensor = nb::steal(static_cast<PyObject*>(Recipe::side()->view(made.ptr(), &place)));
  if (!tensor.is_valid()) {
    throw nb::python_error();
  }
  return tensor;
}

nb::object Hooks::unpack(const Handle& handle) {
  if (const long version = handle.followed.current(); version != handle.version) {
    raise_modified(handle, version);
  }
  if (handle.runtime == nullptr) {
    return handle.passed;
  }
  if (Registry::get().forked()) {
    throw std::runtime_error(
        "stagehand_alloc: this process was forked after the GPU was used, and has no saved "
        "tensors.\n"
        "Run backward in the process that ran forward.");
  }
  Twins::get().sweep();  // first: what they keep on the GPU may be what makes room
  const driver::Stream consumer = current_stream(handle.geometry.device);
  core::Unpacked unpacked = find(handle, consumer);
  if (unpacked.status == core::Status::recompute) {
    if (nb::object apart = make_again(handle, consumer); apart.is_valid()) {
      return handle.followed.shared_by(std::move(apart));
    }
    unpacked = find(handle, consumer);
  }
  if (unpacked.status != core::Status::ok) {
    raise_failed(handle, unpacked.status);
  }
  if (unpacked.storage != nullptr) {
    return handle.followed.shared_by(make_view(handle, unpacked, consumer));
  }
  if (handle.followed.by_library()) {
    auto [tensor, storage] = make_alias(handle, unpacked);
    handle.twin = Twins::get().keep(std::move(storage), *handle.runtime, unpacked.block);
    return handle.followed.shared_by(std::move(tensor));
  }
  nb::object memory = make_alias_by_dlpack(handle, unpacked);
  nb::object tensor = handle.followed.shared_by(memory);
  handle.twin =
      Twins::get().keep(SharedStorage(std::move(memory)), *handle.runtime, unpacked.block);
  return tensor;
}

nb::dict Hooks::passed_through() const {
  nb::dict counts;
  for (std::size_t i = 0; i < passed_.size(); ++i) {
    if (passed_[i] > 0) {
      counts[kReasonNames[i]] = passed_[i];
    }
  }
  return counts;
}

}  // namespace stagehand::entry
