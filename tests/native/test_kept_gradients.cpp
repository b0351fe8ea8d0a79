// Gradients that stay over several steps are served from blocks of a stream of their own.
#include <utility>
#include <vector>

#include "core/kept_gradients.hpp"
#include "core/requests.hpp"
#include "native/held_rig.hpp"
#include "native/trace.hpp"

namespace stagehand::core::test {
namespace {

constexpr Bytes kBytes = 4_MiB;
constexpr Bytes kMost = 64_MiB;

int g_places[2];  // what streams are told apart by
driver::Stream stream(int number) { return &g_places[number]; }

// Backwards that ask for six blocks of one size on stream 0, of which the second and the fifth stay
// until the program lets go of them.
struct Backwards {
  std::pmr::unsynchronized_pool_resource nodes;
  KeptGradients gradients{&nodes};
  Address next = 1;
  std::vector<KeptGradients::Left> there;

  // Returns by which numbers of its requests some were wanted.
  std::vector<std::uint32_t> run(bool keeps, Bytes most = kMost) {
    std::vector<std::uint32_t> wanted;
    gradients.begin_backward(most);
    for (std::uint32_t i = 1; i <= 6; ++i) {
      if (gradients.wants(kBytes, stream(0))) {
        wanted.push_back(i);
      }
      const Address address = next++;
      const std::uint32_t nth = gradients.served(address, kBytes, stream(0));
      CHECK_EQ(nth, i);
      if (keeps && (i == 2 || i == 5)) {
        there.push_back({address, {stream(0), kBytes, nth}});
      } else {
        gradients.freed(address);
      }
    }
    return wanted;
  }
  // The optimizer steps, and its gradients go.
  void zero_grad() {
    gradients.end_backward();
    for (const auto& [address, request] : std::exchange(there, {})) {
      gradients.freed(address);
    }
  }
  // Of two steps each.
  std::vector<std::uint32_t> cycle(Bytes most = kMost) {
    gradients.begin_step({});
    std::vector<std::uint32_t> wanted = run(true, most);
    gradients.begin_step(there);
    CHECK(run(false, most).empty());
    zero_grad();
    return wanted;
  }
};

using Numbers = std::vector<std::uint32_t>;

TEST("a backward's request whose block outlived the next forward is wanted in the next cycle") {
  Backwards backwards;
  CHECK(backwards.cycle().empty());
  CHECK_EQ(backwards.gradients.missing(), 2 * kBytes);
  for (int i = 0; i < 3; ++i) {
    CHECK(backwards.cycle() == (Numbers{2, 5}));
  }
}

TEST("gradients that are let go of before the next backward are never wanted") {
  Backwards backwards;
  for (int i = 0; i < 4; ++i) {
    backwards.gradients.begin_step(std::exchange(backwards.there, {}));
    for (Address address = 1; address < backwards.next; ++address) {
      backwards.gradients.let_go(address);
    }
    CHECK(backwards.run(true).empty());
    CHECK_EQ(backwards.gradients.missing(), 0);
  }
}

TEST("after three cycles of one step none is wanted, and no room is kept") {
  Backwards backwards;
  backwards.cycle();
  for (int i = 0; i < 3; ++i) {
    backwards.gradients.begin_step({});
    CHECK(backwards.run(true) == (Numbers{2, 5}));
    backwards.zero_grad();
  }
  backwards.gradients.begin_step({});
  CHECK(backwards.run(true).empty());
  CHECK_EQ(backwards.gradients.missing(), 0);
}

TEST("room is kept for those that are let go of once the GPU is done with them") {
  Backwards backwards;
  backwards.cycle();
  KeptGradients& gradients = backwards.gradients;
  gradients.begin_step({});
  CHECK(backwards.run(true) == (Numbers{2, 5}));
  gradients.begin_step(backwards.there);
  CHECK(backwards.run(false).empty());
  const std::vector<KeptGradients::Left> let_go = std::exchange(backwards.there, {});
  for (const auto& [address, request] : let_go) {
    gradients.let_go(address);
    CHECK_EQ(gradients.missing(), 0);
  }
  gradients.freed(let_go.front().first);
  CHECK_EQ(gradients.missing(), kBytes);
  gradients.begin_step({});
  CHECK(backwards.run(true) == (Numbers{2, 5}));  // wanted all the same
}

TEST("evaluations between two backwards change nothing") {
  Backwards backwards;
  backwards.gradients.begin_step({});
  backwards.run(true);
  backwards.gradients.begin_step(backwards.there);
  backwards.gradients.begin_step({});
  backwards.gradients.begin_step({});
  CHECK(backwards.run(false).empty());
  backwards.zero_grad();
  CHECK(backwards.cycle() == (Numbers{2, 5}));
}

TEST("what an optimizer asks for, and what is asked for on another stream, is none") {
  Backwards backwards;
  backwards.cycle();
  KeptGradients& gradients = backwards.gradients;
  gradients.begin_step({});
  gradients.begin_backward(kMost);
  CHECK_EQ(gradients.served(1000, kBytes, stream(0)), 1u);
  CHECK(gradients.wants(kBytes, stream(0)));
  CHECK(!gradients.wants(kBytes, stream(1)));
  CHECK(!gradients.wants(2 * kBytes, stream(0)));
  gradients.end_backward();
  CHECK(!gradients.wants(kBytes, stream(0)));
  CHECK_EQ(gradients.served(1001, kBytes, stream(0)), 0u);
  CHECK_EQ(gradients.sizes(), 0u);
}

TEST("what stays through a whole cycle, as a state that is made in a backward, is none") {
  Backwards backwards;
  KeptGradients& gradients = backwards.gradients;
  backwards.cycle();
  gradients.begin_step({});
  CHECK(backwards.run(true) == (Numbers{2, 5}));
  std::vector<KeptGradients::Left> left = backwards.there;
  const Address state = 10'000;
  left.push_back({state, {stream(0), kBytes, 7}});
  gradients.begin_step(left);
  backwards.run(false);
  CHECK_EQ(gradients.missing(), 0);
  backwards.zero_grad();
  CHECK_EQ(gradients.missing(), 2 * kBytes);
  CHECK(backwards.cycle() == (Numbers{2, 5}));
  gradients.let_go(state);
  CHECK_EQ(gradients.missing(), 2 * kBytes);  // it is known no more
}

TEST("where they take more than they may none is wanted, until they may again") {
  Backwards backwards;
  backwards.cycle();
  CHECK(backwards.cycle(2 * kBytes - 1).empty());
  CHECK_EQ(backwards.gradients.missing(), 0);
  CHECK(backwards.cycle(2 * kBytes) == (Numbers{2, 5}));
}

TEST("one whose block is taken by another, of which nobody told, is not there twice") {
  Backwards backwards;
  backwards.cycle();
  backwards.gradients.begin_step({});
  backwards.run(true);
  const auto& [address, request] = backwards.there.front();
  backwards.gradients.begin_step({{address, {stream(0), kBytes, 6}}});
  backwards.gradients.begin_backward(kMost);
  CHECK_EQ(backwards.gradients.missing(), kBytes);
}

// In torch's cache -------------------------------------------------------------------------------

// Micro-batches of 160 MiB in a budget of 128, whose backward makes one gradient.
struct MicroBatches {
  static constexpr Bytes kHigh = 128_MiB;
  static constexpr Bytes kGradient = 12_MiB;

