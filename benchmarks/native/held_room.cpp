// What a miss of torch's cache costs beside n of whatever there may be many of.
#include "bench.hpp"
#include "native/held_rig.hpp"

namespace stagehand::bench {
namespace {

using namespace core;
using namespace core::test;

HeldTensor make_unfilled(HeldRig& rig, Bytes bytes, driver::Stream s) {
  return {rig.torch.make(bytes, s), bytes, s, 0};
}

// n saved storages were dropped by torch, and n newer ones are still used: a miss that has to evict
// nothing, and one more.
BENCH(held_miss) {
  HeldRig rig({.memory = 8_GiB, .classes = {{1_MiB}, {2}}});
  const driver::Stream s = rig.stream();
  rig.budget(8_GiB, 8_GiB);
  std::vector<HeldTensor> old;
  std::vector<HeldTensor> live;
  std::vector<SavedTensor> saved;
  for (int i = 0; i < 2 * n; ++i) {
    const HeldTensor tensor = make_unfilled(rig, 512, s);
    saved.push_back(rig.save(tensor));
    (i < n ? old : live).push_back(tensor);
  }
  rig.drop_all(old);
  const double first = time_us([&] { rig.runtime->missed(s, 0); });
  const double again = time_us([&] { rig.runtime->missed(s, 0); });
  print("first", first / 1000, "ms");
  print("again", again / 1000, "ms");
  for (const SavedTensor& one : saved) {
    rig.drop_handle(one);
  }
  rig.drop_all(live);
}

// A restore of 64 MiB where no segment of torch's comes free, beside n blocks of 1 MiB: three of
// four are clean and may leave.
BENCH(held_make_hole) {
  HeldRig rig({.memory = 16_GiB, .classes = {{1_MiB, 2_MiB}, {64, 8}}, .host_limit = 5_GiB});
  const driver::Stream s = rig.stream();
  rig.budget(kUnlimited, 0);
  const SavedTensor big = rig.retain(64_MiB, s);
  rig.evict_all(s);
  std::vector<HeldTensor> live;
  std::vector<SavedTensor> saved;
  for (int i = 0; i < n; ++i) {
    const HeldTensor tensor = make_unfilled(rig, 1_MiB + 512, s);
    if (i % 4 == 0) {
      live.push_back(tensor);
    } else {
      saved.push_back(rig.save(tensor));
      rig.drop(tensor);
    }
  }
  rig.evict_all(s);
  for (const SavedTensor& one : saved) {
    const Unpacked again = rig.runtime->unpack(one.record, one.offset, s);
    rig.drop(rig.view(again, one, s));
  }
  rig.look(s);
  stagehand_sim_drain();
  rig.budget(rig.cache.usage().reserved, 0);
  rig.look(s);
  for (;;) {  // takes the hole that the large one left
    const Bytes hole = rig.cache.largest_hole(CacheMap::Owner{s, {}});
    if (hole < 2_MiB) {
      break;
    }
    live.push_back(make_unfilled(rig, std::min<Bytes>(hole, 64_MiB), s));
  }
  const Counters was = rig.counters();
  Unpacked again;
  const double us = time_us([&] { again = rig.runtime->unpack(big.record, 0, s); });
  const Counters now = rig.counters();
  print("make_hole", us / 1000, "ms");
  print("evicted",
        static_cast<double>(now.clean_evictions + now.dirty_evictions - was.clean_evictions -
                            was.dirty_evictions),
        "records");
  if (again.block != nullptr) {
    rig.drop(rig.view(again, big, s));
  }
  rig.drop_handle(big);
  for (const SavedTensor& one : saved) {
    rig.drop_handle(one);
  }
  rig.drop_all(live);
}

}  // namespace
}  // namespace stagehand::bench
