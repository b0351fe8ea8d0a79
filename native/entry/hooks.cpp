#include "entry/hooks.hpp"

#include <algorithm>
#include <new>
#include <optional>

#include "core/requests.hpp"
#include "entry/gil.hpp"
#include "entry/python_side.hpp"
#include "entry/regions.hpp"
#include "entry/registry.hpp"
#include "entry/torch_error.hpp"
#include "entry/torch_side.hpp"
#include "entry/twins.hpp"
#include "entry/weights.hpp"

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

// Rule W8: what is over a weight's memory, and not over its storage, as DLPack makes it, would be
// over somebody else's bytes in backward.
void check_no_weight(Address first) {
  if (WeightGroup::over_any(first)) {
    throw std::runtime_error(
        "stagehand_alloc: a tensor that shares memory with an offloaded weight, and not its "
        "storage, is saved for backward: by then that memory has other bytes. DLPack makes such "
        "tensors.\n"
        "Save the weight itself, or a clone() of the tensor.");
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

}  // namespace

bool Handle::by_node() const { return recipe && runtime->by_node(record) && recipe.ready(); }

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

Hooks::Hooks(int device, nb::object modified, nb::object keep, nb::object proof)
    : device_(device),
      modified_(std::move(modified)),
      keep_(std::move(keep)),
      proof_(std::move(proof)) {
  TorchApi::get();
}

int Hooks::visit(visitproc visit, void* arg) const {
  for (const nb::object* one : {&modified_, &keep_, &proof_}) {
    Py_VISIT(one->ptr());
  }
  return 0;
}

void Hooks::clear() {
  for (nb::object* one : {&modified_, &keep_, &proof_}) {
    *one = nb::none();  // not null: who is torn down with it may call it yet
  }
}

void Hooks::begin_step(bool recompute, bool sharded, bool ranks, bool late) {
  order_ = 0;
  leaf_ = 0;
  knows_leaf_ = !late;  // what was recorded of another model's would count for this one
  recompute_ = recompute;
  sharded_ = sharded;
  if (core::Runtime* runtime = Registry::get().find(device_); runtime != nullptr) {
    runtime->set_ranks(ranks);
  }
  Call::forget_open();
  Twins::get().sweep_all();
}

void Hooks::end_step() {
  Call::forget_open();
  Twins::get().sweep_all();
}

void Hooks::pass(nb::object passed, Reason reason, Handle& handle) {
  ++passed_[static_cast<std::size_t>(reason)];
  handle.followed = Followed(passed.ptr());
  handle.version = handle.followed.current();
  handle.passed = std::move(passed);
}

void Hooks::pack(nb::handle tensor, Handle& handle) {
  Twins::get().sweep();
  Call* const call = Call::open_here();
  core::SeenTensor seen;
  pack_in(call, tensor, handle, &seen);
  Call::maybe_input(tensor);
  if (call != nullptr) {
    call->saved(handle, seen);
  }
}

// Whether recipes are looked for now. Where they were not a moment ago, leaves went by unseen.
bool Hooks::wants_recipes(const core::Runtime* runtime) {
  if (!recompute_ || runtime == nullptr || runtime->wants_recipes()) {
    return recompute_;
  }
  knows_leaf_ = false;
  return false;
}

// Which model this is, for proofs.
void Hooks::see_leaf(const core::Runtime* runtime, nb::handle tensor) {
  const std::uint64_t number = wants_recipes(runtime) ? Recipe::leaf_of(tensor) : 0;
  if (number != 0) {
    leaf_ = number;
    knows_leaf_ = true;
  }
}

// What is passed through: leaves as they are; anything else without its graph, since a saved output
// that holds its own node would keep itself alive for ever (rule A4).
void Hooks::pack_in(Call* call, nb::handle tensor, Handle& handle, core::SeenTensor* looked) {
  const TorchApi& torch = TorchApi::get();
  core::Runtime* const runtime = Registry::get().find(device_);
  PyObject* const object = tensor.ptr();
  // Rule W8: before anything else is asked of it; it may be younger than the pool, or away.
  if (WeightGroup* group = WeightGroup::find(object); group != nullptr) {
    see_leaf(runtime, tensor);
    const bool leaf = torch.flag(object, torch.is_leaf);
    group->more();
    handle.weights = nb::find(*group);
    return pass(leaf ? nb::borrow(tensor) : torch.detached(object),
                torch.is_parameter(object) ? Reason::leaf : Reason::view_of_leaf, handle);
  }
  if (!torch.is_tensor(object)) {
    see_leaf(runtime, tensor);
    const bool leaf = torch.flag(object, torch.is_leaf);
    return pass(leaf ? nb::borrow(tensor) : torch.detached(object),
                torch.is_parameter(object) ? Reason::leaf : Reason::subclass, handle);
  }
  const core::SeenTensor seen = *looked = torch.look(object);
  if (seen.kind != core::SeenTensor::plain) {
    see_leaf(runtime, tensor);
    if (seen.kind == core::SeenTensor::view_of_leaf) {  // each linear layer saves one
      return pass(torch.detached_plain(object), Reason::view_of_leaf, handle);
    }
    return pass(seen.leaf ? nb::borrow(tensor) : torch.detached(object), reason_of(seen.kind),
                handle);
  }
  handle.geometry.set(seen);
  handle.dtype = seen.dtype;
  const auto pass_plain = [&](Reason reason) {
    return pass(seen.leaf ? nb::borrow(tensor) : torch.detached_plain(object), reason, handle);
  };
  if (runtime == nullptr) {
    return pass_plain(Reason::foreign_storage);
  }
  if (!keep_.is_none() && nb::cast<bool>(keep_(tensor, order_++))) {
    return pass_plain(Reason::kept);
  }
  const auto first = reinterpret_cast<Address>(seen.data);
  const Address last = first + handle.geometry.extent();
  const bool seeks = wants_recipes(runtime) && knows_leaf_;
  if (seeks) {
    const nb::object inside = call != nullptr ? nb::find(*call) : nb::object();
    handle.recipe = Recipe::of(tensor, inside, sharded_, leaf_);
  }
  core::Inside inside = call != nullptr ? call->inside() : core::Inside{};
  inside.op = seen.op;
  core::Made made = handle.recipe.made();
  made.sought = seeks || !recompute_;
  const core::Saved saved = runtime->uses_torch()
                                ? save_held(*runtime, tensor, handle, first, last, made, inside)
                                : runtime->save(first, first, last, true, made, inside);
  handle.made_inside = saved.inside;
  if (saved.refusal != core::Refusal::none) {
    check_no_weight(first);
    handle.ignored_by = saved.ignored != 0 ? runtime : nullptr;
    handle.ignored = saved.ignored;
    return pass_plain(reason_of(saved.refusal));
  }
  handle.runtime = runtime;
  handle.record = saved.record;
  handle.offset = saved.offset;
  handle.followed = Followed(object);
  handle.version = handle.followed.current();
  if (saved.look.trace != 0 && handle.recipe) {
    handle.look = saved.look;
    handle.looked_on = current_stream(handle.geometry.device);
    handle.sum = sum_of(handle, first);
  }
}

// The same where torch's own allocator cuts the blocks: the record is over a reference to the
// storage, which is given up at once where there is one already, or the storage is not for us.
core::Saved Hooks::save_held(core::Runtime& runtime, nb::handle tensor, Handle& handle,
                             Address first, Address last, core::Made made,
                             core::Inside inside) const {
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
                                              first, last, true, made, inside);
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

core::Unpacked Hooks::find(const Handle& handle, driver::Stream consumer, bool by_recipe) {
  const core::TorchSide* side = Registry::get().torch_side();
  const bool in_python = side != nullptr && side->triggers == 0;  // for want of the library
  if (in_python) {
    note_usage(device_, handle.runtime->bytes_of(handle.record));
  }
  const PausedCollection paused(in_python);
  if (in_python) {
    return handle.runtime->unpack(handle.record, handle.offset, consumer, by_recipe);
  }
  if (const std::optional<core::Unpacked> found =
          handle.runtime->unpack_resident(handle.record, handle.offset, consumer, by_recipe);
      found.has_value()) {
    return *found;
  }
  const GilReleased unlocked;  // making room may wait
  return handle.runtime->unpack(handle.record, handle.offset, consumer, by_recipe);
}

// The recipe's output beside what was saved, which the caller's tensor keeps where it is.
void Hooks::prove(const Handle& handle, const core::Unpacked& unpacked, driver::Stream consumer) {
  core::Runtime& runtime = *handle.runtime;
  const nb::object made =
      handle.recipe.run(*this, [&] { runtime.making(handle.record, consumer); });
  runtime.made(handle.record, consumer);
  const auto first = reinterpret_cast<Address>(TorchApi::get().look(made.ptr()).data);
  const nb::object differs = nb::steal(static_cast<PyObject*>(
      Recipe::side()->differ(unpacked.saved, first + unpacked.begin, unpacked.bytes,
                             handle.geometry.device.type, handle.geometry.device.id)));
  if (!differs.is_valid()) {
    throw nb::python_error();
  }
  tell(differs, nb::none(), consumer, unpacked.proof, handle.recipe.op());
}

nb::object Hooks::sum_of(const Handle& handle, Address first) {
  const auto& device = handle.geometry.device;
  nb::object sum = nb::steal(static_cast<PyObject*>(
      Recipe::side()->sum(first, handle.geometry.extent(), device.type, device.id)));
  if (!sum.is_valid()) {
    PyErr_Clear();  // no memory for it; another step looks
  }
  return sum;
}

// What is there now, beside what was saved. All of a step are compared together.
void Hooks::look_again(const Handle& handle, nb::handle tensor) {
  const auto first = reinterpret_cast<Address>(TorchApi::get().look(tensor.ptr()).data);
  if (const nb::object now = sum_of(handle, first); now.is_valid()) {
    tell(handle.sum, now, handle.looked_on, handle.look, handle.recipe.op());
  }
}

void Hooks::tell(const nb::object& found, const nb::object& now, driver::Stream stream,
                 const core::Plan::ToProve& what, const char* op) {
  proof_(found, now, reinterpret_cast<std::uintptr_t>(stream),
         nb::make_tuple(what.trace, what.index, what.rests_on, what.again, what.other_size), op);
}

bool Hooks::refill(core::Runtime& runtime, core::RecordId record, nb::handle tensor, Bytes offset) {
  core::SeenTensor seen;
  if (const TorchApi& torch = TorchApi::get(); torch.is_tensor(tensor.ptr())) {
    seen = torch.look(tensor.ptr());
  }
  if (seen.kind != core::SeenTensor::plain) {
    return false;
  }
  const Address first = reinterpret_cast<Address>(seen.data) - offset;
  const driver::Stream stream = current_stream({seen.device_type, seen.device});
  if (!runtime.uses_torch()) {
    return runtime.refill(record, first, stream);
  }
  const core::TorchSide& side = *Registry::get().torch_side();
  core::HeldStorage held;
  std::int32_t dtype = 0;
  if (side.hold(tensor.ptr(), &held, &dtype) != core::Hold::held) {
    return false;
  }
  HeldReference reference(side, held.storage);
  bool took = false;
  const bool taken = held.address == first && runtime.refill_held(record, held, stream, &took);
  if (took) {
    reference.release();
  }
  return taken;
}

// A dropped record's storage, made again and given to it. Where its memory is not such as records
// are of, as inside a MemPool of the user's, a tensor as the saved one was; the record stays
// dropped.
nb::object Hooks::make_again(const Handle& handle, driver::Stream consumer) {
  // Of a call's own, only what is sure to be the same is made by its node.
  if (handle.made_inside && !handle.by_node()) {
    return Call::of(handle).make(*this, handle, false);
  }
  const nb::object made =
      handle.recipe.run(*this, [&] { handle.runtime->making(handle.record, consumer); });
  handle.runtime->made(handle.record, consumer);
  if (refill(*handle.runtime, handle.record, made, 0)) {
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

nb::object Hooks::unpack(const Handle& handle, bool by_recipe) {
  const core::MakesAgain makes_again;
  if (handle.call.is_valid()) {
    Call::of(handle).unpacked();
  }
  if (const long version = handle.followed.current(); version != handle.version) {
    // Legal with torch's own checkpoint, which always runs again: so it is here.
    if (handle.made_inside && !Registry::get().forked()) {
      return Call::of(handle).make(*this, handle, true);
    }
    raise_modified(handle, version);
  }
  if (handle.weights.is_valid()) {
    WeightGroup::touch(handle.weights);
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
  core::Unpacked unpacked = find(handle, consumer, by_recipe);
  if (unpacked.status == core::Status::recompute) {
    if (nb::object apart = make_again(handle, consumer); apart.is_valid()) {
      return handle.followed.shared_by(std::move(apart));
    }
    unpacked = find(handle, consumer, by_recipe);
  }
  if (unpacked.status != core::Status::ok) {
    raise_failed(handle, unpacked.status);
  }
  nb::object tensor = tensor_of(handle, unpacked, consumer);
  if (unpacked.proof.trace != 0 && handle.recipe) {
    try {
      prove(handle, unpacked, consumer);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_Exception)) {
        throw;
      }
      // What was saved is there. Without memory for it another step tries; an input that changed
      // since, or is not there, is one that the recipe cannot have.
      if (!error.matches(TorchApi::get().out_of_memory)) {
        handle.runtime->proved(unpacked.proof, false);
      }
    }
  }
  if (handle.sum.is_valid() && consumer == handle.looked_on) {
    look_again(handle, tensor);
  }
  return tensor;
}

nb::object Hooks::tensor_of(const Handle& handle, const core::Unpacked& unpacked,
                            driver::Stream consumer) {
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
