#include "core/plan.hpp"

#include <algorithm>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace stagehand::core {

// The step of this number, null where it is over. Nearly always the newest, or the one in backward.
const Plan::Step* Plan::step_of(std::uint32_t serial) const {
  for (const Step* likely : {static_cast<const Step*>(now_), static_cast<const Step*>(using_)}) {
    if (likely != nullptr && likely->serial == serial) {
      return likely;
    }
  }
  const auto found = std::find_if(steps_.begin(), steps_.end(),
                                  [&](const Step& step) { return step.serial == serial; });
  return found != steps_.end() ? &*found : nullptr;
}

Plan::Step* Plan::step_of(std::uint32_t serial) {
  return const_cast<Step*>(std::as_const(*this).step_of(serial));
}

// Of this budget rather than of another; then one that began with as much live; then what came
// after the last trace the last time; then the newest.
std::shared_ptr<Trace> Plan::likeliest(const Trace& seen, auto may) const {
  std::uint32_t follower = 0;
  for (const auto& trace : traces_) {
    follower = trace->id == learned_ ? trace->follower : follower;
  }
  const auto rank = [&](const Trace& trace) {
    return std::tuple(trace.high == seen.high, trace.begins_like(seen), trace.id == follower);
  };
  std::shared_ptr<Trace> best;
  for (const auto& trace : traces_) {
    if (trace->depth == seen.depth && may(*trace) &&
        (best == nullptr || rank(*trace) > rank(*best))) {
      best = trace;
    }
  }
  return best;
}

void Plan::begin_step(Bytes high, Bytes live) {
  high_ = high;
  rerun_ = {};
  std::vector<Trace::WeightUse> held;  // by whoever the last step told of: from its beginning on
  for (const Trace::WeightUse& use : now_ != nullptr ? now_->seen.weight_uses : held) {
    if (use.until == KnownRecord::kNever) {
      held.push_back({use.group, use.bytes, 0});
    }
  }
  if (now_ != nullptr && (now_->alive == 0 || !now_->seen.by_use.empty())) {
    end(now_);  // records that outlive it are on their own
  }
  Step step;
  step.serial = ++serial_;
  step.before = learned_;
  step.began = uses_;
  step.seen.high = high;
  step.seen.live_before = live;
  step.seen.weight_uses = std::move(held);
  step.seen.depth = static_cast<std::uint32_t>(std::count_if(
      steps_.begin(), steps_.end(), [](const Step& one) { return one.seen.by_use.empty(); }));
  step.trace = likeliest(step.seen, [](const Trace&) { return true; });
  if (step.trace != nullptr) {
    step.look_at = step.trace->nth_by_recipe(serial_);
  }
  steps_.push_back(std::move(step));
  now_ = &steps_.back();
}

// Until a recipe is proven, what a call made comes by running that again, which needs no proof: who
// marked the region vouches for it.
Plan::Place Plan::saved(Bytes block_bytes, RecordId record, const Made& made, Origin from) {
  if (now_ == nullptr || over(*now_)) {
    begin_step(high_, live_);
  }
  const auto index = static_cast<std::uint32_t>(now_->seen.entries.size());
  Trace::Entry entry;
  entry.block_bytes = block_bytes;
  entry.record = record;
  entry.by_node = made.bytes != 0;
  entry.sought = made.sought;
  entry.by_call = from.made;
  entry.call = from.call;
  entry.op = from.op;
  entry.region = from.region;
  entry.kind = made.kind;
  entry.rests_on = made.rests_on;
  entry.any_size = made.any_size;
  entry.proof = made.exact ? Trace::Proof::proven : Trace::Proof::none;
  now_->seen.begin_moment();
  entry.saved = static_cast<std::uint32_t>(now_->seen.full.size() - 1);
  now_->seen.entries.push_back(entry);
  ++now_->alive;
  follow(*now_);
  return {now_->serial, index};
}

