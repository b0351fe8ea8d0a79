// Promises about two GPUs in one process: what is ordered on one is not said to the other.
#include "native/promise_rig.hpp"

namespace stagehand::core::test {
namespace {

const std::uint64_t kSeeds = stagehand::test::seeds(40);

// Prefetched storages, their copies in flight, are let go of while device `current` is; torch hands
// their memory out again at once.
void drop_prefetched(std::uint64_t seed, int current, driver::Stream s) {
  Machine with = kHeldMachine;
  with.seed = seed;
  with.devices = 2;
  HeldRig rig(with);
  rig.budget(64_MiB, 64_MiB);
  std::vector<SavedTensor> saved = rig.retain_many(3, kHeldBlock, s);
  rig.evict_all(s);
  const HeldTensor view = rig.unpack(saved[2], s);
  CHECK(rig.resident(saved[0]) && rig.resident(saved[1]));
  on_device(rig, current, [&] {
    rig.drop_handle(saved[0]);
    rig.drop_handle(saved[1]);
  });
  std::vector<HeldTensor> next{rig.make(kHeldBlock, s), rig.make(kHeldBlock, s)};
  for (const HeldTensor& one : next) {
    rig.check(one, s);
  }
  stagehand_sim_drain();
  for (const HeldTensor& one : next) {
    rig.check(one, s);
  }
  rig.drop_all(next);
  rig.drop_handle(saved[2]);
  rig.drop(view);
  rig.verify_empty();
}

TEST("a graph dropped while another device is current puts no copy behind that device's stream") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    drop_prefetched(seed, 0, nullptr);
    drop_prefetched(seed, 1, nullptr);
  }
}

// As drop_prefetched, on a thread that has never used CUDA: a collector's, for one.
TEST("a graph dropped on a thread without a context leaves no storage behind") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Machine with = kHeldMachine;
    with.seed = seed;
    HeldRig rig(with);
    rig.budget(64_MiB, 64_MiB);
    std::vector<SavedTensor> saved = rig.retain_many(3, kHeldBlock, nullptr);
    rig.evict_all(nullptr);
    const HeldTensor view = rig.unpack(saved[2], nullptr);
    std::thread([&] {
      rig.drop_handle(saved[0]);
      rig.drop_handle(saved[1]);
    }).join();
    CHECK_EQ(rig.torch.storages(), 1);
    std::vector<HeldTensor> next{rig.make(kHeldBlock, nullptr), rig.make(kHeldBlock, nullptr)};
    stagehand_sim_drain();
    for (const HeldTensor& one : next) {
      rig.check(one, nullptr);
    }
    rig.drop_all(next);
    rig.drop_handle(saved[2]);
    rig.drop(view);
    rig.verify_empty();
  }
}

// A miss at which torch gives its free segments back: memory was over high before.
void give_segments_back(HeldRig& rig, driver::Stream s, Bytes in_use = 0) {
  const HeldTensor large = rig.make(56_MiB, s);
  CHECK_EQ(rig.torch.reserved(), in_use + 56_MiB);
  rig.drop(large);
}

// `later`, of `device`, waits for all that `earlier`, of the other one, has queued so far.
void order_across(CoreRig& rig, driver::Stream earlier, driver::Stream later, int device) {
  driver::Event event = nullptr;
  on_device(rig, 1 - device, [&] {
    CHECK_EQ(rig.driver.event_create(&event, driver::kEventDisableTiming), 0);
    CHECK_EQ(rig.driver.event_record(event, earlier), 0);
  });
  on_device(rig, device, [&] { CHECK_EQ(rig.driver.stream_wait_event(later, event, 0), 0); });
  CHECK_EQ(rig.driver.event_destroy(event), 0);
}

// torch's copy from device to device: both sides' streams wait for each other, and the result may
// be dropped at once. The driver takes its memory away from the device that writes it before it
// waits for the one it is of.
TEST("torch's segments go back only when other devices are done with them") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Machine with = kHeldMachine;
    with.seed = seed;
    with.devices = 2;
    HeldRig rig(with);
    driver::Stream other = nullptr;
    on_device(rig, 1, [&] { other = rig.stream(); });
    rig.budget(64_MiB, 40_MiB);
    const HeldTensor kept = rig.make(12_MiB, nullptr);
    const HeldTensor copied = rig.make(54_MiB, nullptr);
    order_across(rig, nullptr, other, 1);
    rig.fill(copied, other);
    order_across(rig, other, nullptr, 0);
    rig.check(copied, nullptr);
    rig.drop(copied);
    give_segments_back(rig, nullptr, 12_MiB);
    rig.drop(kept);
    rig.verify_empty();
  }
}

