#include "entry/weights.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>

#include "core/pinner.hpp"
#include "entry/gil.hpp"
#include "entry/registry.hpp"
#include "entry/torch_api.hpp"
#include "entry/torch_error.hpp"
#include "entry/torch_side.hpp"
#include "entry/without_gil.hpp"

namespace stagehand::entry {

namespace {

using core::Address;
using core::Bytes;
using core::Status;

constexpr Bytes kAligned = 512;  // as torch's own allocator aligns

const core::StorageSide* g_side = nullptr;  // set once, with the GIL

// By the identity of the storage. Guarded by the GIL, leaked: handles outlive the interpreter.
std::unordered_map<const void*, WeightGroup*>& groups() {
  static auto* leaked = new std::unordered_map<const void*, WeightGroup*>;
  return *leaked;
}

// What a backward holds on a thread: the two groups it needed last.
struct Window {
  nb::object newest;
  nb::object previous;
  bool told = false;  // the backward's end will be
};

// By thread and the number of the backward: one may run inside another's node. Guarded by the GIL,
// leaked.
using WindowKey = std::pair<std::thread::id, long>;
std::map<WindowKey, Window>& windows() {
  static auto* leaked = new std::map<WindowKey, Window>;
  return *leaked;
}

// Leaving may give the GIL up: the windows are gone by then.
template <class Which>
void end_windows(Which which) {
  std::vector<nb::object> held;
  for (auto window = windows().begin(); window != windows().end();) {
    if (!which(window->first)) {
      ++window;
      continue;
    }
    for (nb::object* one : {&window->second.previous, &window->second.newest}) {
      if (one->is_valid()) {
        held.push_back(std::move(*one));
      }
    }
    window = windows().erase(window);
  }
  for (const nb::object& one : held) {
    WeightGroup::leave_backward(one);
  }
}

// The number of the backward that runs on this thread; -1 outside of any.
long backward_here() {
  static nb::object* const number =
      new nb::object(nb::module_::import_("torch._C").attr("_current_graph_task_id"));
  return nb::cast<long>((*number)());
}

// The engine calls it at the end of a backward. One that failed it only forgets: on whichever
// thread, with the GIL.
struct EndOfBackward {
  long task = -1;

