// Budgets that hardly hold what a step needs at once, in torch's cache: what is proven there, and
// what goes back first.
#include <random>
#include <vector>

#include "core/free_runs.hpp"
#include "native/lora_replay.hpp"
#include "native/varying_steps.hpp"

namespace stagehand::core::test {
namespace {

// Linear layers with a gelu after each, whose outputs a recipe can make again, and a loss that
// needs the last of them as backward begins. Each gradient takes a small segment. How long kernels
// take hangs on `random`, and so which plans are tried, and when.
LoraModel mlp(std::minstd_rand& random, double spread, bool expandable) {
  constexpr Bytes kUnit = 16_MiB;
  constexpr std::uint64_t kGeluNs = 15'000;
  constexpr int kLayers = 6;
  std::uniform_real_distribution<double> factor(1, spread);
  const auto us = [&](double plain) { return plain * factor(random); };
  StepWriter step;
  LoraModel model;
  std::vector<std::uint64_t> inputs;  // records: of gelus,
  std::vector<std::uint64_t> made;    // and what those made
  std::uint64_t now = 0;
  for (int i = 0; i < kLayers; ++i) {
    const std::uint64_t out = step.allocate(kUnit);
    step.work(us(150));
    if (now != 0) {
      made.push_back(step.save(now));
      model.recipes[made.back()] = {inputs.back(), kGeluNs};
      step.free(now);
    }
    inputs.push_back(step.save(out));
    now = step.allocate(kUnit);
    step.work(us(15));
    step.free(out);
  }
  made.push_back(step.save(now));
  model.recipes[made.back()] = {inputs.back(), kGeluNs};
  const std::uint64_t square = step.allocate(kUnit);
  step.work(us(15));
  step.free(now);
  step.free(square);
  std::uint64_t gradient = step.allocate(kUnit);
  const auto through = [&](std::uint64_t record, double plain_us) {
    const std::uint64_t alias = step.use(record);
    const std::uint64_t next = step.allocate(kUnit);
    step.work(us(plain_us));
    step.used(record, alias);
    step.free(gradient);
    gradient = next;
  };
  through(made.back(), 15);
  for (int i = kLayers; i-- > 0;) {
    through(inputs[i], 20);
    step.allocate(1_MiB);  // of the weight, and of the bias
    step.allocate(2048);
    if (i > 0) {
      through(made[i - 1], 300);
    }
  }
  step.free(gradient);
  model.events = step.take();
  model.expandable = expandable;
  model.kept = 1_MiB + 256_KiB;
  return model;
}

// A proof takes what is made again beside what came back. Where that does not fit the record is
// moved; and free segments of small blocks go back before anything goes over `high`.
TEST("at the edge of a budget no step goes over high, whatever plan it tries") {
  for (const bool expandable : {false, true}) {
    for (const Bytes room : {88_MiB, 92_MiB, 96_MiB, 100_MiB}) {
      for (unsigned seed = 1; seed <= 12; ++seed) {
        std::minstd_rand random(seed);
        const double spread = 1 + seed % 6;
        const Bytes high = LoraReplay<HeldTensors, NoWeights>::others() + room;
        LoraReplay<HeldTensors, NoWeights> replay(mlp(random, spread, expandable), high,
                                                  lora_machine(on_one_link), Recomputes{true, 0});
        for (int i = 0; i < 8; ++i) {
          if (i > 0) {
            replay.follow(mlp(random, spread, expandable));
          }
          CHECK_EQ(replay.step().over, 0);
        }
        CHECK(replay.counters().dropped_bytes > 0);
      }
    }
  }
}

using Runs = std::vector<FreeRun>;

// In MiB; the requests come in that order.
std::int64_t grows(Runs runs, std::vector<Bytes> requests, bool by_pages) {
  for (FreeRun& one : runs) {
    one.bytes *= 1_MiB;
    one.gives_back *= 1_MiB;
  }
  for (Bytes& one : requests) {
    one *= 1_MiB;
  }
  return growth_of(runs, requests, by_pages) / std::int64_t{1_MiB};
}

TEST("each request takes the smallest free run that holds it, and only runs that serve none go") {
  CHECK_EQ(grows({{32, 32}, {16, 16}}, {16}, false), -32);
  CHECK_EQ(grows({{32, 32}, {16, 16}}, {16, 16}, false), 0);
  CHECK_EQ(grows({{40, 0}}, {16, 16}, false), 0);
  CHECK_EQ(grows({{0, 20}}, {16}, false), 16 - 20);  // another stream's
}

TEST("what no run holds gets a segment of its own, of which the rest serves the next") {
  CHECK_EQ(grows({{12, 0}}, {16}, false), 16);
  CHECK_EQ(grows({}, {4, 4}, false), 20);
  CHECK_EQ(grows({}, {15}, false), 16);
  CHECK_EQ(grows({{16, 16}}, {1}, false), -16);  // it lies among other small ones
}

TEST("of an expandable segment whole pages come behind the last, less what is free there") {
  CHECK_EQ(grows({{12, 0, true}}, {16}, true), 20);
  CHECK_EQ(grows({{12, 0, true}}, {16, 16}, true), 20);
  CHECK_EQ(grows({{12, 0, true}, {16, 0}}, {16, 16}, true), 20);
  CHECK_EQ(grows({{16, 0}}, {16, 16}, true), 20);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
