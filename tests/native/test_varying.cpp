// Steps whose sizes were not seen before, replayed: they follow their kin.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "native/trace_recipes.hpp"
#include "native/varying_steps.hpp"

namespace stagehand::core::test {
namespace {

constexpr int kSettling = 12;  // steps, until memory is in larger pieces

Machine large_machine() {
  Machine with = replay_machine();
  with.memory = 96_GiB;
  with.host_limit = 24_GiB;
  with.classes = {{1_MiB, 4_MiB, 16_MiB, 64_MiB, 256_MiB}, {512, 64, 32, 16, 4}};
  return with;
}

struct Bar {
  double jitter;           // of an expert's tokens, from step to step
  bool idle;               // now and then an expert has none
  double evicted_percent;  // of what must leave
  double ns_percent;       // of a step without a budget
};

// The median of the budgets, each of which keeps to `high`: those side by side differ by a tenth.
void expect_at_most(const Bar& bar, const std::vector<double>& shares) {
  std::vector<double> evicted;
  std::vector<double> ns;
  for (const double share : shares) {
    Replay replay(experts_step(0, bar.jitter), large_machine());
    const Bytes high = replay.set_share(share);
    const Bytes need = replay.peak() - high;
    std::vector<double> percent_evicted;
    std::vector<double> percent_ns;
    std::vector<double> map_ms;
    for (int i = 1; i < 40; ++i) {
      replay.follow(experts_step(static_cast<std::uint64_t>(i), bar.jitter, bar.idle));
      const Step step = replay.step();
      CHECK(step.mapped_peak <= high);
      CHECK_EQ(step.gained.overshoot_bytes, 0);
      CHECK(replay.plan_state() == PlanState::following);
      if (i < kSettling) {
        continue;
      }
      percent_evicted.push_back(100.0 * static_cast<double>(step.gained.evicted_bytes) /
                                static_cast<double>(need));
      percent_ns.push_back(100.0 * static_cast<double>(step.ns) /
                           static_cast<double>(replay.unbudgeted_ns()));
      map_ms.push_back(static_cast<double>(step.map_ns) / 1e6);
    }
    CHECK(median(map_ms) <= 3.2);
    replay.verify();
    evicted.push_back(median(percent_evicted));
    ns.push_back(median(percent_ns));
  }
  CHECK(median(evicted) <= bar.evicted_percent);
  CHECK(median(ns) <= bar.ns_percent);
}

// Without kin 119 %, 130 % and 14 ms of the host to map.
TEST("experts: sizes that differ in each step leave ahead of need, and little is mapped") {
  expect_at_most({0.04, false, 130, 112}, {0.75});
}

TEST("experts: so it is where sizes differ by a third, and where an expert has nothing to do") {
  expect_at_most({0.3, true, 135, 111}, {0.73, 0.74, 0.75, 0.76, 0.77});
}

// 1.08 and 124 % where all moves; 1.09 where no more leaves than bytes are short by: no hole is
// found then for what the head asks for, and what makes one is waited for.
TEST("experts: what comes again bit by bit is dropped in steps of other sizes, and little moves") {
  std::vector<double> took;
  for (const double share : {0.7, 0.75, 0.8}) {
    Replay replay(experts_step(0, 0.3), large_machine());
    const Bytes high = replay.set_share(share);
    std::vector<double> moved;
    for (int i = 1; i < 40; ++i) {
      std::map<std::uint64_t, Known> recipes;
      replay.follow(experts_step(static_cast<std::uint64_t>(i), 0.3, true, &recipes));
      replay.make_again(std::move(recipes));
      const Step step = replay.step();
      CHECK(step.mapped_peak <= high);
      CHECK_EQ(step.gained.overshoot_bytes, 0);
      if (i >= kSettling) {
        took.push_back(static_cast<double>(step.ns) / static_cast<double>(replay.unbudgeted_ns()));
        moved.push_back(static_cast<double>(step.gained.evicted_bytes) /
                        static_cast<double>(replay.peak() - high));
      }
    }
    CHECK(median(moved) <= 0.75);
    replay.verify();
  }
  CHECK(median(took) <= 1.03);
}

// Blocks that may run again, over another length in each step. Where each request made those leave
// that fitted it best 8.3 blocks of 16 ran again in a step at 50 %, 2.9 at 75 %: of most of them a
// part had been dropped. Nodes too: 1.122 of a step without a budget at 50 %.
TEST(
    "Llama over other lengths: of a call that must run again all leaves before another one has "
    "to") {
  const std::vector<Event> longest = read_trace("llama.txt");
  struct Bar {
    double share;
    bool nodes;
    double reruns;  // in a step
    double took;    // of a step without a budget
  };
  for (const Bar& bar :
       {Bar{0.5, false, 7, 1.147}, Bar{0.75, false, 2.4, 1.06}, Bar{0.5, true, 5.8, 1.118}}) {
    Replay replay(longest, large_machine());
    const Bytes high = replay.set_share(bar.share);
    double reruns = 0;
    double ns = 0;
    double without = 0;
    constexpr int kSteps = 40;
    for (int i = 0; i < kSteps; ++i) {
      const double by = 1 - i * 97 % 385 / 512.0;
      replay.follow(times_as_large(longest, by));
      replay.run_again(blocks_of("llama.txt"));
      if (bar.nodes) {
        std::map<std::uint64_t, Known> recipes = recipes_of("llama.txt");
        for (auto& [record, known] : recipes) {
          known.any_size = std::exchange(known.exact, false);
          known.ns = static_cast<std::uint64_t>(static_cast<double>(known.ns) * by);
        }
        replay.make_again(std::move(recipes));
      }
      const Step step = replay.step();
      CHECK(step.mapped_peak <= high);
      if (i >= 8) {
        reruns += static_cast<double>(step.reruns) / (kSteps - 8);
        ns += static_cast<double>(step.ns);
        without += by * static_cast<double>(replay.unbudgeted_ns());
      }
    }
    CHECK(reruns <= bar.reruns);
    CHECK(ns <= bar.took * without);
    replay.verify();
  }
}

// Each saves its reserve, and an output of a sixth of that, which would make no room for another
// reserve.
TEST("LSTM layers over other lengths: with what is most of its call nothing else leaves") {
  Replay replay(lstm_step(640), large_machine());
  replay.set_share(0.5);
  std::uint64_t reruns = 0;
  for (Bytes i = 1; i < 14; ++i) {
    const Bytes length = 640 - i * 97 % 385;
    const std::vector<Event> events = lstm_step(length);
    std::vector<Region> layers;
    std::size_t saves = 0;
    for (std::size_t line = 0, begin = 0; line < events.size() && layers.size() < 4; ++line) {
      if (events[line].kind == 's' && ++saves % 2 == 0) {
        layers.push_back({std::exchange(begin, line + 1), line + 1});
      }
    }
    replay.follow(events);
    replay.run_again(layers);
    const Step step = replay.step();
    if (length < 600) {  // else outputs have to leave as well
      CHECK_EQ(step.gained.dropped_bytes % (6 * length * 1_MiB), 0);
    }
    reruns += step.reruns;
  }
  CHECK(reruns > 0);
  replay.verify();
}

// Blocks of GiBs, each of another size in each step; what is free of the step before is in pieces
// of that step's sizes.
TEST("LSTM over other lengths: above high is mapped what is live, and no free memory beside it") {
  Replay replay(lstm_step(640), large_machine());
  const Bytes high = replay.set_share(0.3);
  Bytes over = 0;
  for (Bytes i = 1; i < 14; ++i) {
    replay.follow(lstm_step(640 - i * 97 % 385));
    const Step step = replay.step();
    CHECK(step.mapped_peak <= std::max(high, step.occupied_peak + 128_MiB));
    over += step.gained.overshoot_bytes;
  }
  CHECK(over > 0);  // or nothing was tried
  replay.verify();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
