// What streaming weights beside activations costs, in virtual time, against the step as recorded.
// All copies one way share one link.
#include <string>
#include <vector>

#include "native/lora_replay.hpp"

namespace stagehand::core::test {
namespace {

constexpr int kSettled = 6;  // steps, after which the median is held to what is promised
constexpr int kSteps = 20;
constexpr Bytes kGB = 1'000'000'000;
constexpr char kLong[] = "lora_8k.txt";   // tokens: what is saved is most of it
constexpr char kShort[] = "lora_1k.txt";  // the link bounds it

template <class Tensors, class BlockWeights = EngineWeights<Tensors>>
void holds_to(const LoraModel& model, Bytes high, double of_plain, double gb, double more_ms = 0) {
  std::vector<double> took;
  std::vector<double> came;
  for (const Bytes at : budgets_beside<Tensors>(high)) {
    LoraReplay<Tensors, BlockWeights> replay(model, at, lora_machine(on_one_link));
    const std::vector<LoraStep> steps = settled_steps(replay, kSettled, kSteps - kSettled);
    std::vector<Bytes> in;
    for (const LoraStep& step : steps) {
      in.push_back(step.in);
    }
    took.push_back(settled_of_plain(replay, steps, more_ms));
    came.push_back(static_cast<double>(median(in)) / kGB);
  }
  if (median(took) > of_plain || median(came) > gb) {
    CHECK_EQ(std::to_string(high / kGB) + " GB: " + std::to_string(median(took)) + " of plain, " +
                 std::to_string(median(came)) + " GB came",
             "");
  }
}

TEST("weights that fit are loaded once, and cost nothing") {
  LoraReplay<HeapTensors> replay(equal_blocks(kLong), 24 * kGB, lora_machine());
  CHECK_EQ(replay.step().loads, LoraModel::kBlocks);
  const LoraStep step = replay.step();
  CHECK_EQ(step.loads, 0);
  CHECK(step.ms <= replay.plain_ms() * 1.001);
}

TEST("long sequences on the process allocator: what streams hides behind the step while it can") {
  holds_to<HeapTensors>(equal_blocks(kLong), 12 * kGB, 1.02, 5.5);
  holds_to<HeapTensors>(equal_blocks(kLong), 10 * kGB, 1.15, 8.2);
  holds_to<HeapTensors>(equal_blocks(kLong), 8 * kGB, 1.44, 11.0);
}

TEST("long sequences in torch's cache: likewise, but holes cost some") {
  holds_to<HeldTensors>(equal_blocks(kLong), 12 * kGB, 1.04, 6.0);
  holds_to<HeldTensors>(equal_blocks(kLong), 10 * kGB, 1.19, 7.6);
  holds_to<HeldTensors>(equal_blocks(kLong), 8 * kGB, 1.58, 11.1);
}

// Each block's backward asks for 676 MB, which is more than any block that comes and goes.
TEST("deterministic attention on the process allocator: what streams hides behind the step") {
  holds_to<HeapTensors>(deterministic_blocks(kLong), 12 * kGB, 1.01, 6.4);
  holds_to<HeapTensors>(deterministic_blocks(kLong), 10 * kGB, 1.05, 7.2);
  holds_to<HeapTensors>(deterministic_blocks(kLong), 8 * kGB, 1.10, 10.4);
}

TEST("deterministic attention in torch's cache: nothing comes ahead into its only hole") {
  holds_to<HeldTensors>(deterministic_blocks(kLong), 12 * kGB, 1.02, 6.7);
  holds_to<HeldTensors>(deterministic_blocks(kLong), 10 * kGB, 1.13, 10.0);
  holds_to<HeldTensors>(deterministic_blocks(kLong), 8 * kGB, 1.25, 11.2);
}

// Steps 20 to 59, and not their median: what came ahead of need, and had to leave again once a
// reserve was forgotten, was every third step.
template <class Tensors>
double mean_of_settled(const LoraModel& model, Bytes high) {
  constexpr int kFirst = 20;
  constexpr int kLast = 60;
  return median_beside<Tensors>(high, [&](Bytes at) {
    LoraReplay<Tensors> replay(model, at, lora_machine(on_one_link));
    double ms = 0;
    for (int i = 0; i < kLast; ++i) {
      const LoraStep step = replay.step();
      ms += i >= kFirst ? step.ms : 0;
    }
    return ms / (kLast - kFirst) / replay.plain_ms();
  });
}

TEST("room that prefetch has learned to leave is not given up again every other step") {
  for (const Bytes high : {11 * kGB, 10 * kGB, 9 * kGB}) {
    CHECK(mean_of_settled<HeapTensors>(deterministic_blocks(kLong), high) < 1.025);
  }
  CHECK(mean_of_settled<HeldTensors>(deterministic_blocks(kLong), 11 * kGB) < 1.025);
  CHECK(mean_of_settled<HeldTensors>(equal_blocks(kLong), 12 * kGB) < 1.03);
}

// Nothing is known yet of the 676 MB that each block's backward asks for in one piece.
TEST("a first step: what came far ahead makes way for requests three times, then none comes") {
  for (const Bytes high : {10 * kGB, 12 * kGB, 14 * kGB}) {
    LoraReplay<HeldTensors> replay(deterministic_blocks(kLong), high, lora_machine(on_one_link));
    CHECK(replay.step().loads <= 2 * LoraModel::kBlocks + 3);
  }
}

// What moves stays mapped where it was, so that addresses run out on a small device, step by step.
TEST("where addresses run out no group leaves for it: those that memory has left are given back") {
  Machine machine = lora_machine(on_one_link);
  machine.memory = 16_GiB;
  LoraReplay<HeapTensors> replay(deterministic_blocks(kLong), 8'500'000'000, machine);
  replay.step();
  for (int i = 0; i < 40; ++i) {
    const LoraStep step = replay.step();
    CHECK(step.loads <= LoraModel::kBlocks + 4);
    CHECK(step.ms < 1.6 * replay.plain_ms());
  }
}

TEST("short sequences, which the link bounds: hardly more is loaded than must come") {
  holds_to<HeapTensors>(equal_blocks(kShort), 4 * kGB, 2.27, 4.7);
  holds_to<HeldTensors>(equal_blocks(kShort), 4 * kGB, 2.50, 5.1);
}

// Weights, gradients, AdamW's state and what is saved are 28.3 GB at once.
template <class Tensors>
void holds_trained_to(Bytes high, double of_plain, double gb) {
  const double optimizer_ms = LoraModel::kBlocks * TrainedWeights<Tensors>::kStepNs / 1e6;
  holds_to<Tensors, TrainedWeights<Tensors>>(deterministic_blocks(kLong), high, of_plain, gb,
                                             optimizer_ms);
}

// Each group of state leaves and comes back once a step, one way beside the other.
TEST("all trained on the process allocator: state leaves in forward, and is back in backward") {
  holds_trained_to<HeapTensors>(26 * kGB, 1.01, 3.3);
  holds_trained_to<HeapTensors>(24 * kGB, 1.11, 5.7);
  holds_trained_to<HeapTensors>(22 * kGB, 1.26, 8.2);
  holds_trained_to<HeapTensors>(20 * kGB, 1.34, 9.3);
  holds_trained_to<HeapTensors>(18 * kGB, 1.62, 12.2);
}

TEST("all trained in torch's cache: what finds no hole comes where the optimizer's step has been") {
  holds_trained_to<HeldTensors>(26 * kGB, 1.17, 5.7);
  holds_trained_to<HeldTensors>(24 * kGB, 1.35, 8.3);
  holds_trained_to<HeldTensors>(22 * kGB, 1.70, 14.6);
  holds_trained_to<HeldTensors>(20 * kGB, 1.69, 13.8);
}

// At 20 GiB 23 of 48 blocks must come in each direction, and the link is all that they wait for.
template <class Tensors>
void keeps_the_link_busy(double of_bytes, std::uint64_t loads) {
  LoraReplay<Tensors> replay(checkpointed_blocks(), 20_GiB, lora_machine(on_one_link),
                             Recomputes{false, 0});
  for (int i = 0; i < kSettled; ++i) {
    const LoraStep step = replay.step();
    const double link_ms = static_cast<double>(step.in) / kBytesPerS * 1e3;
    if (i > 0 && (step.loads > loads || step.ms > of_bytes * link_ms)) {
      CHECK_EQ(std::to_string(step.loads) + " loads, " + std::to_string(step.ms / link_ms), "");
    }
    CHECK_EQ(step.over, 0);
  }
}

TEST("checkpointed blocks that the link bounds: it is busy throughout, from the second step on") {
  keeps_the_link_busy<HeapTensors>(1.05, 44);
  keeps_the_link_busy<HeldTensors>(1.05, 47);
}

// Settled steps, in plain ones.
double settled(const char* trace, Bytes high, Recomputes what) {
  constexpr int kTried = 30;  // steps, after which the plan is mostly what it stays
  LoraReplay<HeapTensors> replay(equal_blocks(trace), high, lora_machine(on_one_link), what);
  return settled_of_plain(replay, settled_steps(replay, kTried, kSteps / 2));
}

TEST("regions of two blocks, whose weights come again for a re-run: never slower than moving") {
  const Recomputes moving{false, 0};
  const Recomputes two{true, 2};
  CHECK(settled(kLong, 8 * kGB, two) <= 1.01 * settled(kLong, 8 * kGB, moving));
  CHECK(settled(kShort, 4 * kGB, two) <= 1.01 * settled(kShort, 4 * kGB, moving));
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
