// The plan alone, on recorded steps, and what the runtime makes of it.
#include <array>

#include "core/plan.hpp"
#include "native/core_rig.hpp"
#include "native/plan_steps.hpp"

namespace stagehand::core::test {
namespace {

TEST("the first step expects nothing") {
  Plan plan;
  CHECK(plan.state() == PlanState::none);
  const auto places = forward(plan, {4_MiB, 8_MiB}, {0});
  CHECK(!plan.follows());
  CHECK(!plan.leaves(places[0]));
  CHECK(plan.state() == PlanState::learning);
}

TEST(
    "a step is new until one like it was learned inside such a budget; one that has a kin is not") {
  Plan plan;
  CHECK(plan.is_new());
  const auto first = forward(plan, {4_MiB, 8_MiB}, {0});
  CHECK(plan.is_new());
  backward(plan, first);
  const auto second = forward(plan, {4_MiB});
  CHECK(!plan.is_new());
  backward(plan, {second.front(), plan.saved(2_MiB)});
  CHECK(plan.guesses());
  CHECK(!plan.is_new());
  plan.begin_step(kHigh / 2, 0);
  CHECK(plan.follows());
  CHECK(plan.is_new());
  plan.begin_step(kHigh - kHigh / 128, 0);  // as where what is free of the device goes up and down
  CHECK(!plan.is_new());
}

TEST("what left in the last step is expected to leave in the next one like it") {
  Plan plan;
  step(plan, {4_MiB, 8_MiB, 4_MiB}, {0, 1});
  const auto places = forward(plan, {4_MiB, 8_MiB, 4_MiB});
  CHECK(plan.state() == PlanState::following);
  CHECK(plan.leaves(places[0]));
  CHECK(plan.leaves(places[1]));
  CHECK(!plan.leaves(places[2]));
}

TEST("what left once more than the step before needed is not expected to leave again") {
  Plan plan;
  const std::vector<Bytes> sizes{4_MiB, 8_MiB, 4_MiB};
  step(plan, sizes, {0});
  step(plan, sizes, {0, 1});
  const auto third = forward(plan, sizes, {0, 1});
  CHECK(plan.leaves(third[0]));
  CHECK(!plan.leaves(third[1]));
  backward(plan, third);
  const auto fourth = forward(plan, sizes);  // two steps needed more: so it is
  CHECK(plan.leaves(fourth[1]));
}

TEST(
    "micro-batches that begin with less live memory, before there are gradients, are their own "
    "kind") {
  Plan plan;
  const std::vector<Bytes> sizes{4_MiB, 8_MiB, 4_MiB};
  for (int i = 0; i < 2; ++i) {
    step(plan, sizes, {0}, 8_MiB);
    step(plan, sizes, {0, 1}, 16_MiB);
    step(plan, sizes, {0, 1}, 16_MiB + kHigh / 64);
  }
  const auto first = forward(plan, sizes, {0}, 8_MiB);
  CHECK(plan.leaves(first[0]));
  CHECK(!plan.leaves(first[1]));
  backward(plan, first);
  const auto second = forward(plan, sizes, {0, 1}, 16_MiB);
  CHECK(plan.leaves(second[1]));
}

TEST("of a step with weights the plan knows when nobody holds them, from moment to moment") {
  Plan plan;
  plan.begin_step(kHigh, 0);
  plan.weights_held(7, 3_MiB);  // moment 0
  std::vector<Plan::Place> places{plan.saved(4_MiB)};
  plan.weights_left(7);  // 1
  places.push_back(plan.saved(4_MiB));
  places.push_back(plan.saved(4_MiB));
  plan.unpacked(places[2]);
  plan.unpacked(places[1]);
  plan.weights_held(7, 3_MiB);  // 5
  plan.weights_left(7);
  plan.weights_held(7, 3_MiB);  // at once: it was held all along
  plan.unpacked(places[0]);
  plan.weights_left(7);  // 6
  plan.begin_step(kHigh, 0);
  const std::vector<IdleWeights>& idle = plan.newest()->idle;
  CHECK_EQ(idle.size(), 1);
  CHECK_EQ(idle[0].bytes, 3_MiB);
  CHECK_EQ(idle[0].from, 2);
  CHECK_EQ(idle[0].until, 5);
}

TEST("a use without gradients later in the step changes nothing of when they were idle") {
  Plan plan;
  plan.begin_step(kHigh, 0);
  plan.weights_held(7, 3_MiB);
  std::vector<Plan::Place> places{plan.saved(4_MiB)};
  plan.weights_left(7);  // 1: of a forward with gradients
  places.push_back(plan.saved(4_MiB));
  places.push_back(plan.saved(4_MiB));
  places.push_back(plan.saved(4_MiB));
  plan.weights_left(7);  // 4: Weights::leave of a use without gradients, of which no `held` is told
  plan.unpacked(places[3]);
  plan.unpacked(places[2]);
  plan.weights_held(7, 3_MiB);  // 6
  plan.unpacked(places[0]);
  plan.weights_left(7);
  plan.begin_step(kHigh, 0);
  const std::vector<IdleWeights>& idle = plan.newest()->idle;
  CHECK_EQ(idle.size(), 1);
  CHECK_EQ(idle[0].from, 2);
  CHECK_EQ(idle[0].until, 6);
}

TEST("a step that begins with a save, inside of a block, knows that its weights are held") {
  Plan plan;
  plan.begin_step(kHigh, 0);
  for (int step = 0; step < 3; ++step) {  // one pool around all of them
    plan.weights_held(7, 3_MiB);
    std::vector<Plan::Place> places{plan.saved(4_MiB), plan.saved(4_MiB)};
    plan.weights_left(7);  // 2
    places.push_back(plan.saved(4_MiB));
    places.push_back(plan.saved(4_MiB));
    for (std::size_t i = 4; i-- > 0;) {
      if (i == 1) {
        plan.weights_held(7, 3_MiB);  // 6
      }
      plan.unpacked(places[i]);
      plan.closed(places[i]);
    }
    plan.weights_left(7);
  }
  plan.begin_step(kHigh, 0);
  const std::vector<IdleWeights>& idle = plan.newest()->idle;
  CHECK_EQ(idle.size(), 1);
  CHECK_EQ(idle[0].from, 3);
  CHECK_EQ(idle[0].until, 6);
}

TEST("a pass without backward teaches nothing") {
  Plan plan;
  step(plan, {4_MiB, 8_MiB}, {1});
  for (const Plan::Place place : forward(plan, {1_MiB})) {  // an evaluation between two steps
    plan.closed(place);
  }
  const auto places = forward(plan, {4_MiB, 8_MiB});
  CHECK(!plan.leaves(places[0]));
  CHECK(plan.leaves(places[1]));
}

TEST("steps of two shapes in turn follow a trace each, from their first record on") {
  Plan plan;
  for (int i = 0; i < 2; ++i) {
    step(plan, {4_MiB, 8_MiB}, {0});
    step(plan, {4_MiB, 2_MiB, 2_MiB}, {1});
  }
  plan.begin_step(kHigh, 0);
  const Plan::Place first = plan.saved(4_MiB);
  CHECK(plan.leaves(first));  // of the first shape, which came after the second before
  plan.saved(8_MiB);
  CHECK(plan.follows());
}

TEST("a step that takes another known shape than expected follows that one from there on") {
  Plan plan;
  step(plan, {4_MiB, 8_MiB}, {0});
  step(plan, {4_MiB, 2_MiB, 2_MiB}, {1});
  step(plan, {4_MiB, 8_MiB}, {0});
  const auto places = forward(plan, {4_MiB, 8_MiB});  // the shapes stopped alternating
  CHECK(plan.follows());
  CHECK(plan.leaves(places[0]));
  CHECK(!plan.leaves(places[1]));
}

TEST("times of a step that turned out to be of other sizes say nothing of the one it followed") {
  Plan plan;
  const auto step = [&](Bytes last, bool measured) {
    plan.begin_step(kUnlimited, 0);
    std::vector<Plan::Place> places{plan.saved(1_MiB)};
    const std::optional<StepToTime> wanted = plan.wants_times();
    CHECK_EQ(wanted.has_value(), measured);
    for (const Bytes bytes : {2_MiB, last}) {
      places.push_back(plan.saved(bytes));
    }
    for (; !places.empty(); places.pop_back()) {
      plan.unpacked(places.back());
      plan.closed(places.back());
    }
    plan.begin_step(kUnlimited, 0);
    if (wanted && plan.measures()) {
      StepTimes times;
      for (std::size_t m = 1; m <= wanted->moments; ++m) {
        times.points.push_back({m, m * 1000});
      }
      times.all_ns = wanted->moments * 1000;
      plan.timed(*wanted, times);
    }
  };
  step(3_MiB, false);
  step(3_MiB + 512, true);
  CHECK_EQ(plan.newest()->timed, 0);
  for (int i = 0; i < 2; ++i) {
    step(3_MiB, true);  // the other one was expected to come next
    CHECK_EQ(plan.newest()->timed, 0);
  }
  step(3_MiB, true);
  CHECK_EQ(plan.newest()->timed, 1);
}

TEST("a step in which nobody looked for recipes does not forget those that are known") {
  Plan plan;
  const Made made{.first = 0, .bytes = 2_MiB, .kind = 3, .rests_on = 7};
  const auto step = [&](const Made& how) {
    plan.begin_step(kUnlimited, 0);
    std::vector<Plan::Place> places{plan.saved(1_MiB), plan.saved(2_MiB, {}, how)};
    const bool proven = plan.proven(places[1]);
    for (; !places.empty(); places.pop_back()) {
      plan.unpacked(places.back());
      plan.closed(places.back());
    }
    return proven;
  };
  step(made);
  step(made);
  plan.begin_step(kUnlimited, 0);  // what was proven is of a trace
  plan.proved({plan.newest()->id, 1, 7}, true);
  CHECK(step(made));
  CHECK(!step(Made{.sought = false}));
  CHECK(step(made));
  CHECK(!step(Made{}));  // looked for, and gone
  CHECK(!step(made));
}

// Steps of two records, of which the second leaves and has a recipe; what they ask a proof of.
struct ToBeProven {
  Plan plan;
  bool proven = false;  // in the newest step
  Plan::Place newest{};

