// What streaming weights beside activations costs, in virtual time: against the least that the link
// allows (LoraReplay::bound_ms). Copies in on two lanes do not share the link here, as they do on a
// real one: bytes are held as well.
#include <string>

#include "native/lora_replay.hpp"

namespace stagehand::core::test {
namespace {

constexpr int kSettled = 6;  // steps, after which each is held to what is promised
constexpr int kSteps = 12;

void holds_to(const std::string& name, const Lora& model, Bytes high, double of_bound,
              double of_bytes) {
  LoraReplay replay(model, high);
  for (int i = 0; i < kSteps; ++i) {
    const LoraStep step = replay.step();
    if (i < kSettled) {
      continue;
    }
    const double ms = step.ms / replay.bound_ms();
    const double bytes = static_cast<double>(step.in) / replay.bound_bytes();
    if (ms > of_bound || bytes > of_bytes || step.over != 0 || step.late != 0) {
      CHECK_EQ(name + ": " + std::to_string(ms) + " of the time, " + std::to_string(bytes) +
                   " of the bytes, " + std::to_string(step.over) + " over, " +
                   std::to_string(step.late) + " late",
               "");
    }
  }
}

TEST("weights that fit are loaded once, and cost nothing") {
  LoraReplay replay(long_lora(), 24_GiB);
  CHECK_EQ(replay.step().loads, 12);
  const LoraStep step = replay.step();
  CHECK_EQ(step.loads, 0);
  CHECK(step.ms <= replay.bound_ms() * 1.001);
}

TEST("long sequences: a step with weights that stream is at the bound") {
  holds_to("12 GB", long_lora(), 11'400_MiB, 1.02, 1.10);
  holds_to("10 GB", long_lora(), 9'500_MiB, 1.10, 1.15);
  holds_to("8 GB", long_lora(), 7'600_MiB, 1.07, 1.15);
}

TEST("short sequences, which the link bounds: no more is loaded than must come") {
  holds_to("4 GB", short_lora(), 3'800_MiB, 1.12, 1.03);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
