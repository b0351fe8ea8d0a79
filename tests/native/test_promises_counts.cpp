// Promises on how often the driver is asked. Counts do not hang on how quick the machine is.
#include "native/promise_rig.hpp"

namespace stagehand::core::test {
namespace {

std::uint64_t calls(const char* symbol) { return stagehand_sim_call_count(symbol); }
std::uint64_t queries() { return calls("cuEventQuery"); }

// All that a copy costs beside the copy itself.
std::uint64_t ordering_calls() {
  return calls("cuEventRecord") + calls("cuStreamWaitEvent") + queries() +
         calls("cuStreamIsCapturing");
}

std::uint64_t evictions(const Counters& of) { return of.clean_evictions + of.dirty_evictions; }

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

// --- Whole steps, the same again and again: 96 tensors of 1 MiB, of which about 40 do not fit.
constexpr int kLayers = 96;
constexpr Bytes kHigh = 62_MiB;
constexpr Bytes kLow = 58_MiB;
const Machine kStepMachine{
    .memory = 1_GiB, .classes = {{1_MiB, 4_MiB}, {128, 8}}, .host_limit = 512_MiB};

void step(CoreRig& rig, driver::Stream s) {
  rig.budget(kHigh, kLow);
  std::vector<Held> saved;
  for (int layer = 0; layer < kLayers; ++layer) {
    saved.push_back(rig.retain(1_MiB, s));
    rig.drop(rig.make(1_MiB, s));
  }
  rig.runtime->clear_budget();
  for (; !saved.empty(); saved.pop_back()) {
    const Unpacked again = rig.unpack(saved.back(), s);
    rig.drop(rig.make(1_MiB, s));
    rig.runtime->drop_alias(again.block);
    rig.runtime->drop_handle(saved.back().record);
  }
}

void step(HeldRig& rig, driver::Stream s) {
  rig.budget(kHigh, kLow);
  std::vector<SavedTensor> saved;
  for (int layer = 0; layer < kLayers; ++layer) {
    saved.push_back(rig.retain(1_MiB + 512, s));  // in torch's large segments
    rig.drop(rig.make(1_MiB + 512, s));
  }
  rig.runtime->clear_budget();
  for (; !saved.empty(); saved.pop_back()) {
    const HeldTensor again = rig.unpack(saved.back(), s);
    rig.drop(rig.make(1_MiB + 512, s));
    rig.drop_handle(saved.back());
    rig.drop(again);
  }
}

// Calls for each tensor that left and came back, in steps that go as planned.
template <typename Rig>
double calls_per_tensor(Rig& rig) {
  const driver::Stream s = rig.stream();
  constexpr int kLearning = 5;
  constexpr int kSteps = 10;
  Counters was;
  std::uint64_t before = 0;
  for (int i = 0; i < kLearning + kSteps; ++i) {
    if (i == kLearning) {
      was = rig.counters();
      before = ordering_calls();
    }
    step(rig, s);
    stagehand_sim_drain();
  }
  const Counters now = rig.counters();
  const std::uint64_t left = evictions(now) - evictions(was);
  CHECK(left >= 30 * kSteps && left <= 60 * kSteps);  // else something else was counted
  CHECK(now.restores + now.prefetches - was.restores - was.prefetches >= left);
  const double each = static_cast<double>(ordering_calls() - before) / static_cast<double>(left);
  rig.verify_empty();
  return each;
}

void check_at_most(double most, double is) {
  CHECK(is > 0);
  if (is > most) {
    CHECK_EQ(is, most);  // shows both
  }
}

TEST(
    "a tensor that leaves and comes back as planned costs at most four calls to order its copies") {
  CoreRig rig(kStepMachine);
  check_at_most(4, calls_per_tensor(rig));
}

TEST("a tensor that leaves and comes back as planned costs at most five calls in torch's modes") {
  HeldRig rig(kStepMachine);
  check_at_most(5, calls_per_tensor(rig));
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