// The same the other way round: torch gives back what is free on all devices.
TEST("segments of another device go back only when this one is done with them") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Machine with = kHeldMachine;
    with.seed = seed;
    with.devices = 2;
    HeldRig rig(with);
    const driver::Stream s = rig.stream();
    rig.budget(64_MiB, 40_MiB);
    rig.drop(rig.make(50_MiB, s));
    rig.drop(rig.make(52_MiB, s));
    Address address = 0;
    driver::PhysicalHandle handle = 0;
    driver::AllocationProp prop;
    prop.location.id = 1;
    const driver::AccessDesc access[] = {{{1, 0}, 3}, {{1, 1}, 3}};
    CHECK_EQ(rig.driver.mem_create(&handle, 4_MiB, &prop, 0), 0);
    CHECK_EQ(rig.driver.address_reserve(&address, 4_MiB, 0, 0, 0), 0);
    CHECK_EQ(rig.driver.mem_map(address, 4_MiB, 0, handle, 0), 0);
    CHECK_EQ(rig.driver.mem_set_access(address, 4_MiB, access, 2), 0);
    CHECK_EQ(stagehand_sim_fill(s, address, 4_MiB, 7), 0);  // the copy to it
    bool gone = false;
    rig.torch.release_others = [&] {
      if (gone) {
        return;
      }
      gone = true;
      static CacheMap of_other;
      of_other.apply({CacheEvent::segment, 1, address, 4_MiB, nullptr, {}});
      of_other.apply({CacheEvent::segment_gone, 1, address, 4_MiB, nullptr, {}});
      stagehand_sim_take_from_others(address, 4_MiB, 1);
      CHECK_EQ(rig.driver.mem_unmap(address, 4_MiB), 0);
      CHECK_EQ(rig.driver.mem_release(handle), 0);
      CHECK_EQ(rig.driver.address_free(address, 4_MiB), 0);
    };
    give_segments_back(rig, s);
    CHECK(gone);
    rig.verify_empty();
  }
}

// As a collective that waits for a peer that this thread is to start.
TEST("a request is served although another device's work waits for this thread") {
  Machine with = kHeldMachine;
  with.devices = 2;
  HeldRig rig(with);
  alignas(4096) static std::uint64_t page[512];
  const auto word = reinterpret_cast<driver::DevicePtr>(&page[0]);
  page[0] = 0;
  CHECK_EQ(rig.driver.host_register(page, sizeof page, 1), 0);
  driver::Stream other = nullptr;
  on_device(rig, 1, [&] { other = rig.stream(); });
  rig.budget(64_MiB, 40_MiB);
  const HeldTensor kept = rig.make(12_MiB, nullptr);
  rig.drop(rig.make(54_MiB, nullptr));
  on_device(rig, 1, [&] {
    CHECK_EQ(rig.driver.stream_wait_value64(other, word, 1, driver::kWaitValueGeq), 0);
  });
  const HeldTensor large = rig.make(56_MiB, nullptr);
  CHECK_EQ(rig.torch.reserved(), 12_MiB + 54_MiB + 56_MiB);  // nothing went back
  __atomic_store_n(&page[0], 1, __ATOMIC_SEQ_CST);
  rig.drop(large);
  rig.drop(kept);
  on_device(rig, 1, [&] { CHECK_EQ(rig.driver.stream_synchronize(other), 0); });
  CHECK_EQ(rig.driver.host_unregister(page), 0);
  rig.verify_empty();
}

// Whether blocks that a stream of device 1 was said to use, or that it was not, are evicted.
void evict_beside_user(bool foreign) {
  CoreRig rig({.devices = 2, .classes = {{4_MiB}, {8}}});
  const driver::Stream s = rig.stream();
  driver::Stream other = nullptr;
  on_device(rig, 1, [&] { other = rig.stream(); });
  rig.budget(24_MiB, 16_MiB);
  const Tensor tensor = rig.make(4_MiB, s);
  if (foreign) {
    rig.runtime->record_stream(tensor.address, other);
  }
  std::vector<Held> held{rig.save(tensor)};
  rig.drop(tensor);
  for (const Held& one : rig.retain_many(4, 4_MiB, s)) {
    held.push_back(one);
  }
  std::vector<Tensor> live;
  for (int i = 0; i < 4; ++i) {
    live.push_back(rig.make(4_MiB, s));
  }
  CHECK_EQ(rig.counters().overshoot_bytes, 0);
  for (const Tensor& one : live) {
    rig.drop(one);
  }
  rig.back_all(held, s);
  rig.budget(24_MiB, 16_MiB, 24_MiB);
  CHECK_EQ(rig.try_allocate(24_MiB, s), Status::ok);
  rig.verify();
}

TEST("saved blocks are evicted down to high, the plain case") { evict_beside_user(false); }

