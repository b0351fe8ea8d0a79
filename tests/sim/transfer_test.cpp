// Copies in batches, and streams held back by a value: their hazards, their time, and what waits.
#include <atomic>
#include <chrono>
#include <cstring>
#include <set>
#include <thread>

#include "sim/rig.hpp"

extern "C" int cuGetProcAddress_v2(const char* symbol, void** address, int version,
                                   std::uint64_t flags, int* status);

namespace stagehand::sim::test {

namespace {

constexpr std::uint64_t kCopyNs = 6000;

driver::DevicePtr number(const void* host) { return reinterpret_cast<driver::DevicePtr>(host); }

struct Copy {
  driver::DevicePtr to;
  driver::DevicePtr from;
  std::size_t bytes = kBytes;
};

driver::Result batch(Rig& rig, const std::vector<Copy>& copies, driver::Stream on) {
  std::vector<driver::DevicePtr> to;
  std::vector<driver::DevicePtr> from;
  std::vector<std::size_t> sizes;
  for (const Copy& copy : copies) {
    to.push_back(copy.to);
    from.push_back(copy.from);
    sizes.push_back(copy.bytes);
  }
  driver::CopyAttributes attributes;
  std::size_t start = 0;
  return rig.driver.memcpy_batch_async(to.data(), from.data(), sizes.data(), sizes.size(),
                                       &attributes, &start, 1, on);
}

std::uint64_t* word_of(unsigned char* slab) { return reinterpret_cast<std::uint64_t*>(slab); }

void raise(unsigned char* slab, std::uint64_t value) {
  std::atomic_ref<std::uint64_t>(*word_of(slab)).store(value, std::memory_order_release);
}

void hold(Rig& rig, driver::Stream stream, const unsigned char* slab, std::uint64_t value = 1) {
  CHECK_EQ(rig.driver.stream_wait_value64(stream, number(slab), value, driver::kWaitValueGeq), 0);
}

}  // namespace

// Batches ----------------------------------------------------------------------------------------

TEST("a batch out that does not wait for the kernel that writes one of its blocks is a race") {
  planted(STAGEHAND_SIM_DEVICE_RACE, [](Rig& rig, bool broken) {
    const auto early = rig.block();
    const auto late = rig.block();
    const auto compute = rig.stream();
    const auto lane = rig.stream();
    stagehand_sim_fill(compute, early, kBytes, 1);
    rig.order(compute, lane);
    stagehand_sim_fill(compute, late, kBytes, 2);
    if (!broken) {
      rig.order(compute, lane);
    }
    CHECK_EQ(batch(rig, {{number(rig.slab()), early}, {number(rig.slab()), late}}, lane), 0);
  });
}

TEST("reuse of a block that a queued batch still reads is a race") {
  planted(STAGEHAND_SIM_DEVICE_RACE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto compute = rig.stream();
    const auto lane = rig.stream();
    CHECK_EQ(batch(rig, {{number(rig.slab()), rig.block()}, {number(rig.slab()), block}}, lane), 0);
    if (!broken) {
      rig.order(lane, compute);
    }
    stagehand_sim_fill(compute, block, kBytes, 2);
  });
}

TEST("a slab refilled behind a batch that still reads it is a race") {
  planted(STAGEHAND_SIM_HOST_RACE, [](Rig& rig, bool broken) {
    unsigned char* const slab = rig.slab();
    const auto in = rig.stream();
    const auto out = rig.stream();
    CHECK_EQ(batch(rig, {{rig.block(), number(slab)}, {rig.block(), number(rig.slab())}}, in), 0);
    if (!broken) {
      rig.order(in, out);
    }
    rig.d2h(slab, rig.block(), kBytes, out);
  });
}

