// What the plan makes of steps whose sizes were not seen before.
#include "core/plan.hpp"
#include "native/plan_steps.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {
namespace {

TEST("from the first size that no step had, a step goes on place by place") {
  Plan plan;
  step(plan, {4_MiB, 8_MiB, 4_MiB, 8_MiB}, {0, 1});
  plan.begin_step(kHigh, 0);
  const Plan::Place first = plan.saved(4_MiB, {0, 1});
  const Plan::Place other = plan.saved(8_MiB + 128_KiB, {1, 1});
  const Plan::Place third = plan.saved(4_MiB, {2, 1});
  CHECK(plan.state() == PlanState::following);
  CHECK(plan.guesses());
  CHECK(plan.leaves(first) && plan.leaves(other) && !plan.leaves(third));
  CHECK(plan.next_use(third, 3) < plan.next_use(other, 2));
  Plan::Place next;
  RecordId record;
  CHECK(plan.next_after(third, &next, &record));
  CHECK_EQ(next.index, other.index);
  CHECK_EQ(record.index, 1u);
}

TEST("a step whose sizes were seen before follows that one, and guesses nothing") {
  Plan plan;
  step(plan, {4_MiB, 8_MiB, 4_MiB}, {0});
  step(plan, {4_MiB, 9_MiB, 5_MiB}, {1});
  const auto places = forward(plan, {4_MiB, 9_MiB, 5_MiB});
  CHECK(plan.follows() && !plan.guesses());
  CHECK(plan.leaves(places[1]) && !plan.leaves(places[0]));
}

TEST("records that one of the two steps lacks shift the places behind them") {
  const std::vector<Bytes> layer{1_MiB, 12_MiB, 3_MiB, 64_KiB, 2_MiB, 2_MiB, 64_KiB, 5_MiB};
  std::vector<Bytes> sizes;
  for (int i = 0; i < 4; ++i) {
    sizes.insert(sizes.end(), layer.begin(), layer.end());
  }
  for (const bool more : {false, true}) {
    Plan plan;
    step(plan, sizes, {25});  // the large one of the last layer
    std::vector<Bytes> others = sizes;
    if (more) {
      others.insert(others.begin() + 6, {40_MiB, 1_MiB, 40_MiB});
    } else {
      others.erase(others.begin() + 6, others.begin() + 9);
    }
    const auto places = forward(plan, others);
    const std::size_t large = others.size() - 7;
    CHECK(plan.guesses());
    CHECK(plan.leaves(places[large]));
    CHECK(!plan.leaves(places[large - 8]));
    // Backward comes by all of them but a few around the place.
    std::size_t asked = 1;
    Plan::Place at = places.back();
    RecordId record;
    for (; plan.next_after(at, &at, &record); ++asked) {
      CHECK_EQ(record.index, at.index);
    }
    CHECK(asked + 4 >= others.size());
  }
}

TEST("a step half as large is expected to keep more, one twice as large to let more leave") {
  Plan plan;
  const std::vector<Bytes> sizes(24, 4_MiB);  // of which 8 leave: 64 of 96 MiB stay
  step(plan, sizes, {0, 1, 2, 3, 4, 5, 6, 7});
  const auto leaving = [&](Bytes size) {
    const auto places = forward(plan, std::vector<Bytes>(24, size));
    CHECK(plan.guesses());
    std::size_t found = 0;
    for (const Plan::Place place : places) {
      found += plan.leaves(place) ? 1 : 0;
    }
    CHECK(found == 0 || plan.leaves(places[0]));  // what is needed last
    for (const Plan::Place place : places) {
      plan.closed(place);
    }
    return found;
  };
  CHECK_EQ(leaving(2_MiB), 0u);
  CHECK_EQ(leaving(3_MiB), 3u);  // 72 MiB, of which 64 fit
  CHECK_EQ(leaving(8_MiB), 16u);
}

TEST("of several that are alike the one of which the least left is followed") {
  Plan plan;
  step(plan, {4_MiB, 8_MiB, 4_MiB}, {1});
  step(plan, {4_MiB, 8_MiB + 64_KiB, 4_MiB}, {0, 1});
  const auto places = forward(plan, {4_MiB, 8_MiB - 64_KiB, 4_MiB});
  CHECK(plan.leaves(places[1]) && !plan.leaves(places[0]));
}

TEST("a step that is like none gives up guessing") {
  Plan plan;
  step(plan, std::vector<Bytes>(200, 4_MiB), {0, 1, 2});
  plan.begin_step(kHigh, 0);
  std::vector<Plan::Place> places;
  for (int i = 0; i < 200; ++i) {
    places.push_back(plan.saved(i == 0 ? 4_MiB : Bytes{512} << (i % 3 * 4)));
  }
  CHECK(plan.state() == PlanState::diverged);
  CHECK(!plan.follows());
  CHECK(!plan.leaves(places[0]));
  CHECK_EQ(plan.next_use(places[5], 6), Plan{}.next_use({}, 6));
}

TEST("more records than the last step had come after its last") {
  Plan plan;
  step(plan, {4_MiB, 4_MiB}, {0});
  plan.begin_step(kHigh, 0);
  std::vector<Plan::Place> places;
  for (std::uint32_t i = 0; i < 8; ++i) {
    places.push_back(plan.saved(4_MiB, {i, 1}));
  }
  CHECK(plan.guesses());
  CHECK(plan.next_use(places[7], 8) < plan.next_use(places[0], 1));
  std::size_t found = 1;
  Plan::Place at = places.back();
  RecordId record;
  for (; plan.next_after(at, &at, &record); ++found) {
  }
  CHECK_EQ(found, places.size());
}

TEST("shapes that are seen once do not push out one that repeats") {
  Plan plan;
  const std::vector<Bytes> sizes{4_MiB, 8_MiB, 4_MiB};
  step(plan, sizes, {0});
  step(plan, sizes, {0});
  for (Bytes i = 1; i < 30; ++i) {
    step(plan, {4_MiB, 8_MiB + i * 4_KiB, 4_MiB + i * 4_KiB}, {1});
  }
  CHECK(plan.varies());
  forward(plan, sizes);
  CHECK(plan.follows() && !plan.guesses());
}

TEST("steps vary though a size comes again now and then, and do not once all repeat") {
  Plan plan;
  const auto of_size = [&](Bytes i) {
    step(plan, {4_MiB, 8_MiB + i * 4_KiB, 4_MiB + i * 4_KiB}, {1});
  };
  for (Bytes i = 0; i < 40; ++i) {
    of_size(i);
  }
  of_size(39);
  CHECK(plan.varies());
  for (Bytes i = 40; i < 44; ++i) {
    of_size(i);
  }
  of_size(43);
  CHECK(plan.varies());
  for (int i = 0; i < 8; ++i) {
    of_size(43);
  }
  CHECK(!plan.varies());
}

TEST("what has not repeated for long is forgotten for what does") {
  Plan plan;
  for (Bytes old = 1; old <= 8; ++old) {
    step(plan, {old * 1_MiB}, {0});
    step(plan, {old * 1_MiB}, {0});
  }
  for (int i = 0; i < 80; ++i) {
    step(plan, {64_MiB + static_cast<Bytes>(i % 6) * 32_MiB}, {0});
  }
  CHECK(!plan.varies());
  plan.begin_step(kHigh, 0);
  plan.saved(64_MiB + 4 * 32_MiB);
  CHECK(plan.follows() && !plan.guesses());
}

TEST("live memory that nothing can avoid is known of steps of other sizes too") {
  Plan plan;
  const auto with_live = [&](Bytes size, Bytes live) {
    const auto places = forward(plan, {size, size});
    const Bytes expected = plan.unavoidable();
    plan.live(live);
    backward(plan, places);
    return expected;
  };
  CHECK_EQ(with_live(4_MiB, 2 * kHigh), Bytes{0});
  CHECK_EQ(with_live(2_MiB, kHigh + kHigh / 2), Bytes{0});  // the lesser: kHigh at this size
  const Bytes expected = with_live(4_MiB + 512_KiB, 0);
  CHECK(expected == 0 || expected <= 2 * kHigh + kHigh / 2);
}

TEST("a step goes on with a trace that has been forgotten since it began") {
  Plan plan;
  Bytes size = 1_MiB;
  std::vector<std::vector<Plan::Place>> waiting;
  const auto wait_for_nine = [&] {
    for (int i = 0; i < 9; ++i) {
      waiting.push_back(forward(plan, {size += 1_MiB}));
    }
  };
  const auto end_nine = [&] {  // each teaches its own
    for (const auto& places : waiting) {
      backward(plan, places);
    }
    waiting.clear();
  };
  wait_for_nine();
  backward(plan, forward(plan, {4_MiB, 8_MiB}, {0}));
  end_nine();
  wait_for_nine();
  plan.begin_step(kHigh, 0);
  const Plan::Place first = plan.saved(4_MiB);
  CHECK(plan.leaves(first));
  end_nine();
  plan.saved(9_MiB);
  CHECK(plan.guesses());
  CHECK(plan.leaves(first));
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
