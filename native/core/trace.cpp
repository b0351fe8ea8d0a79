#include "core/trace.hpp"

#include <algorithm>
#include <unordered_map>

#include "core/copy_order.hpp"

namespace stagehand::core {

namespace {
constexpr std::size_t kAround = 4;
// To make a record again, where none of its kind was measured.
constexpr double kLaunchNs = 10e3;
constexpr double kSlowNsPerByte = 1.0 / 400;
constexpr int kTimedAtLeast = 3;  // steps
// What the host takes to begin to run a call again, beside what the call computes.
constexpr double kRerunNs = 50e3;
}  // namespace

bool Trace::repeats(const Trace& other) const {
  return depth == other.depth && high == other.high && begins_like(other) &&
         std::equal(entries.begin(), entries.end(), other.entries.begin(), other.entries.end(),
                    [](const auto& a, const auto& b) { return a.block_bytes == b.block_bytes; });
}

bool Trace::begins_like(const Trace& other) const {
  const auto [less, more] = std::minmax(live_before, other.live_before);
  return more - less <= std::min(high, other.high) / kAlike;
}

Bytes Trace::evicted_bytes() const {
  Bytes bytes = 0;
  for (const Entry& entry : entries) {
    bytes += entry.evicted ? entry.block_bytes : 0;
  }
  return bytes;
}

Bytes Trace::short_by() const {
  const Bytes most = *std::max_element(full.begin(), full.end());
  return most - std::min(most, high);
}

Bytes Trace::memory() const {
  return entries.capacity() * sizeof(Entry) +
         (by_use.capacity() + copies.capacity()) * sizeof(std::uint32_t) +
         (full.capacity() + at_ns.capacity() + least.capacity() + live.capacity() +
          requests.capacity() + requests_before.capacity()) *
             sizeof(Bytes) +
         held.capacity() * sizeof(Held) + weight_uses.capacity() * sizeof(WeightUse) +
         idle.capacity() * sizeof(IdleWeights) + crowding.size() * sizeof(*crowding.begin());
}

Trace::WeightUse* Trace::newest_use(std::uint32_t group) {
  const auto last = std::find_if(weight_uses.rbegin(), weight_uses.rend(),
                                 [&](const WeightUse& use) { return use.group == group; });
  return last != weight_uses.rend() ? &*last : nullptr;
}

// One that was left in the same moment, or the one before, was held all along.
void Trace::weights_held(std::uint32_t group, Bytes bytes) {
  const auto now = static_cast<std::uint32_t>(full.size() - 1);
  WeightUse* const last = newest_use(group);
  if (last != nullptr && last->until + 1 >= now) {
    last->until = KnownRecord::kNever;
  } else {
    weight_uses.push_back({group, bytes, now});
  }
}

void Trace::weights_left(std::uint32_t group) {
  WeightUse* const last = newest_use(group);
  if (last != nullptr && last->until == KnownRecord::kNever) {
    last->until = static_cast<std::uint32_t>(full.size() - 1);
  }
}

void Trace::find_idle() {
  std::unordered_map<std::uint32_t, std::uint32_t> free_from;  // by group
  idle.clear();
  for (const WeightUse& use : weight_uses) {
    std::uint32_t& from = free_from[use.group];
    if (from < use.from) {
      idle.push_back({use.bytes, from, use.from});
    }
    from = use.until == KnownRecord::kNever ? use.until : use.until + 1;
  }
  for (const WeightUse& use : weight_uses) {
    if (std::uint32_t& from = free_from[use.group]; from < full.size()) {
      idle.push_back({use.bytes, from});
      from = KnownRecord::kNever;
    }
  }
}

Trace::Entry* Trace::at_place(SeenAs place) {
  if (!of_kin) {
    const bool here = place.trace == id && place.index < entries.size();
    return here ? &entries[place.index] : nullptr;
  }
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const Entry& entry) { return entry.seen_as == place; });
  return found != entries.end() ? &*found : nullptr;
}

