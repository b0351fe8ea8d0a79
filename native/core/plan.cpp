#include "core/plan.hpp"

#include <algorithm>
#include <tuple>
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

bool Plan::Trace::repeats(const Trace& other) const {
  return depth == other.depth && high == other.high && begins_like(other) &&
         std::equal(entries.begin(), entries.end(), other.entries.begin(), other.entries.end(),
                    [](const auto& a, const auto& b) { return a.block_bytes == b.block_bytes; });
}

bool Plan::Trace::begins_like(const Trace& other) const {
  const auto [less, more] = std::minmax(live_before, other.live_before);
  return more - less <= std::min(high, other.high) / kAlike;
}

// Of this budget rather than of another; then one that began with as much live; then what came
// after the last trace the last time; then the newest.
std::shared_ptr<Plan::Trace> Plan::likeliest(const Trace& seen, auto may) const {
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
  if (now_ != nullptr && (now_->alive == 0 || !now_->seen.by_use.empty())) {
    end(now_);  // records that outlive it are on their own
  }
  Step step;
  step.serial = ++serial_;
  step.before = learned_;
  step.began = uses_;
  step.seen.high = high;
  step.seen.live_before = live;
  step.seen.depth = static_cast<std::uint32_t>(std::count_if(
      steps_.begin(), steps_.end(), [](const Step& one) { return one.seen.by_use.empty(); }));
  step.trace = likeliest(step.seen, [](const Trace&) { return true; });
  steps_.push_back(std::move(step));
  now_ = &steps_.back();
}

Plan::Place Plan::saved(Bytes block_bytes, RecordId record) {
  if (now_ == nullptr || over(*now_)) {
    begin_step(high_, live_);
  }
  const auto index = static_cast<std::uint32_t>(now_->seen.entries.size());
  now_->seen.entries.push_back({block_bytes, record, false, false, 0, 0});
  ++now_->alive;
  follow(*now_);
  return {now_->serial, index};
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
  const std::size_t count = step.seen.entries.size();
  const auto has = [&](const Trace& trace, std::size_t begin) {
    return trace.entries.size() >= count &&
           std::equal(
               step.seen.entries.begin() + static_cast<std::ptrdiff_t>(begin),
               step.seen.entries.end(), trace.entries.begin() + static_cast<std::ptrdiff_t>(begin),
               [](const Entry& a, const Entry& b) { return a.block_bytes == b.block_bytes; });
  };
  if (step.trace == nullptr || has(*step.trace, count - 1)) {
    return;
  }
  step.trace = likeliest(step.seen, [&](const Trace& trace) { return has(trace, 0); });
  ++version_;
  step.diverged = step.trace == nullptr;
}

void Plan::evicted(Place place) {
  if (Step* step = step_of(place.step); step != nullptr) {
    step->seen.entries[place.index].evicted = true;
  }
}

void Plan::unpacked(Place place) {
  Step* step = step_of(place.step);
  if (step == nullptr || step->seen.entries[place.index].used != 0) {
    return;  // asked for again: the first time is the one to be ready for
  }
  using_ = step;
  step->seen.by_use.push_back(place.index);
  step->seen.live.push_back(0);
  Entry& entry = step->seen.entries[place.index];
  entry.used = static_cast<std::uint32_t>(step->seen.by_use.size());
  entry.used_at = ++uses_ - step->began;
}