  explicit EndOfBackward(long number) : task(number) {}
  EndOfBackward(EndOfBackward&& other) noexcept : task(std::exchange(other.task, -1)) {}
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;
  EndOfBackward& operator=(EndOfBackward&&) = delete;
  ~EndOfBackward() {
    if (task >= 0) {
      WeightGroup::end_backward(task);
    }
  }
  void operator()() const { WeightGroup::end_backward(task); }
};

void tell_of_end(Window& window, long task) {
  if (task < 0 || window.told) {
    return;
  }
  nb::module_::import_("torch.autograd")
      .attr("Variable")
      .attr("_execution_engine")
      .attr("queue_callback")(nb::cpp_function(EndOfBackward(task)));
  window.told = true;
}

[[noreturn]] void raise(core::Runtime& runtime, Status status, Bytes bytes) {
  if (status == Status::captured) {
    throw std::runtime_error(
        "stagehand_alloc: a block whose weights are offloaded runs while a CUDA graph is being "
        "captured, which would read where they are now.\n"
        "Capture without offload, or leave these blocks out of the graph.");
  }
  const std::string text = explain(runtime, status, bytes);
  PyErr_SetString(
      status == Status::out_of_memory ? TorchApi::get().out_of_memory : PyExc_RuntimeError,
      text.c_str());
  throw nb::python_error();
}

// `host`, pinned for good, in one stretch, once `fill` has faulted it in: registering is quickest
// for memory that is there. Null where the machine has none.
template <class Fill>
std::byte* pinned(core::Runtime& runtime, std::byte* host, Bytes bytes, Fill fill) {
  if (host == nullptr) {
    return nullptr;
  }
  fill(host);
  if (!runtime.pin(host, bytes)) {
    core::unmap_host(host, bytes);
    return nullptr;
  }
  return host;
}

}  // namespace

HostCopy::HostCopy(const std::vector<HostBytes>& sources, int numa_node) {
  std::vector<core::HostMove> moves;
  moves.reserve(sources.size());
  for (const auto& [address, bytes] : sources) {
    bytes_ += core::round_up(bytes, kAligned);
  }
  const GilReleased unlocked;
  std::byte* const host = core::map_host(bytes_, numa_node);
  if (host == nullptr) {
    return;
  }
  Bytes at = 0;
  for (const auto& [address, bytes] : sources) {
    moves.push_back({host + at, reinterpret_cast<const std::byte*>(address), bytes});
    at += core::round_up(bytes, kAligned);
  }
  try {
    core::copy_on_host(moves);
  } catch (...) {
    core::unmap_host(host, bytes_);
    throw;
  }
  host_ = host;
}

// In a forked child the memory is not there.
HostCopy::~HostCopy() {
  if (host_ != nullptr && !Registry::get().forked()) {
    const GilReleased unlocked;
    core::unmap_host(host_, bytes_);
  }
}

std::string WeightGroup::use(const core::StorageSide* side) {
  if (side == nullptr || side->version != core::StorageSide::kVersion ||
      side->size != sizeof(core::StorageSide)) {
    return "the storage library is of another version";
  }
  g_side = side;
  return "";
}

WeightGroup* WeightGroup::find_slowly(PyObject* tensor) {
  const auto found = groups().find(g_side->identity(tensor));
  return found != groups().end() ? found->second : nullptr;
}

WeightGroup::WeightGroup(int device, const std::vector<nb::object>& tensors,
                         const std::vector<std::string>& texts, int numa_node, std::size_t trained,
                         const std::vector<HostBytes>& sources, const Stretch& shared,
                         HostCopy* ready)
    : device_(device), shared_(std::get<0>(shared) >= 0) {
  if (g_side == nullptr || tensors.empty() || tensors.size() != texts.size() ||
      (!sources.empty() && sources.size() != tensors.size()) ||
      (ready != nullptr && (shared_ || sources.empty()))) {
    throw std::runtime_error("stagehand_alloc: internal error: a weight group of nothing");
  }
  core::Runtime& engine = opened(device);
  const auto undo = [&] {
    for (const Held& one : held_) {
      g_side->drop(one.storage);
    }
    if (host_ != nullptr) {
      engine.unpin(host_, bytes_);
    }
    unmap_read_only();
  };
  std::vector<core::Copy> copies;
  std::vector<core::HostMove> on_host;
  try {
    for (const nb::object& tensor : tensors) {
      core::SeenStorage seen;
      void* storage = g_side->hold(tensor.ptr(), &seen);
      if (storage == nullptr) {
        throw std::runtime_error("stagehand_alloc: internal error: a weight without a storage");
      }
      place_ = {seen.device_type, seen.device};
      held_.push_back({storage, g_side->identity(tensor.ptr()), bytes_, seen.bytes});
      if (sources.empty()) {
        copies.push_back({seen.address, nullptr, seen.bytes});
      } else {
        const auto& [address, bytes] = sources[on_host.size()];
        if (seen.address != 0 || seen.bytes != bytes) {
          throw std::runtime_error("stagehand_alloc: internal error: a weight of another size");
        }
        on_host.push_back({nullptr, reinterpret_cast<const std::byte*>(address), bytes});
      }
      bytes_ += core::round_up(seen.bytes, kAligned);
      trained_ = held_.size() <= trained ? bytes_ : trained_;
    }
    if (ready != nullptr && ready->bytes() != bytes_) {
      throw std::runtime_error("stagehand_alloc: internal error: a host copy of another size");
    }
    std::optional<HostCopy> mine;
    if (!shared_ && !sources.empty() && (ready == nullptr || ready->empty())) {
      ready = &mine.emplace(sources, numa_node);
    }
    const driver::Stream stream = current_stream(place_);
    const auto& [file, begin, makes] = shared;
    const bool compares = shared_ && !makes;
    bool copied = true;
    bool same = true;
    {
      const GilReleased unlocked;
      std::byte* const mapped = shared_ ? core::map_shared(file, begin, bytes_, numa_node, true)
                                : ready != nullptr ? ready->take()  // null: no memory
                                                   : core::map_host(bytes_, numa_node);
      read_only_ = shared_ ? core::map_shared(file, begin, bytes_, numa_node, false) : nullptr;
      host_ = pinned(engine, mapped, bytes_, [&](std::byte* host) {
        if (ready != nullptr) {
          return;
        }
        for (std::size_t i = 0; i < on_host.size(); ++i) {
          on_host[i].to = host + held_[i].offset;
        }
        if (compares) {  // and writes nothing
          same = core::same_on_host(on_host);
        } else if (!on_host.empty()) {
          core::copy_on_host(on_host);
        } else {
          core::Toucher toucher;
          toucher.start(host, bytes_);
          toucher.wait();
        }
      });
      if (host_ != nullptr && !copies.empty()) {
        for (std::size_t i = 0; i < copies.size(); ++i) {
          copies[i].host = host_ + held_[i].offset;
        }
        if (compares) {
          same = same_as_shared(engine, copies, stream, &copied);
        } else {
          copied = engine.read_out(copies, {&stream, 1});
        }
      }
    }
    if (host_ == nullptr || (shared_ && read_only_ == nullptr)) {
      throw nb::value_error("no host memory");
    }
    if (!copied) {
      raise(engine, Status::driver_failed, bytes_);
    }
    if (!same) {
      throw nb::value_error("other bytes");
    }
  } catch (...) {
    undo();
    throw;
  }
  id_ = engine.add_weights(bytes_, host_);
  ++count_;
  for (std::size_t i = 0; i < held_.size(); ++i) {
    groups().emplace(held_[i].identity, this);
    g_side->seal(held_[i].storage, texts[i].c_str());
  }
}

// The host copy stays until nobody refers to the group: what `state_dict` gave is over it.
WeightGroup::~WeightGroup() {
  if (!restored_) {
    forget();
  }
  if (core::Runtime* engine = Registry::get().find(device_); engine != nullptr) {
    const GilReleased unlocked;
    engine->unpin(host_, bytes_);
    unmap_read_only();
  }
}

void WeightGroup::unmap_read_only() {
  if (read_only_ != nullptr) {
    core::unmap_host(read_only_, bytes_);
  }
}

core::Runtime& WeightGroup::runtime() const { return *Registry::get().find(device_); }

// In a forked child the engine is not asked, and the host copy is not there.
void WeightGroup::forget() {
  for (const Held& one : held_) {
    groups().erase(one.identity);
    if (open_ > 0) {
      g_side->seal(one.storage, nullptr);  // whoever has a tensor of it: the memory goes
    }
    g_side->drop(one.storage);
  }
  held_.clear();
  --count_;
  if (core::Runtime* engine = Registry::get().find(device_); engine != nullptr) {
    const GilReleased unlocked;
    engine->remove_weights(id_);
  }
}

void WeightGroup::check_process() {
  if (Registry::get().forked()) {
    throw std::runtime_error(
        "stagehand_alloc: this process was forked after the GPU was used, and has no weights.\n"
        "Start processes that use the model with the 'spawn' or 'forkserver' method.");
  }
}

void WeightGroup::enter(int kind) {
  check_process();
  if (restored_) {
    return;
  }
  core::Runtime& engine = runtime();
  const driver::Stream stream = current_stream(place_);
  Address address = 0;
  Status status = Status::ok;
  ++entering_;
  {
    const GilReleased unlocked;  // making room may wait
    status = engine.enter_weights(id_, static_cast<core::UseKind>(kind), stream, &address);
  }
  --entering_;
  settle(engine);
  if (status != Status::ok) {
    raise(engine, status, bytes_);
  }
  stream_ = stream;
  if (open_++ == 0) {
    address_ = address;
    for (const Held& one : held_) {
      g_side->open(one.storage, address + one.offset);
    }
  }
}

void WeightGroup::leave() {
  if (restored_) {
    return;
  }
  if (--open_ == 0) {
    for (const Held& one : held_) {
      g_side->seal(one.storage, nullptr);
    }
  }
  if (core::Runtime* engine = Registry::get().find(device_); engine != nullptr) {
    engine->leave_weights(id_);  // last: from here on it may leave
  }
}

void WeightGroup::more() const {
  core::Runtime* const engine = Registry::get().find(device_);  // null in a forked child
  if (engine != nullptr && engine->lacks_weights()) {
    engine->more_weights(current_stream(place_));
  }
}

// Rule W4. Also at the end of a backward that failed: what the call raises is told of and no more;
// then all that is trained may have been written to.
void WeightGroup::leave_backward(nb::handle self) {
  auto* const group = nb::cast<WeightGroup*>(self);
  if (group->open_ > 0 && group->before_leave_.is_valid() && !group->before_leave_.is_none() &&
      !Registry::get().forked()) {
    try {
      group->before_leave_();
    } catch (nb::python_error& error) {
      if (group->open_ > 0) {
        group->wrote();
      }
      if (error.matches(PyExc_KeyboardInterrupt)) {
        PyErr_SetInterrupt();  // raised where Python code runs next
      } else {
        error.discard_as_unraisable("stagehand_alloc: the end of a backward");
      }
    }
  }
  group->leave();
}

void WeightGroup::touch(nb::handle self) {
  auto* const group = nb::cast<WeightGroup*>(self);
  check_process();
  if (group->restored_) {
    return;  // since the forward: its weights are like any others
  }
  constexpr int kBackward = static_cast<int>(core::UseKind::backward);
  const WindowKey here{std::this_thread::get_id(), backward_here()};
  Window& window = windows()[here];
  const bool newest = window.newest.is_valid() && window.newest.is(self);
  if (newest || (window.previous.is_valid() && window.previous.is(self))) {
    if (!newest) {
      std::swap(window.newest, window.previous);
    }
    const driver::Stream stream = current_stream(group->place_);
    if (stream != group->stream_) {  // a node of another stream: that one has to wait, too
      group->enter(kBackward);
      group->leave();
    } else {
      group->more();
    }
    return;
  }
  tell_of_end(window, here.second);
  if (window.previous.is_valid()) {
    const nb::object left = std::exchange(window.previous, nb::object());
    leave_backward(left);  // first: its memory may be what makes room
  }
  group->enter(kBackward);  // gives the GIL up: the window may be another one by now
  Window& now = windows()[here];
  tell_of_end(now, here.second);
  const nb::object last = std::exchange(now.previous, std::exchange(now.newest, nb::borrow(self)));
  if (last.is_valid()) {
    leave_backward(last);
  }
}

void WeightGroup::over(nb::handle self) {
  const auto found = windows().find({std::this_thread::get_id(), backward_here()});
  if (found == windows().end()) {
    return;
  }
  for (nb::object* one : {&found->second.newest, &found->second.previous}) {
    if (one->is_valid() && one->is(self)) {
      const nb::object left = std::move(*one);
      *one = nb::object();
      leave_backward(left);
      return;
    }
  }
}

void WeightGroup::end_backward(long task) {
  end_windows([&](const WindowKey& key) { return key.second == task; });
}

void WeightGroup::end_here() {
  const std::thread::id here = std::this_thread::get_id();
  end_windows([&](const WindowKey& key) { return key.first == here; });
}

void WeightGroup::written(Bytes bytes) {
  if (restored_) {
    return;
  }
  ++writes_;
  if (open_ == 0 || runtime().wrote_weights(id_, bytes, current_stream(place_)) != Status::ok) {
    throw std::runtime_error("stagehand_alloc: internal error: weights that are away were written");
  }
}

void WeightGroup::wrote() { written(trained_); }

bool WeightGroup::write_back() {
  if (!shared_) {
    written(bytes_);
    to_host();
    return true;
  }
  check_process();
  if (restored_ || open_ == 0) {
    return true;
  }
  core::Runtime& engine = runtime();
  const driver::Stream stream = current_stream(place_);
  std::vector<core::Copy> copies;
  for (const Held& one : held_) {
    copies.push_back({address_ + one.offset, host_ + one.offset, one.bytes});
  }
  bool read = true;
  bool same = true;
  {
    const GilReleased unlocked;
    same = same_as_shared(engine, copies, stream, &read);
  }
  if (!read) {
    raise(engine, Status::driver_failed, bytes_);
  }
  if (!same) {
    if (const Status status = engine.write_in(copies, stream); status != Status::ok) {
      raise(engine, status, bytes_);
    }
  }
  return same;
}

// Whether what is on the device is what the host has. Without the GIL.
bool WeightGroup::same_as_shared(core::Runtime& engine, const std::vector<core::Copy>& copies,
                                 driver::Stream stream, bool* read) const {
  const auto bytes = std::make_unique_for_overwrite<std::byte[]>(bytes_);
  std::vector<core::Copy> out = copies;
  std::vector<core::HostMove> there;
  for (core::Copy& one : out) {
    std::byte* const here = bytes.get() + (one.host - host_);
    there.push_back({one.host, here, one.bytes});
    one.host = here;
  }
  *read = engine.read_out(out, {&stream, 1});
  return *read && core::same_on_host(there);
}

// Another thread may write meanwhile.
void WeightGroup::to_host() {
  check_process();
  std::uint64_t before = writes_;
  do {
    if (restored_) {
      return;
    }
    core::Runtime& engine = runtime();
    Status status = Status::ok;
    before = writes_;
    {
      const GilReleased unlocked;
      status = engine.weights_to_host(id_);
    }
    if (status != Status::ok) {
      raise(engine, status, bytes_);
    }
  } while (before != writes_);
}

bool WeightGroup::restore() {
  to_host();
  if (open_ + entering_ > 0) {
    return false;
  }
  core::Runtime& engine = runtime();
  const driver::Stream stream = current_stream(place_);
  std::vector<core::Copy> copies;
  for (const Held& one : held_) {
    const Address address = g_side->open_alone(one.storage);
    if (address == 0) {
      for (const Held& other : held_) {
        g_side->seal(other.storage, nullptr);
      }
      raise(engine, Status::out_of_memory, one.bytes);
    }
    copies.push_back({address, host_ + one.offset, one.bytes});
  }
  if (const Status status = engine.write_in(copies, stream); status != Status::ok) {
    for (const Held& other : held_) {
      g_side->seal(other.storage, nullptr);
    }
    raise(engine, status, bytes_);
  }
  restored_ = true;
  forget();
  return true;
}

bool WeightGroup::over_any(Address address) {
  if (count_ == 0) {
    return false;
  }
  for (const auto& [identity, group] : groups()) {
    if (group->open_ > 0 && address - group->address_ < group->bytes_) {
      return true;
    }
  }
  return false;
}

std::vector<HostBytes> WeightGroup::host() const {
  check_process();
  std::vector<HostBytes> found;
  const std::byte* const begin = shared_ ? read_only_ : host_;
  for (const Held& one : held_) {
    found.emplace_back(reinterpret_cast<std::uintptr_t>(begin + one.offset), one.bytes);
  }
  return found;
}

namespace {

nb::dict weights(int device) {
  const auto found =
      without_gil(device, [](core::Runtime& runtime) { return runtime.weight_counts(); });
  nb::dict counts;
  counts["bytes"] = found.bytes;
  counts["home"] = found.home;
  counts["largest"] = found.largest;
  counts["loads"] = found.counts.loads;
  counts["late"] = found.counts.late;
  counts["loaded_bytes"] = found.counts.loaded_bytes;
  counts["dropped"] = found.counts.dropped;
  counts["written_bytes"] = found.counts.written_bytes;
  return counts;
}

}  // namespace

void bind_weights(nb::module_& module) {
  module.def(
      "use_storage_side",
      [](std::uintptr_t table) {
        return WeightGroup::use(reinterpret_cast<const core::StorageSide*>(table));
      },
      nb::arg("table"));
  module.def("weights", &weights, nb::arg("device"));
  module.def(
      "presume_weights",
      [](int device, const std::vector<core::GroupId>& ids) {
        opened(device).presume_weights(ids);
      },
      nb::arg("device"), nb::arg("ids"));
  module.def(
      "drop_weights",
      [](int device) {
        without_gil(device, [](core::Runtime& runtime) { runtime.drop_weights(); });
      },
      nb::arg("device"));
  module.def(
      "claim_storage", [](nb::handle tensor, Bytes bytes) { g_side->claim(tensor.ptr(), bytes); },
      nb::arg("tensor"), nb::arg("bytes"));
  module.def("end_weights_here", &WeightGroup::end_here);
  module.def(
      "is_weight", [](nb::handle tensor) { return WeightGroup::find(tensor.ptr()) != nullptr; },
      nb::arg("tensor"));
  nb::class_<HostCopy>(module, "HostCopy")
      .def(nb::init<const std::vector<HostBytes>&, int>(), nb::arg("sources"),
           nb::arg("numa_node") = -1);
  nb::class_<WeightGroup>(module, "WeightGroup", nb::is_weak_referenceable())
      .def(nb::init<int, const std::vector<nb::object>&, const std::vector<std::string>&, int,
                    std::size_t, const std::vector<HostBytes>&, const WeightGroup::Stretch&,
                    HostCopy*>(),
           nb::arg("device"), nb::arg("tensors"), nb::arg("texts"), nb::arg("numa_node") = -1,
           nb::arg("trained") = 0, nb::arg("sources") = std::vector<HostBytes>(),
           nb::arg("shared") = WeightGroup::Stretch(-1, 0, false),
           nb::arg("ready").none() = nb::none())
      .def("enter", &WeightGroup::enter, nb::arg("kind"))
      .def("leave", &WeightGroup::leave)
      .def("touch", [](nb::handle_t<WeightGroup> self) { WeightGroup::touch(self); })
      .def("over", [](nb::handle_t<WeightGroup> self) { WeightGroup::over(self); })
      .def_prop_rw("before_leave", &WeightGroup::before_leave, &WeightGroup::set_before_leave,
                   nb::arg("call").none())
      .def("wrote", &WeightGroup::wrote)
      .def("write_back", &WeightGroup::write_back)
      .def("to_host", &WeightGroup::to_host)
      .def("restore", &WeightGroup::restore)
      .def("host", &WeightGroup::host)
      .def_prop_ro("id", &WeightGroup::id)
      .def_prop_ro("bytes", &WeightGroup::bytes)
      .def_prop_ro("open", &WeightGroup::open)
      .def_prop_ro("shared", &WeightGroup::shared);
}

}  // namespace stagehand::entry
