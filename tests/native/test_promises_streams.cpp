// Promises about streams: one that its owner destroyed, one that is captured, and many that come
// and go.
#include "native/promise_rig.hpp"

namespace stagehand::core::test {
namespace {

// One tensor was saved and used on a stream of another library's, as by torch.cuda.ExternalStream,
// and is long gone. Then `destroyed` says whether the stream is too.
void evict_after(bool destroyed) {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  const driver::Stream side = rig.stream();
  rig.budget(kHeldSegment, 16_MiB);
  rig.back(rig.retain(kHeldBlock, side), side);
  rig.torch.release_cached();
  stagehand_sim_drain();
  if (destroyed) {
    CHECK_EQ(rig.driver.stream_destroy(side), 0);
  }
  std::vector<SavedTensor> saved = rig.retain_many(5, kHeldBlock, s);
  std::vector<HeldTensor> live;
  for (int i = 0; i < 3; ++i) {
    live.push_back(rig.make(kHeldBlock, s));
  }
  CHECK_EQ(rig.counters().overshoot_bytes, 0);
  CHECK(rig.counters().evicted > 0);
  rig.drop_all(live);
  rig.back_all(saved, s);
  rig.verify_empty();
}

TEST("a miss evicts where a stream of before is still there") { evict_after(false); }

TEST("a miss evicts, and asks nothing of it, where a stream of before was destroyed") {
  evict_after(true);
}

TEST("a trim gives memory back where a stream of before was destroyed") {
  for (const bool destroyed : {false, true}) {
    CoreRig rig;
    const driver::Stream s = rig.stream();
    const driver::Stream side = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    rig.drop(rig.make(4_MiB, side));
    stagehand_sim_drain();
    rig.runtime->trim(0);
    CHECK_EQ(rig.counters().mapped, 0);
    if (destroyed) {
      CHECK_EQ(rig.driver.stream_destroy(side), 0);
    }
    rig.drop(rig.make(4_MiB, s));
    stagehand_sim_drain();
    CHECK_EQ(rig.runtime->trim(0), 4_MiB);
    CHECK_EQ(rig.counters().mapped, 0);
    rig.verify_empty();
  }
}

// What a thread does that watches, while another records a CUDA graph in the mode that torch uses.
// The restore of `held` is to be timed still, where it is not dropped.
void beside_capture(bool dropped, const std::function<void(CoreRig&)>& watch) {
  CoreRig rig({.classes = {{4_MiB}, {8}}});
  const driver::Stream s = rig.stream();
  const driver::Stream captured = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const Held held = rig.retain(8_MiB, s);
  rig.evict_all(s);
  const Unpacked again = rig.unpack(held, s);
  if (dropped) {
    rig.runtime->drop_alias(again.block);
    rig.runtime->drop_handle(held.record);
    stagehand_sim_drain();
  }
  stagehand_sim_capture(captured, 1);
  rig.runtime->capture(1);
  watch(rig);
  CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_CAPTURE), 0);
  CHECK_EQ(hazard_text(0), "");
  rig.runtime->capture(-1);
  stagehand_sim_capture(captured, 0);
  if (!dropped) {
    rig.runtime->drop_alias(again.block);
    rig.runtime->drop_handle(held.record);
  }
  rig.verify_empty();
}

TEST("reading the counters beside a capture makes no call that a capture forbids") {
  beside_capture(false, [](CoreRig& rig) { rig.counters(); });
}

TEST("asking what host memory was wanted beside a capture makes no call that it forbids") {
  beside_capture(false, [](CoreRig& rig) {
    rig.runtime->pinned_demand();
    rig.runtime->plan_state();
    rig.runtime->report(1_MiB);
    rig.runtime->reset_peaks();
  });
}

TEST("pinned memory given back beside a capture makes no call that a capture forbids") {
  beside_capture(true, [](CoreRig& rig) {
    CHECK(rig.runtime->release_pinned(0) > 0);
    CHECK_EQ(rig.counters().pinned_bytes, 0);
  });
}

TEST("a cap on the link set beside a capture makes no call that a capture forbids") {
  beside_capture(false, [](CoreRig& rig) { rig.runtime->set_lane_limits({.rate_d2h = 1_GiB}); });
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