void Plan::made_of(Place place, std::size_t n, Place input) {
  if (Step* step = step_of(place.step); step != nullptr && input.step == place.step) {
    step->seen.entries[place.index].made_of[n] = input.index;
  }
}

// One pool may be around many steps: one is over when most of what it saved is gone. A few records
// may stay, of a graph that somebody keeps.
bool Plan::over(const Step& step) const {
  const std::size_t count = step.seen.entries.size();
  const bool gone = step.alive * 8 <= count;
  return count >= kLongestStep || (gone && (!step.seen.by_use.empty() || count >= kUnasked));
}

// Keeps to the trace while the newest size is its; else looks for another with all sizes so far.
void Plan::follow(Step& step) {
  if (step.kin) {
    follow_kin(step);
    return;
  }
  const std::size_t count = step.seen.entries.size();
  const auto has = [&](const Trace& trace, std::size_t begin) {
    return trace.entries.size() >= count &&
           std::equal(step.seen.entries.begin() + static_cast<std::ptrdiff_t>(begin),
                      step.seen.entries.end(),
                      trace.entries.begin() + static_cast<std::ptrdiff_t>(begin),
                      [](const auto& a, const auto& b) { return a.block_bytes == b.block_bytes; });
  };
  if (step.trace == nullptr || has(*step.trace, count - 1)) {
    return;
  }
  ++version_;
  ++turns_;
  timed_step_ = step.serial == timed_step_ ? 0 : timed_step_;
  if (auto trace = likeliest(step.seen, [&](const Trace& one) { return has(one, 0); });
      trace != nullptr) {
    step.trace = std::move(trace);
    return;
  }
  if (auto trace = nearest(step.seen); trace != nullptr) {
    step.trace = std::move(trace);  // else the one so far, which has been forgotten meanwhile
  }
  step.kin.follow(step.trace, step.seen);
}

// Beside a trace that is not of its sizes, until most of what is saved is not like it.
void Plan::follow_kin(Step& step) {
  version_ += step.kin.saved(step.seen) ? 1 : 0;
  if (step.kin.lost()) {
    step.kin = {};
    step.trace = nullptr;
    step.diverged = true;
    ++version_;
  }
}

// Of this budget rather than of another; then one that began with as much live; then one whose size
// is near the newest record's in its place; then the one of which the least left, since holes
// that happened to cost more are not to be repeated; then the newest.
std::shared_ptr<Trace> Plan::nearest(const Trace& seen) const {
  constexpr Bytes kNear = 8;  // as near as another where both differ by less than an eighth
  const std::size_t newest = seen.entries.size() - 1;
  const auto rank = [&](const Trace& trace) {
    const std::size_t place = std::min(newest, trace.entries.size() - 1);
    const auto [less, more] =
        std::minmax(seen.entries[newest].block_bytes, trace.entries[place].block_bytes);
    return std::tuple(trace.high == seen.high, trace.begins_like(seen), kNear * less / more,
                      kUnlimited - trace.evicted_bytes());
  };
  std::shared_ptr<Trace> best;
  for (const auto& trace : traces_) {
    if (trace->depth == seen.depth && (best == nullptr || rank(*trace) > rank(*best))) {
      best = trace;
    }
  }
  return best;
}

void Plan::evicted(Place place) {
  if (Step* step = step_of(place.step); step != nullptr) {
    Trace::Entry& entry = step->seen.entries[place.index];
    entry.evicted = true;
    entry.away = true;
    if (entry.left_as == KnownRecord::kNever) {
      entry.left_as = step->seen.leavers++;
    }
    step->away += entry.block_bytes;
    away_ += entry.block_bytes;
  }
}

void Plan::dropped(Place place) {
  evicted(place);
  if (Step* step = step_of(place.step); step != nullptr) {
    step->seen.entries[place.index].dropped = true;
  }
}

