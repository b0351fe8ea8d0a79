// What making room costs beside n of whatever there may be many of, in the process's own allocator.
#include "bench.hpp"
#include "native/core_rig.hpp"

namespace stagehand::bench {
namespace {

using namespace core;
using namespace core::test;

// Pinned memory for so much is there before anything is timed.
void pin(CoreRig& rig, Bytes bytes, driver::Stream s) {
  rig.budget(kUnlimited, 0);
  std::vector<Held> held = rig.retain_many(1, bytes, s);
  rig.evict_all(s);
  rig.back_all(held, s);
  stagehand_sim_drain();
  rig.runtime->trim(0);
}

Held save_unfilled(CoreRig& rig, Bytes bytes, driver::Stream s) {
  const Address address = rig.allocate(bytes, s);
  const Saved saved = rig.runtime->save(address, address, address + bytes);
  return {{address, bytes, s, 0}, saved.record, saved.offset};
}

std::vector<Held> save_many(CoreRig& rig, int n, Bytes bytes, driver::Stream s) {
  std::vector<Held> all;
  for (int i = 0; i < n; ++i) {
    all.push_back(save_unfilled(rig, bytes, s));
  }
  return all;
}

void drop_handles(CoreRig& rig, const std::vector<Held>& all) {
  for (const Held& one : all) {
    rig.runtime->drop_handle(one.record);
  }
}

double evictions(const Counters& of) {
  return static_cast<double>(of.clean_evictions + of.dirty_evictions);
}

// An allocation that evicts one small record beside n live blocks of its arena.
BENCH(miss) {
  constexpr int kTimes = 20;
  CoreRig rig({.memory = 4_GiB, .classes = {{64_KiB, 1_MiB}, {64, 8}}, .host_limit = 256_MiB});
  const driver::Stream s = rig.stream();
  pin(rig, 40_MiB, s);
  rig.budget(kUnlimited, kUnlimited);
  std::vector<Held> saved;
  for (int i = 0; i < n; ++i) {
    rig.allocate(2_KiB, s);
    if (i % 8 == 0) {
      saved.push_back(save_unfilled(rig, 4_KiB, s));
    }
  }
  for (const Held& one : saved) {
    rig.runtime->free(one.tensor.address);
  }
  const Counters full = rig.counters();
  rig.budget(full.mapped, full.mapped);
  Address address = 0;
  while (rig.counters().evicted == 0 &&
         rig.runtime->allocate(4_KiB, s, 0, &address) == Status::ok) {
  }
  const double before = evictions(rig.counters());
  const double us = time_us([&] {
    for (int i = 0; i < kTimes; ++i) {
      rig.runtime->allocate(4_KiB, s, 0, &address);
    }
  });
  print("miss", us / kTimes, "us");
  print("evicted", (evictions(rig.counters()) - before) / kTimes, "records an allocation");
}

// One allocation in a step without a plan, which evicts half of n clean records.
BENCH(evict_to_low) {
  CoreRig rig({.memory = 16_GiB, .classes = {{1_MiB}, {64}}, .host_limit = 256_MiB});
  const driver::Stream s = rig.stream();
  pin(rig, 60_MiB, s);
  const std::vector<Held> all = save_many(rig, n, 2_KiB, s);
  for (const Held& one : all) {
    rig.runtime->free(one.tensor.address);
  }
  stagehand_sim_drain();
  const Counters was = rig.counters();
  rig.budget(was.mapped, was.occupied / 2);
  const double us = time_us([&] { rig.allocate(4_MiB, s); });
  print("evict_to_low", us / 1000, "ms");
  print("evicted", evictions(rig.counters()) - evictions(was), "records");
  drop_handles(rig, all);
}

// torch drops the last tenth of n saved tensors, in a step without a plan and above low.
void free_saved(int n, Bytes host_limit) {
  CoreRig rig({.memory = 4_GiB, .classes = {{1_MiB}, {64}}, .host_limit = host_limit});
  const driver::Stream s = rig.stream();
  if (host_limit > 0) {
    pin(rig, 40_MiB, s);
    rig.budget(4_GiB, 0);
  } else {
    rig.budget(4_GiB, 1_MiB);
  }
  const std::vector<Held> all = save_many(rig, n, 2_KiB, s);
  const auto most = static_cast<std::size_t>(n - n / 10);
  for (std::size_t i = 0; i < most; ++i) {
    rig.runtime->free(all[i].tensor.address);
  }
  const double us = time_us([&] {
    for (std::size_t i = most; i < all.size(); ++i) {
      rig.runtime->free(all[i].tensor.address);
    }
  });
  print("free", us / (n / 10), "us");
  drop_handles(rig, all);
}

BENCH(free_saved_no_slabs) { free_saved(n, 0); }
BENCH(free_saved_slabs) { free_saved(n, 256_MiB); }

}  // namespace
}  // namespace stagehand::bench
