// Steps that are measured while the host is ahead of the GPU: core/step_clock.
#include "core/plan.hpp"
#include "core/step_clock.hpp"
#include "core/stream_clock.hpp"
#include "native/core_rig.hpp"

namespace stagehand::core {
namespace {

// Steps that save three records and ask for them. The GPU does nothing unless the test says so.
struct TimedSteps {
  TimedSteps() : rig({.seed = 1}) {
    stagehand_sim_progress(0);
    bank.events.fill();
    step();  // nobody knew it
  }
  Plan::Place save(Bytes bytes) {
    const Plan::Place place = plan.saved(bytes);
    if (steps != place.step) {
      steps = place.step;
      bank.steps.step_began(plan);
    } else if (!plan.measures()) {
      bank.steps.forget();
    }
    bank.moment(plan.moment(), stream);
    return place;
  }
  void use(Plan::Place place) {
    plan.unpacked(place);
    plan.closed(place);
    bank.moment(plan.moment(), stream);
  }
  void step(Bytes last = 3_MiB) {
    plan.begin_step(kUnlimited, 0);
    const Plan::Place places[] = {save(1_MiB), save(2_MiB), save(last)};
    for (int i = 2; i >= 0; --i) {
      use(places[i]);
    }
  }
  // How many steps of the kind were measured, of those that the GPU has come to.
  int timed() {
    plan.begin_step(kUnlimited, 0);
    bank.steps.tell(plan);
    return plan.newest()->timed;
  }

  test::CoreRig rig;
  Gate gate{rig.driver};
  ClockBank bank{gate};
  Plan plan;
  driver::Stream stream = rig.stream();
  std::uint32_t steps = 0;
};

TEST("a step is measured while an earlier one's times are not known yet") {
  TimedSteps steps;
  steps.step();
  steps.step();
  CHECK_EQ(steps.timed(), 0);
  stagehand_sim_drain();
  CHECK_EQ(steps.timed(), 2);
}

TEST("a step that goes another way takes nothing from those that were measured before it") {
  TimedSteps steps;
  steps.step();
  steps.step(5_MiB);
  stagehand_sim_drain();
  steps.step();
  stagehand_sim_drain();
  steps.timed();
  CHECK(steps.plan.newest()->repeated != 0);
  CHECK_EQ(steps.plan.newest()->timed, 1);
}

TEST("a step of too many waits is not measured, and the one before it is") {
  TimedSteps steps;
  steps.step();
  steps.plan.begin_step(kUnlimited, 0);
  const Plan::Place first = steps.save(1_MiB);
  while (steps.bank.steps.watches(steps.stream)) {
    steps.bank.steps.note(StepClock::Kind::waits, steps.stream);
    steps.bank.steps.note(StepClock::Kind::waited, steps.stream);
  }
  CHECK(!steps.bank.steps.note(StepClock::Kind::waited, steps.stream));
  const Plan::Place others[] = {steps.save(2_MiB), steps.save(3_MiB)};
  for (const Plan::Place place : {others[1], others[0], first}) {
    steps.use(place);
  }
  stagehand_sim_drain();
  CHECK_EQ(steps.timed(), 1);
  CHECK_EQ(steps.plan.newest()->totals.waited_ns, 0);
}

TEST("what a step took that began before all was to be tried anew counts no more") {
  TimedSteps steps;
  CHECK_EQ(steps.timed(), 0);
  Trace trace = *steps.plan.newest();
  const StepToTime step = trace.to_time();
  StepTimes times;
  for (std::size_t m = 1; m <= step.moments; ++m) {
    times.points.push_back({m, m * 1000});
  }
  LaneRates rates;
  CHECK(trace.measured(step, times, rates, 1));
  CHECK_EQ(trace.timed, 1);
  trace.forget_trials();
  CHECK(!trace.measured(step, times, rates, 2));
  CHECK_EQ(trace.timed, 0);
  CHECK(trace.measured(trace.to_time(), times, rates, 3));
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