TEST("one block that a stream of another device uses does not keep the others from leaving") {
  evict_beside_user(true);
}

TEST("where another device cannot be waited for torch grows, and gives nothing back") {
  Machine with = kHeldMachine;
  with.devices = 2;
  HeldRig rig(with);
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 40_MiB);
  const HeldTensor kept = rig.make(12_MiB, s);
  rig.drop(rig.make(54_MiB, s));
  CHECK_EQ(stagehand_sim_fail("cuCtxSynchronize", 1, 1, 900), 0);  // a graph is captured there
  rig.drop(rig.make(56_MiB, s));
  CHECK_EQ(rig.torch.reserved(), 12_MiB + 54_MiB + 56_MiB);
  rig.drop(rig.make(58_MiB, s));
  CHECK_EQ(rig.torch.reserved(), 12_MiB + 58_MiB);
  rig.drop(kept);
  rig.verify_empty();
}

// The first byte of what the driver never copies to the host.
Address& refused() {
  static Address address = 0;
  return address;
}

TEST("one block that the driver does not copy does not keep the others from leaving") {
  Machine machine{.classes = {{4_MiB}, {8}}};
  machine.patch = [](driver::Table& table) {
    static decltype(table.memcpy_dtoh_async) real;
    real = table.memcpy_dtoh_async;
    table.memcpy_dtoh_async = [](void* host, driver::DevicePtr device, std::size_t bytes,
                                 driver::Stream on) {
      const bool no = device <= refused() && refused() < device + bytes;
      return no ? driver::kInvalidDevice : real(host, device, bytes, on);
    };
    table.memcpy_batch_async = nullptr;  // an older driver: all copies come by the one above
  };
  CoreRig rig(machine);
  const driver::Stream s = rig.stream();
  rig.budget(24_MiB, 16_MiB);
  std::vector<Held> held = rig.retain_many(5, 4_MiB, s);
  refused() = held.front().tensor.address;
  std::vector<Tensor> live;
  for (int i = 0; i < 4; ++i) {
    live.push_back(rig.make(4_MiB, s));
  }
  CHECK(rig.resident(held.front()));
  CHECK_EQ(rig.counters().overshoot_bytes, 0);
  for (const Tensor& one : live) {
    rig.drop(one);
  }
  rig.back_all(held, s);
  refused() = 0;
  rig.verify_empty();
}

TEST("memory that a stream of another device was said to use serves again some time") {
  CoreRig rig({.memory = 64_MiB, .devices = 2});
  const driver::Stream s = rig.stream();
  driver::Stream foreign = nullptr;
  on_device(rig, 1, [&] { foreign = rig.stream(); });
  rig.budget(32_MiB, 32_MiB, 32_MiB);
  const Address address = rig.allocate(20_MiB, s);
  rig.runtime->record_stream(address, foreign);
  CHECK(rig.runtime->free(address));
  stagehand_sim_drain();
  rig.runtime->trim(0);
  CHECK_EQ(rig.counters().mapped, 0);
  CHECK_EQ(rig.try_allocate(20_MiB, s), Status::ok);
  CHECK_EQ(rig.counters().mapped, 20_MiB);
}

// The default streams of all devices have one handle, null, and torch's interface of a process's
// own allocator does not say whose is meant.
TEST("memory that another device's default stream reads is not handed out under its reads") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    CoreRig rig({.seed = seed, .memory = 64_MiB, .devices = 2});
    CHECK_EQ(rig.runtime->add_peer(1), Status::ok);
    const Tensor tensor = rig.make(4_MiB, nullptr);
    stagehand_sim_drain();  // device 1 comes after what was written,
    on_device(rig, 1, [&] { rig.check(tensor, nullptr); });  // and reads
    rig.runtime->record_stream(tensor.address, nullptr);
    rig.drop(tensor);
    const Tensor next = rig.make(4_MiB, nullptr);
    rig.check(next, nullptr);
    rig.drop(next);
    rig.verify();
  }
}

TEST("memory that another device's default stream reads is not given back under its reads") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    CoreRig rig({.seed = seed, .memory = 64_MiB, .devices = 2});
    CHECK_EQ(rig.runtime->add_peer(1), Status::ok);
    stagehand_sim_progress(0);  // what is queued runs only where somebody waits for it
    const Tensor tensor = rig.make(4_MiB, nullptr);
    stagehand_sim_drain();
    on_device(rig, 1, [&] { rig.check(tensor, nullptr); });
    rig.runtime->record_stream(tensor.address, nullptr);
    rig.drop(tensor);
    CHECK_EQ(rig.runtime->trim(0), rig.counters().mapped_peak);
    rig.verify();
  }
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