void Plan::closed(Place place) {
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

void Plan::requested(Bytes largest) {
  if (now_ != nullptr) {
    now_->seen.largest_request = std::max(now_->seen.largest_request, largest);
    now_->seen.requests.resize(now_->seen.entries.size() + now_->seen.by_use.size() + 1, 0);
    now_->seen.requests.back() = std::max(now_->seen.requests.back(), largest);
  }
}

Bytes Plan::expected_request() const {
  if (!follows()) {
    return 0;
  }
  constexpr std::size_t kAround = 4;
  const std::size_t place = now_->seen.entries.size() + now_->seen.by_use.size();
  Bytes request = now_->trace->requested(place);
  if (request == 0) {
    for (std::size_t i = place - std::min(place, kAround); i <= place + kAround; ++i) {
      request = std::max(request, now_->trace->requested(i));
    }
  }
  return request;
}

Bytes Plan::Trace::evicted_bytes() const {
  Bytes bytes = 0;
  for (const Entry& entry : entries) {
    bytes += entry.evicted ? entry.block_bytes : 0;
  }
  return bytes;
}

Bytes Plan::Trace::memory() const {
  return entries.capacity() * sizeof(Entry) + by_use.capacity() * sizeof(std::uint32_t) +
         (live.capacity() + requests.capacity() + requests_before.capacity()) * sizeof(Bytes);
}

Bytes Plan::Trace::requested(std::size_t place) const {
  const auto at = [&](const std::vector<Bytes>& all) {
    return place < all.size() ? all[place] : 0;
  };
  return std::max(at(requests), at(requests_before));
}

void Plan::end(Step* step) {
  version_ += step->alive > 0 ? 1 : 0;  // they are on their own from here on
  if (!step->seen.by_use.empty()) {
    learn(*step);
  }
  now_ = now_ == step ? nullptr : now_;
  using_ = using_ == step ? nullptr : using_;
  steps_.remove_if([&](const Step& one) { return &one == step; });
}

void Plan::learn(Step& step) {
  auto trace = std::make_shared<Trace>(std::move(step.seen));
  const auto same = std::find_if(traces_.begin(), traces_.end(),
                                 [&](const auto& one) { return one->repeats(*trace); });
  // What left is to leave again, in the lesser of two such steps: a hole that happened to cost more
  // is not repeated.
  const bool fewer = same == traces_.end() || trace->evicted_bytes() <= (*same)->evicted_bytes();
  for (std::size_t i = 0; i < trace->entries.size(); ++i) {
    trace->entries[i].leaves = fewer ? trace->entries[i].evicted : (*same)->entries[i].evicted;
  }
  if (same != traces_.end()) {
    trace->id = (*same)->id;
    trace->follower = (*same)->follower;
    trace->unavoidable = std::min((*same)->live_peak, trace->live_peak);
    trace->requests_before = (*same)->requests;
    traces_.erase(same);
  } else {
    trace->id = ++ids_;
  }
  learned_ = trace->id;
  for (const auto& one : traces_) {
    if (one->id == step.before) {
      one->follower = trace->id;
    }
  }
  if (trace->id == step.before) {
    trace->follower = trace->id;
  }
  traces_.push_front(std::move(trace));
  Bytes bytes = 0;
  for (auto one = std::next(traces_.begin()); one != traces_.end(); ++one) {
    bytes += (*one)->memory();
  }
  while (traces_.size() > kTraces || (traces_.size() > 1 && bytes > kTraceBytes)) {
    bytes -= std::min(bytes, traces_.back()->memory());
    traces_.pop_back();
  }
}

// What the step's trace says of the record; null without one.
const Plan::Entry* Plan::expected(Place place, const Step** step) const {
  *step = step_of(place.step);
  if (*step == nullptr || (*step)->trace == nullptr ||
      place.index >= (*step)->trace->entries.size()) {
    return nullptr;
  }
  return &(*step)->trace->entries[place.index];
}

bool Plan::leaves(Place place) const {
  const Step* step = nullptr;
  const Entry* entry = expected(place, &step);
  return entry != nullptr && entry->leaves && step->trace->predicts(step->seen.high);
}

bool Plan::is_new() const {
  if (now_ == nullptr || now_->diverged) {
    return now_ == nullptr;
  }
  const Trace* trace = now_->trace.get();
  const Bytes other = trace != nullptr ? trace->high : 0;
  return std::max(other, high_) - std::min(other, high_) > high_ / kAlike;
}

Plan::Use Plan::next_use(Place place, std::uint64_t order) const {
  const Step* step = nullptr;
  const Entry* entry = expected(place, &step);
  if (entry == nullptr) {
    return 2 * kUnplanned - order;
  }
  return entry->used != 0 ? step->began + entry->used_at : 2 * kUnplanned;
}

bool Plan::knows(Place place) const {
  const Step* step = nullptr;
  return expected(place, &step) != nullptr;
}

bool Plan::next_after(Place place, Place* next, RecordId* record) const {
  const Step* step = nullptr;
  const Entry* entry = expected(place, &step);
  if (entry == nullptr || entry->used == 0 || entry->used >= step->trace->by_use.size()) {
    return false;
  }
  *next = {place.step, step->trace->by_use[entry->used]};
  if (next->index >= step->seen.entries.size()) {
    return false;
  }
  *record = step->seen.entries[next->index].record;
  return true;
}

Bytes Plan::live_after(Place place) const {
  const Step* step = nullptr;
  const Entry* entry = expected(place, &step);
  return entry != nullptr && entry->used != 0 ? step->trace->live[entry->used] : 0;
}

Bytes Plan::unavoidable() const {
  return follows() && now_->trace->unavoidable > high_ ? now_->trace->unavoidable : 0;
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
  return std::any_of(entries.begin(), entries.end(), [](const Entry& e) { return e.evicted; })
             ? PlanState::learning
             : PlanState::none;
}

}  // namespace stagehand::core
