#include "entry/regions.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <set>
#include <unordered_map>

#include "entry/gil.hpp"
#include "entry/registry.hpp"

namespace stagehand::entry {

namespace {

std::uint64_t last_call = 0;  // guarded by the GIL

// Of this thread, each with a reference. Plain pointers: a thread may end without the GIL, and then
// leaves a call behind that ran nothing.
struct Here {
  PyObject* open = nullptr;
  PyObject* collecting = nullptr;
};
thread_local Here here;

void put(PyObject*& place, PyObject* value) {
  Py_XINCREF(value);
  Py_XDECREF(std::exchange(place, value));
}

nb::object regions(const char* name) {
  return nb::module_::import_("stagehand_alloc._step.regions").attr(name);
}

std::string numbers(const std::int64_t* values, std::int32_t count) {
  std::string text = "[";
  for (std::int32_t i = 0; i < count; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  }
  return text + "]";
}

// One text for each name, which stays: plans outlive calls. With the GIL.
const char* staying(const std::string& name) {
  static auto& names = *new std::set<std::string>();
  return name.empty() ? nullptr : names.insert(name).first->c_str();
}

std::string words(const Geometry& g, const char* op, std::uint32_t version) {
  static constexpr const char* kCodes[] = {"int", "uint", "float", "", "bfloat", "complex", "bool"};
  std::string text = g.dtype.code < std::size(kCodes) ? kCodes[g.dtype.code] : "dtype ";
  text += std::to_string(g.dtype.bits) + " " + numbers(g.shape(), g.ndim) + " with strides " +
          numbers(g.strides(), g.ndim);
  text += version > 0 ? ", changed in place " + std::to_string(version) + " times" : "";
  return text + (op != nullptr ? ", made by " + op_name(op) : "");
}

bool same(const std::int64_t* a, const std::int64_t* b, std::int32_t count) {
  return std::equal(a, a + count, b);
}

}  // namespace

// One re-run of a call at a time.
class Call::Turn {
 public:
  explicit Turn(Call& call) : call_(call) {
    if (call_.running_by_ == std::this_thread::get_id()) {
      throw std::runtime_error(
          "stagehand_alloc: internal error: a region's re-run asked for what it is to make.\n"
          "Please report it, with the model.");
    }
    if (!call_.running_.try_lock()) {
      const GilReleased unlocked;
      call_.running_.lock();
    }
    call_.running_by_ = std::this_thread::get_id();
  }
  ~Turn() {
    call_.running_by_ = {};
    call_.running_.unlock();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Call& call_;
};

Call::Call(int device, const std::string& region)
    : region_(staying(region)),
      runtime_(Registry::get().find(device)),
      id_(++last_call),
      since_(runtime_ != nullptr ? runtime_->serial() : 0) {}

Call::~Call() = default;

void Call::collect(nb::handle call) { put(here.collecting, call.ptr()); }

void Call::begin(nb::handle call, nb::object sentinel) {
  auto& self = *nb::inst_ptr<Call>(call);
  self.sentinel_ = std::move(sentinel);
  self.outer_ = here.open != nullptr ? nb::borrow(here.open) : nb::object();
  self.open_ = true;
  put(here.collecting, nullptr);
  put(here.open, call.ptr());
}

// An input that the function changes in place cannot be given to it again as it was: what it saved
// is copied instead.
void Call::end() {
  if (!std::exchange(open_, false)) {
    return;
  }
  open_here();  // takes it off
  const bool changed = std::any_of(inputs_.begin(), inputs_.end(), [](const auto& input) {
    return input.first.current() != input.second;
  });
  inputs_.clear();
  if (changed && runtime_ != nullptr) {
    std::vector<core::RecordId> records;
    for (const Save& save : saves_) {
      records.push_back(save.record);
    }
    runtime_->forget_recipes(records);
  }
}

// torch has unpacked the function's inputs by now, which may have run other calls.
nb::object Call::capture() {
  if (!capture_.is_valid()) {
    return nb::none();
  }
  runtime_->rerun_begins();
  return capture_;
}

Call* Call::open_here() {
  while (here.open != nullptr) {
    auto* call = nb::inst_ptr<Call>(nb::handle(here.open));
    if (call->open_) {
      return call;
    }
    put(here.open, call->outer_.ptr());
  }
  return nullptr;
}

void Call::forget_open() {
  while (Call* call = open_here()) {
    call->open_ = false;
  }
  put(here.collecting, nullptr);
}

void Call::saved(Handle& handle, const core::SeenTensor& seen) {
  Save save;
  save.plain = seen.kind == core::SeenTensor::plain;
  save.inside = handle.made_inside;
  if (save.plain) {
    save.geometry = handle.geometry;
    save.dtype = handle.dtype;
    save.version = seen.version;
    save.op = seen.op;
  }
  if (save.inside && handle.runtime != nullptr) {
    save.record = handle.record;
    save.offset = handle.offset;
  }
  handle.call = nb::borrow(here.open);
  handle.index = static_cast<std::uint32_t>(saves_.size());
  saves_.push_back(std::move(save));
}

void Call::maybe_input(nb::handle tensor) {
  if (here.collecting != nullptr) {
    Followed followed(tensor.ptr());
    const long version = followed.current();
    nb::inst_ptr<Call>(nb::handle(here.collecting))
        ->inputs_.emplace_back(std::move(followed), version);
  }
}

void Call::unpacked() {
  for (Call* call = this; call != nullptr;) {
    call->keeps_ |= call->open_;
    call = call->outer_.is_valid() ? nb::inst_ptr<Call>(call->outer_) : nullptr;
  }
}

std::vector<std::uint32_t> Call::wanted() const {
  std::unordered_map<std::uint32_t, std::uint32_t> last;  // by the record's number
  for (std::uint32_t i = 0; i < saves_.size(); ++i) {
    if (saves_[i].record.generation != 0 && runtime_->dropped(saves_[i].record)) {
      last[saves_[i].record.index] = i;
    }
  }
  std::vector<std::uint32_t> found;
  for (const auto& [record, index] : last) {
    found.push_back(index);
  }
  std::sort(found.begin(), found.end());
  return found;
}

nb::object Call::make(Hooks& hooks, const Handle& handle, bool exact) {
  const nb::object alive = handle.call;  // whatever the function does
  const Turn turn(*this);
  if (!exact && !runtime_->dropped(handle.record)) {
    return {};  // another thread was quicker
  }
  runtime_->note_rerun();
  const driver::Stream stream = current_stream(handle.geometry.device);
  runtime_->making(handle.record, stream);
  const nb::object hooks_of_run = nb::cast(
      new Capture(hooks, *this, handle, exact, regions("Stop")), nb::rv_policy::take_ownership);
  auto& capture = *nb::inst_ptr<Capture>(hooks_of_run);
  capture_ = hooks_of_run;
  const auto over = [&] {
    runtime_->rerun_ends();
    capture_.reset();
    capture.end();
  };
  try {
    regions("run_again")(sentinel_);
  } catch (const nb::python_error&) {
    over();
    if (capture.failure().empty()) {
      throw;
    }
  }
  over();
  if (capture.failure().empty()) {
    runtime_->made(saves_[capture.last()].record, stream, true);
  }
  if (capture.failure().empty() && !capture.done()) {
    raise_recompute("A checkpointed region saved " + std::to_string(capture.count()) +
                    " tensors when it ran again for backward, and " +
                    std::to_string(saves_.size()) + " in its first run; tensor " +
                    std::to_string(handle.index) + " (" +
                    words(handle.geometry, saves_[handle.index].op, 0) + ") is asked for.");
  }
  if (!capture.failure().empty()) {
    raise_recompute(capture.failure());
  }
  const bool apart = exact || runtime_->dropped(handle.record);
  return apart ? capture.made() : nb::object();
}

Capture::Capture(Hooks& hooks, Call& call, const Handle& asked, bool exact, nb::object stop)
    : hooks_(&hooks),
      call_(call),
      wanted_(exact ? std::vector<std::uint32_t>() : call.wanted()),
      asked_(asked.index),
      last_(wanted_.empty() ? asked_ : std::max(asked_, wanted_.back())),
      keeps_(call.keeps_),
      stop_(std::move(stop)) {}

nb::object Capture::pack(nb::handle tensor) {
  if (hooks_ == nullptr) {
    return kept(tensor);
  }
  if (done_) {
    stop();  // the function swallowed it the first time
  }
  const std::size_t index = at_++;
  if (index < call_.saves_.size()) {
    const Call::Save& save = call_.saves_[index];
    compare(save, tensor);
    if (index == asked_) {
      made_ = kept(tensor);
    }
    if (next_ < wanted_.size() && wanted_[next_] == index) {
      ++next_;
      hooks_->refill(*call_.runtime_, save.record, tensor, save.offset);
    }
  }
  if (index >= last_) {
    stop();
  }
  return keeps_ ? kept(tensor) : nb::none();
}

nb::object Capture::unpack(nb::handle packed) const {
  if (packed.is_none()) {
    raise_recompute(
        "A checkpointed region ran backward inside itself when it ran again, and had not in its "
        "first run.");
  }
  return nb::borrow(packed);
}

void Capture::stop() {
  done_ = true;
  PyErr_SetNone(stop_.ptr());
  throw nb::python_error();
}

// A leaf as it is: its gradient goes there.
nb::object Capture::kept(nb::handle tensor) const {
  const TorchApi& torch = TorchApi::get();
  const bool leaf = torch.flag(tensor.ptr(), torch.is_leaf);
  return leaf ? nb::borrow(tensor) : torch.detached(tensor.ptr());
}

// Beside how many there are: whether this is what was saved in this place, as far as it shows.
void Capture::compare(const Call::Save& save, nb::handle tensor) {
  const TorchApi& torch = TorchApi::get();
  core::SeenTensor seen;
  if (torch.is_tensor(tensor.ptr())) {
    seen = torch.look(tensor.ptr());
  }
  const bool plain = seen.kind == core::SeenTensor::plain;
  if (!plain && !(save.inside && save.plain)) {
    return;
  }
  Geometry came;
  if (plain) {
    came.set(seen);
  }
  const Geometry& was = save.geometry;
  bool equal = !save.plain ||
               (plain && came.dtype.code == was.dtype.code && came.dtype.bits == was.dtype.bits &&
                came.ndim == was.ndim && same(came.shape(), was.shape(), was.ndim));
  if (equal && save.inside && save.plain) {
    equal = same(came.strides(), was.strides(), was.ndim) && seen.version == save.version &&
            came.device.type == was.device.type && came.device.id == was.device.id &&
            seen.op == save.op;
  }
  if (equal) {
    return;
  }
  failure_ = "Saved tensor " + std::to_string(at_ - 1) +
             " of a checkpointed region, made again for backward, is " +
             (plain ? words(came, seen.op, seen.version) : std::string("of another kind")) +
             "; it was " + words(was, save.op, save.version) + ".";
  failure_ += nb::cast<std::string>(regions("where")());
  stop();
}

}  // namespace stagehand::entry
