// What a run without pressure says of smaller budgets, beside what the engine does inside them: on
// recorded steps (trace.hpp), in virtual time.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/step_shape.hpp"
#include "native/heap_replay.hpp"

namespace stagehand::core::test {
namespace {

constexpr int kLearning = 6;  // steps without pressure
constexpr int kSettling = 5;  // of each budget
constexpr int kSteps = 12;
constexpr double kBytes = 0.05;
constexpr double kTime = 0.10;
constexpr double kDeep = 2.5;  // times a step without a budget

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

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
    "GPT at 8192 tokens: bytes within 5 % at four budgets, and time within 10 % up to 2.5 times a "
    "step without one") {
  expect_told("gpt_8k.txt", {0.9, 0.75, 0.6, 0.45});
}

TEST("Llama: likewise") { expect_told("llama.txt", {0.9, 0.75, 0.6, 0.5, 0.45}); }

TEST("ViT: likewise at three") { expect_told("vit.txt", {0.9, 0.7, 0.5}); }

TEST("U-Net: likewise at three") { expect_told("unet.txt", {0.9, 0.8, 0.75}); }

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
