// The scheduler and the virtual clock.
#include <cstring>
#include <set>
#include <thread>

#include "sim/rig.hpp"

namespace stagehand::sim::test {

namespace {

constexpr std::uint64_t kCopyNs = 6000;
constexpr std::uint64_t kEventNs = 500;

RigSettings host_synchronous() {
  RigSettings with;
  with.flags |= STAGEHAND_SIM_HOST_SYNCHRONOUS;
  return with;
}

// A block is filled, written back, refilled, and the write-back compared. Wrong bytes of it.
bool evicts_right(std::uint64_t seed, bool lane_waits, bool reuse_waits) {
  Rig rig(seed);
  const auto block = rig.block();
  unsigned char* const slab = rig.slab();
  const auto compute = rig.stream();
  const auto lane = rig.stream();
  stagehand_sim_fill(compute, block, kBytes, 1);
  if (lane_waits) {
    rig.order(compute, lane);
  }
  rig.d2h(slab, block, kBytes, lane);
  if (reuse_waits) {
    rig.order(lane, compute);
  }
  stagehand_sim_fill(compute, block, kBytes, 2);
  CHECK_EQ(rig.driver.event_synchronize(rig.record(compute)), 0);
  CHECK_EQ(rig.driver.stream_synchronize(lane), 0);
  std::vector<unsigned char> expected(kBytes);
  stagehand_sim_pattern(expected.data(), kBytes, 1, 0);
  return std::memcmp(expected.data(), slab, kBytes) == 0;
}

float elapsed_ms(Rig& rig, driver::Event start, driver::Event end) {
  float milliseconds = -1;
  CHECK_EQ(rig.driver.event_elapsed_time(&milliseconds, start, end), 0);
  return milliseconds;
}

bool about(double left, double right) { return left > right - 1e-4 && left < right + 1e-4; }

}  // namespace

TEST("a program that waits where it must has right bytes under every seed") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    CHECK(evicts_right(seed, true, true));
    CHECK_NO_HAZARD();
  }
}

TEST("dropping one stream wait gives wrong bytes under a good share of seeds") {
  int without_lane_wait = 0;
  int without_reuse_wait = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    without_lane_wait += evicts_right(seed, false, true) ? 0 : 1;
    CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_DEVICE_RACE), 1);
    without_reuse_wait += evicts_right(seed, true, false) ? 0 : 1;
    CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_DEVICE_RACE), 1);
  }
  CHECK(without_lane_wait > 50);
  CHECK(without_lane_wait < 200);
  CHECK(without_reuse_wait > 50);
  CHECK(without_reuse_wait < 200);
}

TEST("queuing runs nothing") {
  Rig rig(1);
  const auto block = rig.block();
  const auto stream = rig.stream();
  CHECK_EQ(rig.driver.memset_d8_async(block, 0x33, kGranule, stream), 0);
  CHECK_EQ(stagehand_sim_queued(), 1);
  CHECK_EQ(*reinterpret_cast<unsigned char*>(block + kGranule - 1), 0);
  CHECK_EQ(rig.driver.stream_synchronize(stream), 0);
  CHECK_EQ(*reinterpret_cast<unsigned char*>(block + kGranule - 1), 0x33);
}

TEST("a half-done copy can be seen") {
  int halves = 0;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Rig rig(seed);
    const auto block = rig.block();
    CHECK_EQ(rig.driver.memset_d8_async(block, 0x33, kBytes, rig.stream()), 0);
    stagehand_sim_step(1);
    const auto* const bytes = reinterpret_cast<unsigned char*>(block);
    halves += bytes[0] == 0x33 && bytes[kBytes - 1] == 0 ? 1 : 0;
  }
  CHECK(halves > 40);
}

TEST("one seed is one schedule, and seeds differ") {
  const auto trace = [](std::uint64_t seed) {
    Rig rig(seed);
    const auto block = rig.block();
    std::vector<driver::Stream> streams;
    for (unsigned i = 0; i < 4; ++i) {
      streams.push_back(rig.stream());
      for (unsigned j = 0; j < 4; ++j) {
        stagehand_sim_fill(streams.back(), block + i * 4096, 4096, i * 4 + j);
      }
    }
    std::string seen;
    while (stagehand_sim_step(1) > 0) {
      for (unsigned i = 0; i < 4; ++i) {
        seen += reinterpret_cast<char*>(block)[i * 4096];
      }
    }
    return seen;
  };
  std::set<std::string> traces;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CHECK(trace(seed) == trace(seed));
    traces.insert(trace(seed));
  }
  CHECK_EQ(traces.size(), 20);
}