  std::vector<Plan::Place> forward() {
    const Made made{.first = 0, .bytes = 2_MiB, .kind = 3, .rests_on = 7};
    plan.begin_step(kHigh, 0);
    const std::vector<Plan::Place> places{plan.saved(1_MiB), plan.saved(2_MiB, {}, made)};
    plan.evicted(places[1]);
    proven = plan.proven(places[1]);
    newest = places[1];
    return places;
  }
  Plan::ToProve step() {
    const std::vector<Plan::Place> places = forward();
    const Plan::ToProve asked = plan.to_prove(places[1]);
    backward(plan, places);
    return asked;
  }
};

TEST("what cannot be proven for want of room is moved in such steps, and asked for again later") {
  ToBeProven steps;
  steps.step();
  CHECK(steps.step().trace != 0);
  steps.plan.no_room_to_prove(steps.newest);
  int quiet = 0;
  while (quiet < 200 && steps.step().trace == 0) {
    CHECK(!steps.plan.drops(steps.newest));
    ++quiet;
  }
  CHECK(quiet >= 60 && quiet <= 66);
  CHECK(!steps.proven);
}

// Micro-batches: each forward comes before the backward of the one before.
TEST("so it is where a step of its kind ends while it is under way") {
  ToBeProven steps;
  std::vector<Plan::Place> before = steps.forward();
  bool cramped = false;
  for (int i = 0; i < 12; ++i) {
    const std::vector<Plan::Place> now = steps.forward();
    const bool asked = steps.plan.to_prove(before[1]).trace != 0;
    CHECK(!asked || !cramped);
    if (asked) {
      steps.plan.no_room_to_prove(before[1]);
      cramped = true;
    }
    backward(steps.plan, before);
    before = now;
  }
  CHECK(cramped);
}

TEST("a step's typical block is the one that half of its bytes are in, or in larger ones") {
  Plan plan;
  CHECK_EQ(plan.typical_block(), 0);
  const auto typical = [&](const std::vector<Bytes>& blocks) {
    plan.begin_step(kHigh, 0);
    std::vector<Plan::Place> places;
    for (const Bytes block : blocks) {
      places.push_back(plan.saved(block));
    }
    backward(plan, places);
    plan.begin_step(kHigh, 0);
    return plan.typical_block();
  };
  CHECK_EQ(typical({1_MiB, 8_MiB, 1_MiB, 1_MiB, 1_MiB}), 8_MiB);
  CHECK_EQ(typical({4_MiB, 1_MiB, 4_MiB, 6_MiB, 1_MiB}), 4_MiB);
}

TEST("a record's inputs are those that its recipe reads, and no record where it reads fewer") {
  Plan plan;
  plan.begin_step(kHigh, 0);
  const RecordId id{7, 3};
  const Plan::Place input = plan.saved(3_MiB, id);
  const Plan::Place made = plan.saved(2_MiB, {}, {.first = 0, .bytes = 2_MiB});
  plan.made_of(made, 0, input);
  CHECK_EQ(plan.inputs(made).front().index, id.index);
  CHECK_EQ(plan.inputs(made).front().generation, id.generation);
  CHECK_EQ(plan.inputs(made).back().generation, 0);
  CHECK_EQ(plan.inputs(input).front().generation, 0);
}

TEST("what leaves is to be proven once, and again where no answer came for many steps") {
  ToBeProven steps;
  CHECK_EQ(steps.step().trace, 0);  // nobody knows yet that it leaves
  const Plan::ToProve asked = steps.step();
  CHECK(asked.trace != 0);
  int quiet = 0;
  while (quiet < 64 && steps.step().trace == 0) {
    ++quiet;
  }
  CHECK_EQ(quiet, 15);
  CHECK(!steps.proven);
  steps.plan.proved(asked, true);
  CHECK_EQ(steps.step().trace, 0);
  CHECK(steps.proven);
}

TEST("what differed once is not proven by an answer that comes later") {
  ToBeProven steps;
  steps.step();
  const Plan::ToProve asked = steps.step();
  steps.step();
  steps.plan.proved(asked, false);
  steps.plan.proved(asked, true);
  for (int i = 0; i < 20; ++i) {
    CHECK_EQ(steps.step().trace, 0);
    CHECK(!steps.proven);
  }
}

// Steps of other sizes each time: of two records made again by themselves the first leaves.
struct Sized {
  static constexpr Bytes kFirst = 4_MiB;
  using Both = std::array<Plan::ToProve, 2>;
  Plan plan;
  std::array<bool, 2> proven{};  // in the newest step
  std::array<bool, 2> drops{};
  Both looks;

