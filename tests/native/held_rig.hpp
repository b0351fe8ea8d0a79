// One Runtime on torch's own caching allocator (held_torch.hpp), and short names for what tests do
// with it.
#pragma once

#include <vector>

#include "native/core_rig.hpp"
#include "native/held_torch.hpp"

namespace stagehand::core::test {

// A tensor, filled with pattern(seed) on its stream; it counts one reference to its storage.
struct HeldTensor {
  Storage* storage = nullptr;
  Bytes bytes = 0;
  driver::Stream stream = nullptr;
  std::uint64_t seed = 0;
  Bytes offset = 0;  // in the storage

  Address address() const { return storage->address + offset; }
};

// What autograd holds of a saved tensor.
struct SavedTensor {
  RecordId record;
  Bytes offset = 0;
  Bytes bytes = 0;
  std::uint64_t seed = 0;
  Refusal refusal = Refusal::none;
};

// Blocks of 4 MiB, five of which fill a segment of torch's.
inline constexpr Bytes kHeldBlock = 4_MiB;
inline constexpr Bytes kHeldSegment = 20_MiB;
inline const Machine kHeldMachine{.classes = {{kHeldBlock}, {8}}};

class HeldRig : public CoreRig {
 public:
  explicit HeldRig(const Machine& with = kHeldMachine, bool triggers = true)
      : CoreRig(with),
        cache(*new_cache()),
        torch(driver, *runtime, cache, triggers),
        triggers_(triggers) {
    runtime->use_torch(FakeTorch::side(triggers), cache);
  }

  HeldTensor make(Bytes bytes, driver::Stream on) {
    const HeldTensor tensor = try_make(bytes, on);
    CHECK(tensor.storage != nullptr);
    return tensor;
  }
  // `storage` is null where torch is out of memory.
  HeldTensor try_make(Bytes bytes, driver::Stream on) {
    const HeldTensor tensor{torch.make(bytes, on), bytes, on, ++seeds_};
    if (tensor.storage != nullptr) {
      fill(tensor, on);
    }
    return tensor;
  }
  void fill(const HeldTensor& tensor, driver::Stream on) {
    CHECK_EQ(stagehand_sim_fill(on, tensor.address(), tensor.bytes, tensor.seed), 0);
  }
  void check(const HeldTensor& tensor, driver::Stream on) {
    CHECK_EQ(stagehand_sim_check(on, tensor.address(), tensor.bytes, tensor.seed), 0);
  }
  void drop(const HeldTensor& tensor) { torch.drop(tensor.storage); }
  void drop_all(std::vector<HeldTensor>& tensors) {
    for (const HeldTensor& tensor : tensors) {
      drop(tensor);
    }
    tensors.clear();
  }

  // The pack hook, as entry/hooks.cpp does it.
  SavedTensor try_save(const HeldTensor& tensor, driver::Stream on) {
    FakeTorch::hold(tensor.storage);
    note_usage();
    const Address first = tensor.address();
    const Saved saved = runtime->save_held(
        {tensor.storage, tensor.storage, tensor.storage->address, tensor.storage->bytes}, on, first,
        first, first + tensor.bytes);
    if (!saved.took_reference) {
      torch.drop(tensor.storage);
    }
    runtime->drop_orphans();
    return {saved.record, saved.offset, tensor.bytes, tensor.seed, saved.refusal};
  }
  SavedTensor save(const HeldTensor& tensor) { return save(tensor, tensor.stream); }
  SavedTensor save(const HeldTensor& tensor, driver::Stream on) {
    const SavedTensor saved = try_save(tensor, on);
    CHECK_EQ(saved.refusal, Refusal::none);
    return saved;
  }
  SavedTensor retain(Bytes bytes, driver::Stream on) {
    const HeldTensor tensor = make(bytes, on);
    const SavedTensor saved = save(tensor);
    drop(tensor);
    return saved;
  }
  std::vector<SavedTensor> retain_many(int count, Bytes bytes, driver::Stream on) {
    std::vector<SavedTensor> all;
    for (int i = 0; i < count; ++i) {
      all.push_back(retain(bytes, on));
    }
    return all;
  }
  // The unpack hook: a tensor over the storage, its contents checked on `consumer`.
  HeldTensor unpack(const SavedTensor& saved, driver::Stream consumer) {
    note_usage();
    const Unpacked again = runtime->unpack(saved.record, saved.offset, consumer);
    CHECK_EQ(again.status, Status::ok);
    if (again.status != Status::ok) {
      return {};
    }
    const HeldTensor tensor = view(again, saved, consumer);
    check(again, saved, consumer);
    return tensor;
  }
  // What wrap and drop_alias make of it.
  HeldTensor view(const Unpacked& again, const SavedTensor& saved, driver::Stream consumer) {
    auto* storage = static_cast<Storage*>(again.storage);
    FakeTorch::hold(storage);
    if (again.elsewhere) {
      FakeTorch::side().used_on(storage, 0, consumer);
    }
    runtime->drop_alias(again.block);
    return {storage, saved.bytes, consumer, saved.seed, again.offset};
  }
  void check(const Unpacked& again, const SavedTensor& saved, driver::Stream on) {
    CHECK_EQ(stagehand_sim_check(on, again.address, saved.bytes, saved.seed), 0);
  }
  void drop_handle(const SavedTensor& saved) {
    runtime->drop_handle(saved.record);
    runtime->drop_orphans();
  }
  // Backward's part: unpacked, read; the saved variable and the tensor dropped.
  void back(const SavedTensor& saved, driver::Stream consumer) {
    const HeldTensor tensor = unpack(saved, consumer);
    drop_handle(saved);
    if (tensor.storage != nullptr) {
      drop(tensor);
    }
  }
  void back_all(std::vector<SavedTensor>& saved, driver::Stream consumer) {
    for (; !saved.empty(); saved.pop_back()) {
      back(saved.back(), consumer);
    }
  }
  bool resident(const SavedTensor& saved) { return runtime->resident(saved.record); }
  // The engine looks which storages torch has dropped, and what it looks at is evicted.
  void evict_all(driver::Stream on) {
    const HeldTensor tensor{torch.make(512, on), 512, on, 0};
    runtime->set_debug({true, false});
    const SavedTensor saved = save(tensor);
    runtime->set_debug({});
    drop_handle(saved);
    drop(tensor);
  }
  // The same without evicting.
  void look(driver::Stream on) {
    const HeldTensor tensor{torch.make(512, on), 512, on, 0};
    drop_handle(save(tensor));
    drop(tensor);
  }

  // Where no event tells, each pack and unpack asks torch, as entry/python_side.cpp does.
  void note_usage() {
    if (!triggers_) {
      cache.set_usage(torch.reserved(), torch.allocated());
    }
  }

  void verify() {
    CoreRig::verify();
    CHECK_EQ(torch.differs(cache), "");
  }
  // The program has dropped everything: no reference is left behind.
  void verify_empty() {
    verify();
    torch.release_cached();  // what other streams were still at has passed
    CHECK_EQ(torch.differs(cache), "");
    CHECK_EQ(torch.storages(), 0);
    CHECK_EQ(torch.allocated(), 0);
    note_usage();
    CoreRig::verify_empty();
  }

  CacheMap& cache;
  FakeTorch torch;

 private:
  // Lives as long as the Runtime, which is leaked on purpose (rule T3).
  static CacheMap* new_cache() {
    static auto* const all = new std::vector<CacheMap*>;
    all->push_back(new CacheMap);
    return all->back();
  }

  const bool triggers_;
  std::atomic<std::uint64_t> seeds_{0};
};

}  // namespace stagehand::core::test
