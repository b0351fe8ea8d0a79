// How often the driver is asked: counts, which do not hang on how quick the machine is.
#include "bench.hpp"
#include "native/planned_step.hpp"

namespace stagehand::bench {
namespace {

using namespace core;
using namespace core::test;

void print_calls(const PlannedCalls& found) {
  print("calls", found.sum(), "calls a tensor");
  for (std::size_t i = 0; i < found.each.size(); ++i) {
    print(kOrderingCalls[i], found.each[i], "calls a tensor");
  }
  print("evicted", found.evicted_a_step, "tensors a step");
}

BENCH(planned_calls_allocator) {
  CoreRig rig(kPlannedMachine);
  print_calls(planned_calls(rig));
}

BENCH(planned_calls_native) {
  HeldRig rig(kPlannedMachine);
  print_calls(planned_calls(rig));
}

// Event queries of one allocation beside n blocks that are being copied out.
BENCH(queries_beside_evicting) {
  constexpr Bytes kBlock = 128_KiB + 512;
  constexpr int kTimes = 10;
  const auto count = static_cast<Bytes>(n);
  const Bytes high = 2 * count * kBlock + 64_MiB;
  CoreRig rig({.memory = 2 * high, .classes = {{1_MiB}, {16}}, .host_limit = high + 256_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(high, 1_MiB);
  std::vector<Held> all = rig.retain_many(n, kBlock, s);
  rig.evict_all(s);  // pins memory for all of them
  for (const Held& held : all) {
    rig.runtime->drop_handle(held.record);
  }
  stagehand_sim_drain();
  rig.runtime->trim(0);
  rig.budget(high, high);
  all = rig.retain_many(n, kBlock, s);
  stagehand_sim_progress(0);
  rig.evict_all(s);
  rig.budget(rig.counters().mapped, rig.counters().mapped);
  for (Bytes free = rig.counters().mapped - count * kBlock; free >= kBlock; free -= kBlock) {
    rig.allocate(kBlock, s);
  }
  const std::uint64_t before = stagehand_sim_call_count("cuEventQuery");
  const double us = time_us([&] {
    for (int i = 0; i < kTimes; ++i) {
      rig.allocate(kBlock, s);
    }
  });
  const std::uint64_t asked = stagehand_sim_call_count("cuEventQuery") - before;
  print("queries", static_cast<double>(asked) / kTimes, "queries an allocation");
  print("time", us / kTimes, "us");
}

// Event queries of each of n restores while the GPU does not move.
BENCH(queries_of_restores) {
  CoreRig rig({.memory = 512_MiB, .classes = {{64_KiB, 1_MiB}, {16, 1}}, .host_limit = 256_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(256_MiB, 256_MiB);
  std::vector<Held> all = rig.retain_many(n, 64_KiB, s);
  rig.evict_all(s);
  stagehand_sim_drain();
  stagehand_sim_progress(0);
  const std::uint64_t before = stagehand_sim_call_count("cuEventQuery");
  for (int i = n; i-- > 0;) {
    rig.unpack(all[static_cast<std::size_t>(i)], s);
  }
  const std::uint64_t asked = stagehand_sim_call_count("cuEventQuery") - before;
  print("queries", static_cast<double>(asked) / n, "queries a restore");
}

}  // namespace
}  // namespace stagehand::bench
