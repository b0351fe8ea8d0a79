// Steps of one plan are served at the addresses that they had: core/usual_addresses alone, and in
// recorded steps whose times are never the same.
#include "core/usual_addresses.hpp"
#include "native/trace_recipes.hpp"

namespace stagehand::core::test {
namespace {

using Usual = UsualAddresses::Usual;

constexpr std::uint32_t kTrace = 7;
constexpr std::uint64_t kPlan = 70;

// A step of the plan has gathered, and the next one begins.
UsualAddresses after_a_gather() {
  UsualAddresses usual;
  usual.begin_step(kTrace, kPlan, {0});
  usual.begin_step(kTrace, kPlan, {1});
  return usual;
}

TEST("addresses are kept once a step of a plan that is kept had to gather") {
  UsualAddresses usual;
  usual.begin_step(kTrace, 0, {0});  // plans are tried
  usual.begin_step(kTrace, kPlan, {3});
  CHECK(!usual.kept(kTrace));
  usual.begin_step(kTrace, kPlan, {3});
  CHECK(!usual.kept(kTrace));  // what it needs is where it was
  usual.begin_step(kTrace, kPlan, {4});
  CHECK(usual.kept(kTrace));
  CHECK(!usual.kept(kTrace + 1));  // the step turned out to be of another kind
  usual.begin_step(kTrace, kPlan, {4});
  CHECK(usual.kept(kTrace));
}

TEST("no addresses are kept while steps go over high, which map in any case") {
  UsualAddresses usual = after_a_gather();
  CHECK(usual.kept(kTrace));
  usual.begin_step(kTrace, kPlan, {2, 1_MiB});
  CHECK(!usual.kept(kTrace));
  usual.begin_step(kTrace, kPlan, {2, 1_MiB});
  CHECK(!usual.kept(kTrace));
  usual.begin_step(kTrace, kPlan, {3, 1_MiB});
  CHECK(usual.kept(kTrace));
}

TEST("a request is known by its place in the step and its number there, in every step") {
  UsualAddresses usual = after_a_gather();
  const UsualAddresses::Key first = usual.request(5);
  const UsualAddresses::Key second = usual.request(5);
  const UsualAddresses::Key next = usual.request(6);
  CHECK(first != 0 && second != 0 && first != second && next != first && next != second);
  usual.begin_step(kTrace, kPlan, {1});
  CHECK_EQ(usual.request(5), first);
  CHECK_EQ(usual.request(5), second);
  usual.request(5);  // one more, for something made again
  CHECK_EQ(usual.request(6), next);
}

TEST("records that come back have keys of their own") {
  UsualAddresses usual = after_a_gather();
  usual.note(usual.request(0), {4096, 0});
  CHECK_EQ(usual.of(UsualAddresses::comes_back(0)).at, 0u);
  usual.note(UsualAddresses::comes_back(0), {8192, 3});
  usual.begin_step(kTrace, kPlan, {1});
  CHECK_EQ(usual.of(UsualAddresses::comes_back(0)).at, 8192u);
  CHECK_EQ(usual.of(usual.request(0)).at, 4096u);
  usual.forget(UsualAddresses::comes_back(0));
  CHECK_EQ(usual.of(UsualAddresses::comes_back(0)).at, 0u);
}

TEST("without a key nothing is noted, nor where no step's addresses are kept") {
  UsualAddresses usual = after_a_gather();
  usual.note(0, {4096, 0});
  CHECK_EQ(usual.of(0).at, 0u);
  const UsualAddresses::Key key = usual.request(1);
  usual.begin_step(kTrace, 0, {1});  // while a request that was under way gave the lock up
  usual.note(key, {4096, 1});
  usual.forget(key);
  CHECK_EQ(usual.of(key).at, 0u);
}

TEST("what comes ahead waits for its address hardly longer than the last time") {
  const Usual came{4096, 20};
  CHECK(UsualAddresses::may_come(came, 0));
  CHECK(UsualAddresses::may_come(came, 28));
  CHECK(!UsualAddresses::may_come(came, 29));
}

TEST("plans that take turns keep their own addresses; of nine the oldest loses them") {
  UsualAddresses usual;
  const auto begin = [&](std::uint64_t plan, std::uint64_t gathers) {
    usual.begin_step(static_cast<std::uint32_t>(plan), plan, {gathers});
  };
  begin(1, 0);
  begin(2, 1);  // the first one's step gathered
  begin(1, 1);
  CHECK(usual.kept(1));
  usual.note(usual.request(3), {4096, 3});
  begin(2, 1);
  CHECK(!usual.kept(2));
  begin(1, 1);
  CHECK_EQ(usual.of(usual.request(3)).at, 4096u);
  for (std::uint64_t plan = 2; plan <= 9; ++plan) {
    begin(plan, 1);
  }
  begin(1, 1);
  CHECK(!usual.kept(1));
}

// Holes of such a step come out of free blocks everywhere, since memory is full to a few percent
// and what comes back does so a little earlier or later each time.
TEST("no step maps once a plan is kept, though no two take the same times") {
  constexpr int kSettled = 34;
  for (const double share : {0.4, 0.5}) {
    Replay replay("gpt_8k.txt");
    replay.make_again(recipes_of("gpt_8k.txt", true));
    replay.run_again(blocks_of("gpt_8k.txt"));
    replay.unsteady(0.03, 1);
    replay.set_share(share);
    for (int i = 0; i < kSettled + 10; ++i) {
      const Step step = replay.step();
      CHECK(i < kSettled || step.map_calls == 0);
    }
    replay.verify();
  }
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