Bytes Trace::request_at(std::size_t place) const {
  const auto here = [&](std::size_t i) {
    const auto at = [&](const std::vector<Bytes>& all) { return i < all.size() ? all[i] : 0; };
    return std::max(at(requests), at(requests_before));
  };
  Bytes request = here(place);
  if (request == 0) {
    for (std::size_t i = place - std::min(place, kAround); i <= place + kAround; ++i) {
      request = std::max(request, here(i));
    }
  }
  return request;
}

Bytes Trace::largest_request_in(std::size_t begin, std::size_t end) const {
  Bytes largest = 0;
  for (const std::vector<Bytes>* all : {&requests, &requests_before}) {
    for (std::size_t i = begin; i < std::min(end, all->size()); ++i) {
      largest = std::max(largest, (*all)[i]);
    }
  }
  return largest;
}

Bytes Trace::largest_crowding_in(std::size_t begin, std::size_t end, driver::Stream stream) const {
  Bytes largest = 0;
  const std::uint32_t plan = trials.id();
  const auto stop = crowding.lower_bound({plan, end});
  for (auto one = crowding.lower_bound({plan, begin}); one != stop; ++one) {
    largest = one->second.stream == stream ? std::max(largest, one->second.bytes) : largest;
  }
  return largest;
}

// Of the steps before, as far as such requests still come.
void Trace::keep_crowding(const Trace& before) {
  for (const auto& [where, request] : before.crowding) {
    const std::size_t place = where.second;
    if (largest_request_in(place, place + 1) >= request.bytes) {
      Crowding& mine = crowding[where];
      mine = mine.bytes < request.bytes ? request : mine;
    }
  }
}

// As measured, else as the quickest of its kind that was, by bytes; else slower than any GPU is.
std::uint64_t Trace::time_to_make(const Entry& entry) const {
  if (entry.again_ns != 0) {
    return entry.again_ns;
  }
  double ns_per_byte = 0;
  for (const Entry& one : entries) {
    if (one.kind == entry.kind && one.again_ns != 0) {
      const double its = static_cast<double>(one.again_ns) / static_cast<double>(one.block_bytes);
      ns_per_byte = ns_per_byte == 0 ? its : std::min(ns_per_byte, its);
    }
  }
  const double bytes = static_cast<double>(entry.block_bytes);
  return static_cast<std::uint64_t>(ns_per_byte != 0 ? ns_per_byte * bytes
                                                     : kLaunchNs + bytes * kSlowNsPerByte);
}

// As long as forward took for it, by as much longer or shorter as was measured of this call, else
// of all that were.
void Trace::time_reruns(std::vector<KnownRecord>* records) const {
  struct Call {
    double begin = 0;
    double measured = 0;
    double took = 0;  // in forward, what was measured
    Bytes bytes = 0;
  };
  std::unordered_map<std::uint64_t, Call> calls;
  Call all;
  const auto at = [&](const Entry& entry) {
    return entry.saved < at_ns.size() ? static_cast<double>(at_ns[entry.saved]) : 0.0;
  };
  const auto span = [&](const Call& call, const Entry& entry) {
    return kRerunNs + at(entry) - call.begin;
  };
  for (const Entry& entry : entries) {
    if (entry.call == 0) {
      continue;
    }
    Call& call = calls.try_emplace(entry.call, Call{at(entry)}).first->second;
    call.bytes = std::max(call.bytes, entry.rerun_bytes);
    all.bytes = std::max(all.bytes, entry.rerun_bytes);
    if (entry.rerun_ns != 0) {
      for (Call* one : {&call, &all}) {
        one->measured += static_cast<double>(entry.rerun_ns);
        one->took += span(call, entry);
      }
    }
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].by_call) {
      const Call& call = calls.at(entries[i].call);
      const Call& by = call.took > 0 ? call : all;
      const double scale = by.took > 0 ? by.measured / by.took : 1;
      (*records)[i].call = entries[i].call;
      (*records)[i].rerun_ns =
          static_cast<std::uint64_t>(std::max(1.0, scale * span(call, entries[i])));
      (*records)[i].rerun_bytes = call.bytes != 0 ? call.bytes : all.bytes;
    }
  }
}

