// Promises about what comes back ahead of need in torch's modes: it costs nobody else anything.
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "native/promise_rig.hpp"
#include "native/trace.hpp"

namespace stagehand::core::test {
namespace {

int& refusals() {
  static int count = 0;
  return count;
}

// Torch's own way out of a request that the driver refuses is to give its whole cache back, which
// waits for the GPU.
TEST("prefetch does not ask torch for memory that the driver does not have") {
  Machine machine{.memory = 64_MiB, .classes = {{kHeldBlock}, {16}}};
  machine.patch = [](driver::Table& table) {
    static decltype(table.mem_create) real;
    real = table.mem_create;
    table.mem_create = [](driver::PhysicalHandle* handle, std::size_t bytes,
                          const driver::AllocationProp* prop, unsigned long long flags) {
      const driver::Result result = real(handle, bytes, prop, flags);
      refusals() += result != driver::kSuccess ? 1 : 0;
      return result;
    };
  };
  refusals() = 0;
  HeldRig rig(machine);
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  std::vector<SavedTensor> saved = rig.retain_many(10, kHeldBlock, s);  // two segments
  rig.evict_all(s);
  rig.torch.release_cached();
  // Another program takes all of the GPU but for one segment.
  const driver::AllocationProp prop;
  driver::PhysicalHandle others = 0;
  CHECK_EQ(rig.driver.mem_create(&others, 64_MiB - kHeldSegment - 2_MiB, &prop, 0), 0);
  stagehand_sim_drain();
  const std::uint64_t waits = stagehand_sim_call_count("cuCtxSynchronize");
  int resident = 0;
  for (int i = 0; i < 5; ++i) {
    const SavedTensor one = saved.back();
    saved.pop_back();
    rig.back(one, s);
    resident += saved.empty() || !rig.resident(saved.back()) ? 0 : 1;
  }
  CHECK_EQ(refusals(), 0);
  CHECK_EQ(stagehand_sim_call_count("cuCtxSynchronize"), waits);
  CHECK(resident > 0);  // it does prefetch what there is room for
  CHECK_EQ(rig.driver.mem_release(others), 0);
  rig.back_all(saved, s);
  rig.verify_empty();
}

// Each batch may have twice as many records as the one before, and is full with one of these.
TEST("a prefetch of more batches than a number has bits ends") {
  constexpr Bytes kBatch = 32_MiB;
  constexpr int kRecords = 160;
  HeldRig rig(trace_machine());
  const driver::Stream s = rig.stream();
  rig.budget(8_GiB, 8_GiB);
  std::vector<SavedTensor> saved;
  for (int i = 0; i < kRecords; ++i) {
    Storage* storage = rig.torch.make(kBatch, s);
    saved.push_back(rig.save({storage, kBatch, s}));
    rig.torch.drop(storage);
  }
  rig.evict_all(s);
  CHECK(!rig.resident(saved.front()));
  for (; !saved.empty(); saved.pop_back()) {
    const Unpacked again = rig.runtime->unpack(saved.back().record, saved.back().offset, s);
    CHECK_EQ(again.status, Status::ok);
    Storage* storage = rig.view(again, saved.back(), s).storage;
    if (saved.size() == kRecords / 2) {
      CHECK(rig.resident(saved.front()));
    }
    rig.drop_handle(saved.back());
    rig.torch.drop(storage);
  }
  stagehand_sim_drain();
  rig.verify_empty();
}

// What is there is on the way to what is not: one of sixteen leaves, and there is room for few.
TEST("of thousands of small records an unpack looks at a few, not at all that are alive") {
  constexpr Bytes kBytes = 64_KiB;
  constexpr int kRecords = 4096;
  CoreRig rig({.memory = 2_GiB, .classes = {{kBytes}, {kRecords}}, .host_limit = 1_GiB});
  const driver::Stream s = rig.stream();
  rig.budget(1_GiB, 1_GiB);
  std::vector<Held> held = rig.retain_many(kRecords, kBytes, s);
  const Bytes all = rig.counters().occupied;
  rig.budget(all - all / 16, all - all / 16 - 1_MiB);
  rig.drop(rig.make(kBytes, s));
  stagehand_sim_drain();
  CHECK(rig.counters().evicted >= all / 16);
  const std::uint64_t before = rig.runtime->prefetcher().looked();
  rig.back_all(held, s);
  CHECK(rig.counters().prefetches > 0);
  CHECK(rig.runtime->prefetcher().looked() - before <= 16U * kRecords);
  rig.verify_empty();
}

TEST("what is asked for now does not wait for what was queued to come back ahead of need") {
  constexpr Bytes kBytes = 8_MiB;
  constexpr int kRecords = 64;
  CoreRig rig({.memory = 2_GiB, .classes = {{kBytes}, {kRecords}}, .host_limit = 1_GiB});
  const driver::Stream s = rig.stream();
  rig.budget(1_GiB, kRecords / 2 * kBytes);  // room for half of them, ahead of need
  std::vector<Held> held = rig.retain_many(kRecords, kBytes, s);
  rig.evict_all(s);
  stagehand_sim_drain();
  const auto since = [began = stagehand_sim_clock_ns()] {
    return stagehand_sim_clock_ns() - began;
  };
  rig.back(held.back(), s);  // queues what comes after it
  held.pop_back();
  CHECK(!rig.runtime->resident(held.front().record));
  rig.back(held.front(), s);
  held.erase(held.begin());
  CHECK_EQ(rig.driver.stream_synchronize(s), driver::kSuccess);
  const std::uint64_t one = since();
  stagehand_sim_drain();
  CHECK(one < since() / 2);
  rig.back_all(held, s);
  rig.verify_empty();
}

// The host asks for all that is on its way before the GPU has any of it.
TEST("what comes back ahead of need overtakes nothing that is awaited already") {
  constexpr Bytes kBytes = 32_MiB;
  CoreRig rig({.memory = 1_GiB, .classes = {{kBytes}, {8}}, .host_limit = 1_GiB});
  const driver::Stream s = rig.stream();
  rig.budget(512_MiB, 3 * kBytes);  // room for two, ahead of need
  const std::vector<Held> held = rig.retain_many(8, kBytes, s);
  rig.evict_all(s);
  stagehand_sim_drain();
  std::vector<Unpacked> aliases;
  const auto ask = [&](int i) { aliases.push_back(rig.unpack(held[i], s)); };
  const auto leave = [&](int i) {
    rig.runtime->drop_alias(aliases[7 - i].block);
    rig.runtime->drop_handle(held[i].record);
  };
  ask(7);
  CHECK(rig.runtime->resident(held[5].record));
  ask(6);
  ask(5);
  leave(7);
  leave(6);
  ask(4);
  CHECK(rig.runtime->resident(held[3].record));
  CHECK_EQ(rig.counters().overtakes, 0);
  leave(5);
  leave(4);
  for (int i = 3; i >= 0; --i) {
    ask(i);
    leave(i);
  }
  rig.verify_empty();
}

// A copy out under a rate takes weeks, and who wants its record again waits for it.
TEST("a record whose copy out is held back keeps nothing else from coming back ahead of need") {
  constexpr Bytes kBytes = 8_MiB;
  CoreRig rig({.memory = 512_MiB, .classes = {{kBytes}, {8}}, .host_limit = 256_MiB});
  const driver::Stream s = rig.stream();
  const driver::Stream other = rig.stream();
  rig.budget(256_MiB, 256_MiB);
  std::vector<Held> held = rig.retain_many(3, kBytes, s);
  rig.evict_all(s);
  stagehand_sim_drain();
  CHECK(rig.runtime->set_lane_limits({.rate_d2h = 1}));
  const Held last = rig.retain(kBytes, s);
  rig.evict_all(s);
  const Unpacked awaited = rig.unpack(last, s);  // and what is wanted next comes in turn
  CHECK_EQ(awaited.status, Status::ok);
  CHECK(rig.runtime->resident(held.back().record));
  const Unpacked next = rig.unpack(held.back(), other);
  std::atomic<bool> done = false;
  std::atomic<bool> let_go = false;
  std::thread watch([&] {
    for (int i = 0; i < 300 && !done; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (!done) {
      let_go = true;
      rig.runtime->set_lane_limits({});
    }
  });
  CHECK_EQ(rig.driver.stream_synchronize(other), driver::kSuccess);
  done = true;
  watch.join();
  CHECK(!let_go);
  CHECK(rig.runtime->set_lane_limits({}));
  rig.order(s, other);
  for (const auto& [alias, record] : {std::pair{awaited, last}, std::pair{next, held.back()}}) {
    rig.runtime->drop_alias(alias.block);
    rig.runtime->drop_handle(record.record);
  }
  held.pop_back();
  rig.back_all(held, s);
  stagehand_sim_drain();
  rig.verify_empty();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
