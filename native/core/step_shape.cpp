#include "core/step_shape.hpp"

#include <algorithm>
#include <queue>
#include <tuple>
#include <utility>

namespace stagehand::core {

namespace {

// Of `high`, what no block fits into: recorded steps of four models occupied 97.5 % to 100 % of it
// at 44 budgets, half of them more than 99.8 %. Tensors leave whole, so more only tells of one too
// many.
constexpr Bytes kHoles = 1024;

// What evicting without a plan comes to: whenever a moment lacks room, weights leave that nobody
// holds, for nothing, and where there are none, records; of each what is needed last.
std::vector<Fate> needed_last(const KnownStep& step) {
  std::vector<Fate> fates(step.records.size(), Fate::stay);
  struct Candidate {
    std::uint32_t used = 0;
    std::uint32_t index = 0;  // of a record, and behind those of weights
    Bytes bytes = 0;
    bool weights = false;
    bool operator<(const Candidate& other) const {
      return std::tuple(weights, used, index) < std::tuple(other.weights, other.used, other.index);
    }
  };
  std::vector<std::vector<Candidate>> from(step.full.size());
  const auto add = [&](std::uint32_t begin, const Candidate& one) {
    if (begin < step.full.size() && begin < one.used) {
      from[begin].push_back(one);
    }
  };
  const auto records = static_cast<std::uint32_t>(step.records.size());
  for (std::uint32_t i = 0; i < records; ++i) {
    add(step.records[i].retained, {step.records[i].used, i, step.records[i].bytes});
  }
  for (std::uint32_t i = 0; i < step.idle.size(); ++i) {
    add(step.idle[i].from, {step.idle[i].until, records + i, step.idle[i].bytes, true});
  }
  const std::vector<Bytes> idle = idle_bytes(step);
  std::vector<Bytes> back(step.full.size() + 1, 0);
  std::priority_queue<Candidate> candidates;
  Bytes away = 0;
  for (std::size_t m = 0; m < step.full.size(); ++m) {
    away -= back[m];
    for (const Candidate& one : from[m]) {
      candidates.push(one);
    }
    while (step.full[m] + idle[m] > step.high + away && !candidates.empty()) {
      const Candidate one = candidates.top();
      candidates.pop();
      if (one.used <= m) {
        continue;
      }
      if (one.index < records) {
        fates[one.index] = Fate::leave;
      }
      away += one.bytes;
      back[std::min<std::size_t>(one.used, step.full.size())] += one.bytes;
    }
  }
  return fates;
}

// The most of the records that are in those intervals at once.
template <class Counts>
std::vector<Bytes> between(const KnownStep& step, Counts counts) {
  std::vector<Bytes> change(step.full.size() + 1, 0);  // unsigned, and sums come out right
  for (std::size_t i = 0; i < step.records.size(); ++i) {
    const KnownRecord& one = step.records[i];
    const std::size_t end = std::min<std::size_t>(one.used, step.full.size());
    if (counts(i) && one.retained < end) {
      change[one.retained] += one.bytes;
      change[end] -= one.bytes;
    }
  }
  Bytes sum = 0;
  for (Bytes& one : change) {
    one = sum += one;
  }
  return change;
}

Bytes largest_that_leaves(const KnownStep& step, std::span<const Fate> fates) {
  Bytes largest = 0;
  for (std::size_t i = 0; i < fates.size(); ++i) {
    largest = std::max(largest, fates[i] == Fate::leave ? step.records[i].bytes : 0);
  }
  return largest;
}

// A group comes ahead of its use, a record likewise, and what leaves for it may be there still.
Bytes room_ahead(const KnownStep& step) {
  Bytes group = 0;
  for (const IdleWeights& one : step.idle) {
    group = std::max(group, one.bytes);
  }
  Bytes record = 0;
  for (const KnownRecord& one : step.records) {
    const bool may_leave = one.retained < step.full.size() && one.retained < one.used;
    record = std::max(record, may_leave ? one.bytes : 0);
  }
  return std::min(step.high, group + 2 * record);
}

}  // namespace

StepShape shape_of(const Trace& trace) {
  StepShape shape;
  shape.id = trace.id;
  shape.high = trace.high;
  shape.live_before = trace.live_before;
  trace.known(&shape.records);
  shape.idle = trace.idle;
  shape.fates = trace.fates();
  shape.full = trace.full;
  shape.held = trace.held;
  shape.at_ns = trace.at_ns;
  shape.rates = trace.rates;
  shape.rates_known =
      trace.rates.out != LaneRates::kUnknown && trace.rates.in != LaneRates::kUnknown;
  shape.totals = trace.totals;
  return shape;
}

Advice advise(KnownStep step) {
  Advice advice;
  step.high -= step.high / kHoles;
  advice.fates = choose_fates(step, needed_last(step));
  advice.forecast = forecast(step, advice.fates);
  if (advice.forecast.weights > 0) {
    step.ahead = room_ahead(step);
    KnownStep within = step;
    within.high -= std::exchange(within.ahead, 0);
    advice.fates = choose_fates(step, needed_last(within));
    advice.forecast = forecast(step, advice.fates);
  }
  // While a record comes back its room is taken, and what leaves for it may be there still.
  step.high -= std::min(step.high, largest_that_leaves(step, advice.fates));
  advice.forecast.late_ns = forecast(step, advice.fates).late_ns;
  const std::vector<Bytes> copies =
      between(step, [&](std::size_t i) { return advice.fates[i] == Fate::leave; });
  advice.host = *std::max_element(copies.begin(), copies.end());
  const std::vector<Bytes> any = between(step, [](std::size_t) { return true; });
  const std::vector<Bytes> idle = idle_bytes(step);
  for (std::size_t m = 0; m < step.full.size(); ++m) {
    advice.fullest = std::max(advice.fullest, step.full[m] + idle[m]);
    advice.least = std::max(advice.least, step.full[m] - std::min(step.full[m], any[m]));
  }
  advice.least += advice.least / kHoles;
  advice.fullest += advice.fullest / kHoles;
  return advice;
}

}  // namespace stagehand::core