TEST("one copy of a batch that reads what another one writes is a race") {
  planted(STAGEHAND_SIM_DEVICE_RACE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto lane = rig.stream();
    const Copy in{block, number(rig.slab())};
    const Copy out{number(rig.slab()), block};
    if (broken) {
      CHECK_EQ(batch(rig, {in, out}, lane), 0);
    } else {
      CHECK_EQ(batch(rig, {in}, lane), 0);
      CHECK_EQ(batch(rig, {out}, lane), 0);
    }
  });
}

TEST("two copies of a batch may read the same bytes, but not write them") {
  planted(STAGEHAND_SIM_HOST_RACE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    unsigned char* const slab = rig.slab();
    unsigned char* const other = broken ? slab + kBytes / 2 : rig.slab();
    CHECK_EQ(batch(rig, {{number(slab), block}, {number(other), block, kBytes / 2}}, rig.stream()),
             0);
  });
}

TEST("memory unmapped under a queued batch is a free in use") {
  planted(STAGEHAND_SIM_FREE_IN_USE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto lane = rig.stream();
    CHECK_EQ(batch(rig, {{number(rig.slab()), block}, {number(rig.slab()), rig.block()}}, lane), 0);
    if (!broken) {
      CHECK_EQ(rig.driver.stream_synchronize(lane), 0);
    }
    CHECK_EQ(rig.driver.mem_unmap(block, kGranule), 0);
  });
}

TEST("a batch with one bad copy queues none") {
  Rig rig(1);
  const auto block = rig.block();
  const auto lane = rig.stream();
  const Copy good{number(rig.slab()), block};
  std::vector<unsigned char> pageable(kBytes);
  CHECK(batch(rig, {good, {number(pageable.data()), block}}, lane) != 0);
  CHECK(batch(rig, {good, {number(rig.slab()), block, 0}}, lane) != 0);
  CHECK(batch(rig, {good, {number(rig.slab()), number(rig.slab())}}, lane) != 0);
  CHECK(batch(rig, {}, lane) != 0);
  CHECK(batch(rig, {good}, nullptr) != 0);
  CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_ALL), 0);
  const auto unmapped = rig.reserve(kGranule);
  CHECK(batch(rig, {good, {number(rig.slab()), unmapped}}, lane) != 0);
  CHECK_EQ(stagehand_sim_queued(), 0);
  CHECK_ONE_HAZARD(STAGEHAND_SIM_UNMAPPED);
}

TEST("a batch costs six microseconds in all, and bytes over bandwidth") {
  Rig rig(2);
  const auto lane = rig.stream();
  std::vector<Copy> copies;
  for (int i = 0; i < 50; ++i) {
    copies.push_back({number(rig.slab()), rig.block(), 1000});
  }
  CHECK_EQ(batch(rig, copies, lane), 0);
  CHECK_EQ(rig.driver.stream_synchronize(lane), 0);
  CHECK_EQ(stagehand_sim_clock_ns(), kCopyNs + 50 * 1000);
  CHECK_EQ(stagehand_sim_call_count("cuMemcpyBatchAsync"), 1);
}

TEST("the copies of a batch run in an order that the seed chooses") {
  std::set<int> first;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Rig rig(seed);
    const auto block = rig.block();
    std::memset(reinterpret_cast<void*>(block), 1, kBytes);
    std::vector<unsigned char*> slabs;
    std::vector<Copy> copies;
    for (int i = 0; i < 3; ++i) {
      slabs.push_back(rig.slab());
      copies.push_back({number(slabs.back()), block, 64});
    }
    CHECK_EQ(batch(rig, copies, rig.stream()), 0);
    stagehand_sim_step(1);
    for (int i = 0; i < 3; ++i) {
      if (slabs[static_cast<std::size_t>(i)][0] == 1) {
        first.insert(i);
      }
    }
  }
  CHECK_EQ(first.size(), 3);
}

