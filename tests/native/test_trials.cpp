// Which of the plans that were tried is kept: core/trials.
#include <utility>
#include <vector>

#include "core/trials.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {
namespace {

RunPlan plan_of(std::size_t dropped, bool late = false) {
  std::vector<Fate> fates(64, Fate::leave);
  std::fill_n(fates.begin(), dropped, Fate::drop);
  return RunPlan(std::move(fates), late);
}

TEST("what was in use before is known by one step, and what is tried by more than the first") {
  Trials trials;
  CHECK(trials.took(plan_of(0), 1000, 0));
  trials.begin(plan_of(32), 1);
  CHECK(!trials.took(plan_of(32), 5000, 0));
  CHECK(!trials.took(plan_of(32), 900, 0));
  CHECK(trials.took(plan_of(32), 900, 0));
  CHECK(trials.best() == plan_of(32));
  CHECK_EQ(trials.best_ns(), 900);
}

TEST("a plan that still gains by its own steps has more of them, up to six") {
  Trials trials;
  trials.took(plan_of(0), 1000, 0);
  trials.begin(plan_of(32), 2);
  trials.took(plan_of(32), 1240, 0);
  CHECK(!trials.took(plan_of(32), 1200, 0));
  CHECK(!trials.took(plan_of(32), 1100, 0));
  CHECK(!trials.took(plan_of(32), 1050, 0));
  CHECK(!trials.took(plan_of(32), 1020, 0));
  CHECK(trials.took(plan_of(32), 1005, 0));
  CHECK(trials.best() == plan_of(0));
}

// What each step ran with, and took: the first one's plan is begun, and its own steps change it.
void run(Trials* trials, const std::vector<std::pair<std::size_t, std::uint64_t>>& steps) {
  const std::size_t begun = steps.front().first;
  trials->begin(plan_of(begun), static_cast<std::uint32_t>(begun));
  for (const auto& [dropped, ns] : steps) {
    trials->took(plan_of(dropped), ns, 0);
  }
}

void run(Trials* trials, std::size_t dropped, const std::vector<std::uint64_t>& all_ns) {
  std::vector<std::pair<std::size_t, std::uint64_t>> steps;
  for (const std::uint64_t ns : all_ns) {
    steps.emplace_back(dropped, ns);
  }
  run(trials, steps);
}

TEST("a plan that had one lucky step is not the best") {
  Trials trials;
  trials.took(plan_of(0), 1000, 0);
  run(&trials, 16, {2000, 900, 900});
  run(&trials, 32, {2000, 800, 950});
  CHECK(trials.best() == plan_of(16));
  CHECK_EQ(trials.best_ns(), 900);
}

// At most by a 32nd: FSDP2's steps differ by a tenth, and what was kept took as much longer.
TEST("a plan that is preferred is the best where steps of another differ by as much") {
  const auto best_of = [](std::uint64_t next_ns, std::uint64_t preferred_ns) {
    Trials trials;
    trials.took(plan_of(0), 2000, 0);
    run(&trials, 16, {2000, 900, next_ns});
    run(&trials, 32, {2000});
    trials.prefer();
    trials.took(plan_of(32), preferred_ns, 0);
    trials.took(plan_of(32), preferred_ns, 0);
    return trials.best();
  };
  CHECK(best_of(920, 940) == plan_of(32));
  CHECK(best_of(920, 941) == plan_of(16));
  CHECK(best_of(990, 1020) == plan_of(32));
  CHECK(best_of(990, 1021) == plan_of(16));
}

// It is the last that is tried: on a GPU steps of 55 ms came between those of 50.
TEST("a plan that is preferred has more steps until two of them agree") {
  for (const bool preferred : {false, true}) {
    Trials trials;
    trials.took(plan_of(0), 2000, 0);
    run(&trials, 16, {2000, 900, 900});
    run(&trials, 32, {2000});
    if (preferred) {
      trials.prefer();
    }
    CHECK(!trials.took(plan_of(32), 800, 0));
    CHECK_EQ(trials.took(plan_of(32), 950, 0), !preferred);
    trials.took(plan_of(32), 810, 0);
    CHECK(trials.took(plan_of(32), 810, 0));
    CHECK_EQ(trials.best_ns(), 810);
  }
}

// Replays tried one five times over: each time its first step had all that left in it leave in the
// next one, too.
TEST("a plan that was begun was tried, whatever its own steps made of it") {
  const std::vector<KnownRecord> records(64, KnownRecord{1_MiB});
  Trials trials;
  trials.took(plan_of(0), 1000, 0);
  run(&trials, {{16, 800}, {40, 1200}});
  CHECK(trials.tried(plan_of(16), records));
  CHECK(trials.tried(plan_of(40), records));
  CHECK(!trials.tried(plan_of(16, true), records));
}

TEST("what a plan gains or loses as it changes is nothing that its steps differ by") {
  Trials trials;
  trials.took(plan_of(0), 2000, 0);
  run(&trials, {{16, 2000}, {17, 990}, {18, 900}, {18, 900}});
  run(&trials, 32, {2000});
  trials.prefer();
  trials.took(plan_of(32), 920, 0);
  trials.took(plan_of(32), 920, 0);
  CHECK(trials.prefers());
  CHECK(!trials.prefers_best());
}

// Of a plan whose two quickest steps spent so much.
std::uint64_t spent_of_best(std::uint64_t quickest_ns, std::uint64_t next_ns) {
  Trials trials;
  trials.took(plan_of(0), 1000, 90);
  trials.begin(plan_of(16), 3);
  trials.took(plan_of(16), 2000, 700);
  trials.took(plan_of(16), 960, quickest_ns);
  trials.took(plan_of(16), 980, next_ns);
  CHECK_EQ(trials.best_ns(), 980);
  return trials.best_spent_ns();
}

TEST("what another plan could save is what the best one spends, not all that its steps take") {
  CHECK_EQ(spent_of_best(10, 20), 20);
}

// A replay settled on 1.14: of two steps that took as long, the one with a pause spent a quarter.
TEST("what the best one spends is the most of the two steps that took the least") {
  CHECK_EQ(spent_of_best(80, 20), 80);
}

TEST("the best is gone back to before it is sure, and another one then where it takes longer now") {
  Trials trials;
  trials.took(plan_of(0), 1000, 0);
  run(&trials, 16, {2000, 900, 900});
  run(&trials, 32, {2000, 800, 800});
  run(&trials, 48, {2000, 990, 990});
  CHECK(trials.best() == plan_of(32));
  CHECK(!trials.sure_of_best());
  run(&trials, 32, {2000, 950, 950, 950, 950});
  CHECK(trials.best() == plan_of(16));
  CHECK(!trials.sure_of_best());
  run(&trials, 16, {2000, 900, 900});
  CHECK(trials.sure_of_best());
}

TEST("a plan is what its fastest step ran, which what it has learned may have changed") {
  Trials trials;
  trials.took(plan_of(0), 1000, 0);
  run(&trials, {{16, 2000}, {17, 800}, {18, 900}});
  CHECK(trials.best() == plan_of(17));
  CHECK_EQ(trials.best_ns(), 900);
}

TEST("where plans come up again that were left before, there are no more to try") {
  Trials trials;
  trials.took(plan_of(0), 1000, 0);
  run(&trials, 16, {900, 900, 900});
  CHECK(trials.more());
  run(&trials, 0, {950, 950, 950});
  CHECK(trials.more());
  run(&trials, 16, {900, 900, 900});
  CHECK(!trials.more());
  CHECK(trials.sure_of_best());
}

TEST("a plan that drops late is another one than the same that drops at once") {
  const std::vector<KnownRecord> records(64, KnownRecord{1_MiB});
  Trials trials;
  trials.took(plan_of(0), 1000, 0);
  run(&trials, 32, {2000, 900, 900});
  CHECK(!trials.tried(true));
  CHECK(!trials.tried(plan_of(32, true), records));
  trials.begin(plan_of(32, true), 5);
  CHECK(trials.tried(true));
  CHECK(trials.tried(plan_of(32, true), records));
  trials.took(plan_of(32, true), 2000, 0);
  trials.took(plan_of(32, true), 800, 0);
  trials.took(plan_of(32, true), 800, 0);
  CHECK(trials.best() == plan_of(32, true));
}

TEST("a plan that takes a quarter longer is given up at once") {
  Trials trials;
  trials.took(plan_of(0), 1000, 0);
  trials.begin(plan_of(32), 6);
  trials.took(plan_of(32), 1300, 0);
  CHECK(trials.took(plan_of(32), 1300, 0));
}

TEST("a plan hardly different from one that was tried is not tried") {
  const std::vector<KnownRecord> records(64, KnownRecord{1_MiB});
  Trials trials;
  trials.took(plan_of(0), 1000, 0);
  trials.begin(plan_of(32), 7);
  CHECK(trials.tried(plan_of(34), records));
  CHECK(!trials.tried(plan_of(48), records));
}

TEST("a plan that is gone back to has the id that it had") {
  Trials trials(7);
  CHECK_EQ(trials.id(), 7);
  trials.took(plan_of(8), 100, 10);
  CHECK_EQ(trials.id(), 7);
  trials.begin(plan_of(16), 8);
  CHECK_EQ(trials.id(), 8);
  trials.begin(plan_of(32), 9);
  trials.begin(plan_of(16), 10);
  CHECK_EQ(trials.id(), 8);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
