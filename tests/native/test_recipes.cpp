// Recorded steps whose elementwise outputs can be made again: what is dropped, and what that saves.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "native/test.hpp"
#include "native/trace_recipes.hpp"

namespace stagehand::core::test {
namespace {

struct Outcome {
  double first = 0;  // over a step without a budget
  double later = 0;
  Step last;
};

Outcome replayed(const std::string& trace, double share, bool recipes) {
  constexpr int kSteps = 40;  // by then one plan is kept
  Replay replay(trace);
  if (recipes) {
    replay.make_again(recipes_of(trace));
  }
  replay.set_share(share);
  Outcome outcome;
  const auto plain = static_cast<double>(replay.unbudgeted_ns());
  for (int i = 0; i < kSteps; ++i) {
    outcome.last = replay.step();
    outcome.later = static_cast<double>(outcome.last.ns) / plain;
    outcome.first = i == 0 ? outcome.later : outcome.first;
    CHECK_EQ(outcome.last.gained.overshoot_bytes, 0);
  }
  replay.verify();
  return outcome;
}

TEST(
    "at three quarters of the activations a step with recipes takes what it takes without a "
    "budget") {
  for (const char* trace : {"gpt_8k.txt", "llama.txt", "vit.txt"}) {
    const Outcome outcome = replayed(trace, 0.75, true);
    CHECK(outcome.later < 1.03);
    CHECK(outcome.first < 1.25);
  }
}

TEST("at half of them making again takes the place of waiting for the lanes") {
  for (const char* trace : {"gpt_8k.txt", "llama.txt", "vit.txt"}) {
    const Outcome moved = replayed(trace, 0.5, false);
    const Outcome outcome = replayed(trace, 0.5, true);
    CHECK(outcome.last.gained.dropped_bytes > 2_GiB);
    CHECK(outcome.later - 1 < 0.7 * (moved.later - 1));
    CHECK(outcome.first < moved.first);
  }
}

TEST("where the lanes carry all for nothing, nothing is made again") {
  const Outcome outcome = replayed("gpt_8k.txt", 0.85, true);
  CHECK(outcome.last.gained.recomputes <= 9);
  CHECK(outcome.later < 1.01);
}

// Nothing of torch's is known to be exact: a proof needs a step in which it left by a copy, and a
// plan the one after.
TEST("what has left by a copy is proven in the next step, and dropped from the third one on") {
  std::map<std::uint64_t, Known> recipes = recipes_of("gpt_8k.txt");
  for (auto& [record, known] : recipes) {
    known.exact = false;
  }
  Replay replay("gpt_8k.txt");
  replay.make_again(recipes);
  replay.set_share(0.5);
  std::vector<Bytes> dropped;
  for (int i = 0; i < 4; ++i) {
    dropped.push_back(replay.step().gained.dropped_bytes);
  }
  CHECK_EQ(dropped[0], 0);
  CHECK_EQ(dropped[1], 0);
  CHECK(dropped[2] > 1_GiB);
  CHECK(dropped[3] > 2_GiB);
  replay.verify();
}

TEST("what was proven is dropped, also where other records were planned to leave with it") {
  Replay replay("llama.txt");
  replay.make_again(recipes_of("llama.txt", true));
  replay.set_share(0.43);
  Step last;
  for (int i = 0; i < 32; ++i) {
    last = replay.step();
    CHECK_EQ(last.gained.overshoot_bytes, 0);
  }
  CHECK(last.gained.dropped_bytes > 5_GiB);  // 3.75 are of elementwise recipes
  CHECK(last.ns < replay.unbudgeted_ns() * 5 / 4);
  replay.verify();
}

// The recorded step on a host that takes a tenth longer than the GPU, and some more or less each
// time.
std::vector<Event> on_a_slow_host(const std::string& trace, unsigned seed) {
  std::vector<Event> events = read_trace(trace);
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const double slower = 1.1 * (1 + 0.03 * std::abs(normal(random)));
  std::uint64_t before = 0;
  double host_us = 0;
  for (Event& event : events) {
    if (event.kind == 't') {
      const auto us = static_cast<double>(event.a - std::exchange(before, event.a));
      host_us += us * slower * (0.8 + 0.3 * std::abs(normal(random)));
      event.b = static_cast<std::uint64_t>(host_us);
    }
  }
  return events;
}

TEST("where the host is slow, and not equally in each step, plans are soon no more tried") {
  for (const char* trace : {"gpt_8k.txt", "llama.txt", "vit.txt"}) {
    Replay replay(on_a_slow_host(trace, 0), replay_machine());
    replay.make_again(recipes_of(trace));
    const auto plain = static_cast<double>(replay.unbudgeted_ns());
    replay.set_share(0.75);
    for (unsigned i = 0; i < 30; ++i) {
      replay.follow(on_a_slow_host(trace, i + 1));
      const Step step = replay.step();
      CHECK(i < 10 || static_cast<double>(step.ns) < 1.08 * plain);  // the host's own 8 % of them
      CHECK(i < 10 || step.map_calls == 0);
    }
    replay.verify();
  }
}

// A heap made new for one kind's plan would have the other's holes to make again.
TEST("two models in turn, both with recipes: each keeps its plan, and nothing is mapped any more") {
  Replay replay("vit.txt");
  replay.set_share(0.5);
  for (int i = 0; i < 40; ++i) {
    const std::string trace = i % 2 != 0 ? "gpt_8k.txt" : "vit.txt";
    replay.follow(trace);
    replay.make_again(recipes_of(trace));
    const Step step = replay.step();
    CHECK_EQ(step.gained.overshoot_bytes, 0);
    CHECK(step.gained.dropped_bytes > 1_GiB);
    CHECK(i < 30 || step.map_calls == 0);
  }
  replay.verify();
}

// Else a request at a time, in pieces that hold no larger one: 580, 59, 25 and 29 calls in the next
// steps.
TEST("what the program has given back is mapped again as the pool is entered, and soon no more") {
  Replay replay("vit.txt");
  replay.make_again(recipes_of("vit.txt"));
  replay.set_share(0.5);
  for (int i = 0; i < 40; ++i) {
    replay.step();
  }
  for (int turn = 0; turn < 2; ++turn) {
    replay.empty_cache();
    for (int i = 0; i < 4; ++i) {
      CHECK(replay.step().map_calls <= (i < 2 ? 64U : 0U));
    }
  }
  replay.verify();
}

TEST("recipes that come after a step was planned are planned with") {
  Replay replay("vit.txt");
  replay.set_share(0.5);
  for (int i = 0; i < 6; ++i) {
    CHECK_EQ(replay.step().gained.drops, 0);
  }
  replay.make_again(recipes_of("vit.txt"));
  Step last;
  for (int i = 0; i < 6; ++i) {
    last = replay.step();
  }
  CHECK(last.gained.dropped_bytes > 2_GiB);
  replay.verify();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
