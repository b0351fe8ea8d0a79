// Steps of one plan are served at the addresses that they had: core/usual_addresses alone, and in
// recorded steps whose times are never the same.
#include "core/plan.hpp"
#include "core/usual_addresses.hpp"
#include "native/trace_recipes.hpp"

namespace stagehand::core::test {
namespace {

using Usual = UsualAddresses::Usual;

constexpr std::uint64_t kPlan = 70;
constexpr Bytes kBytes = 4_MiB;

// A step of the plan has gathered, and the next one begins.
UsualAddresses after_a_gather() {
  UsualAddresses usual;
  usual.begin_step(kPlan, {0});
  usual.begin_step(kPlan, {1});
  return usual;
}

TEST("addresses are kept once a step of a plan that is kept had to gather") {
  UsualAddresses usual;
  usual.begin_step(0, {0});  // plans are tried
  usual.begin_step(kPlan, {3});
  CHECK(!usual.kept());
  usual.begin_step(kPlan, {3});
  CHECK(!usual.kept());  // what it needs is where it was
  usual.begin_step(kPlan, {4});
  CHECK(usual.kept());
  CHECK_EQ(usual.plan(), kPlan);
  usual.begin_step(kPlan, {4});
  CHECK(usual.kept());
}

TEST(
    "none are kept while steps go over high, which map in any case, and those before are "
    "forgotten") {
  UsualAddresses usual = after_a_gather();
  const UsualAddresses::Key key = usual.request(5);
  usual.note(key, {4096, kBytes, 5});
  usual.begin_step(kPlan, {2, 1_MiB});
  CHECK(!usual.kept());
  usual.begin_step(kPlan, {2, 1_MiB});
  CHECK(!usual.kept());
  usual.begin_step(kPlan, {3, 1_MiB});
  CHECK(usual.kept());
  CHECK_EQ(usual.of(key, kBytes).at, 0u);
}

TEST("a request is known by its place in the step and its number there, in every step") {
  UsualAddresses usual = after_a_gather();
  const UsualAddresses::Key first = usual.request(5);
  const UsualAddresses::Key second = usual.request(5);
  const UsualAddresses::Key next = usual.request(6);
  CHECK(first != 0 && second != 0 && first != second && next != first && next != second);
  usual.begin_step(kPlan, {1});
  CHECK_EQ(usual.request(5), first);
  CHECK_EQ(usual.request(5), second);
  usual.request(5);  // one more, for something made again
  CHECK_EQ(usual.request(6), next);
}

TEST(
    "of what goes on at one place, as an evaluation between two steps, only a thousand have keys") {
  UsualAddresses usual = after_a_gather();
  int keys = 0;
  for (int i = 0; i < 5000; ++i) {
    keys += usual.request(9) != 0 ? 1 : 0;
  }
  CHECK_EQ(keys, 1023);
}

TEST("an address is usual for blocks of its size only") {
  UsualAddresses usual = after_a_gather();
  const UsualAddresses::Key key = usual.request(0);
  usual.note(key, {4096, kBytes, 0});
  CHECK_EQ(usual.of(key, kBytes).at, 4096u);
  CHECK_EQ(usual.of(key, 2 * kBytes).at, 0u);
}

TEST("records that come back have keys of their own") {
  UsualAddresses usual = after_a_gather();
  usual.note(usual.request(0), {4096, kBytes, 0});
  CHECK_EQ(usual.of(UsualAddresses::comes_back(0), kBytes).at, 0u);
  usual.note(UsualAddresses::comes_back(0), {8192, kBytes, 3});
  usual.begin_step(kPlan, {1});
  CHECK_EQ(usual.of(UsualAddresses::comes_back(0), kBytes).at, 8192u);
  CHECK_EQ(usual.of(usual.request(0), kBytes).at, 4096u);
}

TEST("a record is of the newest step or of one before") {
  Plan plan;
  plan.begin_step(1_GiB, 0);
  const Plan::Place place = plan.saved(1_MiB);
  CHECK(plan.of_newest(place));
  plan.begin_step(1_GiB, 0);
  CHECK(!plan.of_newest(place));
}

TEST("without a key nothing is noted, nor where no step's addresses are kept") {
  UsualAddresses usual = after_a_gather();
  usual.note(0, {4096, kBytes, 0});
  CHECK_EQ(usual.of(0, kBytes).at, 0u);
  const UsualAddresses::Key key = usual.request(1);
  usual.begin_step(0, {1});  // while a request that was under way gave the lock up
  usual.note(key, {4096, kBytes, 1});
  CHECK_EQ(usual.of(key, kBytes).at, 0u);
}

TEST("what comes ahead waits hardly longer than when it came earliest, step after step") {
  UsualAddresses usual = after_a_gather();
  const UsualAddresses::Key record = UsualAddresses::comes_back(4);
  for (std::size_t when = 20; when <= 28; when += 2) {
    usual.note(record, {4096, kBytes, when});
  }
  const Usual came = usual.of(record, kBytes);
  CHECK(UsualAddresses::may_come(came, 0));
  CHECK(UsualAddresses::may_come(came, 28));
  CHECK(!UsualAddresses::may_come(came, 29));
  usual.note(record, {8192, kBytes, 40});  // elsewhere: anew
  CHECK(UsualAddresses::may_come(usual.of(record, kBytes), 48));
}

TEST("plans that take turns keep their own addresses; of nine the oldest loses them") {
  UsualAddresses usual;
  usual.begin_step(1, {0});
  usual.begin_step(2, {1});  // the first one's step gathered
  usual.begin_step(1, {1});
  CHECK(usual.kept());
  usual.note(usual.request(3), {4096, kBytes, 3});
  usual.begin_step(2, {1});
  CHECK(!usual.kept());
  usual.begin_step(1, {1});
  CHECK_EQ(usual.of(usual.request(3), kBytes).at, 4096u);
  for (std::uint64_t plan = 2; plan <= 9; ++plan) {
    usual.begin_step(plan, {1});
  }
  usual.begin_step(1, {1});
  CHECK(!usual.kept());
}

// Holes of such a step come out of free blocks everywhere, since memory is full to a few percent
// and what comes back does so a little earlier or later each time. Of plain torch's time it takes
// what it took before addresses were kept, and no more than noise beside.
void expect_settled(double share, bool regions, int may_map, double most) {
  constexpr int kSettled = 36;
  constexpr int kSteps = 12;
  Replay replay("gpt_8k.txt");
  replay.make_again(recipes_of("gpt_8k.txt", true));
  if (regions) {
    replay.run_again(blocks_of("gpt_8k.txt"));
  }
  replay.unsteady(0.03, 1);
  replay.set_share(share);
  double ns = 0;
  for (int i = 0; i < kSettled + kSteps; ++i) {
    const Step step = replay.step();
    may_map -= i >= kSettled && step.map_calls > 0 ? 1 : 0;
    ns += i < kSettled ? 0 : static_cast<double>(step.ns);
  }
  CHECK(may_map >= 0);
  CHECK(ns / kSteps <= most * static_cast<double>(replay.unbudgeted_ns()));
  replay.verify();
}

TEST("no step maps once a plan is kept, though no two take the same times") {
  expect_settled(0.4, true, 0, 1.11);
  expect_settled(0.5, true, 0, 1.06);
}

TEST("where nodes alone make things again hardly one maps, and no copy is late for it") {
  expect_settled(0.5, false, 1, 1.03);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