void Plan::returned(Place place) {
  Step* step = step_of(place.step);
  if (step != nullptr && std::exchange(step->seen.entries[place.index].away, false)) {
    const Trace::Entry& entry = step->seen.entries[place.index];
    step->away -= entry.block_bytes;
    away_ -= entry.block_bytes;
    rerun_.made += entry.dropped ? entry.block_bytes : 0;
  }
}

// Saved again meanwhile it is in use once more: the last time counts.
void Plan::retained(Place place) {
  Step* step = step_of(place.step);
  Trace::Entry* entry = step != nullptr ? &step->seen.entries[place.index] : nullptr;
  if (entry != nullptr && entry->used == 0 && !entry->dropped) {  // else it was made again
    entry->retained = static_cast<std::uint32_t>(step->seen.full.size() - 1);
  }
}

void Plan::unpacked(Place place, bool by_recipe) {
  Step* step = step_of(place.step);
  if (step == nullptr) {
    return;
  }
  Trace::Entry& entry = step->seen.entries[place.index];
  if (!by_recipe && entry.needed == 0) {
    entry.needed = ++step->needed;
    step->newest_needed = place.index;
  }
  if (entry.used != 0) {
    return;  // asked for again: the first time is the one to be ready for
  }
  using_ = step;
  version_ += step->with_weights() && step->seen.by_use.empty() ? 1 : 0;  // has_stayed
  step->seen.begin_moment();
  step->seen.by_use.push_back(place.index);
  step->seen.live.push_back(0);
  entry.used = static_cast<std::uint32_t>(step->seen.by_use.size());
  entry.used_at = ++uses_ - step->began;
  entry.used_moment = static_cast<std::uint32_t>(step->seen.full.size() - 1);
}

void Plan::closed(Place place) {
  returned(place);
  Step* step = step_of(place.step);
  if (step != nullptr && --step->alive == 0 && step != now_) {
    end(step);
  }
}

void Plan::live(Bytes bytes) {
  live_ = bytes;
  if (now_ == nullptr) {
    return;
  }
  now_->seen.live_peak = std::max(now_->seen.live_peak, bytes);
  Bytes& since = (using_ != nullptr ? using_ : now_)->seen.live.back();
  since = std::max(since, bytes);
}

void Plan::rerun_begins(Bytes occupied) { rerun_ = {true, occupied + away_}; }

void Plan::rerun_made(Place last) {
  if (Step* step = step_of(last.step); step != nullptr && rerun_.most != 0) {
    const Bytes beside = rerun_.most - std::min(rerun_.most, rerun_.made);
    step->seen.entries[last.index].rerun_bytes = std::max<Bytes>(beside, 1);
  }
  rerun_ = {};
}

// What a call takes that runs again is told apart: it hangs on what is dropped.
void Plan::occupied(Bytes bytes, Bytes mapped) {
  if (rerun_.on) {
    const Bytes all = bytes + away_ + rerun_.made;
    rerun_.most = std::max(rerun_.most, all - std::min(all, rerun_.before));
  }
  for (Step* step : {now_, using_ != now_ ? using_ : nullptr}) {
    if (step != nullptr) {
      Bytes& full = step->seen.full.back();
      full = rerun_.on ? full : std::max(full, bytes + step->away);
      Trace::Held& held = step->seen.held.back();
      held = {std::max(held.occupied, bytes), std::max(held.mapped, mapped)};
    }
  }
}

void Plan::weights_held(std::uint32_t group, Bytes bytes) {
  for (Step* step : {now_, using_ != now_ ? using_ : nullptr}) {
    if (step != nullptr) {
      version_ += !step->with_weights() && !step->seen.by_use.empty() ? 1 : 0;  // has_stayed
      step->seen.weights_held(group, bytes);
    }
  }
}

void Plan::weights_left(std::uint32_t group) {
  for (Step& step : steps_) {
    step.seen.weights_left(group);
  }
}