  Both step(int number, std::uint32_t of_second = 8, bool any_size = true,
            const char* op = nullptr) {
    const Bytes more = static_cast<Bytes>(number) * 64_KiB;
    const auto made = [&](std::uint32_t rests_on) {
      return Made{.bytes = kFirst, .kind = 3, .rests_on = rests_on, .any_size = any_size};
    };
    plan.begin_step(kHigh, 0);
    std::vector<Plan::Place> places;
    places.push_back(plan.saved(6_MiB + more, {}, {}, {.op = op}));
    places.push_back(plan.saved(kFirst + more, {}, made(7)));
    places.push_back(plan.saved(kFirst + more, {}, made(of_second)));
    plan.evicted(places[1]);
    plan.occupied(kHigh);
    Both asked;
    for (const std::size_t i : {0, 1}) {
      proven[i] = plan.proven(places[i + 1]);
      drops[i] = plan.drops(places[i + 1]);
      looks[i] = plan.looks_at(places[i + 1]);
      asked[i] = plan.to_prove(places[i + 1]);
    }
    backward(plan, places);
    return asked;
  }
  // Steps until both are proven for all sizes; of which number the next one is.
  int prove_both() {
    int number = 0;
    for (step(number++); !proven[0] || !proven[1]; ++number) {
      CHECK(number < 16);
      for (const Plan::ToProve& one : step(number)) {
        plan.proved(one, true);
      }
    }
    return number;
  }
};

TEST("in steps of other sizes a place is proven once four of them came back the same") {
  Sized steps;
  steps.step(0);
  int proofs = 0;
  for (int number = 1; number < 12; ++number) {
    const Sized::Both asked = steps.step(number);
    CHECK_EQ(steps.proven[0], proofs == 4);
    CHECK_EQ(steps.drops[0], proofs == 4);
    CHECK(!steps.proven[1] && !steps.drops[1]);
    CHECK_EQ(asked[0].trace != 0, proofs < 4);
    CHECK_EQ(asked[1].trace != 0, number == 1);  // it stays, and may leave next; never answered
    if (asked[0].trace != 0) {
      steps.plan.proved(asked[0], true);
      ++proofs;
    }
  }
}

TEST("what came back in steps of one size only is not proven for others") {
  Sized steps;
  steps.step(0);
  for (int i = 0; i < 40; ++i) {
    for (const Plan::ToProve& one : steps.step(1)) {
      steps.plan.proved(one, true);
    }
    for (Plan::ToProve& look : steps.looks) {
      steps.plan.proved(look, true);
    }
  }
  CHECK(steps.proven[0]);
  for (int number = 2; number < 4; ++number) {
    steps.step(number);
    CHECK(!steps.proven[0] && !steps.drops[0]);
  }
}

TEST("what differed in a step of one size is not dropped in those of others") {
  Sized steps;
  steps.step(0);
  const Sized::Both asked = steps.step(1);
  steps.step(2);
  steps.plan.proved(asked[0], false);
  steps.plan.proved(asked[0], true);
  for (int number = 3; number < 40; ++number) {
    CHECK_EQ(steps.step(number)[0].trace, 0);
    CHECK(!steps.proven[0] && !steps.drops[0]);
  }
}

TEST("a proof says nothing of a recipe that rests on something else, whatever the place") {
  Sized steps;
  const int next = steps.prove_both();
  steps.step(next, 9);
  CHECK(steps.proven[0] && !steps.proven[1]);
}

TEST("a proof is good for no place behind a record that another op has made") {
  static const char* const kOther = "another";
  Sized steps;
  const int next = steps.prove_both();
  steps.step(next, 8, true, kOther);
  CHECK(!steps.proven[0] && !steps.proven[1]);
}

TEST("where sizes choose the kernel nothing that stays is proven in steps of other sizes") {
  Sized steps;
  steps.step(0, 8, false);
  CHECK_EQ(steps.step(1, 8, false)[1].trace, 0);
}

TEST("in steps of other sizes each drop is looked at, and after sixteen one in eight") {
  Sized steps;
  int number = steps.prove_both();
  int looks = 0;
  for (int i = 0; i < 16 + 64; ++i) {
    steps.step(number++);
    CHECK(steps.drops[0]);
    CHECK(i >= 8 || steps.looks[0].trace != 0);
    if (steps.looks[0].trace != 0) {
      ++looks;
      steps.plan.proved(steps.looks[0], true);
    }
  }
  CHECK(looks >= 16 && looks <= 24);
}

TEST("what comes back otherwise than when it was proven ends all drops in steps of other sizes") {
  Sized steps;
  int number = steps.prove_both();
  steps.step(number++);
  steps.plan.proved(steps.looks[0], false);
  for (int i = 0; i < 40; ++i) {
    for (const Plan::ToProve& one : steps.step(number++)) {
      steps.plan.proved(one, true);
    }
    CHECK(!steps.proven[0] && !steps.proven[1]);
    CHECK(!steps.drops[0] && !steps.drops[1]);
  }
}

TEST("micro-batches in flight learn and follow by how many are in flight") {
  Plan plan;
  const std::vector<Bytes> sizes{4_MiB, 8_MiB};
  const auto pipeline = [&](std::size_t first_leaves, std::size_t second_leaves) {
    const auto first = forward(plan, sizes, {first_leaves});
    const auto second = forward(plan, sizes, {second_leaves});
    backward(plan, first);
    backward(plan, second);
  };
  pipeline(0, 1);
  const auto first = forward(plan, sizes);
  CHECK(plan.leaves(first[0]) && !plan.leaves(first[1]));
  const auto second = forward(plan, sizes);
  CHECK(!plan.leaves(second[0]) && plan.leaves(second[1]));
  // Backward comes to the older step first: its records are needed before those saved later.
  CHECK(plan.next_use(first[1], 2) < plan.next_use(first[0], 1));
  CHECK(plan.next_use(first[0], 1) < plan.next_use(second[1], 4));
}

TEST("without a plan the oldest record is the one needed last") {
  Plan plan;
  const auto places = forward(plan, {4_MiB, 4_MiB});
  CHECK(plan.next_use(places[0], 1) > plan.next_use(places[1], 2));
}

TEST("the order of use is the one backward had, and what it never asked for comes last") {
  Plan plan;
  const auto places = forward(plan, {1_MiB, 2_MiB, 3_MiB});
  plan.unpacked(places[0]);
  plan.unpacked(places[2]);
  for (const Plan::Place place : places) {
    plan.closed(place);
  }
  const auto again = forward(plan, {1_MiB, 2_MiB, 3_MiB});
  CHECK(plan.next_use(again[0], 1) < plan.next_use(again[2], 3));
  CHECK(plan.next_use(again[2], 3) < plan.next_use(again[1], 2));
  Plan::Place next;
  RecordId record;
  CHECK(plan.next_after(again[0], &next, &record));
  CHECK_EQ(next.index, 2u);
  CHECK_EQ(record.index, 2u);
  CHECK(!plan.next_after(again[2], &next, &record));
  CHECK(!plan.next_after(again[1], &next, &record));
}

TEST("what left inside a budget is not expected to leave inside a larger one") {
  Plan plan;
  step(plan, {4_MiB, 8_MiB}, {0});
  plan.begin_step(2 * kHigh, 0);
  const Plan::Place place = plan.saved(4_MiB);
  CHECK(!plan.leaves(place));
  CHECK(plan.follows());  // the order of use is as it was
  plan.closed(place);
  plan.begin_step(kHigh / 2, 0);
  CHECK(plan.leaves(plan.saved(4_MiB)));
}

TEST("steps of two budgets in turn keep a trace each") {
  Plan plan;
  const auto turn = [&](Bytes high, std::size_t leaves) {
    plan.begin_step(high, 0);
    const std::vector<Plan::Place> places{plan.saved(4_MiB), plan.saved(4_MiB)};
    const bool expected = plan.leaves(places[leaves]);
    plan.evicted(places[leaves]);
    backward(plan, places);
    return expected;
  };
  turn(kHigh, 0);
  turn(2 * kHigh, 1);
  CHECK(turn(kHigh, 0));
  CHECK(turn(2 * kHigh, 1));
}

TEST("a record asked for twice counts the first time") {
  Plan plan;
  const auto places = forward(plan, {1_MiB, 2_MiB});
  plan.unpacked(places[1]);
  plan.unpacked(places[0]);
  plan.unpacked(places[1]);
  plan.closed(places[0]);
  plan.closed(places[1]);
  const auto again = forward(plan, {1_MiB, 2_MiB});
  CHECK(plan.next_use(again[1], 2) < plan.next_use(again[0], 1));
}

TEST("what is asked for to make another one again does not move the requests that are expected") {
  Plan plan;
  const auto turn = [&](bool made_again) {
    const auto places = forward(plan, {1_MiB, 2_MiB});
    std::vector<Bytes> expected;
    const auto ask = [&](Bytes request) {
      expected.push_back(plan.expected_request());
      plan.requested(request);
    };
    if (made_again) {
      plan.unpacked(places[0], true);
    }
    plan.unpacked(places[1]);
    ask(96_MiB);
    plan.unpacked(places[0]);
    ask(8_MiB);
    plan.closed(places[1]);
    plan.closed(places[0]);
    return expected;
  };
  turn(false);
  const std::vector<Bytes> requests{96_MiB, 8_MiB};
  CHECK(turn(true) == requests);
  turn(true);
  CHECK(turn(false) == requests);
}

TEST("requests that made early ones leave again are known in the steps after, while they come") {
  Plan plan;
  int here = 0;
  int elsewhere = 0;
  const auto turn = [&](Bytes large, Bytes asked) {
    const auto places = forward(plan, {1_MiB, 2_MiB});
    std::vector<Bytes> ahead{plan.crowding_ahead(2, &here)};
    CHECK_EQ(plan.crowding_ahead(2, &elsewhere), 0);
    if (large != 0) {
      plan.crowded(plan.place() + 1, large, &here);
      plan.crowded(plan.place() + 1, 40_MiB, &here);
    }
    for (const std::size_t i : {1, 0}) {
      plan.unpacked(places[i]);
      plan.requested(asked);
      ahead.push_back(plan.crowding_ahead(2, &here));
      plan.closed(places[i]);
    }
    return ahead;
  };
  const std::vector<Bytes> none{0, 0, 0};
  const std::vector<Bytes> known{96_MiB, 96_MiB, 0};
  CHECK(turn(96_MiB, 96_MiB) == none);
  CHECK(turn(0, 96_MiB) == known);
  CHECK(turn(50_MiB, 96_MiB) == known);  // kept, for it is what keeps it from happening again
  CHECK(turn(0, 60_MiB) == known);
  CHECK(turn(0, 60_MiB) == known);
  CHECK(turn(0, 60_MiB) == none);  // it came no more in the last two
}

TEST("a plan tells whether the request that it expects has come") {
  Plan plan;
  const auto turn = [&] {
    const auto places = forward(plan, {1_MiB});
    std::vector<bool> came;
    const auto ask = [&](Bytes request) {
      plan.requested(request);
      came.push_back(plan.request_came());
    };
    plan.unpacked(places[0]);
    ask(8_MiB);
    ask(96_MiB);
    ask(64_MiB);
    plan.closed(places[0]);
    return came;
  };
  turn();
  CHECK(turn() == (std::vector<bool>{false, true, true}));
}

TEST("so it is in a step of sizes not seen before, which follows its kin") {
  Plan plan;
  const auto turn = [&](double times) {
    const auto grown = [&](Bytes bytes) {
      return static_cast<Bytes>(times * static_cast<double>(bytes / 512)) * 512;
    };
    std::vector<Bytes> sizes;
    for (int i = 0; i < 8; ++i) {
      sizes.push_back(grown((8 + 2 * (i % 2)) * 1_MiB));
    }
    const auto places = forward(plan, sizes);
    std::vector<Bytes> expected;
    const auto ask = [&](Bytes request) {
      expected.push_back(plan.expected_request());
      plan.requested(request);
    };
    for (std::size_t i = places.size(); i > 0; i -= 2) {  // the second of two is made of the first
      plan.unpacked(places[i - 2], true);
      plan.unpacked(places[i - 1]);
      ask(grown(80_MiB));
      plan.unpacked(places[i - 2]);
      ask(grown(960_MiB));
    }
    for (const Plan::Place& place : places) {
      plan.closed(place);
    }
    return expected;
  };
  turn(1);
  turn(1);
  const std::vector<Bytes> expected = turn(1.1);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const bool large = i % 2 == 1;
    CHECK_EQ(expected[i] > 500_MiB, large);
  }
}

TEST("the plan knows how much the step needs for itself between two uses") {
  Plan plan;
  const auto places = forward(plan, {1_MiB, 2_MiB});
  plan.unpacked(places[1]);
  plan.live(7_MiB);
  plan.live(3_MiB);
  plan.unpacked(places[0]);
  plan.live(5_MiB);
  plan.closed(places[0]);
  plan.closed(places[1]);
  const auto again = forward(plan, {1_MiB, 2_MiB});
  CHECK_EQ(plan.live_after(again[1]), Bytes{7_MiB});
  CHECK_EQ(plan.live_after(again[0]), Bytes{5_MiB});
}

TEST("one pool around many steps: a step ends when backward has used up what was saved") {
  Plan plan;
  plan.begin_step(kHigh, 0);
  for (int i = 0; i < 2; ++i) {
    std::vector<Plan::Place> places{plan.saved(4_MiB), plan.saved(8_MiB)};
    plan.evicted(places[0]);
    backward(plan, places);
  }
  const Plan::Place first = plan.saved(4_MiB);
  CHECK(plan.follows());
  CHECK(plan.leaves(first));
}

TEST("a graph that somebody keeps does not end planning, in one pool or in many") {
  for (const bool one_pool : {false, true}) {
    Plan plan;
    const std::vector<Bytes> sizes(16, 4_MiB);
    bool followed = false;
    for (int i = 0; i < 6; ++i) {
      std::vector<Plan::Place> places;
      if (one_pool && i > 0) {
        for (const Bytes size : sizes) {
          places.push_back(plan.saved(size));
        }
        plan.evicted(places[3]);
      } else {
        places = forward(plan, sizes, {3});
      }
      followed = plan.follows() && plan.leaves(places[3]);
      for (std::size_t j = 16; j-- > 0;) {
        plan.unpacked(places[j]);
        if (i != 1 || j != 7) {  // one record of the second step is never let go
          plan.closed(places[j]);
        }
      }
    }
    CHECK(followed);
  }
}

TEST("the plan declines when live memory alone was above high in two steps, and only then") {
  Plan plan;
  const auto with_live = [&](Bytes live) {
    const auto places = forward(plan, {4_MiB});
    const Bytes expected = plan.unavoidable();
    plan.live(live);
    backward(plan, places);
    return expected;
  };
  CHECK_EQ(with_live(kHigh + 9_MiB), Bytes{0});
  CHECK_EQ(with_live(kHigh + 5_MiB), Bytes{0});  // once may have been chance
  CHECK_EQ(with_live(kHigh - 1), Bytes{kHigh + 5_MiB});
  CHECK_EQ(with_live(kHigh - 1), Bytes{0});
}

TEST(
    "where all is forgotten a step that runs expects nothing more, and teaches as a first one "
    "does") {
  Plan plan;
  const std::vector<Bytes> sizes{4_MiB, 8_MiB, 4_MiB};
  step(plan, sizes, {0});
  step(plan, sizes, {0});
  const auto running = forward(plan, sizes, {1});
  CHECK(plan.leaves(running[0]));
  const std::uint64_t version = plan.version();
  plan.forget_all();
  CHECK(plan.version() > version);
  CHECK(!plan.follows() && !plan.learned());
  CHECK(!plan.leaves(running[0]));
  backward(plan, running);
  const auto next = forward(plan, sizes);
  CHECK(plan.follows());
  CHECK(plan.leaves(next[1]));
  CHECK(!plan.leaves(next[0]));
}

TEST("a record of an earlier step that leaves late does not confuse the step that runs") {
  Plan plan;
  const auto early = forward(plan, {4_MiB, 8_MiB});
  plan.unpacked(early[1]);
  const auto late = forward(plan, {4_MiB, 8_MiB});
  plan.evicted(early[0]);
  CHECK(!plan.leaves(late[0]));
  backward(plan, late);
  backward(plan, early);
  plan.evicted(early[0]);  // of a step that is over: nothing
  CHECK(!plan.leaves(early[0]));
}

// Forward: `count` activations of 4 MiB; then backward asks for them, newest first.
void train(CoreRig& rig, driver::Stream stream, int count) {
  rig.budget(24_MiB, 20_MiB);
  std::vector<Held> saved = rig.retain_many(count, 4_MiB, stream);
  rig.runtime->clear_budget();
  rig.back_all(saved, stream);
}

TEST("a step like the last one writes back ahead: no victim has to be copied when room is needed") {
  for (std::uint64_t seed = 0; seed < stagehand::test::seeds(50); ++seed) {
    CoreRig rig({.seed = seed});
    const auto stream = rig.stream();
    train(rig, stream, 10);
    train(rig, stream, 10);
    const Counters before = rig.counters();
    train(rig, stream, 10);
    const Counters after = rig.counters();
    CHECK_EQ(after.dirty_evictions, before.dirty_evictions);
    CHECK(after.write_backs > before.write_backs);
    CHECK(after.clean_evictions > before.clean_evictions);
    CHECK_EQ(after.host_waits, before.host_waits);
    CHECK_EQ(after.overshoot_bytes, Bytes{0});
    rig.verify_empty();
  }
}

TEST("backward may ask in any order: small records that come back together come back once") {
  for (std::uint64_t seed = 0; seed < stagehand::test::seeds(30); ++seed) {
    CoreRig rig({.seed = seed, .classes = {{64_KiB, 1_MiB}, {64, 8}}});
    const auto stream = rig.stream();
    for (int step = 0; step < 4; ++step) {
      rig.budget(24_MiB, 20_MiB);
      std::vector<Held> saved = rig.retain_many(12, 16_KiB, stream);
      rig.runtime->clear_budget();
      rig.evict_all(stream);
      for (const std::size_t i : {11, 0, 5, 1, 10, 2, 9, 3, 8, 4, 7, 6}) {
        rig.back(saved[i], stream);
      }
      rig.verify_empty();
    }
    CHECK(rig.counters().prefetches > 0);
  }
}

TEST("what is mapped over high in a step known to need it is counted as over high") {
  CoreRig rig;
  const auto stream = rig.stream();
  for (int step = 0; step < 4; ++step) {
    rig.budget(32_MiB, 28_MiB);
    rig.runtime->trim(0);  // so that each step maps its memory anew
    const Bytes before = rig.counters().overshoot_bytes;
    std::vector<Held> saved = rig.retain_many(4, 4_MiB, stream);
    const Tensor live = rig.make(40_MiB, stream);  // no eviction can hold it
    CHECK_EQ(rig.counters().overshoot_bytes - before, rig.counters().mapped - 32_MiB);
    CHECK(rig.counters().overshoot_live >= 40_MiB);
    rig.drop(live);
    rig.back_all(saved, stream);
    rig.runtime->clear_budget();
  }
  CHECK(rig.runtime->plan_state() != PlanState::none);
  rig.verify_empty();
}

TEST(
    "regions are worth their marks until such steps are known, and from the first that was short") {
  Plan plan;
  const auto wanted = [&](Bytes high) {
    plan.begin_step(high, 0);
    return plan.wants_regions();
  };
  CHECK(wanted(kHigh));
  step(plan, {4_MiB, 8_MiB}, {});
  CHECK(!wanted(kHigh));
  CHECK(wanted(kHigh / 2));
  step(plan, {16_MiB, 16_MiB}, {0});
  for (Bytes size = 1_MiB; size < 16_MiB; size += 1_MiB) {  // more kinds than are remembered
    step(plan, {size, 8_MiB}, {});
  }
  CHECK(wanted(kHigh));
  plan.begin_step(2 * kHigh, 0);  // which is as good as room
  backward(plan, {plan.saved(4_MiB, {0, 1})});
  CHECK(!wanted(2 * kHigh));
  for (int i = 0; i < 1024; ++i) {
    plan.begin_step(kHigh, 0);
  }
  step(plan, {4_MiB, 8_MiB}, {});
  CHECK(!wanted(kHigh));
}

TEST("what a step needed inside another budget does not raise the ceiling of this one") {
  CoreRig rig;
  const auto stream = rig.stream();
  const auto step = [&](Bytes high, Bytes live) {
    rig.runtime->trim(0);
    rig.budget(high, high);
    std::vector<Held> saved = rig.retain_many(4, 4_MiB, stream);
    rig.drop(rig.make(live, stream));
    rig.back_all(saved, stream);
    rig.runtime->clear_budget();
  };
  for (int i = 0; i < 3; ++i) {
    step(64_MiB, 40_MiB);
  }
  rig.runtime->trim(0);
  rig.runtime->reset_peaks();
  for (int i = 0; i < 3; ++i) {
    step(32_MiB, 20_MiB);
    CHECK(rig.counters().mapped_peak <= 32_MiB);
  }
  rig.verify_empty();
}

TEST("what the optimizer needs between two pools does not raise the ceiling inside them") {
  CoreRig rig;
  const auto stream = rig.stream();
  for (int step = 0; step < 5; ++step) {
    rig.budget(32_MiB, 28_MiB);
    std::vector<Held> saved = rig.retain_many(10, 4_MiB, stream);
    CHECK(rig.counters().mapped <= 32_MiB);
    CHECK(rig.runtime->plan_state() != PlanState::declined);
    rig.runtime->clear_budget();
    rig.back_all(saved, stream);
    rig.drop(rig.make(48_MiB, stream));
  }
  rig.verify_empty();
}

TEST("a step unlike the last one falls back to reacting, with the right bytes") {
  for (std::uint64_t seed = 0; seed < stagehand::test::seeds(50); ++seed) {
    CoreRig rig({.seed = seed});
    const auto stream = rig.stream();
    train(rig, stream, 10);
    train(rig, stream, 14);
    train(rig, stream, 8);
    train(rig, stream, 10);
    CHECK_EQ(rig.counters().overshoot_bytes, Bytes{0});
    rig.verify_empty();
  }
}

}  // namespace
}  // namespace stagehand::core::test
STAGEHAND_TEST_MAIN()
