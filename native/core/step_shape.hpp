// One kind of step as people look at it, and what the planner would make of it inside another
// budget. Data, and pure.
#pragma once

#include <cstdint>
#include <vector>

#include "core/planner.hpp"
#include "core/trace.hpp"

namespace stagehand::core {

struct StepShape {
  std::uint32_t id = 0;  // 0: no step was learned
  Bytes high = 0;
  Bytes live_before = 0;
  std::vector<KnownRecord> records;
  std::vector<Fate> fates;  // what the next such step is to do
  std::vector<Bytes> full;
  std::vector<Trace::Held> held;
  std::vector<std::uint64_t> at_ns;  // empty: no such step was measured
  std::vector<IdleWeights> idle;
  LaneRates rates;
  bool rates_known = false;
  StepTotals totals;
  Bytes dirty = 0;  // of offloaded weights, newer than their host copies as this is asked

  KnownStep known() const { return {records, full, at_ns, high, rates.out, rates.in, idle}; }
};

StepShape shape_of(const Trace& trace);

struct Advice {
  std::vector<Fate> fates;
  Forecast forecast;
  Bytes host = 0;     // copies that are there at once, at the most
  Bytes least = 0;    // mapped in the fullest moment when all that can be away is
  Bytes fullest = 0;  // mapped in the fullest moment when nothing is, weights and all
};

// What steps like this one settle on inside `step.high`: the first ones have what is needed last
// leave, weights before records, and the planner then looks for better.
Advice advise(KnownStep step);

}  // namespace stagehand::core