std::optional<StepToTime> Plan::wants_times(bool others) {
  if (!follows() || now_->kin) {
    return {};
  }
  const Trace& trace = *now_->trace;
  const bool looks = trace.tried_all();
  if ((looks && !trace.watch.due(serial_)) || (others && (looks || trace.proving())) ||
      trace.cut_off >= Trace::kCutOff) {
    return {};
  }
  timed_step_ = now_->serial;
  return trace.to_time();
}

void Plan::timed(const StepToTime& step, const StepTimes& times) {
  if (const auto found = trace_of(step.trace);
      found != nullptr && found->measured(step, times, rates_, serial_, ranks_)) {
    ++version_;
    ++turns_;
  }
}

void Plan::cut_off(const StepToTime& step) {
  if (const auto found = trace_of(step.trace); found != nullptr && found->plans == step.plans) {
    ++found->cut_off;
  }
}

std::shared_ptr<Trace> Plan::trace_of(std::uint32_t id) const {
  const auto found =
      std::find_if(traces_.begin(), traces_.end(), [&](const auto& one) { return one->id == id; });
  return found != traces_.end() ? *found : nullptr;
}

// As it is known by now: that may be newer than the one which the step began with.
std::shared_ptr<Trace> Plan::repeated() const { return trace_of(repeats()); }

// Where kinds of steps take turns, one is told of the other's times as it begins: memory is for the
// step that the plan is for.
bool Plan::takes_other_plan() {
  const auto trace = repeated();
  return trace != nullptr && std::exchange(trace->begins_plan, false);
}

std::uint64_t Plan::in_use() const {
  const auto trace = repeated();
  return trace != nullptr ? std::uint64_t{trace->id} << 32 | trace->trials.id() : 0;
}

std::uint64_t Plan::kept() const {
  const auto trace = repeated();
  return trace != nullptr && trace->settled() && alike(trace.get(), high_) ? in_use() : 0;
}

bool Plan::far_from_free() const {
  const auto trace = repeated();
  return trace != nullptr && trace->far_from_free();
}

void Plan::requested(Bytes largest) {
  if (now_ != nullptr) {
    now_->seen.largest_request = std::max(now_->seen.largest_request, largest);
    now_->seen.requests.resize(place() + 1, 0);
    now_->seen.requests.back() = std::max(now_->seen.requests.back(), largest);
  }
}

Bytes Plan::expected_request() const {
  if (!follows()) {
    return 0;
  }
  const Step& step = *now_;
  if (!step.kin) {
    return step.trace->request_at(place());
  }
  // So many were needed by where the newest of them stands in the trace.
  const bool none = step.newest_needed == KnownRecord::kNever;
  const std::size_t needed =
      none ? 0 : step.trace->entries[step.kin.place_of(step.newest_needed)].needed;
  return step.kin.request_at(step.kin.next_place() + needed);
}

bool Plan::request_came() const {
  const bool here = follows() && now_->seen.requests.size() == place() + 1;
  return here && now_->seen.requests.back() >= expected_request();
}

void Plan::crowded(std::size_t place, Bytes request, driver::Stream stream) {
  if (now_ != nullptr) {
    const auto trace = repeated();
    const std::uint32_t plan = trace != nullptr ? trace->trials.id() : Trials().id();
    Trace::Crowding& largest = now_->seen.crowding[{plan, place}];
    largest = largest.bytes < request ? Trace::Crowding{request, stream} : largest;
  }
}

Bytes Plan::crowding_ahead(std::size_t places, driver::Stream stream) const {
  const auto trace = repeated();
  return trace != nullptr ? trace->largest_crowding_in(place(), place() + places, stream) : 0;
}

Bytes Plan::largest_ahead(std::size_t places) const {
  if (!follows() || now_->kin) {
    return 0;
  }
  return now_->trace->largest_request_in(place(), place() + places);
}

void Plan::end(Step* step) {
  version_ += step->alive > 0 ? 1 : 0;  // they are on their own from here on
  if (!step->seen.by_use.empty()) {
    learn(*step);
  }
  now_ = now_ == step ? nullptr : now_;
  using_ = using_ == step ? nullptr : using_;
  away_ -= step->away;
  steps_.remove_if([&](const Step& one) { return &one == step; });
}

