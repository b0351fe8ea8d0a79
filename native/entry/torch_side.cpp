#include "entry/torch_side.hpp"

#include <array>

#include "entry/gil.hpp"
#include "entry/python_side.hpp"
#include "entry/registry.hpp"

namespace stagehand::entry {

namespace {

namespace nb = nanobind;
using core::CacheEvent;
using core::TorchSide;

// Called by torch under its mutex, on any thread: no exception leaves, and no GIL is taken.

bool missed(int device, driver::Stream stream, core::Bytes bytes) noexcept {
  Registry& registry = Registry::get();
  core::Runtime* runtime = registry.forked() ? nullptr : registry.find(device);
  const TorchSide* side = registry.torch_side();
  if (runtime == nullptr || !runtime->uses_torch() || side == nullptr || side->triggers == 0) {
    return false;
  }
  try {
    return runtime->missed(stream, bytes);
  } catch (const std::exception&) {
    return false;
  }
}

void asks(int device) noexcept {
  Registry& registry = Registry::get();
  core::Runtime* runtime = registry.forked() ? nullptr : registry.find(device);
  if (runtime == nullptr) {
    core::Runtime::awaits().fetch_and(~(std::uint64_t{1} << device));  // of one that is gone
    return;
  }
  try {
    runtime->asks();
  } catch (const std::exception&) {
  }
}

template <class F>
void on_cache(int device, F&& call) noexcept {
  if (device < 0 || device >= kMaxDevices || Registry::get().forked()) {
    return;
  }
  try {
    call(Registry::get().torch_cache(device));
  } catch (const std::exception&) {
  }
}

void event(const CacheEvent* event) noexcept {
  // Where the table failed its try, Python counts instead.
  if (const TorchSide* side = Registry::get().torch_side();
      side != nullptr && side->triggers == 0) {
    return;
  }
  on_cache(event->device, [&](core::CacheMap& cache) { cache.apply(*event); });
}
void snapshot(int device) noexcept {
  on_cache(device, [](core::CacheMap& cache) { cache.snapshot(); });
}
void known(const CacheEvent* event) noexcept {
  on_cache(event->device, [&](core::CacheMap& cache) { cache.known(*event); });
}
void told(int device) noexcept {
  on_cache(device, [](core::CacheMap& cache) { cache.told(); });
}

driver::Stream place(int device, driver::Stream stream, core::Bytes bytes) noexcept {
  driver::Stream placed = stream;
  on_cache(device, [&](core::CacheMap& cache) { placed = cache.place(bytes, stream); });
  return placed;
}

core::PoolRoute* route_of(int device) {
  Registry& registry = Registry::get();
  core::Runtime* runtime = registry.forked() ? nullptr : registry.find(device);
  return runtime != nullptr ? runtime->route() : nullptr;
}

void backward_goes_on(int device) noexcept {
  if (core::PoolRoute* route = route_of(device); route != nullptr && route->to_join()) {
    route->join();
  }
}

void backward_ended(int device) noexcept {
  if (core::PoolRoute* route = route_of(device); route != nullptr) {
    route->backward_ended();
  }
}

const core::TorchListener kListener{&missed,
                                    &asks,
                                    core::Runtime::devices_that_await(),
                                    &place,
                                    core::TorchStore::survivor_sizes(),
                                    &event,
                                    core::TorchStore::devices_that_follow(),
                                    &snapshot,
                                    &known,
                                    &told,
                                    &backward_goes_on,
                                    &backward_ended};

// A memory pool that serves this thread and then nobody. Where that does not work, the table is
// used without. By its name alone: a torch.cuda.MemPool ends the process where it goes while any
// other serves somebody, as it does in a user's (torch's own check, until 2.13).
bool try_route(const TorchSide& side, int device) try {
  const nb::module_ torch = nb::module_::import_("torch");
  const nb::object place = torch.attr("device")("cuda", device);
  const nb::object id = torch.attr("cuda").attr("graph_pool_handle")();
  const std::array<std::uint64_t, 2> wanted{nb::cast<std::uint64_t>(id[0]),
                                            nb::cast<std::uint64_t>(id[1])};
  const auto owner = [&] {
    const nb::object tensor = torch.attr("empty")(1, nb::arg("device") = place);
    const auto found = Registry::get().torch_cache(device).owner_of(
        nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
    return found.has_value() ? found->pool : std::array<std::uint64_t, 2>{};
  };
  const auto tell = [&](bool on) {
    const GilReleased unlocked;
    if (!on) {
      side.end_route(device);
      side.let_pool_go(device, wanted.data());
      return false;
    }
    return side.keep_pool(device, wanted.data()) && side.route(device, wanted.data(), false);
  };
  bool right = tell(true) && side.routed(device) && owner() == wanted;
  tell(false);
  right &= !side.routed(device) && owner() != wanted;
  return right;
} catch (const std::exception&) {  // nobody is served: what raised is not torch's own `route`
  return false;
}

// One storage through the whole table: what a torch unknown to us may do otherwise shows here.
std::string try_out(const TorchSide& side, int device) {
  const nb::module_ torch = nb::module_::import_("torch");
  constexpr std::int64_t kRows = 768;
  constexpr std::int64_t kColumns = 512;
  const nb::object place = torch.attr("device")("cuda", device);
  nb::object tensor = torch.attr("arange")(kRows * kColumns, nb::arg("device") = place);
  const nb::object expected = torch.attr("arange")(kRows * kColumns).attr("view")(kRows, kColumns);
  core::HeldStorage held;
  std::int32_t dtype = 0;
  if (side.hold(tensor.ptr(), &held, &dtype) != core::Hold::held) {
    return "a tensor of torch's allocator could not be held";
  }
  std::string wrong;
  const auto expect = [&](bool right, const char* what) {
    if (!right && wrong.empty()) {
      wrong = what;
    }
  };
  const std::array<std::int64_t, 2> shape{kRows, kColumns};
  const std::array<std::int64_t, 2> strides{kColumns, 1};
  const core::TensorPlace whole{0, shape.data(), strides.data(), 2, dtype};
  expect(held.address == nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()) &&
             held.bytes == nb::cast<core::Bytes>(tensor.attr("nbytes")),
         "a storage is not where its tensor is");
  expect(!side.alone(held.storage, held.address, held.bytes), "a storage in use looks unused");
  tensor = nb::none();
  expect(side.alone(held.storage, held.address, held.bytes), "an unused storage looks used");
  expect(Registry::get().torch_cache(device).owner_of(held.address).has_value(),
         "no event told of a segment");
  if (auto* view = static_cast<PyObject*>(side.wrap(held.storage, &whole)); view == nullptr) {
    throw nb::python_error();
  } else {
    const nb::object found = nb::steal(view);
    expect(nb::cast<bool>(torch.attr("equal")(found.attr("cpu")(), expected)),
           "a tensor over a held storage reads other values");
    expect(!side.alone(held.storage, held.address, held.bytes), "a view does not hold its storage");
  }
  expect(side.alone(held.storage, held.address, held.bytes), "a view outlived its tensor");
  const core::Address address = held.address;
  expect(Registry::get().torch_cache(device).live(address), "no event told of a block");
  const core::Bytes bytes = held.bytes;
  side.drop(held.storage);
  expect(!Registry::get().torch_cache(device).live(address), "a dropped storage is not free");
  core::HeldStorage made;
  if (!side.make(device, bytes, nullptr, true, &made)) {
    return "torch gave no memory";
  }
  expect(made.address != 0 && made.bytes == bytes, "torch gave other memory than asked for");
  side.drop(made.storage);
  return wrong;
}

}  // namespace

std::string use_torch_side(std::uintptr_t table, int device) {
  const auto* side = reinterpret_cast<const TorchSide*>(table);
  if (side->version != TorchSide::kVersion || side->size != sizeof(TorchSide)) {
    return "it was built for another version of stagehand_alloc";
  }
  if (const char* refused = side->listen(&kListener); refused != nullptr) {
    return refused;
  }
  // What other threads allocate meanwhile may spoil a try.
  std::string wrong = try_out(*side, device);
  for (int again = 0; again < 3 && !wrong.empty(); ++again) {
    wrong = try_out(*side, device);
  }
  if (wrong.empty()) {
    static TorchSide without;
    without = *side;
    without.route = nullptr;
    const bool routes = side->route != nullptr && try_route(*side, device);
    Registry::get().set_torch_side(routes ? side : &without);
  } else if (side->tell_no_more != nullptr) {
    side->tell_no_more();
  }
  return wrong;
}

bool can_route() {
  const TorchSide* side = Registry::get().torch_side();
  return side != nullptr && side->route != nullptr;
}

bool keep_mem_pool(int device, std::uint64_t first, std::uint64_t second) {
  const TorchSide* side = Registry::get().torch_side();
  const std::array<std::uint64_t, 2> pool{first, second};
  const GilReleased unlocked;
  return side != nullptr && side->keep_pool != nullptr && side->keep_pool(device, pool.data());
}

void let_mem_pool_go(int device, std::uint64_t first, std::uint64_t second) {
  const std::array<std::uint64_t, 2> pool{first, second};
  const GilReleased unlocked;
  Registry::get().torch_side()->let_pool_go(device, pool.data());
}

void settle(core::Runtime& runtime) {
  runtime.drop_orphans();
  if (core::PoolRoute* route = runtime.route(); route != nullptr && route->to_settle()) {
    const GilReleased unlocked;
    route->settle();
  }
}

void use_python_side() { Registry::get().set_torch_side(&python_side()); }

}  // namespace stagehand::entry