TEST("a batch made to fail queues nothing") {
  Rig rig(3);
  stagehand_sim_fail("cuMemcpyBatchAsync", 1, 1, 999);
  const std::vector<Copy> copies{{number(rig.slab()), rig.block()}};
  const auto lane = rig.stream();
  CHECK_EQ(batch(rig, copies, lane), 999);
  CHECK_EQ(stagehand_sim_queued(), 0);
  CHECK_EQ(batch(rig, copies, lane), 0);
  CHECK_EQ(stagehand_sim_queued(), 1);
}

TEST("a batch is found only in a driver that has it, by who knows its form") {
  for (const bool old : {false, true}) {
    RigSettings with;
    with.flags |= old ? STAGEHAND_SIM_OLD_DRIVER : 0;
    Rig rig(4, with);
    void* address = nullptr;
    CHECK_EQ(cuGetProcAddress_v2("cuMemcpyBatchAsync", &address, 13000, 0, nullptr) == 0, !old);
    CHECK_EQ(address != nullptr, !old);
    CHECK_EQ(rig.driver.memcpy_batch_async != nullptr, !old);
    CHECK(cuGetProcAddress_v2("cuMemcpyBatchAsync", &address, 12000, 0, nullptr) != 0);
    CHECK_EQ(cuGetProcAddress_v2("cuStreamWaitValue64", &address, 12000, 0, nullptr), 0);
  }
}

// Values -----------------------------------------------------------------------------------------

TEST("a held stream runs on once the host raises the value, under every seed") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Rig rig(seed);
    const auto block = rig.block();
    const auto lane = rig.stream();
    unsigned char* const word = rig.slab(8);
    hold(rig, lane, word, 2);
    CHECK_EQ(rig.driver.memset_d8_async(block, 0x21, kBytes, lane), 0);
    const auto event = rig.record(lane);
    while (stagehand_sim_step(1) > 0) {
    }
    raise(word, 1);
    for (int i = 0; i < 200; ++i) {
      CHECK_EQ(rig.driver.event_query(event), driver::kNotReady);
    }
    CHECK_EQ(stagehand_sim_queued(), 3);
    CHECK_EQ(*reinterpret_cast<unsigned char*>(block), 0);
    raise(word, 2);
    CHECK_EQ(rig.driver.event_synchronize(event), 0);
    CHECK_EQ(*reinterpret_cast<unsigned char*>(block), 0x21);
    CHECK_NO_HAZARD();
  }
}

TEST("the host may wait for a held stream while another thread raises the value") {
  Rig rig(5);
  const auto lane = rig.stream();
  const auto other = rig.stream();
  unsigned char* const word = rig.slab(8);
  hold(rig, lane, word);
  const auto event = rig.record(lane);
  for (int way = 0; way < 4; ++way) {
    hold(rig, lane, word, static_cast<std::uint64_t>(way) + 1);
    CHECK_EQ(rig.driver.event_record(event, lane), 0);
    std::thread raiser([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK_EQ(rig.driver.stream_synchronize(other), 0);
      raise(word, static_cast<std::uint64_t>(way) + 1);
    });
    if (way == 0) {
      CHECK_EQ(rig.driver.stream_synchronize(lane), 0);
    } else if (way == 1) {
      CHECK_EQ(rig.driver.event_synchronize(event), 0);
    } else if (way == 2) {
      CHECK_EQ(rig.driver.ctx_synchronize(), 0);
    } else {
      stagehand_sim_drain();
    }
    CHECK_EQ(stagehand_sim_queued(), 0);
    raiser.join();
  }
  CHECK_EQ(stagehand_sim_host_waits(), 3);
}

TEST("host-synchronous work behind a held stream waits for the value") {
  RigSettings with;
  with.flags |= STAGEHAND_SIM_HOST_SYNCHRONOUS;
  Rig rig(6, with);
  const auto block = rig.block();
  const auto lane = rig.stream();
  unsigned char* const word = rig.slab(8);
  hold(rig, lane, word);
  CHECK_EQ(rig.driver.memset_d8_async(block, 0x13, kBytes, lane), 0);
  const auto event = rig.record(lane);
  std::thread raiser([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK_EQ(rig.driver.event_query(event), driver::kNotReady);
    raise(word, 1);
  });
  CHECK_EQ(rig.driver.stream_wait_event(nullptr, event, 0), 0);
  CHECK_EQ(*reinterpret_cast<unsigned char*>(block), 0x13);
  raiser.join();
  CHECK_EQ(stagehand_sim_host_waits(), 0);
}

