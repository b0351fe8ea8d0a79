// Which records leave, and when: pure decisions over a step that is known. Both lanes are taken to
// be busy all the time that they can be: a record that is asked for sooner, but whose copies fit
// into idle time of the lanes, may be the better one to leave than the one that is asked for last.
//
// A step is a row of moments: one begins with each save and with each first use of a record. The
// plan looks at them through a grid of equal times, so its cost is that of records times buckets.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

// What becomes of a record between its last use in forward and its use in backward.
enum class Fate : std::uint8_t {
  stay,
  leave,  // by a copy
  drop,   // and made again
};

struct KnownRecord {
  static constexpr std::uint32_t kNever = ~0u;
  Bytes bytes = 0;
  std::uint32_t retained = kNever;  // the moment from which on it may be copied out
  std::uint32_t used = kNever;      // the moment that begins with its use
  std::uint64_t again_ns = 0;       // how long it takes to make it again; 0: no recipe can
  // What the recipe needs, by their places in the step: made again before, where they were dropped.
  std::uint32_t made_of[Made::kInputs] = {kNever, kNever, kNever};
  // The call that can be run again for it, 0: none; and how long that takes up to this record. It
  // makes all before it as well, as many of them as were dropped.
  std::uint64_t call = 0;
  std::uint64_t rerun_ns = 0;
  Bytes rerun_bytes = 0;  // that it takes then, beside what it makes
};

// A weight group that nobody holds from one moment to another (not in the last one; kNever: to the
// end): it may leave for nothing, and comes back by the lane.
struct IdleWeights {
  Bytes bytes = 0;
  std::uint32_t from = 0;
  std::uint32_t until = KnownRecord::kNever;
};

struct KnownStep {
  std::span<const KnownRecord> records;
  // Of each moment: the most memory that would be occupied if nothing had left, but weights that
  // nobody holds; and when it begins.
  std::span<const Bytes> full;
  std::span<const std::uint64_t> at_ns;
  Bytes high = 0;
  double out_bytes_per_ns = 0;
  double in_bytes_per_ns = 0;
  std::span<const IdleWeights> idle{};
  Bytes ahead = 0;  // of `high`, kept free for what comes next
};

// What the lanes carry, in bytes per ns: what was measured last, of whichever step. Until a copy
// was, more than most links do: where that is wrong copies are planned, and measured.
struct LaneRates {
  static constexpr double kUnknown = 40;
  double out = kUnknown;
  double in = kUnknown;
};

// What was measured of one step.
struct StepTimes {
  struct Point {
    std::size_t moment = 0;
    std::uint64_t ns = 0;  // of computing, since the first point
  };
  std::vector<Point> points;
  Bytes out_bytes = 0;
  Bytes in_bytes = 0;
  // To make a record of the step again, by its place in the order of saving.
  struct Again {
    std::uint32_t index = 0;
    std::uint64_t ns = 0;
    bool rerun = false;  // by its call, from the beginning of that on
  };
  std::vector<Again> again;
  std::uint64_t out_ns = 0;
  std::uint64_t in_ns = 0;
  std::uint64_t all_ns = 0;     // from the first point to the last, with all waits
  std::uint64_t waited_ns = 0;  // of it, for the lanes
};

// Where the time of one measured step went. For people.
struct StepTotals {
  std::uint64_t all_ns = 0;
  std::uint64_t waited_ns = 0;
  std::uint64_t again_ns = 0;
};

struct Forecast {
  std::uint64_t late_ns = 0;  // the GPU waits for the lanes
  Bytes bytes = 0;            // that leave
  Bytes dropped = 0;
  std::uint64_t again_ns = 0;  // to make again what is dropped
  Bytes weights = 0;           // that left for nothing, and come again in the step

  // ns of the GPU that the plan spends.
  double takes() const { return static_cast<double>(late_ns + again_ns); }
};

// What weights take that nobody holds, of each moment and after the last one.
std::vector<Bytes> idle_bytes(const KnownStep& step);

Forecast forecast(const KnownStep& step, std::span<const Fate> fates);

// What the planner finds, the one with the least forecast first; and what that is, in ns that the
// step takes longer.
struct Proposal {
  std::vector<Fate> fates;
  double ns = 0;
  Forecast told{};
};
// What is gained below that is not to be told from noise.
double noise(const KnownStep& step);
// `crowded`: such steps waited for the lanes longer than was forecast; then plans are found too
// that leave more of the lanes' time free, and so drop more.
std::vector<Proposal> proposals(const KnownStep& step, const Forecast& before, bool crowded);

// What moves as little as can be: dropped is all that takes less than its copies would if no time
// of the lanes were free. Its `ns` is what it is forecast to take.
Proposal moving_least(const KnownStep& step);

// What a proposal must be forecast at less than to take the place of what was done before.
double to_beat(const KnownStep& step, const Forecast& before);

// The better of what was done so far and what the planner finds; `was` unless the other one is
// better by more than noise.
std::vector<Fate> choose_fates(const KnownStep& step, std::span<const Fate> was);

// The least that can be occupied in each moment when those records leave.
std::vector<Bytes> least_occupied(const KnownStep& step, std::span<const Fate> fates);

}  // namespace stagehand::core