  // Returns the stream on which torch hands out what the gradient's request gets.
  driver::Stream step(bool first) {
    if (first && gradient.storage != nullptr) {
      rig.runtime->optimizer_steps();
      rig.check(gradient, reduced_on);  // it kept its bytes
      rig.drop(std::exchange(gradient, {}));
    }
    rig.budget(kHigh, kHigh - 16_MiB);
    std::vector<SavedTensor> saved = rig.retain_many(40, kHeldBlock, s);
    rig.runtime->clear_budget();
    rig.back(saved.back(), s);
    saved.pop_back();
    const HeldTensor made = rig.make(kGradient, reduced_on);
    const driver::Stream on = rig.torch.stream_of(made.address());
    rig.back_all(saved, s);
    if (first) {
      gradient = made;
    } else {
      rig.drop(made);
    }
    if (waits) {
      stagehand_sim_drain();
    } else {
      CHECK_EQ(keep_busy(s, 50'000'000), driver::kSuccess);
    }
    rig.verify();
    return on;
  }
  void end() {
    rig.drop(std::exchange(gradient, {}));
    stagehand_sim_drain();
    rig.verify_empty();
  }

  HeldRig rig{Machine{.classes = {{kHeldBlock}, {64}}}};
  driver::Stream s = rig.stream();
  driver::Stream reduced_on = s;
  bool waits = true;  // for the GPU after each step
  HeldTensor gradient;
};

TEST(
    "torch's cache: from the second cycle on a gradient that stays is served apart, and no other") {
  MicroBatches batches;
  CHECK_EQ(batches.step(true), batches.s);
  CHECK_EQ(batches.step(false), batches.s);
  driver::Stream apart = nullptr;
  for (int i = 0; i < 3; ++i) {
    const driver::Stream on = batches.step(true);
    CHECK(on != batches.s);
    CHECK(apart == nullptr || on == apart);
    apart = on;
    CHECK_EQ(batches.step(false), batches.s);
    CHECK_EQ(batches.step(false), batches.s);
    CHECK_EQ(batches.rig.counters().overshoot_bytes, 0u);
  }
  batches.end();
}

TEST("torch's cache: gradients whose stream is behind are served apart likewise") {
  MicroBatches batches;
  batches.waits = false;
  for (int i = 0; i < 12; ++i) {
    CHECK_EQ(batches.step(i % 3 == 0) != batches.s, i % 3 == 0 && i > 0);
  }
  batches.end();
}

TEST("torch's cache: without accumulation gradients stay where they are") {
  for (const bool waits : {true, false}) {
    MicroBatches batches;
    batches.waits = waits;
    for (int i = 0; i < 6; ++i) {
      CHECK_EQ(batches.step(true), batches.s);
    }
    batches.end();
  }
}

TEST("torch's cache: after three cycles of one step gradients are where they were") {
  for (const bool waits : {true, false}) {
    MicroBatches batches;
    batches.waits = waits;
    for (int i = 0; i < 6; ++i) {
      batches.step(i % 2 == 0);
    }
    for (int i = 0; i < 3; ++i) {
      CHECK(batches.step(true) != batches.s);
    }
    for (int i = 0; i < 3; ++i) {
      CHECK_EQ(batches.step(true), batches.s);
    }
    batches.end();
  }
}

TEST("torch's cache: gradients of a stream on which nothing is saved stay on it") {
  MicroBatches batches;
  batches.reduced_on = batches.rig.stream();
  for (int i = 0; i < 9; ++i) {
    CHECK_EQ(batches.step(i % 3 == 0), batches.reduced_on);
  }
  batches.end();
}

TEST("torch's cache: what is made again for a backward is not counted among its requests") {
  MicroBatches batches;
  HeldRig& rig = batches.rig;
  batches.step(true);
  batches.step(false);
  rig.runtime->optimizer_steps();
  rig.drop(std::exchange(batches.gradient, {}));
  rig.budget(MicroBatches::kHigh, MicroBatches::kHigh - 16_MiB);
  std::vector<SavedTensor> saved = rig.retain_many(40, kHeldBlock, batches.s);
  rig.runtime->clear_budget();
  rig.back(saved.back(), batches.s);
  saved.pop_back();
  {
    const MakesAgain makes_again;
    const HeldTensor again = rig.make(MicroBatches::kGradient, batches.s);
    CHECK_EQ(rig.torch.stream_of(again.address()), batches.s);
    rig.drop(again);
  }
  batches.gradient = rig.make(MicroBatches::kGradient, batches.s);
  CHECK(rig.torch.stream_of(batches.gradient.address()) != batches.s);
  rig.back_all(saved, batches.s);
  batches.end();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
