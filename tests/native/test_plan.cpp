// The plan alone, on recorded steps, and what the runtime makes of it.
#include "core/plan.hpp"
#include "native/core_rig.hpp"

namespace stagehand::core::test {
namespace {

// One step: records of these sizes are saved, those named leave, and backward asks or does not.
std::vector<Plan::Place> step(Plan& plan, const std::vector<Bytes>& sizes,
                              const std::vector<std::size_t>& leave, bool backward = true) {
  plan.begin_step();
  std::vector<Plan::Place> places;
  for (const Bytes size : sizes) {
    places.push_back(plan.saved(size));
  }
  for (const std::size_t i : leave) {
    plan.evicted(places[i]);
  }
  if (backward) {
    plan.unpacked();
  }
  return places;
}

TEST("the first step expects nothing") {
  Plan plan;
  const auto places = step(plan, {4_MiB, 8_MiB}, {0});
  CHECK(!plan.follows());
  CHECK(!plan.leaves(places[0]));
}

TEST("what left in the last step is expected to leave in the next one like it") {
  Plan plan;
  step(plan, {4_MiB, 8_MiB, 4_MiB}, {0, 1});
  const auto places = step(plan, {4_MiB, 8_MiB, 4_MiB}, {});
  CHECK(plan.follows());
  CHECK(plan.leaves(places[0]));
  CHECK(plan.leaves(places[1]));
  CHECK(!plan.leaves(places[2]));
}

TEST("from the first different size on, a step expects nothing") {
  Plan plan;
  step(plan, {4_MiB, 8_MiB, 4_MiB}, {0, 1, 2});
  plan.begin_step();
  const Plan::Place same = plan.saved(4_MiB);
  CHECK(plan.leaves(same));
  const Plan::Place other = plan.saved(16_MiB);
  CHECK(!plan.follows());
  CHECK(!plan.leaves(other));
  CHECK(!plan.leaves(same));
}

TEST("more records than the last step had is a difference too") {
  Plan plan;
  step(plan, {4_MiB}, {0});
  plan.begin_step();
  plan.saved(4_MiB);
  plan.saved(4_MiB);
  CHECK(!plan.follows());
}

TEST("a pass without backward teaches nothing") {
  Plan plan;
  step(plan, {4_MiB, 8_MiB}, {1});
  step(plan, {1_MiB}, {}, false);  // an evaluation between two steps
  const auto places = step(plan, {4_MiB, 8_MiB}, {});
  CHECK(!plan.leaves(places[0]));
  CHECK(plan.leaves(places[1]));
}

TEST("a record of an earlier step that leaves late does not confuse the step that runs") {
  Plan plan;
  const auto early = step(plan, {4_MiB, 8_MiB}, {});
  const auto late = step(plan, {4_MiB, 8_MiB}, {});
  plan.evicted(early[0]);
  CHECK(!plan.leaves(early[0]));
  const auto places = step(plan, {4_MiB, 8_MiB}, {});
  CHECK(!plan.leaves(places[0]));
  CHECK(!plan.leaves(late[0]));
}

// Forward: `count` activations of 4 MiB; then backward asks for them, newest first.
void train(CoreRig& rig, driver::Stream stream, int count) {
  rig.budget(24_MiB, 20_MiB);
  std::vector<Held> saved;
  for (int i = 0; i < count; ++i) {
    saved.push_back(rig.retain(4_MiB, stream));
  }
  rig.runtime->clear_budget();
  while (!saved.empty()) {
    rig.back(saved.back(), stream);
    saved.pop_back();
  }
}

TEST("a step like the last one writes back ahead: no victim has to be copied when room is needed") {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    CoreRig rig({.seed = seed});
    const auto stream = rig.stream();
    train(rig, stream, 10);
    train(rig, stream, 10);
    const Counters before = rig.counters();
    train(rig, stream, 10);
    const Counters after = rig.counters();
    CHECK_EQ(after.dirty_evictions, before.dirty_evictions);
    CHECK(after.write_backs > before.write_backs);
    CHECK(after.clean_evictions > before.clean_evictions);
    CHECK_EQ(after.host_waits, before.host_waits);
    CHECK_EQ(after.overshoot_bytes, Bytes{0});
    rig.verify_empty();
  }
}

TEST("a step unlike the last one falls back to reacting, with the right bytes") {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    CoreRig rig({.seed = seed});
    const auto stream = rig.stream();
    train(rig, stream, 10);
    train(rig, stream, 14);
    train(rig, stream, 8);
    train(rig, stream, 10);
    CHECK_EQ(rig.counters().overshoot_bytes, Bytes{0});
    rig.verify_empty();
  }
}

}  // namespace
}  // namespace stagehand::core::test
STAGEHAND_TEST_MAIN()
