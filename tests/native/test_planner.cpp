// Which records leave, by the time that both lanes have: core/planner.
#include <algorithm>
#include <numeric>
#include <vector>

#include "core/plan.hpp"
#include "core/planner.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {
namespace {

constexpr Bytes kSize = 32_MiB;
constexpr std::uint64_t kMomentNs = 1'000'000;

// A step whose moments take a millisecond each: records are saved and used in the order given, a
// positive number saves that record, its negative uses it.
struct Made {
  Made(const std::vector<int>& events, Bytes high, double copies_in_moment) {
    Bytes full = 0;
    step_full.push_back(0);
    for (const int event : events) {
      const auto number = static_cast<std::size_t>(event > 0 ? event : -event) - 1;
      records.resize(std::max(records.size(), number + 1));
      const auto moment = static_cast<std::uint32_t>(step_full.size());
      if (event > 0) {
        records[number].bytes = kSize;
        records[number].retained = moment;
        full += kSize;
        step_full.push_back(full);
      } else {
        records[number].used = moment;
        step_full.push_back(full);
        full -= kSize;
      }
    }
    for (std::size_t i = 0; i < step_full.size(); ++i) {
      at_ns.push_back(i * kMomentNs);
    }
    const double rate = copies_in_moment * static_cast<double>(kSize) / kMomentNs;
    step = {records, step_full, at_ns, high, rate, rate};
    stay.assign(records.size(), Fate::stay);
  }
  Made(const Made&) = delete;

  std::vector<Fate> leave(const std::vector<std::size_t>& numbers) const {
    std::vector<Fate> fates = stay;
    for (const std::size_t number : numbers) {
      fates[number - 1] = Fate::leave;
    }
    return fates;
  }

