// What a pool asks of the lanes, and what is told of a budget or a copy that went wrong.
#include <string>

#include "native/core_rig.hpp"

namespace stagehand::core::test {
namespace {

TEST("lane limits are what was set last, and nothing at first") {
  CoreRig rig;
  CHECK_EQ(rig.runtime->lane_limits().inflight_d2h, 0);
  CHECK_EQ(rig.runtime->lane_limits().rate_h2d, 0);
  rig.runtime->set_lane_limits({1, 2, 3_GiB, 4_GiB});
  const LaneLimits now = rig.runtime->lane_limits();
  CHECK_EQ(now.inflight_d2h, 1);
  CHECK_EQ(now.inflight_h2d, 2);
  CHECK_EQ(now.rate_d2h, 3_GiB);
  CHECK_EQ(now.rate_h2d, 4_GiB);
}

TEST("an overshoot says how much of what is live are saved activations in use") {
  CoreRig rig({.memory = 64_MiB});
  const auto stream = rig.stream();
  const Tensor weight = rig.make(8_MiB, stream);
  rig.budget(16_MiB, 16_MiB, 48_MiB);
  const Tensor used = rig.make(6_MiB, stream);
  const Held held = rig.save(used);
  const Tensor request = rig.make(8_MiB, stream);
  CHECK_EQ(rig.counters().overshoot_live, 22_MiB);
  CHECK_EQ(rig.counters().overshoot_saved, 6_MiB);
  rig.drop(request);
  rig.drop(used);
  rig.back(held, stream);
  rig.drop(weight);
  rig.runtime->reset_peaks();
  CHECK_EQ(rig.counters().overshoot_saved, 0);
  rig.verify_empty();
}

TEST("a record's history counts how often it left and came back") {
  CoreRig rig({.memory = 64_MiB});
  const auto stream = rig.stream();
  rig.budget(32_MiB, 32_MiB);
  const Held held = rig.retain(4_MiB, stream);
  for (int i = 0; i < 2; ++i) {
    rig.evict_all(stream);
    rig.runtime->drop_alias(rig.unpack(held, stream).block);
  }
  const std::string history = rig.runtime->history(held.record);
  CHECK(history.find("4194304 bytes") != std::string::npos);
  CHECK(history.find("evicted 2 times and restored 2 times") != std::string::npos);
  rig.back(held, stream);
  CHECK_EQ(rig.runtime->history(held.record), "its record is gone");
  const Held next = rig.retain(4_MiB, stream);
  CHECK(rig.runtime->history(next.record).find("evicted 0 times") != std::string::npos);
  rig.back(next, stream);
  rig.verify_empty();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
