// What each call costs where nothing has to move.
#include "bench.hpp"
#include "native/held_rig.hpp"

namespace stagehand::bench {
namespace {

using namespace core;
using namespace core::test;

constexpr int kRounds = 15;

// The median of so many rounds of `count` calls, in nanoseconds a call.
template <typename Body>
double nanoseconds(int count, Body body) {
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    const double us = time_us([&] {
      for (int i = 0; i < count; ++i) {
        body();
      }
    });
    rounds.push_back(us * 1000 / count);
  }
  return median(rounds);
}

BENCH(alloc_free_hit) {
  CoreRig rig({.memory = 1_GiB});
  const driver::Stream s = rig.stream();
  rig.budget(1_GiB, 1_GiB);
  const double ns = nanoseconds(20'000, [&] {
    Address address = 0;
    rig.runtime->allocate(1_MiB, s, 0, &address);
    rig.runtime->free(address);
  });
  print("alloc_free_hit", ns, "ns");
}

BENCH(save_unpack_cycle) {
  CoreRig rig({.memory = 1_GiB});
  const driver::Stream s = rig.stream();
  rig.budget(1_GiB, 1_GiB);
  const double ns = nanoseconds(10'000, [&] {
    Address address = 0;
    rig.runtime->allocate(1_MiB, s, 0, &address);
    const Saved saved = rig.runtime->save(address, address, address + 1_MiB);
    rig.runtime->free(address);
    const Unpacked again = rig.runtime->unpack(saved.record, 0, s);
    rig.runtime->drop_alias(again.block);
    rig.runtime->drop_handle(saved.record);
  });
  print("save_unpack_cycle", ns, "ns");
}

// One save in torch's modes beside n storages that are saved and still used.
BENCH(held_save_beside_live) {
  HeldRig rig({.memory = 4_GiB, .classes = {{1_MiB}, {2}}});
  const driver::Stream s = rig.stream();
  rig.budget(4_GiB, 4_GiB);
  std::vector<HeldTensor> live;
  std::vector<SavedTensor> saved;
  for (int i = 0; i < n; ++i) {
    live.push_back({rig.torch.make(512, s), 512, s, 0});
    saved.push_back(rig.save(live.back()));
  }
  const HeldTensor tensor{rig.torch.make(2_MiB, s), 2_MiB, s, 0};
  const double ns = nanoseconds(2000, [&] { rig.drop_handle(rig.try_save(tensor, s)); });
  print("held_save_beside_live", ns, "ns");
  rig.drop(tensor);
  for (const SavedTensor& one : saved) {
    rig.drop_handle(one);
  }
  rig.drop_all(live);
}

}  // namespace
}  // namespace stagehand::bench
