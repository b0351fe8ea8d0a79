// What the core does when the driver or the host says no (rules O3, O4): nothing is lost, and what
// follows works.
#include <string>
#include <vector>

#include "native/core_rig.hpp"

namespace stagehand::core::test {
namespace {

constexpr int kError = 999;

void fail(const char* symbol, std::uint64_t nth, std::uint64_t times = 1, int result = kError) {
  CHECK_EQ(stagehand_sim_fail(symbol, nth, times, result), 0);
}

void recover() {
  for (const char* symbol : driver::kSymbols) {
    stagehand_sim_fail(symbol, 1, 0, 0);
  }
}

// Device memory ----------------------------------------------------------------------------------

TEST("memory refused although under high: evict, move what that frees, and go on") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(256_MiB, 256_MiB);
  const Held held = rig.retain(32_MiB, s);
  fail("cuMemCreate", 1, 1000, driver::kOutOfMemory);
  const Tensor next = rig.make(24_MiB, s);
  CHECK(!rig.resident(held));
  CHECK_EQ(rig.counters().mapped, 32_MiB);
  rig.drop(next);
  rig.back(held, s);
  rig.verify_empty();
}

TEST("memory refused with nothing to evict: out of memory, and right again once there is some") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(256_MiB, 256_MiB);
  const Tensor live = rig.make(32_MiB, s);
  fail("cuMemCreate", 1, 1000, driver::kOutOfMemory);
  CHECK_EQ(rig.try_allocate(24_MiB, s), Status::out_of_memory);
  rig.verify();
  recover();
  const Tensor next = rig.make(24_MiB, s);
  rig.check(live, s);
  rig.drop(live);
  rig.drop(next);
  rig.verify_empty();
}

TEST("another process has the device's memory: what is ours is used again and again") {
  CoreRig rig({.memory = 64_MiB});
  const driver::Stream s = rig.stream();
  driver::PhysicalHandle foreign = 0;
  const driver::AllocationProp prop;
  CHECK_EQ(rig.driver.mem_create(&foreign, 40_MiB, &prop, 0), 0);
  rig.budget(64_MiB, 60_MiB);  // more than there is
  std::vector<Held> saved = rig.retain_many(8, 6_MiB, s);
  CHECK(rig.counters().mapped_peak <= 24_MiB);
  rig.back_all(saved, s);
  rig.verify_empty();
  CHECK_EQ(rig.driver.mem_release(foreign), 0);
}

// Pinned memory ----------------------------------------------------------------------------------

TEST("pinned memory refused: pageable copies, counted as waits, with the right bytes") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CoreRig rig({.seed = seed});
    const driver::Stream s = rig.stream();
    fail("cuMemHostRegister", 1, 1'000'000, driver::kOutOfMemory);
    rig.budget(16_MiB, 16_MiB, 16_MiB);
    std::vector<Held> saved = rig.retain_many(6, 4_MiB, s);
    CHECK(rig.counters().pageable_copies >= 2);
    CHECK(rig.counters().host_waits >= rig.counters().pageable_copies);
    CHECK(rig.counters().pageable_bytes >= rig.counters().evicted);
    rig.back_all(saved, s);
    rig.verify_empty();
  }
}

