// Promises about host memory that runs short: pinned memory for a while, or for good.
#include "native/promise_rig.hpp"

namespace stagehand::core::test {
namespace {

// A step that saves 16 MiB where 8 fit.
void crowded_step(CoreRig& rig, driver::Stream s) {
  rig.budget(8_MiB, 8_MiB, 64_MiB);
  std::vector<Held> all = rig.retain_many(4, 4_MiB, s);
  rig.back_all(all, s);
  rig.runtime->clear_budget();
}

TEST("host memory that could not be pinned for a moment is pinned again some time") {
  CoreRig rig({.classes = {{1_MiB}, {0}}, .host_limit = 63_MiB});
  const driver::Stream s = rig.stream();
  stagehand_sim_fail("cuMemHostRegister", 1, 8, driver::kOutOfMemory);
  crowded_step(rig, s);
  stagehand_sim_fail("cuMemHostRegister", 1, 0, 0);
  // Whether it asks again after so many requests or after so long is the engine's to choose.
  CHECK(eventually([&] {
    crowded_step(rig, s);
    return rig.counters().pinned_bytes > 0;
  }));
  const Counters was = rig.counters();
  crowded_step(rig, s);
  CHECK_EQ(rig.counters().pageable_copies, was.pageable_copies);
  rig.verify_empty();
}

TEST("host memory that can never be pinned is not asked for at every step") {
  CoreRig rig({.classes = {{1_MiB}, {0}}, .host_limit = 63_MiB});
  const driver::Stream s = rig.stream();
  stagehand_sim_fail("cuMemHostRegister", 1, 1 << 20, driver::kOutOfMemory);
  crowded_step(rig, s);
  const std::uint64_t first = stagehand_sim_call_count("cuMemHostRegister");
  constexpr int kSteps = 100;
  for (int step = 0; step < kSteps; ++step) {
    crowded_step(rig, s);
  }
  CHECK(stagehand_sim_call_count("cuMemHostRegister") - first < kSteps);
  CHECK_EQ(rig.counters().pinned_bytes, 0);
  rig.verify_empty();
}

TEST("without pinned memory only what has to leave goes through pageable memory") {
  CoreRig rig({.memory = 256_MiB, .classes = {{1_MiB}, {0}}, .host_limit = 0});
  const driver::Stream s = rig.stream();
  const driver::Stream t = rig.stream();
  rig.budget(66_MiB, 66_MiB, 200_MiB);
  // The oldest are small blocks of another stream; the newest is just what the request needs.
  std::vector<Held> all = rig.retain_many(16, 3_MiB, t);
  all.push_back(rig.retain(16_MiB, s));
  const Counters was = rig.counters();
  rig.drop(rig.make(16_MiB, s));
  const Counters now = rig.counters();
  CHECK_EQ(now.pageable_copies - was.pageable_copies, 1);
  CHECK_EQ(now.evicted - was.evicted, 16_MiB);
  rig.order(t, s);  // those of the other stream are where they were: the program orders its reads
  rig.back_all(all, s);
  rig.verify_empty();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