KnownStep Trace::known(std::vector<KnownRecord>* records) const {
  for (const Entry& entry : entries) {
    const std::uint64_t again_ns = entry.may_by_node() ? time_to_make(entry) : 0;
    records->push_back({entry.block_bytes, entry.retained, entry.used_moment, again_ns});
    std::copy(std::begin(entry.made_of), std::end(entry.made_of), records->back().made_of);
  }
  time_reruns(records);
  return {*records, full, at_ns, high, rates.out, rates.in, idle};
}

// Of each stretch the least of what was measured counts: what else held the GPU up is not its own.
bool Trace::measured(const StepToTime& of, const StepTimes& times, LaneRates& known_rates,
                     std::uint32_t step, bool ranks) {
  const std::size_t moments = full.size();
  if (of.plans != plans || times.points.size() < 2 || times.points.back().moment + 1 != moments) {
    return false;  // the latter: it went another way
  }
  if (tried_all()) {
    cut_off = 0;  // else a few in a long run end the looks
    const bool tried = trials.best_ns() != 0;
    if (!of.look || !watch.moved(times, tried ? trials.best_spent_ns() : Watch::kUnknown, step)) {
      return false;
    }
    forget_times();
  }
  const bool had_plan = planned;
  std::vector<std::uint64_t> at(moments, 0);
  for (std::size_t i = 1; i < times.points.size(); ++i) {
    const StepTimes::Point& a = times.points[i - 1];
    const StepTimes::Point& b = times.points[i];
    const std::uint64_t ns = b.ns - std::min(a.ns, b.ns);
    for (std::size_t m = a.moment + 1; m <= b.moment && m < moments; ++m) {
      const std::uint64_t mine = ns / (b.moment - a.moment);
      const std::uint64_t before = at_ns.size() == moments ? at_ns[m] - at_ns[m - 1] : mine;
      at[m] = at[m - 1] + std::min(mine, before);
    }
  }
  at_ns = std::move(at);
  const auto note = [](double& rate, Bytes bytes, std::uint64_t ns) {
    rate = ns != 0 ? static_cast<double>(bytes) / static_cast<double>(ns) : rate;
  };
  note(known_rates.out, times.out_bytes, times.out_ns);
  note(known_rates.in, times.in_bytes, times.in_ns);
  rates = known_rates;
  for (const StepTimes::Again& one : times.again) {
    if (one.index < entries.size()) {
      Entry& entry = entries[one.index];
      std::uint64_t& ns = one.rerun ? entry.rerun_ns : entry.again_ns;
      const std::uint64_t took =
          std::max<std::uint64_t>(one.ns, 1);  // 0 is for what was not measured
      ns = ns == 0 ? took : std::min(ns, took);
    }
  }
  totals = {times.all_ns, times.waited_ns, 0};
  for (const StepTimes::Again& one : times.again) {
    totals.again_ns += one.ns;
  }
  ++timed;
  if (!planned) {
    drop_what_is_cheap();
  }
  if (!drops()) {
    choose();
    timed = timed >= kTimedAtLeast ? kTimed : timed;
  } else if (const bool without = had_plan && of.ran.fates.empty(); !of.proving && !without) {
    const RunPlan ran = of.ran.fates.empty() ? plan() : of.ran;
    const std::uint64_t spent = times.all_ns - times.points.back().ns;
    const bool first = trials.best_ns() == 0;
    if (trials.took(ran, times.all_ns, spent) || tried_all()) {
      const bool kept = trials.tries_first_of_all() && kept_first_of_all();
      if (kept) {
        watch.wait_until(step + kOthersSettle);
      } else if (!(first && ranks && tries_first_of_all())) {
        try_another();
      }
    }
    if (tried_all() && begins_plan) {
      watch.wait_until(step + kPays);
    }
  }
  if (planned) {
    expect();
  }
  return true;
}