TEST("work behind a value starts when the host has raised it") {
  constexpr std::uint64_t kRaisedNs = 50'000;
  for (const bool at_once : {false, true}) {
    Rig rig(7);
    const auto lane = rig.stream();
    unsigned char* const word = rig.slab(8);
    const auto start = rig.record(rig.stream());
    raise(word, at_once ? 1 : 0);
    hold(rig, lane, word);
    rig.d2h(rig.slab(), rig.block(), 1000, lane);
    const auto end = rig.record(lane);
    stagehand_sim_advance_ns(kRaisedNs);
    raise(word, 1);
    stagehand_sim_advance_ns(1'000'000);  // the first call to see the value is at kRaisedNs
    stagehand_sim_drain();
    float milliseconds = 0;
    CHECK_EQ(rig.driver.event_elapsed_time(&milliseconds, start, end), 0);
    const std::uint64_t expected = (at_once ? 0 : kRaisedNs) + 1000 + kCopyNs;
    CHECK_EQ(static_cast<std::uint64_t>(milliseconds * 1e6F + 0.5F), expected);
  }
}

TEST("a value orders nothing for other streams: that takes an event") {
  planted(STAGEHAND_SIM_DEVICE_RACE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto compute = rig.stream();
    const auto lane = rig.stream();
    unsigned char* const word = rig.slab(8);
    stagehand_sim_fill(compute, block, kBytes, 1);
    if (!broken) {
      rig.order(compute, lane);
    }
    hold(rig, lane, word);
    rig.d2h(rig.slab(), block, kBytes, lane);
    CHECK_EQ(rig.driver.stream_synchronize(compute), 0);
    raise(word, 1);
  });
}

TEST("a word unregistered while a stream waits for it is a free in use") {
  Rig rig(8);
  const auto lane = rig.stream();
  std::vector<std::uint64_t> memory(512);
  CHECK_EQ(rig.driver.host_register(memory.data(), 4096, 0), 0);
  CHECK_EQ(rig.driver.stream_wait_value64(lane, number(memory.data()), 1, 0), 0);
  CHECK_EQ(rig.driver.host_unregister(memory.data()), 0);
  memory[0] = 1;
  CHECK_ONE_HAZARD(STAGEHAND_SIM_FREE_IN_USE);
  CHECK_EQ(rig.driver.stream_synchronize(lane), 0);
}

TEST("a value that no stream can wait for is refused") {
  Rig rig(9);
  const auto lane = rig.stream();
  unsigned char* const slab = rig.slab();
  std::uint64_t pageable = 1;
  CHECK(rig.driver.stream_wait_value64(lane, number(slab) + 4, 1, 0) != 0);
  CHECK(rig.driver.stream_wait_value64(lane, number(slab), 1, 1) != 0);
  CHECK(rig.driver.stream_wait_value64(lane, number(&pageable), 1, 0) != 0);
  CHECK_EQ(stagehand_sim_queued(), 0);
}

TEST("a held stream may be destroyed, and its work still runs") {
  Rig rig(10);
  const auto block = rig.block();
  const auto lane = rig.stream();
  unsigned char* const word = rig.slab(8);
  hold(rig, lane, word);
  CHECK_EQ(rig.driver.memset_d8_async(block, 0x55, kBytes, lane), 0);
  CHECK_EQ(rig.driver.stream_destroy(lane), 0);
  raise(word, 1);
  stagehand_sim_drain();
  CHECK_EQ(*reinterpret_cast<unsigned char*>(block), 0x55);
}

}  // namespace stagehand::sim::test
