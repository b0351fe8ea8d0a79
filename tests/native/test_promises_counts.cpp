// Promises on how often the driver is asked. Counts do not hang on how quick the machine is.
#include "native/planned_step.hpp"

namespace stagehand::core::test {
namespace {

std::uint64_t queries() { return stagehand_sim_call_count("cuEventQuery"); }

TEST("an allocation beside 512 blocks that are being copied out asks for at most two events") {
  constexpr int kBlocks = 512;
  constexpr Bytes kBlock = 128_KiB + 512;
  CoreRig rig({.memory = 512_MiB, .classes = {{1_MiB}, {16}}, .host_limit = 600_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(256_MiB, 1_MiB);
  std::vector<Held> all = rig.retain_many(kBlocks, kBlock, s);
  rig.evict_all(s);  // pins memory for all of them
  for (const Held& held : all) {
    rig.runtime->drop_handle(held.record);
  }
  stagehand_sim_drain();
  rig.runtime->trim(0);
  rig.budget(256_MiB, 256_MiB);
  all = rig.retain_many(kBlocks, kBlock, s);
  stagehand_sim_progress(0);
  rig.evict_all(s);  // from here on all of them are being copied out
  CHECK_EQ(rig.counters().evicted, kBlocks * kBlock);
  rig.budget(rig.counters().mapped, rig.counters().mapped);
  constexpr int kTimes = 10;
  std::vector<Address> made;
  for (Bytes free = rig.counters().mapped - kBlocks * kBlock; free >= kBlock; free -= kBlock) {
    made.push_back(rig.allocate(kBlock, s));
  }
  const std::uint64_t before = queries();
  for (int i = 0; i < kTimes; ++i) {
    made.push_back(rig.allocate(kBlock, s));
  }
  CHECK(queries() - before <= 2 * kTimes);
  stagehand_sim_progress(0.25);
  for (const Address address : made) {
    CHECK(rig.runtime->free(address));
  }
  for (const Held& held : all) {
    rig.runtime->drop_handle(held.record);
  }
  rig.verify_empty();
}

// Whether the GPU answers "not yet" to every question.
bool& behind() {
  static bool is = false;
  return is;
}

// Questions asked in so many restores while the GPU does not move.
std::uint64_t queries_of(int restores, Bytes bytes, Bytes low) {
  Machine machine{.memory = 512_MiB, .classes = {{64_KiB, 1_MiB}, {16, 16}}, .host_limit = 256_MiB};
  machine.patch = [](driver::Table& table) {
    static decltype(table.event_query) real;
    real = table.event_query;
    table.event_query = [](driver::Event event) {
      const driver::Result answer = real(event);
      return behind() ? driver::kNotReady : answer;
    };
  };
  CoreRig rig(machine);
  const driver::Stream s = rig.stream();
  rig.budget(256_MiB, 256_MiB);
  std::vector<Held> all = rig.retain_many(restores, bytes, s);
  rig.evict_all(s);
  stagehand_sim_drain();
  rig.budget(256_MiB, low);
  behind() = true;
  std::vector<Unpacked> back;
  const std::uint64_t before = queries();
  for (int i = restores; i-- > 0;) {
    back.push_back(rig.unpack(all[static_cast<std::size_t>(i)], s));
  }
  const std::uint64_t asked = queries() - before;
  behind() = false;
  for (const Unpacked& one : back) {
    rig.runtime->drop_alias(one.block);
  }
  for (const Held& held : all) {
    rig.runtime->drop_handle(held.record);
  }
  rig.verify_empty();
  return asked;
}

TEST("restores ask for at most two events each, with a GPU 800 of them behind") {
  CHECK(queries_of(800, 64_KiB, 256_MiB) <= 2 * 800);
}

TEST("restores ask for at most two events each, with a GPU 700 of them behind and no prefetch") {
  CHECK(queries_of(700, 128_KiB, 0) <= 2 * 700);
}

// --- Whole steps

template <typename Rig>
void check_planned(double most) {
  Rig rig(kPlannedMachine);
  const PlannedCalls found = planned_calls(rig);
  CHECK(found.evicted_a_step >= 30 && found.evicted_a_step <= 60);  // else it counts another thing
  if (found.sum() > most) {
    CHECK_EQ(found.sum(), most);  // shows both
  }
  rig.verify_empty();
}

TEST("a tensor that leaves and returns as planned costs at most four calls to order its copies") {
  check_planned<CoreRig>(4);
}

TEST("a tensor that leaves and returns as planned costs at most five calls in torch's modes") {
  check_planned<HeldRig>(5);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