// What left by a copy before it was proven, and is made again in far less time than that takes. The
// step that was measured then counts for the plan that drops: as one that has to be gone back to,
// the copies of before are no plan worth its trials (replays settle 7 % slower with it).
void Trace::drop_what_is_cheap() {
  constexpr double kFar = 4;
  if (rates.out <= 0 || rates.in <= 0) {
    return;
  }
  for (Entry& entry : entries) {
    const double copies = static_cast<double>(entry.block_bytes) * (1 / rates.out + 1 / rates.in);
    if (entry.leaves && entry.by_node && entry.proof == Proof::proven && entry.again_ns != 0 &&
        kFar * static_cast<double>(entry.again_ns) < copies) {
      entry.dropped = true;
    }
  }
}

void Trace::forget_times() {
  at_ns.clear();
  for (Entry& entry : entries) {
    entry.again_ns = entry.rerun_ns = entry.rerun_bytes = 0;
    entry.cramped = false;
  }
  forget_trials();
}

void Trace::forget_trials() {
  timed = cut_off = 0;
  trials = Trials(++plans);
  crowding.clear();  // of plans that are forgotten
}

StepToTime Trace::to_time() const {
  return {id, full.size() - 1, plans, tried_all(), proving(), planned ? plan() : RunPlan{}};
}

std::vector<Fate> Trace::fates() const {
  std::vector<Fate> all;
  for (const Entry& entry : entries) {
    const Fate gone = entry.dropped ? Fate::drop : Fate::leave;
    all.push_back(entry.leaves ? gone : Fate::stay);
  }
  return all;
}

bool Trace::proving() const {
  return std::any_of(entries.begin(), entries.end(), [](const Entry& entry) {
    return entry.leaves && entry.dropped && entry.unproven();
  });
}

bool Trace::drops() const {
  return std::any_of(entries.begin(), entries.end(),
                     [](const Entry& entry) { return entry.again(); });
}

bool Trace::far_from_free() const {
  constexpr std::uint64_t kPart = 20;
  return drops() && !at_ns.empty() && trials.best_spent_ns() > at_ns.back() / kPart;
}

std::uint32_t Trace::nth_by_recipe(std::uint32_t n) const {
  std::vector<std::uint32_t> all;
  for (std::uint32_t i = 0; tried_all() && i < entries.size(); ++i) {
    if (entries[i].leaves && entries[i].dropped && entries[i].may_by_node()) {
      all.push_back(i);
    }
  }
  return all.empty() ? KnownRecord::kNever : all[n % all.size()];
}

// Where such a step was not measured as it went, the turns of before stay. None where weights come
// and go: their memory lies otherwise each time, and so others leave first.
void Trace::order_copies() {
  const bool with_weights = !weight_uses.empty();
  if ((at_ns.size() != full.size() || rates.out <= 0) && !with_weights) {
    return;
  }
  for (Entry& entry : entries) {
    entry.turn = KnownRecord::kNever;
  }
  std::vector<PlannedCopy> planned_copies;
  for (std::uint32_t i = 0; i < entries.size() && !with_weights; ++i) {
    const Entry& entry = entries[i];
    if (entry.leaves && !entry.dropped && entry.retained < at_ns.size()) {
      planned_copies.push_back({i, at_ns[entry.retained], entry.block_bytes, entry.left_as});
    }
  }
  copies = copy_order(std::move(planned_copies), rates.out);
  for (std::uint32_t turn = 0; turn < copies.size(); ++turn) {
    entries[copies[turn]].turn = turn;
  }
}

