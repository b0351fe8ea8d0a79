// When a settled plan is made anew: core/watch.
#include "core/watch.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {
namespace {

// A step that computes so long, and takes so long in all.
StepTimes step_of(std::uint64_t compute_ns, std::uint64_t all_ns) {
  StepTimes times;
  times.points = {{0, 0}, {1, compute_ns}};
  times.all_ns = all_ns;
  return times;
}

TEST("a plan is made anew where two looks in a row spend a fifth of computing more than it did") {
  constexpr std::uint64_t kSpent = 10;
  Watch watch;
  CHECK(!watch.moved(step_of(100, 110), kSpent, 0));
  CHECK(!watch.moved(step_of(100, 131), kSpent, 64));
  CHECK(!watch.moved(step_of(100, 130), kSpent, 65));  // not more than a fifth
  CHECK(!watch.moved(step_of(100, 131), kSpent, 128));
  CHECK(watch.due(129));
  CHECK(watch.moved(step_of(100, 131), kSpent, 129));
  // The new plan is looked at twice as seldom.
  CHECK(!watch.moved(step_of(100, 130), kSpent, 150));
  CHECK(!watch.due(150 + 127));
  CHECK(watch.due(150 + 128));
}

TEST("a plan that spends far more than it did as soon as it is kept is left at once, but twice") {
  Watch watch;
  std::uint32_t step = 0;
  const auto left_at_once = [&] {
    const bool first = watch.due(step) && watch.moved(step_of(100, 131), 10, step);
    const bool second = watch.due(step + 1) && watch.moved(step_of(100, 131), 10, step + 1);
    step += 2;
    return !first && second;
  };
  CHECK(left_at_once());
  CHECK(left_at_once());
  CHECK(!left_at_once());
}

TEST("a plan that is made anew over and over is looked at ever more seldom") {
  Watch watch;
  std::uint32_t step = 0;
  int moved = 0;
  for (; step < 1'000'000; ++step) {
    moved += watch.due(step) && watch.moved(step_of(100, 900), 10, step) ? 1 : 0;
  }
  CHECK(moved > 2);
  CHECK(moved < 40);
}

TEST("a plan of which nobody knows what it spends is not made anew for that") {
  Watch watch;
  for (std::uint32_t step = 0; step < 4; ++step) {
    CHECK(!watch.moved(step_of(100, 900), Watch::kUnknown, step));
  }
}

TEST("a plan is made anew where computing takes a fifth longer in two looks in a row") {
  Watch watch;
  CHECK(!watch.moved(step_of(100, 110), 10, 0));
  CHECK(!watch.moved(step_of(121, 131), 10, 64));
  CHECK(watch.moved(step_of(121, 131), 10, 65));
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
