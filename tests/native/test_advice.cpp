// What a run without pressure says of smaller budgets, beside what the engine does inside them: on
// recorded steps (trace.hpp), in virtual time.
#include <cmath>
#include <string>
#include <vector>

#include "core/step_shape.hpp"
#include "native/heap_replay.hpp"
#include "native/lora_replay.hpp"

namespace stagehand::core::test {
namespace {

constexpr int kLearning = 6;  // steps without pressure
constexpr int kSettling = 5;  // of each budget
constexpr int kSteps = 12;
constexpr double kBytes = 0.05;
constexpr double kTime = 0.10;
constexpr double kDeep = 2.5;  // times a step without a budget

bool near(double told, double seen, double apart) { return std::abs(told - seen) <= apart * seen; }

// Shares of the activations.
void expect_told(const std::string& trace, const std::vector<double>& shares) {
  Replay replay(trace);
  replay.set_share(4);
  std::uint64_t plain_ns = 0;
  for (int i = 0; i < kLearning; ++i) {
    const Step step = replay.step();
    CHECK_EQ(step.gained.evicted_bytes, 0);
    plain_ns = step.ns;
  }
  const StepShape shape = replay.shape();
  CHECK(!shape.rates_known);
  for (const double share : shares) {
    KnownStep known = shape.known();
    known.high = replay.set_share(share);
    known.out_bytes_per_ns = known.in_bytes_per_ns = kBytesPerS / 1e9;
    const Advice advice = advise(known);
    std::vector<double> bytes;
    std::vector<double> ns;
    for (int i = 0; i < kSteps; ++i) {
      const Step step = replay.step();
      if (i >= kSettling) {
        bytes.push_back(static_cast<double>(step.gained.evicted_bytes));
        ns.push_back(static_cast<double>(step.ns));
      }
    }
    CHECK(near(static_cast<double>(advice.forecast.bytes), median(bytes), kBytes));
    const auto told = static_cast<double>(plain_ns + advice.forecast.late_ns);
    if (median(ns) < kDeep * static_cast<double>(plain_ns)) {
      CHECK(near(told, median(ns), kTime));
    } else {  // nobody would train so; it is told as slower than it is
      CHECK(told >= (1 - kTime) * median(ns));
      CHECK(told <= 1.2 * median(ns));
    }
    CHECK(advice.least < known.high);
    CHECK(advice.host >= advice.forecast.bytes * 9 / 10);  // nearly all is away at the peak
  }
  replay.verify();
}

TEST(
    "GPT at 8192 tokens: bytes within 5 % at five budgets, and time within 10 % up to 2.5 times a "
    "step without one") {
  expect_told("gpt_8k.txt", {0.9, 0.8, 0.75, 0.6, 0.45});
}

TEST("Llama: likewise") { expect_told("llama.txt", {0.9, 0.75, 0.6, 0.5, 0.45}); }

TEST("ViT: likewise at three") { expect_told("vit.txt", {0.9, 0.7, 0.5}); }

TEST("U-Net: likewise at three") { expect_told("unet.txt", {0.9, 0.8, 0.75}); }

// In GB. Weights come in whole groups, and holes decide of some, so bytes are told as they add up.
void expect_told_with_weights(const LoraModel& model, const std::vector<double>& budgets,
                              double bytes_apart, double time_apart) {
  // A run without pressure does not know how long it takes to make something again.
  const Recomputes nothing{false, 0};
  LoraReplay<HeapTensors> replay(model, 24'000'000'000, lora_machine(on_one_link), nothing);
  double plain_ms = 0;
  for (int i = 0; i < kLearning; ++i) {
    plain_ms = replay.step().ms;
  }
  const StepShape shape = replay.shape();
  for (const double budget : budgets) {
    KnownStep known = shape.known();
    known.high = static_cast<Bytes>(budget * 1e9);
    known.out_bytes_per_ns = known.in_bytes_per_ns = kBytesPerS / 1e9;
    const Advice advice = advise(known);
    replay.set_high(known.high);
    std::vector<double> bytes;
    std::vector<double> ms;
    for (int i = 0; i < 2 * kSteps; ++i) {
      const LoraStep step = replay.step();
      if (i >= kSettling) {
        bytes.push_back(static_cast<double>(step.in));
        ms.push_back(step.ms);
      }
    }
    const auto told = static_cast<double>(advice.forecast.bytes + advice.forecast.weights);
    const double told_ms = plain_ms + static_cast<double>(advice.forecast.late_ns) / 1e6;
    CHECK(advice.forecast.weights > 0);
    CHECK(near(told, median(bytes), bytes_apart));
    CHECK(near(told_ms, median(ms), time_apart));
    CHECK(advice.fullest > known.high);
    CHECK(advice.least < known.high);
  }
}

TEST("LoRA with offloaded weights: bytes within 16 % and time within 10 % at four budgets") {
  expect_told_with_weights(equal_blocks("lora_8k.txt"), {14, 12, 10, 8}, 0.16, 0.10);
  expect_told_with_weights(unequal_blocks("lora_8k.txt"), {14, 12, 10, 8}, 0.26, 0.10);
}

TEST("LoRA that the link bounds: likewise time within 16 %") {
  expect_told_with_weights(equal_blocks("lora_1k.txt"), {5, 4, 3.5}, 0.25, 0.16);
}

TEST("weights that nobody holds leave before records, and are in what a step needs") {
  const std::vector<KnownRecord> records{{64_MiB, 1, 4}};
  const std::vector<Bytes> full{64_MiB, 128_MiB, 128_MiB, 128_MiB, 64_MiB};
  const std::vector<std::uint64_t> at_ns{0, 1'000'000, 2'000'000, 3'000'000, 4'000'000};
  const std::vector<IdleWeights> idle{{64_MiB, 1, 4}};
  const Advice roomy = advise({records, full, at_ns, 1_GiB, 25, 25, idle});
  CHECK_EQ(roomy.forecast.weights, 0);
  CHECK(roomy.fullest >= 192_MiB);
  const Advice tight = advise({records, full, at_ns, 160_MiB, 25, 25, idle});
  CHECK_EQ(tight.forecast.weights, 64_MiB);
  const Advice without = advise({records, full, at_ns, 160_MiB, 25, 25});
  CHECK_EQ(without.forecast.weights, 0);
  CHECK_EQ(without.forecast.bytes, 0);
}

TEST("a budget that holds everything moves nothing, and one below what is live is told") {
  const std::vector<KnownRecord> records{{64_MiB, 1, 4}, {64_MiB, 2, 3}};
  const std::vector<Bytes> full{64_MiB, 128_MiB, 192_MiB, 192_MiB, 128_MiB};
  const std::vector<std::uint64_t> at_ns{0, 1'000'000, 2'000'000, 3'000'000, 4'000'000};
  const Advice roomy = advise({records, full, at_ns, 1_GiB, 25, 25});
  CHECK_EQ(roomy.forecast.bytes, 0);
  CHECK_EQ(roomy.forecast.late_ns, 0);
  CHECK_EQ(roomy.host, 0);
  CHECK(roomy.fullest >= 192_MiB);
  const Advice tight = advise({records, full, at_ns, 32_MiB, 25, 25});
  CHECK(tight.forecast.bytes >= 128_MiB);
  CHECK(tight.least > 32_MiB);
  CHECK_EQ(tight.host, 128_MiB);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