TEST("a query in a loop ends even when nothing else makes progress") {
  Rig rig(2);
  stagehand_sim_progress(0);
  const auto stream = rig.stream();
  stagehand_sim_fill(stream, rig.block(), kGranule, 1);
  const auto event = rig.record(stream);
  int polls = 0;
  while (rig.driver.event_query(event) == driver::kNotReady) {
    ++polls;
  }
  CHECK_EQ(polls, 63);
  CHECK_EQ(stagehand_sim_host_waits(), 0);
}

TEST("only a wait that had to wait counts as one") {
  Rig rig(3);
  const auto stream = rig.stream();
  stagehand_sim_fill(stream, rig.block(), kGranule, 1);
  const auto event = rig.record(stream);
  CHECK_EQ(rig.driver.event_synchronize(event), 0);
  CHECK_EQ(rig.driver.event_synchronize(event), 0);
  CHECK_EQ(rig.driver.stream_synchronize(stream), 0);
  CHECK_EQ(stagehand_sim_host_waits(), 1);
}

TEST("a copy costs bytes over bandwidth and six microseconds") {
  Rig rig(4);
  const auto stream = rig.stream();
  const auto start = rig.record(stream);
  rig.d2h(rig.slab(kGranule), rig.block(), 1'000'000, stream);
  const auto end = rig.record(stream);
  CHECK_EQ(rig.driver.event_synchronize(end), 0);
  CHECK(about(elapsed_ms(rig, start, end), (1'000'000 + kCopyNs + kEventNs) * 1e-6));
  CHECK_EQ(stagehand_sim_clock_ns(), 1'000'000 + kCopyNs + 2 * kEventNs);
}

TEST("copies both ways overlap, copies one way do not") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    for (const bool both_ways : {true, false}) {
      Rig rig(seed);
      const auto one = rig.stream();
      const auto two = rig.stream();
      rig.d2h(rig.slab(kGranule), rig.block(), 1'000'000, one);
      if (both_ways) {
        rig.h2d(rig.block(), rig.slab(kGranule), 1'000'000, two);
      } else {
        rig.d2h(rig.slab(kGranule), rig.block(), 1'000'000, two);
      }
      stagehand_sim_drain();
      CHECK_EQ(stagehand_sim_clock_ns(), (1'000'000 + kCopyNs) * (both_ways ? 1 : 2));
    }
  }
}

