// What outlives its step, as a loss that is kept, is served from blocks of a stream of its own.
#include <vector>

#include "core/survivors.hpp"
#include "native/held_rig.hpp"

namespace stagehand::core::test {
namespace {

int g_places[3];  // what streams are told apart by
driver::Stream stream(int number) { return &g_places[number]; }

constexpr Bytes kMost = 64_MiB;

// The next step begins, and the nth request of that size was left by the last one.
Survivors after(Bytes bytes, std::uint32_t nth) {
  Survivors survivors;
  survivors.begin_step({{bytes, 0, stream(0)}}, kMost);
  survivors.begin_step({{bytes, nth, stream(0)}}, kMost);
  survivors.give(stream(0), stream(1));
  return survivors;
}

TEST("a request is placed apart where the last step left one of its size and number") {
  Survivors survivors = after(4_MiB, 2);
  CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(0));
  CHECK_EQ(survivors.served(4_MiB), 1u);
  CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(1));
  CHECK_EQ(survivors.place(4_MiB, stream(2)), stream(2));  // another stream's work
  CHECK_EQ(survivors.place(5_MiB, stream(0)), stream(0));
  CHECK_EQ(survivors.served(5_MiB), 0u);
  CHECK_EQ(survivors.served(4_MiB), 2u);
  CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(0));
}

TEST("one that was placed apart and outlives its step again is placed so again") {
  Survivors survivors = after(4_MiB, 1);
  survivors.begin_step({{4_MiB, 1, stream(1)}}, kMost);
  CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(1));
}

TEST(
    "what three steps did not leave, as an evaluation, is placed apart in the next one; then no "
    "more") {
  Survivors survivors = after(4_MiB, 1);
  for (int i = 0; i < 3; ++i) {
    survivors.begin_step({}, kMost);
    CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(1));
  }
  survivors.begin_step({{4_MiB, 1, stream(1)}}, kMost);
  for (int i = 0; i < 3; ++i) {
    survivors.begin_step({}, kMost);
    CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(1));
  }
  survivors.begin_step({}, kMost);
  CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(0));
  CHECK_EQ(survivors.sizes(), 0u);
}

TEST("where another request of its size outlives the step, that one is placed apart") {
  Survivors survivors = after(4_MiB, 1);
  survivors.begin_step({{4_MiB, 2, stream(0)}}, kMost);
  CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(0));
  CHECK_EQ(survivors.served(4_MiB), 1u);
  CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(1));
}

TEST("the next step ends what an optimizer that raised has begun") {
  Survivors survivors;
  survivors.serve_all(stream(0), 10_MiB);
  CHECK((survivors.sizes() & size_bit(6_MiB)) != 0);
  survivors.begin_step({}, kMost);
  CHECK(!survivors.all_of().has_value());
  CHECK_EQ(survivors.sizes(), 0u);
}

TEST("nothing is placed apart in the step after the first that left something") {
  Survivors survivors;
  survivors.begin_step({{4_MiB, 0, stream(0)}}, kMost);
  CHECK((survivors.sizes() & size_bit(4_MiB)) != 0);  // it is counted there
  CHECK(!survivors.lacks().has_value());
  CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(0));
}

TEST("a stream is asked for once, for requests that would be placed apart") {
  Survivors survivors;
  survivors.begin_step({{4_MiB, 1, stream(0)}, {6_MiB, 1, stream(0)}}, kMost);
  CHECK(survivors.lacks() == stream(0));
  CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(0));
  survivors.give(stream(0), stream(1));
  CHECK(!survivors.lacks().has_value());
  CHECK_EQ(survivors.place(6_MiB, stream(0)), stream(1));
}

TEST("where many outlive their step, or take much, none is placed apart") {
  Survivors survivors;
  survivors.give(stream(0), stream(1));
  const Survivors::One one{4_MiB, 1, stream(0)};
  survivors.begin_step({Survivors::kFew, one}, kMost);
  CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(1));
  survivors.begin_step({Survivors::kFew + 1, one}, kMost);
  CHECK_EQ(survivors.place(4_MiB, stream(0)), stream(0));
  CHECK_EQ(survivors.sizes(), 0u);
  survivors.begin_step({{kMost + 1_MiB, 1, stream(0)}}, kMost);
  CHECK_EQ(survivors.sizes(), 0u);
}

// Steps of 160 MiB in a budget of 128, that keep something.
struct Steps {
  static constexpr Bytes kHigh = 128_MiB;
  static constexpr Bytes kKept = 1536_KiB;
  static inline const Machine kMachine{.classes = {{kHeldBlock}, {64}}};