TEST("pinned memory runs out half-way: copies spread over small slabs, then pageable") {
  CoreRig rig({.classes = {{64_KiB, 4_MiB}, {16, 1}}, .host_limit = 5_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(8_MiB, 8_MiB, 8_MiB);
  std::vector<Held> saved = rig.retain_many(6, 4_MiB, s);
  CHECK(rig.counters().pinned_bytes <= 5_MiB);
  CHECK(rig.counters().pageable_copies > 0);
  rig.back_all(saved, s);
  rig.verify_empty();
}

TEST("a class that cannot grow any more spreads its copies over the slabs of the others") {
  CoreRig rig({.classes = {{64_KiB, 4_MiB}, {16, 2}}, .host_limit = 32_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(256_MiB, 256_MiB);
  const Held small = rig.retain(64_KiB, s);
  rig.evict_all(s);
  const Held large = rig.retain(4_MiB, s);
  rig.evict_all(s);
  CHECK_EQ(rig.counters().pinned_used_bytes, 64_KiB + 4_MiB);
  CHECK_EQ(rig.counters().pageable_copies, 0);
  CHECK(!rig.resident(large));
  rig.back(large, s);
  rig.back(small, s);
  rig.verify_empty();
}

TEST("a record dropped while its pageable copy runs is gone when the copy is") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  fail("cuMemHostRegister", 1, 1'000'000, driver::kOutOfMemory);
  rig.budget(16_MiB, 16_MiB, 16_MiB);
  const Held held = rig.retain(16_MiB, s);
  interludes().stream_synchronize = [&] { rig.runtime->drop_handle(held.record); };
  rig.drop(rig.make(16_MiB, s));
  CHECK_EQ(rig.counters().pageable_copies, 1);
  rig.verify_empty();
}

TEST("a record unpacked while its pageable copy runs stays where it is") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  fail("cuMemHostRegister", 1, 1'000'000, driver::kOutOfMemory);
  rig.budget(16_MiB, 16_MiB, 24_MiB);
  const Held held = rig.retain(16_MiB, s);
  Unpacked again;
  interludes().stream_synchronize = [&] { again = rig.unpack(held, s); };
  const Tensor next = rig.make(8_MiB, s);
  CHECK_EQ(again.address, held.tensor.address);
  CHECK(rig.resident(held));
  rig.check({again.address, 16_MiB, s, held.tensor.seed}, s);
  rig.runtime->drop_alias(again.block);
  rig.drop(next);
  rig.drop(rig.make(20_MiB, s));  // evicts it: the copy is there
  CHECK(!rig.resident(held));
  rig.back(held, s);
  rig.verify_empty();
}

TEST("memory that other threads free while pinned memory is made is used") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(32_MiB, 32_MiB, 32_MiB);
  const Held held = rig.retain(16_MiB, s);
  const Tensor live = rig.make(16_MiB, s);
  interludes().host_register = [&] { rig.drop(live); };
  const Tensor next = rig.make(16_MiB, s);
  CHECK(rig.resident(held));
  CHECK_EQ(next.address, live.address);
  rig.drop(next);
  rig.back(held, s);
  rig.verify_empty();
}

TEST("a record restored by another thread while this one makes room is not restored twice") {
  CoreRig rig({.classes = {{4_MiB}, {1}}, .host_limit = 8_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(8_MiB, 8_MiB, 8_MiB);
  const Held wanted = rig.retain(4_MiB, s);
  rig.evict_all(s);  // pins all 8 MiB
  rig.runtime->configure_pinned({{4_MiB}, {1}}, 16_MiB);
  std::vector<Held> saved;
  for (int i = 0; i < 3; ++i) {
    saved.push_back(rig.retain(4_MiB, s));  // one more slab is used, none is left
  }
  Unpacked other;
  interludes().host_register = [&] {
    rig.runtime->drop_handle(saved[0].record);
    rig.runtime->drop_handle(saved[1].record);
    other = rig.unpack(wanted, s);
  };
  const Unpacked mine = rig.unpack(wanted, s);
  CHECK_EQ(mine.address, other.address);
  CHECK_EQ(rig.counters().restores, 1);
  rig.runtime->drop_alias(mine.block);
  rig.runtime->drop_alias(other.block);
  rig.runtime->drop_handle(wanted.record);
  rig.back(saved[2], s);
  rig.verify_empty();
}

// Copies, events and waits -----------------------------------------------------------------------

TEST("O4: an eviction that fails leaves the record on the device, to be evicted later") {
  for (const char* symbol : {"cuMemcpyDtoHAsync", "cuEventRecord", "cuStreamWaitEvent"}) {
    for (std::uint64_t nth = 1; nth <= 3; ++nth) {
      CoreRig rig({.memory = 64_MiB});
      const driver::Stream s = rig.stream();
      rig.budget(16_MiB, 16_MiB, 16_MiB);
      const Held held = rig.retain(16_MiB, s);
      fail(symbol, nth, 1000);
      const Status status = rig.try_allocate(16_MiB, s);
      CHECK_EQ(rig.runtime->invariants_broken(), "");
      recover();
      if (status != Status::ok) {
        CHECK(rig.resident(held) || nth > 1);
        rig.drop(rig.make(16_MiB, s));
        rig.back(held, s);
        rig.verify_empty();
      }
    }
  }
}

TEST("O4: a restore that fails leaves the record evicted, to be restored later") {
  for (const char* symbol : {"cuMemcpyHtoDAsync", "cuEventRecord", "cuStreamWaitEvent"}) {
    for (std::uint64_t nth = 1; nth <= 3; ++nth) {
      CoreRig rig({.memory = 64_MiB});
      const driver::Stream s = rig.stream();
      rig.budget(64_MiB, 64_MiB);
      const Held held = rig.retain(4_MiB, s);
      rig.evict_all(s);
      fail(symbol, nth, 1000);
      const Unpacked failed = rig.runtime->unpack(held.record, held.offset, s);
      CHECK_EQ(rig.runtime->invariants_broken(), "");
      recover();
      if (failed.status == Status::ok) {
        rig.runtime->drop_alias(failed.block);
      } else {
        CHECK(failed.block == nullptr);
        CHECK_EQ(rig.counters().aliases, 0);
      }
      rig.back(held, s);
      rig.verify_empty();
    }
  }
}

TEST("O4: restoring for want of device memory fails, and works once there is some") {
  CoreRig rig({.memory = 64_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(16_MiB, 16_MiB, 16_MiB);
  const Held held = rig.retain(16_MiB, s);
  const Tensor next = rig.make(16_MiB, s);
  CHECK_EQ(rig.runtime->unpack(held.record, 0, s).status, Status::out_of_memory);
  CHECK_EQ(rig.counters().aliases, 0);
  rig.check(next, s);
  rig.drop(next);
  rig.back(held, s);
  rig.verify_empty();
}

// A step under pressure in which every call may fail once; what fails is asked for again.
void stubborn_step(CoreRig& rig, driver::Stream s) {
  std::vector<Held> saved;
  rig.budget(12_MiB, 9_MiB, 24_MiB);
  for (std::uint64_t layer = 0; layer < 10; ++layer) {
    Tensor tensor{0, 3_MiB, s, 50 + layer};
    for (int tries = 0; tries < 3 && tensor.address == 0; ++tries) {
      rig.runtime->allocate(tensor.bytes, s, 0, &tensor.address);
      CHECK_EQ(rig.runtime->invariants_broken(), "");
    }
    if (tensor.address == 0) {
      CHECK(tensor.address != 0);
      continue;
    }
    rig.fill(tensor, s);
    saved.push_back(rig.save(tensor));
    rig.drop(tensor);
  }
  rig.runtime->clear_budget();
  for (auto held = saved.rbegin(); held != saved.rend(); ++held) {
    Unpacked again{Status::driver_failed, 0, nullptr};
    for (int tries = 0; tries < 3 && again.block == nullptr; ++tries) {
      again = rig.runtime->unpack(held->record, held->offset, s);
      CHECK_EQ(rig.runtime->invariants_broken(), "");
    }
    CHECK_EQ(again.status, Status::ok);
    if (again.block != nullptr) {
      rig.check({again.address, held->tensor.bytes, s, held->tensor.seed}, s);
      rig.runtime->drop_alias(again.block);
    }
    rig.runtime->drop_handle(held->record);
  }
}

TEST("O4: any one driver call of a step may fail, and the step still ends with the right bytes") {
  int runs = 0;
  for (const char* symbol : driver::kSymbols) {
    if (std::string(symbol).rfind("cuCtx", 0) == 0) {
      continue;  // pushing and popping the context cannot fail by themselves
    }
    std::uint64_t calls = 1;
    for (std::uint64_t nth = 1; nth <= calls && nth <= 24; ++nth) {
      CoreRig rig({.seed = nth, .memory = 64_MiB});
      const driver::Stream s = rig.stream();
      const std::uint64_t before = stagehand_sim_call_count(symbol);
      fail(symbol, nth, 1, nth % 2 == 0 ? kError : driver::kOutOfMemory);
      stubborn_step(rig, s);
      calls = stagehand_sim_call_count(symbol) - before;
      recover();
      rig.verify_empty();
      ++runs;
    }
  }
  CHECK(runs > 120);
}

TEST("a device that cannot be opened says which call failed") {
  for (const char* symbol : {"cuDevicePrimaryCtxRetain", "cuMemGetInfo",
                             "cuMemGetAllocationGranularity", "cuStreamCreateWithPriority"}) {
    const CoreRig rig;
    fail(symbol, 1);
    std::string error;
    CHECK(Runtime::open(rig.driver, 0, &error) == nullptr);
    CHECK(error.find(symbol) != std::string::npos);
    CHECK(error.find("999") != std::string::npos);
  }
}

TEST("a device serves a thread with no context from the very first call on") {
  const CoreRig rig;
  std::string error;
  static Runtime* opened = nullptr;  // leaked, rule T3
  opened = Runtime::open(rig.driver, 0, &error);
  driver::Context popped = nullptr;
  CHECK_EQ(rig.driver.ctx_pop_current(&popped), 0);
  CHECK(opened->start_timeline());  // makes an event, which is of the context that is current
  driver::Context current = nullptr;
  CHECK_EQ(rig.driver.ctx_get_current(&current), 0);
  CHECK(current == nullptr);
  CHECK_EQ(rig.driver.ctx_push_current(popped), 0);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
