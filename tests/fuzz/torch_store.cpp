#include "fuzz/torch_store.hpp"

#include <set>
#include <utility>
#include <vector>

namespace stagehand::fuzz {

using core::Address;
using core::Bytes;
using core::Status;
using core::operator""_MiB;
using core::test::FakeTorch;
using core::test::Storage;

namespace {

constexpr core::test::TorchPool kMemPool{7, 0};

core::test::TorchPool pool_of(std::uint64_t graph) { return {graph, 1}; }

// What torch's side of the table knows that the fake of it does not.
struct World {
  driver::Table table;
  driver::Context context = nullptr;
  core::TorchSide torch;
  bool gil = false;
  bool capturing = false;
  std::set<const void*> used_aside;  // storages that torch was told other streams use
  std::vector<void*> deferred;       // dropped in a capture
  std::string broken;
};
World& world() {
  static World one;
  return one;
}

Storage* storage_of(const void* storage) {
  return static_cast<Storage*>(const_cast<void*>(storage));
}

// Torch records no event in a capture: what other streams use becomes free after it.
void drop_in_torch(void* storage) {
  World& here = world();
  if (here.capturing && here.used_aside.contains(storage)) {
    here.deferred.push_back(storage);
    return;
  }
  if (storage_of(storage)->references == 1) {
    here.used_aside.erase(storage);
  }
  const driver::ContextGuard guard(here.table, here.context);
  here.torch.drop(storage);
}

void use_aside(void* storage, driver::Stream stream) {
  const driver::ContextGuard guard(world().table, world().context);
  world().used_aside.insert(storage);
  world().torch.used_on(storage, 0, stream);
}

class Gil {
 public:
  Gil() : before_(std::exchange(world().gil, true)) {}
  ~Gil() { world().gil = before_; }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  const bool before_;
};

// Torch sets its device itself, whatever is current where it is called.
core::TorchSide side_of(bool triggers) {
  world().torch = FakeTorch::side(triggers);
  core::TorchSide side = world().torch;
  side.used_on = [](void* storage, int /*device*/, driver::Stream stream) {
    use_aside(storage, stream);
  };
  side.drop = [](void* storage) {
    if (!world().gil && storage_of(storage)->references > 1 && world().torch.triggers != 0) {
      world().broken = "a storage that others refer to was dropped without the GIL";
    }
    drop_in_torch(storage);
  };
  side.make = [](int device, Bytes bytes, driver::Stream stream, bool quiet,
                 core::HeldStorage* held) {
    const driver::ContextGuard guard(world().table, world().context);
    return world().torch.make(device, bytes, stream, quiet, held);
  };
  side.release_cached = [] {
    const driver::ContextGuard guard(world().table, world().context);
    return world().torch.release_cached();
  };
  return side;
}

// Both live as long as the runtime, which is leaked on purpose (rule T3).
template <typename Kept>
Kept& kept(Kept* object) {
  static auto* const all = new std::vector<Kept*>;
  all->push_back(object);
  return *object;
}

}  // namespace

TorchStore::TorchStore(const driver::Table& table, core::Runtime& runtime, driver::Context context,
                       const Setup& setup)
    : runtime_(runtime),
      cache_(kept(new core::CacheMap)),
      torch_(table, runtime, cache_, setup.triggers != 0),
      setup_(setup) {
  world() = {};
  world().table = table;
  world().context = context;
  runtime.use_torch(kept(new core::TorchSide(side_of(setup.triggers != 0))), cache_);
  if (setup.expandable != 0) {
    torch_.expandable = true;
    torch_.drop(torch_.make(1, nullptr));  // tells the map
  }
  if (setup.mem_pool != 0) {
    torch_.use_segments(kMemPool);
  }
}

Status TorchStore::make(driver::Stream stream, std::uint64_t graph, Reference* made) {
  const bool in_graph = graph != 0;
  if (in_graph) {
    graphs_.push_back(graph);
    FakeTorch::use_pool(pool_of(graph));
  }
  Storage* storage = nullptr;
  {
    const driver::ContextGuard guard(world().table, world().context);
    storage = torch_.make(made->bytes, stream);
  }
  if (in_graph) {
    FakeTorch::use_pool(in_pool_ ? kMemPool : core::test::kDefaultPool);
  }
  if (storage == nullptr) {
    return Status::out_of_memory;
  }
  made->storage = storage;
  made->address = storage->address;
  return Status::ok;
}

// By a thread with the GIL, as most are.
bool TorchStore::drop(const Reference& reference) {
  const Gil gil;
  drop_in_torch(reference.storage);
  return true;
}

// The pack hook, as entry/hooks.cpp does it.
core::Saved TorchStore::save(const Reference& of, driver::Stream on, Address first, Address last,
                             Again again) {
  const Gil gil;
  Storage* storage = storage_of(of.storage);
  FakeTorch::hold(storage);
  note_usage();
  const core::Saved saved =
      runtime_.save_held({storage, storage, storage->address, storage->bytes}, on, first, first,
                         last, false, again.made(storage->address, storage->bytes), again.inside());
  if (!saved.took_reference) {
    drop(of);
  }
  drop_orphans();
  return saved;
}

bool TorchStore::refill(core::RecordId record, const Reference& with, driver::Stream on) {
  const Gil gil;
  Storage* storage = storage_of(with.storage);
  FakeTorch::hold(storage);
  bool took = false;
  const bool taken =
      runtime_.refill_held(record, {storage, storage, storage->address, storage->bytes}, on, &took);
  if (!took) {
    drop(with);
  }
  return taken;
}

// The unpack hook, and what wrap and drop_alias make of it.
Status TorchStore::unpack(std::size_t /*device*/, core::RecordId record, Bytes offset,
                          driver::Stream consumer, Reference* again) {
  note_usage();
  const core::Unpacked unpacked = runtime_.unpack(record, offset, consumer);
  if (unpacked.status != Status::ok) {
    return unpacked.status;
  }
  say_proved(0, record, unpacked);
  const Gil gil;
  FakeTorch::hold(storage_of(unpacked.storage));
  if (unpacked.elsewhere) {
    use_aside(unpacked.storage, consumer);
  }
  runtime_.drop_alias(unpacked.block);
  *again = {unpacked.storage, nullptr, unpacked.address, 0, 0};
  return Status::ok;
}

void TorchStore::drop_handle(std::size_t /*device*/, core::RecordId record) {
  runtime_.drop_handle(record);
  drop_orphans();
}

void TorchStore::drop_orphans() {
  const Gil gil;
  runtime_.drop_orphans();
}

void TorchStore::record_stream(const Reference& of, driver::Stream user) {
  use_aside(of.storage, user);
}

void TorchStore::capture(std::size_t /*device*/, int change) {
  world().capturing = change > 0;
  const Gil gil;
  for (void* storage : std::exchange(world().deferred, {})) {
    drop_in_torch(storage);
  }
}

void TorchStore::enter_pool() {
  if (setup_.mem_pool != 0) {
    in_pool_ = true;
    runtime_.set_torch_pool(kMemPool);
    FakeTorch::use_pool(kMemPool);
  }
}
void TorchStore::leave_pool() {
  in_pool_ = false;
  runtime_.set_torch_pool({});
  FakeTorch::use_pool(core::test::kDefaultPool);
}

void TorchStore::trim(std::size_t /*device*/, Bytes target) { runtime_.trim(target); }

void TorchStore::release_graph(std::size_t /*device*/, std::uint64_t graph) {
  const driver::ContextGuard guard(world().table, world().context);
  torch_.destroy_pool(pool_of(graph));
}

// Where no event tells, each pack and unpack asks torch, as entry/python_side.cpp does.
void TorchStore::note_usage() {
  if (setup_.triggers == 0) {
    cache_.set_usage(torch_.reserved(), torch_.allocated());
  }
}

std::string TorchStore::broken() {
  return !world().broken.empty() ? world().broken : torch_.differs(cache_);
}

std::string TorchStore::left() {
  const driver::ContextGuard guard(world().table, world().context);
  for (const std::uint64_t graph : std::exchange(graphs_, {})) {
    torch_.destroy_pool(pool_of(graph));
  }
  torch_.release_cached();
  trim(0, 0);  // what a capture kept back is gone
  Reference last;
  last.bytes = 5_MiB;
  if (make(nullptr, 0, &last) == Status::ok) {
    const core::Saved saved = save(last, nullptr, last.address, last.address + 512, {});
    if (saved.refusal == core::Refusal::none) {
      drop_handle(0, saved.record);
    }
    drop(last);
  }
  drop_orphans();
  torch_.destroy_pool(kMemPool);
  torch_.release_cached();
  note_usage();
  return torch_.storages() != 0 ? std::to_string(torch_.storages()) + " storages are left"
         : torch_.allocated() != 0
             ? "torch has " + std::to_string(torch_.allocated()) + " bytes handed out"
             : "";
}

}  // namespace stagehand::fuzz