  // Returns the stream on which torch hands the new one's block out.
  driver::Stream step(const driver::Stream on, Bytes bytes = kKept) {
    rig.budget(kHigh, kHigh - 16_MiB);
    std::vector<SavedTensor> saved = rig.retain_many(40, kHeldBlock, on);
    const HeldTensor fresh = rig.make(bytes, on);
    drop_kept();
    kept = fresh;
    rig.back_all(saved, on);
    rig.runtime->clear_budget();
    rig.verify();
    return rig.torch.stream_of(kept.address());
  }
  void drop_kept() {
    if (kept.storage != nullptr) {
      rig.check(kept, kept.stream);  // it kept its bytes
      rig.drop(std::exchange(kept, {}));
    }
  }
  void end() {
    drop_kept();
    stagehand_sim_drain();
    rig.verify_empty();
  }

  HeldRig rig{kMachine};
  HeldTensor kept;
};

TEST("torch's cache: from the third step on what is kept is served from a stream of its own") {
  Steps steps;
  const driver::Stream s = steps.rig.stream();
  for (int i = 0; i < 2; ++i) {
    CHECK_EQ(steps.step(s), s);
  }
  const driver::Stream apart = steps.step(s);
  CHECK(apart != s);
  for (int i = 0; i < 4; ++i) {
    CHECK_EQ(steps.step(s), apart);
    CHECK_EQ(steps.rig.counters().overshoot_bytes, 0u);
  }
  steps.end();
}

TEST("torch's cache: what was placed apart and is kept no more is placed as any") {
  Steps steps;
  const driver::Stream s = steps.rig.stream();
  for (int i = 0; i < 5; ++i) {
    steps.step(s);
  }
  const auto drop = [&] {
    steps.drop_kept();
    stagehand_sim_drain();
    steps.rig.look(s);  // torch hears of what has passed at its next request
  };
  for (int i = 0; i < 4; ++i) {
    drop();
    steps.step(s);
  }
  drop();
  CHECK_EQ(steps.step(s), s);
  steps.end();
}

TEST(
    "torch's cache: small blocks, and what is kept in a pool without pressure, stay where they "
    "are") {
  Steps steps;
  const driver::Stream s = steps.rig.stream();
  for (int i = 0; i < 6; ++i) {
    CHECK_EQ(steps.step(s, 512_KiB), s);
  }
  steps.drop_kept();
  for (int i = 0; i < 6; ++i) {
    steps.rig.budget(1_GiB, 1_GiB);
    const HeldTensor fresh = steps.rig.make(Steps::kKept, s);
    steps.drop_kept();
    steps.kept = fresh;
    steps.rig.runtime->clear_budget();
    CHECK_EQ(steps.rig.torch.stream_of(fresh.address()), s);
  }
  steps.end();
}

TEST("torch's cache: what is saved for a backward that comes in a later step is no survivor") {
  Steps steps;
  HeldRig& rig = steps.rig;
  const driver::Stream s = rig.stream();
  std::vector<SavedTensor> before;
  for (int i = 0; i < 6; ++i) {
    rig.budget(Steps::kHigh, Steps::kHigh - 16_MiB);
    std::vector<SavedTensor> saved = rig.retain_many(40, kHeldBlock, s);
    const HeldTensor fresh = rig.make(Steps::kKept, s);
    CHECK_EQ(rig.torch.stream_of(fresh.address()), s);
    const SavedTensor of_fresh = rig.save(fresh);
    steps.drop_kept();
    steps.kept = fresh;
    rig.back_all(saved, s);
    rig.back_all(before, s);
    before.push_back(of_fresh);
    rig.runtime->clear_budget();
  }
  rig.back_all(before, s);
  steps.end();
}

TEST("torch's cache: what is kept since it was made in backward, as gradients, is no survivor") {
  Steps steps;
  HeldRig& rig = steps.rig;
  const driver::Stream s = rig.stream();
  for (int i = 0; i < 6; ++i) {
    rig.budget(Steps::kHigh, Steps::kHigh - 16_MiB);
    std::vector<SavedTensor> saved = rig.retain_many(40, kHeldBlock, s);
    steps.drop_kept();
    rig.back(saved.back(), s);
    saved.pop_back();
    steps.kept = rig.make(Steps::kKept, s);
    CHECK_EQ(rig.torch.stream_of(steps.kept.address()), s);
    rig.back_all(saved, s);
    rig.runtime->clear_budget();
  }
  steps.end();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