void Plan::learn(Step& step) {
  auto trace = std::make_shared<Trace>(std::move(step.seen));
  trace->find_idle();
  const auto same = std::find_if(traces_.begin(), traces_.end(),
                                 [&](const auto& one) { return one->repeats(*trace); });
  const bool same_kind = same != traces_.end();
  // What left is to leave again, in the lesser of two such steps: a hole that happened to cost more
  // is not repeated.
  const bool fewer = !same_kind || trace->evicted_bytes() <= (*same)->evicted_bytes();
  const bool planned = same_kind && (*same)->planned;
  const bool settled = planned && (*same)->drops() && (*same)->tried_all();
  std::unordered_set<std::uint64_t> ran;  // calls, again
  for (const Trace::Entry& entry : trace->entries) {
    if (entry.rerun_bytes != 0) {
      ran.insert(entry.call);
    }
  }
  bool more_recipes = false;
  for (std::size_t i = 0; i < trace->entries.size(); ++i) {
    Trace::Entry& entry = trace->entries[i];
    entry.away = false;
    if (!same_kind) {
      entry.leaves = entry.evicted;
      continue;
    }
    const Trace::Entry& before = (*same)->entries[i];
    entry.seen_as = before.seen_as;
    entry.again_ns = before.again_ns;
    entry.rerun_ns = before.rerun_ns;
    entry.rerun_bytes = ran.contains(entry.call) ? entry.rerun_bytes : before.rerun_bytes;
    entry.comes = before.comes;
    if (entry.left_as == KnownRecord::kNever && before.left_as != KnownRecord::kNever) {
      entry.left_as = trace->leavers + before.left_as;  // behind all that left now
    }
    entry.turn = before.turn;
    if (!entry.sought) {
      entry.keep_recipe(before);
    }
    more_recipes |= (entry.by_node && !before.by_node) || (entry.by_call && !before.by_call);
    if (entry.same_recipe(before)) {
      entry.proof = before.proof;
      entry.agreed = before.agreed;
      entry.asked = before.asked;
      entry.cramped = before.cramped && serial_ - before.asked < kCramped;
    }
    const bool as_now = planned ? entry.evicted == before.evicted : fewer;
    if (settled) {
      entry.leaves = before.leaves;
      entry.dropped = before.dropped;
      continue;
    }
    entry.leaves = planned ? (as_now ? entry.evicted : before.leaves)
                           : (fewer ? entry.evicted : before.evicted);
    // What is still to be proven left by a copy for that, and is to be dropped once it was.
    const bool open = entry.unproven();
    entry.dropped = as_now && !open ? entry.dropped : before.dropped;
  }
  if (same_kind) {
    trace->id = (*same)->id;
    trace->follower = (*same)->follower;
    trace->of_kin = (*same)->of_kin;
    trace->unavoidable =
        (*same)->high == trace->high ? std::min((*same)->live_peak, trace->live_peak) : 0;
    trace->requests_before = (*same)->requests;
    trace->keep_crowding(**same);
    trace->repeated = serial_;
    trace->planned = planned;
    trace->drops_late = (*same)->drops_late;
    trace->plans = (*same)->plans;
    trace->timed = (*same)->timed;
    trace->cut_off = (*same)->cut_off;
    trace->totals = (*same)->totals;
    trace->trials = std::move((*same)->trials);
    trace->watch = (*same)->watch;
    if (more_recipes) {
      trace->forget_trials();
    }
    if (trace->full.size() == (*same)->full.size()) {
      trace->at_ns = (*same)->at_ns;
      trace->rates = (*same)->rates;
      trace->least = (*same)->least;
      if (planned && !trace->at_ns.empty() && trace->fates() != (*same)->fates()) {
        trace->expect();
      }
    }
    trace->copies = std::move((*same)->copies);
    traces_.erase(same);
  } else {
    trace->id = ++ids_;
    see_places(*trace, step);
    if (step.kin) {
      trace->unavoidable = std::min(step.kin.live_peak(trace->live_before), trace->live_peak);
    }
  }
  if (same_kind) {
    varied_ -= std::min(varied_, kTraces / 2);
  } else if (step.kin || step.diverged) {
    varied_ = std::min(varied_ + 1, 4 * kTraces);
  }
  trace->order_copies();
  trace->pressed = trace->evicted_bytes() > 0;
  if (trace->pressed) {
    const bool old = serial_ - pressed_in_ >= kPressed;
    pressed_ = std::max(old ? 0 : pressed_, trace->high + trace->high / Trace::kAlike);
    pressed_in_ = serial_;
  }
  learned_ = trace->id;
  if (const auto before = trace_of(step.before); before != nullptr) {
    before->follower = trace->id;
  }
  if (trace->id == step.before) {
    trace->follower = trace->id;
  }
  traces_.push_front(std::move(trace));
  forget();
}