  std::vector<KnownRecord> records;
  std::vector<Bytes> step_full;
  std::vector<std::uint64_t> at_ns;
  KnownStep step;
  std::vector<Fate> stay;
};

// Forward saves 1 to n, backward uses n to 1.
std::vector<int> one_graph(int n) {
  std::vector<int> events;
  for (int i = 1; i <= n; ++i) {
    events.push_back(i);
  }
  for (int i = n; i >= 1; --i) {
    events.push_back(-i);
  }
  return events;
}

// F0 F1 B0 F2 B1 B2, of n records each.
std::vector<int> pipeline(int n) {
  std::vector<int> events;
  for (const int word : {1, 2, -1, 3, -2, -3}) {
    const int first = (std::abs(word) - 1) * n;
    for (int i = 1; i <= n; ++i) {
      events.push_back(word > 0 ? first + i : -(first + n + 1 - i));
    }
  }
  return events;
}

Bytes leaving(const std::vector<Fate>& fates) {
  return kSize * static_cast<Bytes>(std::count(fates.begin(), fates.end(), Fate::leave));
}

TEST("one graph: what is asked for last leaves, and no more than must") {
  const Made made(one_graph(64), 48 * kSize, 1);
  const std::vector<Fate> fates = choose_fates(made.step, made.stay);
  CHECK_EQ(forecast(made.step, fates).late_ns, 0);
  CHECK(leaving(fates) >= 16 * kSize);
  CHECK(leaving(fates) <= 17 * kSize);
  for (std::size_t i = 0; i < 16; ++i) {
    CHECK(fates[i] == Fate::leave);
  }
}

// At the peak, after F2, what is asked for last was saved a moment ago.
TEST(
    "live graphs: what could be copied out while the lane was idle leaves before what is asked for "
    "last") {
  const Made made(pipeline(64), 112 * kSize, 0.2);
  std::vector<std::size_t> last(32);
  std::iota(last.begin(), last.end(), 129);
  const Forecast by_last = forecast(made.step, made.leave(last));
  const std::vector<Fate> fates = choose_fates(made.step, made.leave(last));
  const Forecast planned = forecast(made.step, fates);
  CHECK(by_last.late_ns > 2 * kMomentNs);
  CHECK(planned.late_ns < by_last.late_ns / 2);
  CHECK(planned.bytes < 2 * by_last.bytes);
}

TEST("what was done stays where nothing is to gain") {
  const Made made(one_graph(64), 48 * kSize, 1);
  std::vector<std::size_t> first(17);
  std::iota(first.begin(), first.end(), 1);
  const std::vector<Fate> was = made.leave(first);
  CHECK(choose_fates(made.step, was) == was);
}

TEST("a slow lane is late, by what it lacks") {
  const Made made(one_graph(64), 32 * kSize, 0.25);
  const std::vector<Fate> fates = choose_fates(made.step, made.stay);
  const Forecast told = forecast(made.step, fates);
  // 32 records leave in 64 moments that carry 16: out, and back.
  CHECK(told.late_ns > 60 * kMomentNs);
  CHECK(told.late_ns < 160 * kMomentNs);
  CHECK(leaving(fates) <= 34 * kSize);
}

// Made again
// ----------------------------------------------------------------------------------------

Bytes dropped(const std::vector<Fate>& fates) {
  return kSize * static_cast<Bytes>(std::count(fates.begin(), fates.end(), Fate::drop));
}

// Every `every`-th record takes so long to make again.
void can_make(Made& made, std::size_t every, std::uint64_t ns) {
  for (std::size_t i = 0; i < made.records.size(); i += every) {
    made.records[i].again_ns = ns;
  }
}

TEST("what cannot leave in time is dropped where that takes less than the lanes") {
  Made made(one_graph(64), 32 * kSize, 0.25);
  can_make(made, 1, kMomentNs / 10);
  const std::vector<Fate> fates = choose_fates(made.step, made.stay);
  const Forecast told = forecast(made.step, fates);
  CHECK(told.late_ns < 2 * kMomentNs);
  CHECK(told.again_ns < 4 * kMomentNs);
  CHECK(dropped(fates) + leaving(fates) >= 32 * kSize);
}

TEST("nothing is dropped that leaves and comes back for nothing") {
  Made made(one_graph(64), 48 * kSize, 1);
  can_make(made, 1, kMomentNs / 10);
  const std::vector<Fate> fates = choose_fates(made.step, made.stay);
  CHECK_EQ(dropped(fates), 0);
  CHECK_EQ(forecast(made.step, fates).late_ns, 0);
}

// Holes, and what else goes over the link, are not in the forecast.
TEST("where steps waited for the lanes though none is forecast to be late, dropping is proposed") {
  Made made(one_graph(64), 48 * kSize, 0.5);
  can_make(made, 2, kMomentNs / 10);
  std::vector<std::size_t> first(16);
  std::iota(first.begin(), first.end(), 1);
  const Forecast before = forecast(made.step, made.leave(first));
  const auto drops = [&](bool crowded) {
    const std::vector<Proposal> all = proposals(made.step, before, crowded);
    return std::any_of(all.begin(), all.end(),
                       [](const auto& one) { return dropped(one.fates) > 0; });
  };
  CHECK(before.late_ns < kMomentNs);
  CHECK(!drops(false));
  CHECK(drops(true));
}

TEST("nothing is dropped that takes longer to make again than to move") {
  Made made(one_graph(64), 32 * kSize, 0.25);
  can_make(made, 1, 20 * kMomentNs);
  CHECK_EQ(dropped(choose_fates(made.step, made.stay)), 0);
}

// 12 must go, and the lanes carry 8 at the most: those that can be made again are dropped, although
// they are asked for last.
TEST("the lanes are kept for what cannot be made again") {
  Made made(one_graph(64), 52 * kSize, 0.13);
  for (std::size_t i = 0; i < 8; ++i) {
    made.records[i].again_ns = kMomentNs / 10;
  }
  const std::vector<Fate> fates = choose_fates(made.step, made.stay);
  const Forecast told = forecast(made.step, fates);
  CHECK(dropped(fates) >= 4 * kSize);
  CHECK(leaving(fates) >= 4 * kSize);
  CHECK(std::none_of(fates.begin(), fates.begin() + 8, [](Fate f) { return f == Fate::leave; }));
  CHECK(told.late_ns + told.again_ns < 3 * kMomentNs);
}

TEST("what was dropped for nothing stays, once that is known") {
  Made made(one_graph(64), 64 * kSize, 1);
  can_make(made, 1, kMomentNs);
  std::vector<Fate> was = made.stay;
  std::fill_n(was.begin(), 32, Fate::drop);
  CHECK_EQ(dropped(choose_fates(made.step, was)), 0);
}

TEST("nothing that is not retained, or is never over high, leaves") {
  Made made(one_graph(64), 48 * kSize, 1);
  for (std::size_t i = 0; i < 16; ++i) {
    made.records[i].retained = KnownRecord::kNever;
  }
  const std::vector<Fate> fates = choose_fates(made.step, made.stay);
  CHECK(std::all_of(fates.begin(), fates.begin() + 16, [](Fate f) { return f == Fate::stay; }));
  const Made roomy(one_graph(64), 64 * kSize, 1);
  CHECK_EQ(leaving(choose_fates(roomy.step, roomy.stay)), 0);
}

TEST("records that are never asked for leave first, and do not come back") {
  Made made(one_graph(64), 60 * kSize, 1);
  for (std::size_t i = 20; i < 24; ++i) {
    made.records[i].used = KnownRecord::kNever;
  }
  const std::vector<Fate> fates = choose_fates(made.step, made.stay);
  for (std::size_t i = 20; i < 24; ++i) {
    CHECK(fates[i] == Fate::leave);
  }
  CHECK_EQ(leaving(fates), 4 * kSize);
}

TEST("what is occupied at the least is all where nothing leaves, and never more than high") {
  const Made made(one_graph(64), 48 * kSize, 1);
  const std::vector<Bytes> all = least_occupied(made.step, made.stay);
  const std::vector<Fate> fates = choose_fates(made.step, made.stay);
  const std::vector<Bytes> planned = least_occupied(made.step, fates);
  for (std::size_t m = 0; m < all.size(); ++m) {
    CHECK_EQ(all[m], std::min(made.step_full[m], 48 * kSize));
    CHECK(planned[m] <= 48 * kSize);
  }
  // At the turn all that leaves has left.
  CHECK(planned[64] <= 64 * kSize - leaving(fates) + kSize);
}

TEST("an empty step is planned") {
  const std::vector<KnownRecord> records;
  const std::vector<Bytes> full{0};
  const std::vector<std::uint64_t> at_ns{0};
  const KnownStep step{records, full, at_ns, 1, 1, 1};
  CHECK(choose_fates(step, {}).empty());
  CHECK_EQ(least_occupied(step, {}).size(), 1);
}

// The plan ----------------------------------------------------------------------------------------

constexpr Bytes kHigh = 112 * kSize;

// A pipeline's step: what was saved last leaves at the peak.
void pipelined(Plan& plan, const std::vector<int>& events) {
  plan.begin_step(kHigh, 0);
  std::vector<Plan::Place> places(192);
  Bytes occupied = 0;
  for (const int event : events) {
    if (event > 0) {
      occupied += kSize;
      Plan::Place& place = places[static_cast<std::size_t>(event) - 1];
      place = plan.saved(kSize);
      plan.retained(place);
      plan.live(kSize);
      if (event > 128 && event <= 128 + 32) {
        plan.evicted(place);
        occupied -= kSize;
      }
      plan.occupied(occupied);
    } else {
      const Plan::Place place = places[static_cast<std::size_t>(-event) - 1];
      if (-event > 128 && -event <= 128 + 32) {
        plan.returned(place);
        occupied += kSize;
      }
      plan.unpacked(place);
      plan.live(kSize);
      plan.occupied(occupied);
      plan.closed(place);
      occupied -= kSize;
    }
  }
}

StepTimes times_of(std::size_t moments) {
  StepTimes times;
  for (std::size_t m = 1; m <= moments; ++m) {
    times.points.push_back({m, m * kMomentNs});
  }
  times.out_bytes = times.in_bytes = kSize;
  times.out_ns = times.in_ns = 5 * kMomentNs;
  return times;
}

TEST("a plan that knows the times of its step chooses what leaves anew") {
  const std::vector<int> events = pipeline(64);
  Plan plan;
  pipelined(plan, events);
  plan.begin_step(kHigh, 0);
  const std::optional<StepToTime> wanted = plan.wants_times();
  CHECK(wanted.has_value());
  CHECK_EQ(wanted->moments, events.size());
  const Plan::Place early = plan.saved(kSize);
  CHECK(!plan.leaves(early));
  plan.timed(*wanted, times_of(wanted->moments));
  std::size_t leave = 0;
  std::size_t late = 0;
  for (std::uint32_t i = 0; i < 192; ++i) {
    const bool leaves = plan.leaves({early.step, i});
    leave += leaves ? 1 : 0;
    late += leaves && i >= 128 ? 1 : 0;
  }
  CHECK(leave >= 16);
  CHECK(late < leave);
  CHECK(plan.least_after({early.step, 64 + 10}) > 0);
}

// The next step of the pipeline; whether it was measured, as taking so many times as long.
bool measured(Plan& plan, const std::vector<int>& events, std::uint64_t slower = 1) {
  plan.begin_step(kHigh, 0);
  const std::optional<StepToTime> wanted = plan.wants_times();
  if (wanted) {
    StepTimes times = times_of(wanted->moments);
    for (StepTimes::Point& point : times.points) {
      point.ns = point.ns * slower;
    }
    plan.timed(*wanted, times);
  }
  pipelined(plan, events);
  return wanted.has_value();
}

int measured_of(Plan& plan, const std::vector<int>& events, int steps, std::uint64_t slower = 1) {
  int count = 0;
  for (int i = 0; i < steps; ++i) {
    count += measured(plan, events, slower) ? 1 : 0;
  }
  return count;
}

TEST("three steps of a kind are measured, one to compare with, and then one in many") {
  const std::vector<int> events = pipeline(8);
  Plan plan;
  pipelined(plan, events);
  CHECK_EQ(measured_of(plan, events, 4), 4);
  CHECK_EQ(measured_of(plan, events, 28), 0);
  CHECK_EQ(measured_of(plan, events, 128), 4);
}

TEST("where steps take a fifth longer, twice in a row, they are measured and planned anew") {
  const std::vector<int> events = pipeline(8);
  Plan plan;
  pipelined(plan, events);
  measured_of(plan, events, 4);
  CHECK_EQ(measured_of(plan, events, 40, 2), 2 + 2 + 1);  // looks, two more, one to compare with
  CHECK_EQ(measured_of(plan, events, 80, 2), 1);          // and then looked at half as often
}

TEST("one step that took longer changes nothing") {
  const std::vector<int> events = pipeline(8);
  Plan plan;
  pipelined(plan, events);
  measured_of(plan, events, 4);
  while (!measured(plan, events, 2)) {
  }
  CHECK_EQ(measured_of(plan, events, 30), 1);
}

TEST("times of a step that went another way change nothing") {
  Plan plan;
  pipelined(plan, pipeline(64));
  plan.begin_step(kHigh, 0);
  const std::optional<StepToTime> wanted = plan.wants_times();
  CHECK(wanted.has_value());
  const Plan::Place first = plan.saved(kSize);
  plan.timed(*wanted, times_of(wanted->moments - 1));
  CHECK_EQ(plan.least_after({first.step, 64}), 0);
  CHECK(plan.wants_times().has_value());
}

TEST("idle weights leave for nothing, and no record beside them while the lane can bring them") {
  Made made(one_graph(8), 8 * kSize, 0.25);
  const std::vector<IdleWeights> idle{{kSize, 2, 16}};
  made.step.idle = idle;
  CHECK(choose_fates(made.step, made.stay) == made.stay);
  CHECK_EQ(forecast(made.step, made.stay).late_ns, 0);
  // Held all along they are in the way.
  const std::vector<IdleWeights> none;
  made.step.idle = none;
  for (Bytes& full : made.step_full) {
    full += kSize;
  }
  CHECK(choose_fates(made.step, made.stay) != made.stay);
}

TEST(
    "what brings idle weights back is not there for records: the GPU waits, and the forecast says "
    "so") {
  Made made(one_graph(8), 6 * kSize, 0.5);
  const std::vector<IdleWeights> idle{{4 * kSize, 2, 11}};
  const std::uint64_t alone = forecast(made.step, made.leave({1, 2})).late_ns;
  made.step.idle = idle;
  CHECK(forecast(made.step, made.leave({1, 2})).late_ns > alone + 4 * kMomentNs);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
