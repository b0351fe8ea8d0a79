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
  void spare_no_event() {
    while (!bank.events.empty(SpareEvents::Kind::time)) {
      bank.events.take(SpareEvents::Kind::time);
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

StepTimes times_of(const StepToTime& step, std::uint64_t spent_ns) {
  StepTimes times;
  for (std::size_t m = 1; m <= step.moments; ++m) {
    times.points.push_back({m, m * 1'000'000});
  }
  times.all_ns = step.moments * 1'000'000 + spent_ns;
  times.out_bytes = times.in_bytes = 64_MiB;
  times.out_ns = times.in_ns = 1'000'000;
  return times;
}

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
  const StepTimes times = times_of(step, 0);
  LaneRates rates;
  CHECK(trace.measured(step, times, rates, 1));
  CHECK_EQ(trace.timed, 1);
  trace.forget_trials();
  CHECK(!trace.measured(step, times, rates, 2));
  CHECK_EQ(trace.timed, 0);
  CHECK(trace.measured(trace.to_time(), times, rates, 3));
}

TEST("where no event is to spare, one step is measured and no other beside it") {
  TimedSteps steps;
  steps.spare_no_event();
  const std::uint64_t made = stagehand_sim_call_count("cuEventCreate");
  steps.step();
  const std::uint64_t of_one = stagehand_sim_call_count("cuEventCreate") - made;
  CHECK(of_one > 0);
  steps.step();
  CHECK_EQ(stagehand_sim_call_count("cuEventCreate") - made, of_one);
  stagehand_sim_drain();
  CHECK_EQ(steps.timed(), 1);
}

TEST("where the GPU keeps up, the events of one step serve all") {
  TimedSteps steps;
  steps.step();
  stagehand_sim_drain();
  steps.spare_no_event();
  const std::uint64_t late = steps.bank.events.late();
  steps.step();
  stagehand_sim_drain();
  steps.step();
  CHECK_EQ(steps.bank.events.late(), late);
}

TEST("a kind of step that the next one always cuts off is not measured for ever") {
  TimedSteps steps;
  for (int i = 0; i < Trace::kCutOff; ++i) {
    steps.plan.begin_step(kUnlimited, 0);
    const Plan::Place places[] = {steps.save(1_MiB), steps.save(2_MiB), steps.save(3_MiB)};
    CHECK(steps.bank.steps.watches(steps.stream));
    steps.plan.begin_step(kUnlimited, 0);
    steps.bank.steps.tell(steps.plan);
    for (int n = 2; n >= 0; --n) {
      steps.use(places[n]);
    }
  }
  steps.timed();
  CHECK(steps.plan.newest()->settled());
  CHECK_EQ(steps.plan.newest()->timed, 0);
  steps.step();
  steps.save(1_MiB);
  CHECK(!steps.bank.steps.watches(steps.stream));
}

// A trace of such records, which are used last to first.
Trace of_records(const std::vector<Bytes>& records) {
  Trace trace;
  for (const Bytes bytes : records) {
    trace.begin_moment();
    Trace::Entry& entry = trace.entries.emplace_back();
    entry.block_bytes = bytes;
    entry.saved = entry.retained = static_cast<std::uint32_t>(trace.entries.size());
    entry.leaves = true;
  }
  for (auto i = static_cast<std::uint32_t>(records.size()); i-- > 0;) {
    trace.begin_moment();
    trace.by_use.push_back(i);
    trace.entries[i].used_moment = static_cast<std::uint32_t>(trace.full.size() - 1);
  }
  trace.live.assign(records.size() + 1, 0);
  trace.planned = true;
  return trace;
}

// Of three records a node can make the second again.
Trace one_that_drops() {
  Trace trace = of_records({64_MiB, 64_MiB, 64_MiB});
  trace.high = 1_GiB;
  trace.entries[1].by_node = trace.entries[1].dropped = true;
  trace.entries[1].proof = Trace::Proof::proven;
  trace.entries[1].again_ns = 1000;
  return trace;
}

TEST("what a step took in which something was proven is no plan's") {
  Trace trace = one_that_drops();
  trace.entries[1].proof = Trace::Proof::none;
  const StepToTime proves = trace.to_time();
  trace.entries[1].proof = Trace::Proof::proven;  // meanwhile
  LaneRates rates;
  trace.measured(proves, times_of(proves, 10), rates, 1);
  CHECK_EQ(trace.trials.best_ns(), 0);
  const StepToTime after = trace.to_time();
  trace.measured(after, times_of(after, 20), rates, 2);
  CHECK_EQ(trace.trials.best_spent_ns(), times_of(after, 20).all_ns - 6'000'000);
}

// A step in torch's cache whose plan moves all, though to drop one would do.
Trace moves_what_it_could_drop() {
  Trace trace = one_that_drops();
  trace.largest_request = 64_MiB;
  trace.high = 128_MiB;
  trace.full = {0, 64_MiB, 128_MiB, 192_MiB, 192_MiB, 128_MiB, 64_MiB};
  trace.entries[1].dropped = false;
  return trace;
}

// The plan that is tried then.
Trace moves_least() {
  Trace other = moves_what_it_could_drop();
  LaneRates rates;
  other.measured(other.to_time(), times_of(other.to_time(), 2'000'000), rates, 1, true);
  Trace trace = moves_what_it_could_drop();
  trace.use(other.plan());
  return trace;
}

TEST(
    "with ranks, in torch's cache, what moves least is tried first, and kept if it spends little") {
  for (const bool ranks : {false, true}) {
    Trace trace = moves_what_it_could_drop();
    LaneRates rates;
    trace.measured(trace.to_time(), times_of(trace.to_time(), 2'000'000), rates, 1, ranks);
    CHECK_EQ(trace.trials.tries_first_of_all(), ranks);
    CHECK(!ranks || trace.entries[1].dropped);
    for (std::uint32_t step = 2; step < 6 && ranks; ++step) {  // others hold it up
      StepTimes times = times_of(trace.to_time(), 1000);
      times.points.back().ns += 3'000'000;
      times.all_ns += 3'000'000;
      trace.measured(trace.to_time(), times, rates, step, ranks);
    }
    CHECK_EQ(trace.tried_all(), ranks);
    CHECK(!ranks || trace.entries[1].dropped);
    CHECK(!ranks || trace.trials.best_spent_ns() == 1000);  // what it is watched by
  }
}

TEST("with ranks, what steps do is kept where that moves least already, and spends little") {
  Trace trace = moves_least();
  const RunPlan plan = trace.plan();
  LaneRates rates;
  for (std::uint32_t step = 1; step < 6; ++step) {
    trace.measured(trace.to_time(), times_of(trace.to_time(), 1000), rates, step, true);
  }
  CHECK(trace.tried_all());
  CHECK(trace.plan() == plan);
}

TEST("with ranks, where what moves least spends much it is as if it had not been tried") {
  for (const bool already : {false, true}) {
    Trace trace = already ? moves_least() : moves_what_it_could_drop();
    LaneRates rates;
    trace.measured(trace.to_time(), times_of(trace.to_time(), 2'000'000), rates, 1, true);
    CHECK(trace.trials.tries_first_of_all());
    const std::uint32_t plans = trace.plans;
    std::uint32_t step = 2;
    for (; step < 10 && trace.trials.tries_first_of_all(); ++step) {
      trace.measured(trace.to_time(), times_of(trace.to_time(), 9'000'000), rates, step, true);
    }
    CHECK(step < 10);
    CHECK(!trace.tried_all());
    CHECK(!trace.trials.prefers());
    CHECK(trace.plans > plans);  // what its steps still tell is no other plan's
    CHECK(trace.begins_plan);
  }
}

TEST("what a step took counts for the plan that it began with, or for none") {
  Trace trace = one_that_drops();
  LaneRates rates;
  StepToTime begun = trace.to_time();
  for (std::uint32_t at = 1; !trace.drops_late; ++at) {
    CHECK(at < 10);
    begun = trace.to_time();
    trace.measured(begun, times_of(begun, 60'000'000), rates, at);
  }
  const std::uint64_t spent = trace.trials.best_spent_ns();
  for (std::uint32_t at = 11; at < 14; ++at) {
    CHECK(!trace.measured(begun, times_of(begun, 10), rates, at));
  }
  CHECK_EQ(trace.trials.best_spent_ns(), spent);
}

TEST("steps that had begun before a plan was settled on do not have it made anew") {
  Trace trace = one_that_drops();
  LaneRates rates;
  StepToTime step = trace.to_time();
  trace.measured(step, times_of(step, 10), rates, 1);
  step = trace.to_time();
  trace.timed = Trace::kTimed;
  for (std::uint32_t at = 2; at < 5; ++at) {
    CHECK(!trace.measured(step, times_of(step, 60'000'000), rates, at));
  }
  CHECK_EQ(trace.timed, Trace::kTimed);
  step = trace.to_time();
  trace.measured(step, times_of(step, 60'000'000), rates, 5);
  CHECK(trace.measured(step, times_of(step, 60'000'000), rates, 6));  // two looks do
}

bool copies_something(const Trace& trace) {
  return std::any_of(trace.entries.begin(), trace.entries.end(),
                     [](const Trace::Entry& entry) { return entry.leaves && !entry.dropped; });
}

// Of four records two have to leave. Their copies hide in what is computed, and a node can make
// both again; where something is copied the host makes each moment longer by so much, and the GPU
// waits for so long.
Trace settled_where_copies_hold_up(std::uint64_t moment_ns, std::uint64_t wait_ns = 0,
                                   Bytes told = 0) {
  Trace trace = of_records({64_MiB, 64_MiB, 64_MiB, 64_MiB});
  trace.largest_request = told;
  trace.high = 130_MiB;
  for (std::size_t moment = 1; moment < trace.full.size(); ++moment) {
    trace.full[moment] = std::min(moment, trace.full.size() - moment) * 64_MiB;
  }
  for (std::size_t i = 0; i < trace.entries.size(); ++i) {
    trace.entries[i].by_node = trace.entries[i].leaves = i < 2;
    trace.entries[i].proof = Trace::Proof::proven;
    trace.entries[i].again_ns = 50'000;
  }
  LaneRates rates;
  for (std::uint32_t at = 1; !trace.settled(); ++at) {
    const StepToTime step = trace.to_time();
    const std::uint64_t each = 500'000 + (copies_something(trace) ? moment_ns : 0);
    StepTimes times = times_of(step, 0);
    for (StepTimes::Point& point : times.points) {
      point.ns = point.moment * each;
    }
    times.all_ns = times.points.back().ns + (copies_something(trace) ? wait_ns : 0);
    for (const Trace::Entry& entry : trace.entries) {
      times.all_ns += entry.dropped ? entry.again_ns : 0;
    }
    times.out_bytes = times.in_bytes = 256_MiB;
    trace.measured(step, times, rates, at);
  }
  CHECK(trace.trials.prefers());
  return trace;
}

TEST("what moves least is tried once, and kept where copies hold up what computes beside them") {
  CHECK(!copies_something(settled_where_copies_hold_up(100'000)));
  CHECK(copies_something(settled_where_copies_hold_up(0)));
}

// What was dropped late had a miss for each place: a video transformer on an H200 had 48 for 9.
TEST("what moves least drops late in torch's cache where the best spends much, and only there") {
  constexpr std::uint64_t kMuch = 2'000'000;
  CHECK(settled_where_copies_hold_up(100'000, kMuch, 64_MiB).plan().drops_late);
  CHECK(!settled_where_copies_hold_up(100'000, kMuch, 0).plan().drops_late);
  CHECK(!settled_where_copies_hold_up(100'000, 0, 64_MiB).plan().drops_late);
}

TEST("what moves least is tried dropping late, too, where another that did was no better") {
  Trace trace = settled_where_copies_hold_up(400'000);
  const RunPlan least = trace.plan();
  const std::uint64_t ns = trace.trials.best_ns();
  trace.timed = Trace::kTimed / 2;
  const auto run = [&](const RunPlan& plan, std::uint64_t more_ns) {
    trace.use(plan);
    trace.trials.begin(plan, ++trace.plans);
    for (int i = 0; i < 5; ++i) {
      trace.trials.took(plan, ns + more_ns, more_ns);
    }
  };
  run(RunPlan(std::vector<Fate>(least.fates.size(), Fate::leave), true), 20'000'000);
  run(least, 2'500'000);
  trace.try_another();
  CHECK(trace.plan() == RunPlan(least.fates, true));
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