TEST("time follows waits, whatever the scheduler runs first") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Rig rig(seed);
    const auto compute = rig.stream();
    const auto lane = rig.stream();
    const auto block = rig.block();
    const stagehand_sim_range range{block, 1000};
    stagehand_sim_kernel(compute, 50'000, nullptr, 0, &range, 1, nullptr, nullptr);
    rig.order(compute, lane);
    rig.d2h(rig.slab(), block, 1000, lane);
    stagehand_sim_kernel(compute, 90'000, nullptr, 0, nullptr, 0, nullptr, nullptr);
    const auto kernel_end = rig.record(compute);
    const auto copy_end = rig.record(lane);
    stagehand_sim_drain();
    CHECK(about(elapsed_ms(rig, copy_end, kernel_end), (90'000.0 - 1000 - kCopyNs) * 1e-6));
    CHECK_EQ(stagehand_sim_clock_ns(), 50'000 + kEventNs + 90'000 + kEventNs);
  }
}

TEST("work starts no earlier than the host queued it") {
  Rig rig(5);
  const auto stream = rig.stream();
  stagehand_sim_advance_ns(1'000'000);
  rig.d2h(rig.slab(), rig.block(), 1000, stream);
  CHECK_EQ(rig.driver.stream_synchronize(stream), 0);
  CHECK_EQ(stagehand_sim_clock_ns(), 1'000'000 + 1000 + kCopyNs);
}

TEST("the host-synchronous stream runs at once what its waits need") {
  int others_lag = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Rig rig(seed, host_synchronous());
    const auto block = rig.block();
    const auto other = rig.block();
    const auto lane = rig.stream();
    const auto aside = rig.stream();
    auto* const bytes = reinterpret_cast<unsigned char*>(block);
    std::memset(bytes, 0x77, kBytes);
    unsigned char* const slab = rig.slab();
    rig.d2h(slab, block, kBytes, lane);
    CHECK_EQ(rig.driver.memset_d8_async(other, 1, 64, aside), 0);
    rig.order(lane, nullptr);
    stagehand_sim_host_access(bytes, kBytes, 1);
    CHECK_EQ(slab[kBytes - 1], 0x77);
    others_lag += stagehand_sim_queued() > 0 ? 1 : 0;
    CHECK_NO_HAZARD();
  }
  CHECK(others_lag > 20);
  CHECK(others_lag < 200);
}

TEST("host-synchronous work is no host wait and leaves other streams behind") {
  Rig rig(6, host_synchronous());
  const auto block = rig.block();
  CHECK_EQ(rig.driver.memset_d8_async(block, 0x12, kGranule, nullptr), 0);
  CHECK_EQ(*reinterpret_cast<unsigned char*>(block + kGranule - 1), 0x12);
  const auto event = rig.record(nullptr);
  CHECK_EQ(rig.driver.event_query(event), 0);
  CHECK_EQ(stagehand_sim_host_waits(), 0);
  CHECK_EQ(stagehand_sim_queued(), 0);
}

TEST("a copy to pageable memory is complete at the return, one from it is staged") {
  Rig rig(7);
  const auto block = rig.block();
  const auto stream = rig.stream();
  std::vector<unsigned char> host(kGranule, 0x21);
  rig.h2d(block, host.data(), kGranule, stream);
  CHECK_EQ(stagehand_sim_host_waits(), 0);
  std::memset(host.data(), 0, host.size());
  rig.d2h(host.data(), block, kGranule, stream);
  CHECK_EQ(stagehand_sim_host_waits(), 1);
  CHECK_EQ(host[kGranule - 1], 0x21);
}

TEST("a check kernel counts the wrong bytes of a pattern") {
  Rig rig(8);
  const auto block = rig.block();
  const auto stream = rig.stream();
  stagehand_sim_fill(stream, block + 3, 5000, 9);
  stagehand_sim_check(stream, block + 3, 5000, 9);
  CHECK_EQ(rig.driver.stream_synchronize(stream), 0);
  CHECK_EQ(stagehand_sim_mismatches(), 0);
  reinterpret_cast<unsigned char*>(block)[3 + 700] ^= 1;
  stagehand_sim_check(stream, block + 3, 5000, 9);
  CHECK_EQ(rig.driver.stream_synchronize(stream), 0);
  CHECK_EQ(stagehand_sim_mismatches(), 1);
}

TEST("a kernel runs its callback once, when its stream gets there") {
  Rig rig(9);
  int runs = 0;
  const auto stream = rig.stream();
  stagehand_sim_kernel(
      stream, 10, nullptr, 0, nullptr, 0, [](void* user) { ++*static_cast<int*>(user); }, &runs);
  CHECK_EQ(runs, 0);
  CHECK_EQ(rig.driver.stream_synchronize(stream), 0);
  CHECK_EQ(runs, 1);
}

TEST("threads that keep to their own streams and blocks have no hazard") {
  Rig rig(10);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&rig, t] {
      const driver::ContextGuard guard(rig.driver, rig.context);
      driver::Stream stream = nullptr;
      driver::DevicePtr block = 0;
      driver::PhysicalHandle handle = 0;
      const driver::AllocationProp prop;
      const driver::AccessDesc access;
      rig.driver.stream_create(&stream, 1, 0);
      rig.driver.address_reserve(&block, kGranule, 0, 0, 0);
      rig.driver.mem_create(&handle, kGranule, &prop, 0);
      rig.driver.mem_map(block, kGranule, 0, handle, 0);
      rig.driver.mem_set_access(block, kGranule, &access, 1);
      for (unsigned round = 0; round < 200; ++round) {
        stagehand_sim_fill(stream, block, 4096, t * 1000 + round);
        stagehand_sim_check(stream, block, 4096, t * 1000 + round);
        if (round % 16 == 0) {
          rig.driver.stream_synchronize(stream);
        }
      }
      rig.driver.stream_synchronize(stream);
      rig.driver.mem_unmap(block, kGranule);
      rig.driver.mem_release(handle);
      rig.driver.stream_destroy(stream);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(stagehand_sim_mismatches(), 0);
  CHECK_EQ(stagehand_sim_physical_bytes(0), 0);
  CHECK_NO_HAZARD();
}

}  // namespace stagehand::sim::test