void Trace::choose() {
  std::vector<KnownRecord> records;
  const std::vector<Fate> was = fates();
  if (const std::vector<Fate> chosen = choose_fates(known(&records), was); chosen != was) {
    use(RunPlan(chosen));
  }
}

// Whether what moves least is worth a trial, for hardly more time of the GPU than is forecast for
// the best, or for less than that spends: where it saves the host a good deal, since what copies
// take of that no forecast knows, or where the best spends a good part of a step, as holes make it,
// and this needs far fewer bytes. Where the best spends much in torch's cache it drops late: of all
// plans it drops the most, so what fills each place at once breaks up the most. Elsewhere as the
// best does: a place that is needed later is a miss, which takes the host's time. If that is not
// the best then, the other way round, in torch's cache: places that others of the same size fill at
// once are not broken up. `before`: of the best.
bool Trace::moves_least(const KnownStep& step, const Forecast& before, RunPlan* best) {
  constexpr double kHardly = 1.0 / 32;  // of a step
  constexpr double kSaved = 1.0 / 100;
  // Of a record that leaves and comes back, for driver calls alone (a video transformer's 87 took
  // 3.7 ms of each step).
  constexpr double kHostNs = 40'000;
  constexpr std::uint64_t kHoles = 64;  // a part of a step that holes take
  const bool other_way = trials.prefers();
  if (other_way && (trials.prefers_best() || !is_not_moved())) {
    return false;
  }
  Proposal moved = moving_least(step);
  RunPlan least(std::move(moved.fates), best->drops_late);
  const auto step_ns = static_cast<double>(step.at_ns.back());
  const double saved_ns = kHostNs * static_cast<double>(best->copies() - least.copies());
  const bool spends_much = far_from_free();
  const bool holes = is_not_moved() && trials.best_spent_ns() > step.at_ns.back() / kHoles;
  const bool worth = saved_ns > kSaved * step_ns ||
                     ((spends_much || holes) && moved.told.bytes < before.bytes / 4 * 3);
  least.drops_late = (least.drops_late || (spends_much && is_not_moved())) != other_way;
  const double most = std::max(before.takes() + kHardly * step_ns,
                               static_cast<double>(trials.best_spent_ns()) - noise(step));
  if (!worth || moved.ns > most || trials.tried(least, step.records)) {
    return false;
  }
  *best = std::move(least);
  return true;
}

// With ranks, in torch's cache: what moves least, before anything else, and it is kept where it
// spends little. Each rank waits for the others, who try plans too, and meanwhile its own copies go
// on: any plan looks as good then, and those that move much wait once the others have settled.
bool Trace::tries_first_of_all() {
  std::vector<KnownRecord> records;
  const KnownStep step = known(&records);
  Proposal moved = moving_least(step);
  if (!is_not_moved() || moved.ns > little()) {
    return false;
  }
  RunPlan least(std::move(moved.fates));
  use(least);
  begins_plan = true;
  ++plans;
  trials.begin_first_of_all(std::move(least), plans);
  return true;
}

bool Trace::kept_first_of_all() {
  if (static_cast<double>(trials.spent_ns()) <= little()) {
    timed = kTimed;
    use(trials.keep_first_of_all());
    return true;
  }
  trials.refuse_first_of_all();
  use(trials.best());
  begins_plan = true;
  ++plans;
  timed = 1;
  return false;
}

double Trace::little() const {
  constexpr double kLittle = 1.0 / 32;
  return kLittle * static_cast<double>(at_ns.back());
}