// A trace's places are those of its step's kin, with what is known of them there; else new ones.
void Plan::see_places(Trace& trace, const Step& step) const {
  const auto kin = step.kin ? trace_of(step.trace->id) : nullptr;  // null: it was forgotten
  trace.of_kin = static_cast<bool>(step.kin);
  for (std::uint32_t i = 0; i < trace.entries.size(); ++i) {
    Trace::Entry& entry = trace.entries[i];
    if (kin == nullptr || !step.kin.anchored(i)) {
      entry.seen_as = {trace.id, i};
      continue;
    }
    const Trace::Entry& its = kin->entries[step.kin.place_of(i)];
    entry.seen_as = its.seen_as;
    if (entry.same_recipe(its) && entry.proof == Trace::Proof::none) {
      entry.proof = its.proof;
      entry.agreed = its.agreed;
      entry.asked = its.asked;
    }
  }
}

// The oldest go first. Shapes that are seen once and never again must not push out those that
// repeat: of these a few are kept, and the oldest of the others goes.
void Plan::forget() {
  const auto repeats = [&](const Trace& trace) {
    return trace.repeated != 0 && serial_ - trace.repeated < kRemembered;
  };
  const auto once = static_cast<std::size_t>(std::count_if(
      traces_.begin(), traces_.end(), [&](const auto& one) { return !repeats(*one); }));
  if (traces_.size() > kTraces) {
    const auto oldest = std::find_if(traces_.rbegin(), traces_.rend(), [&](const auto& one) {
      return once <= kSeenOnce || !repeats(*one);
    });
    traces_.erase(std::next(oldest).base());
  }
  Bytes bytes = 0;
  for (auto one = std::next(traces_.begin()); one != traces_.end(); ++one) {
    bytes += (*one)->memory();
  }
  while (traces_.size() > 1 && bytes > kTraceBytes) {
    bytes -= std::min(bytes, traces_.back()->memory());
    traces_.pop_back();
  }
}

void Plan::forget_all() {
  traces_.clear();
  for (Step& step : steps_) {
    step.trace = nullptr;
    step.kin = Kin{};
  }
  rates_ = {};
  learned_ = 0;
  varied_ = 0;
  pressed_ = 0;
  timed_step_ = 0;
  ++turns_;
  ++version_;
}

PlanState Plan::state() const {
  if (now_ == nullptr) {
    return PlanState::none;
  }
  if (now_->trace != nullptr) {
    return unavoidable() != 0 ? PlanState::declined : PlanState::following;
  }
  if (now_->diverged) {
    return PlanState::diverged;
  }
  const auto& entries = now_->seen.entries;
  return std::any_of(entries.begin(), entries.end(), [](const auto& e) { return e.evicted; })
             ? PlanState::learning
             : PlanState::none;
}

}  // namespace stagehand::core
