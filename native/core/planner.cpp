#include "core/planner.hpp"

#include <algorithm>
#include <utility>

#include "core/fate_search.hpp"
#include "core/lane_simulation.hpp"

namespace stagehand::core {

namespace {

// A gain below both is noise.
constexpr double kNoiseShare = 0.01;  // of a step
constexpr double kNoiseNs = 1e6;
// Where records can be made again, what that takes is measured, and less of that is noise. How late
// the lanes are hangs on holes too.
constexpr double kDropNoise = 0.25;
constexpr double kLateShare = 0.125;
// What leaves more than must has to save this much of the time of its copy.
constexpr double kCopyShare = 1.0 / 16;
// Beside what can be made again a copy costs what it takes of the memory's own bandwidth.
constexpr double kCopyBesideDrops = 1.0 / 32;
// What fewer bytes would save is mostly not to be had, up to a tenth: holes decide how many leave.
constexpr double kFewerBytes = 1.5;
constexpr Bytes kHoles = 10;
// Shares of the lanes' idle time that are planned with: less leaves room for what is not as known.
constexpr double kIdle[] = {1.0, 0.85};
// How many kinds of what can be made again are looked at apart.
constexpr std::size_t kKinds = 6;

// Twice: what may come back depends on when copies out end, and so on how long the GPU waits.
Forecast forecast(Grid& grid, std::span<const Fate> fates) {
  place_copies(grid, leaving(grid, fates));
  Simulation first(grid, fates);
  first.run();
  for (std::size_t i = 0; i < fates.size(); ++i) {
    grid.records[i].done = std::min(grid.records[i].done, first.ends()[i]);
  }
  return Simulation(grid, fates).run();
}

// Up to which time for a byte what can be made again is dropped and nothing else: none, then more
// and more of it.
std::vector<double> cheap_kinds(const KnownStep& step) {
  std::vector<double> all;
  for (const KnownRecord& record : step.records) {
    if (record.again_ns > 0 && record.bytes > 0) {
      all.push_back(static_cast<double>(record.again_ns) / static_cast<double>(record.bytes));
    }
  }
  std::sort(all.begin(), all.end());
  std::vector<double> kinds{0};
  for (std::size_t k = 1; k <= kKinds && !all.empty(); ++k) {
    const double kind = all[k * (all.size() - 1) / kKinds];
    if (kind > kinds.back()) {
      kinds.push_back(kind);
    }
  }
  return kinds;
}

}  // namespace

Forecast forecast(const KnownStep& step, std::span<const Fate> fates) {
  Grid grid(step);
  return forecast(grid, fates);
}

std::vector<Fate> choose_fates(const KnownStep& step, std::span<const Fate> was) {
  std::vector<Fate> best(was.begin(), was.end());
  const double ns_per_byte = 1 / step.out_bytes_per_ns;
  const Forecast before = forecast(step, was);
  const std::vector<double> kinds = cheap_kinds(step);
  const double share = kinds.size() > 1 ? kCopyBesideDrops : kCopyShare;
  const auto cost = [&](const Forecast& told) {
    const Bytes fewer = std::min(before.bytes - std::min(before.bytes, told.bytes + told.dropped),
                                 before.bytes / kHoles);
    return static_cast<double>(told.late_ns) + static_cast<double>(told.again_ns) +
           ns_per_byte *
               (share * static_cast<double>(told.bytes) + kFewerBytes * static_cast<double>(fewer));
  };
  const double step_ns = step.at_ns.empty() ? 0 : static_cast<double>(step.at_ns.back());
  const double noise = std::max(kNoiseNs, kNoiseShare * step_ns);
  const double unsure = kLateShare * static_cast<double>(before.late_ns);
  double least = cost(before) - (kinds.size() > 1 ? kDropNoise * noise + unsure : noise);
  const Grid grid(step);
  for (const double cheap : kinds) {
    for (const double idle : kIdle) {
      if (least <= 0 || (idle < 1 && step.records.size() > Grid::kManyRecords)) {
        break;  // nothing to gain, or it takes the host too long
      }
      std::vector<Fate> found = Search(grid, idle, cheap).run();
      if (const double one = cost(forecast(step, found)); one < least) {
        best = std::move(found);
        least = one;
      }
    }
  }
  return best;
}

std::vector<Bytes> least_occupied(const KnownStep& step, std::span<const Fate> fates) {
  Grid grid(step);
  forecast(grid, fates);
  std::vector<Bytes> away(step.full.size() + 1, 0);  // changes; unsigned, and sums come out right
  for (std::size_t i = 0; i < fates.size(); ++i) {
    const KnownRecord& record = step.records[i];
    const Placed& one = grid.records[i];
    if (fates[i] == Fate::stay || (fates[i] == Fate::leave && one.done >= grid.buckets)) {
      continue;
    }
    std::size_t begin = record.retained;
    if (fates[i] == Fate::leave) {
      const auto from = std::lower_bound(grid.bucket_of.begin(), grid.bucket_of.end(), one.done);
      begin = std::max(begin, static_cast<std::size_t>(from - grid.bucket_of.begin()));
    }
    const std::size_t end = std::min<std::size_t>(record.used, step.full.size());
    if (begin < end) {
      away[begin] += record.bytes;
      away[end] -= record.bytes;
    }
  }
  std::vector<Bytes> least(step.full.size());
  Bytes sum = 0;
  for (std::size_t m = 0; m < least.size(); ++m) {
    sum += away[m];
    // Where that is not enough others leave too, or the GPU waits.
    least[m] = std::min(step.full[m] - std::min(step.full[m], sum), step.high);
  }
  return least;
}

}  // namespace stagehand::core
