// Which of the plans that were tried is kept: core/trials.
#include <vector>

#include "core/trials.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {
namespace {

using Fates = std::vector<Fate>;

Fates plan_of(std::size_t dropped) {
  Fates fates(64, Fate::leave);
  std::fill_n(fates.begin(), dropped, Fate::drop);
  return fates;
}

TEST("what was in use before is known by one step, and what is tried by more than the first") {
  Trials trials;
  CHECK(trials.took(plan_of(0), 1000));
  trials.begin(plan_of(32));
  CHECK(!trials.took(plan_of(32), 5000));
  CHECK(!trials.took(plan_of(32), 900));
  CHECK(trials.took(plan_of(32), 900));
  CHECK(trials.best() == plan_of(32));
  CHECK_EQ(trials.best_ns(), 900);
}

TEST("a plan that still gains by its own steps has more of them, up to six") {
  Trials trials;
  trials.took(plan_of(0), 1000);
  trials.begin(plan_of(32));
  trials.took(plan_of(32), 1240);
  CHECK(!trials.took(plan_of(32), 1200));
  CHECK(!trials.took(plan_of(32), 1100));
  CHECK(!trials.took(plan_of(32), 1050));
  CHECK(!trials.took(plan_of(32), 1020));
  CHECK(trials.took(plan_of(32), 1005));
  CHECK(trials.best() == plan_of(0));
}

TEST("a plan that takes a quarter longer is given up at once") {
  Trials trials;
  trials.took(plan_of(0), 1000);
  trials.begin(plan_of(32));
  trials.took(plan_of(32), 1300);
  CHECK(trials.took(plan_of(32), 1300));
}

TEST("a plan hardly different from one that was tried is not tried") {
  const std::vector<KnownRecord> records(64, KnownRecord{1_MiB});
  Trials trials;
  trials.took(plan_of(0), 1000);
  trials.begin(plan_of(32));
  CHECK(trials.tried(plan_of(34), records));
  CHECK(!trials.tried(plan_of(48), records));
}

TEST("what turned out not to be the same when made again is not dropped by the best plan either") {
  Trials trials;
  trials.took(plan_of(2), 1000);
  trials.refuse(0);
  CHECK(trials.best()[0] == Fate::leave);
  CHECK(trials.best()[1] == Fate::drop);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