// As long as such steps take longer than something else that is forecast. Where a good part of what
// they spend is not forecast, holes waste memory: one is tried that drops late, or the other way
// round, first where hardly anything is, else last. What is forecast at less than the best is
// tried that way in its place; and what moves least, last of all, too.
void Trace::try_another() {
  constexpr double kHardly = 16;         // times what is forecast
  constexpr double kUnexplained = 0.25;  // of it, beside it
  std::vector<KnownRecord> records;
  const KnownStep step = known(&records);
  const RunPlan was = plan();
  const Forecast before = forecast(step, was.fates);
  const double least = to_beat(step, before);
  const auto spent = static_cast<double>(trials.best_spent_ns());
  const bool costly = spent > 2 * noise(step);
  std::vector<Proposal> found;
  if (!trials.prefers() && (least > 0 || costly)) {  // those come last
    found = proposals(step, before, spent > before.takes() + 2 * noise(step));
  }
  RunPlan chosen = trials.best();
  const Forecast of_best = chosen.fates == was.fates ? before : forecast(step, chosen.fates);
  RunPlan other_way(chosen.fates, !chosen.drops_late);
  Forecast of_other = of_best;
  if (!found.empty() && found.front().ns < of_best.takes()) {
    other_way.fates = found.front().fates;
    of_other = found.front().told;
  }
  const bool last = timed + 1 >= kTimed;
  const bool turns =
      !trials.tried(other_way.drops_late) ||
      (trials.prefers_best() && other_way.drops_late && !trials.tried(other_way, records));
  const double told = of_other.takes();
  const bool wastes =
      costly && of_other.dropped > 0 && spent > told + std::max(noise(step), kUnexplained * told);
  const bool enough = timed >= kTimedAtLeast && !last;  // steps, and not too many
  const bool may = enough && turns && wastes;
  const auto untried = [&](const Proposal& one) {
    return !trials.tried(RunPlan(one.fates, chosen.drops_late), records);
  };
  if (may && spent > kHardly * told + 2 * noise(step)) {
    chosen = other_way;
  } else if (!found.empty() && found.front().ns < least && found.front().fates != was.fates &&
             untried(found.front())) {
    chosen.fates = std::move(found.front().fates);
  } else if (costly) {
    // By what such steps spent, where that is more than was forecast.
    for (Proposal& one : found) {
      if (one.ns < spent && untried(one)) {
        chosen.fates = std::move(one.fates);
        break;
      }
    }
  }
  bool prefers = false;
  const bool no_more = chosen == trials.best() || !trials.more();
  if ((timed >= kTimedAtLeast && no_more) || last) {
    chosen = trials.best();
    if (may) {
      chosen = std::move(other_way);
    } else {
      prefers = enough && moves_least(step, of_best, &chosen);
      timed = !prefers && (trials.sure_of_best() || last) ? kTimed : timed;
    }
  }
  if (chosen == was) {
    return;
  }
  use(chosen);
  if (!trials.in_use(chosen)) {
    begins_plan = true;
    ++plans;
    trials.begin(std::move(chosen), plans);
    if (prefers) {
      trials.prefer();
    }
  }
}

void Trace::use(const RunPlan& plan) {
  planned = true;
  drops_late = plan.drops_late;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    entries[i].leaves = plan.fates[i] != Fate::stay;
    entries[i].dropped = plan.fates[i] == Fate::drop;
  }
  std::unordered_map<std::uint64_t, std::uint32_t> runs;  // up to this save of each call
  for (const Entry& entry : entries) {
    if (entry.dropped && entry.by_call && !entry.may_by_node()) {
      runs[entry.call] = std::max(runs[entry.call], entry.saved);
    }
  }
  for (Entry& entry : entries) {
    const auto run = runs.find(entry.call);
    entry.comes = entry.by_call && run != runs.end() && entry.saved <= run->second;
  }
  order_copies();
}

void Trace::expect() {
  std::vector<KnownRecord> records;
  const std::vector<Bytes> of_moments = least_occupied(known(&records), fates());
  least.assign(by_use.size() + 1, 0);
  std::size_t use = 0;
  for (std::size_t m = 0; m < of_moments.size(); ++m) {
    while (use < by_use.size() && entries[by_use[use]].used_moment <= m) {
      ++use;
    }
    least[use] = std::max(least[use], of_moments[m]);
  }
}

}  // namespace stagehand::core
