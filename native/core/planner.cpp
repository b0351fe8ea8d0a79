#include "core/planner.hpp"

#include <algorithm>
#include <numeric>
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
// Beside weights that stream it costs more: how these take turns with it on the lane, and in which
// holes, is known less well. Replays of LoRA settle with this; without they go up and down.
constexpr double kCopyBesideWeights = 1.0 / 8;
// What fewer bytes would save is mostly not to be had, up to a tenth: holes decide how many leave.
constexpr double kFewerBytes = 1.5;
constexpr Bytes kHoles = 10;
// Shares of the lanes' idle time that are planned with: less leaves room for what is not as known.
constexpr double kIdle[] = {1.0, 0.85, 0.6, 0.4};
constexpr std::size_t kNotCrowded = 2;   // of those, where the lanes were as free as forecast
constexpr std::size_t kOnlyOnce = 1024;  // records: more are planned once
// How many kinds of what can be made again are looked at apart.
constexpr std::size_t kKinds = 6;

// Twice: what may come back depends on when copies out end, and so on how long the GPU waits.
Forecast forecast(Grid& grid, std::span<const Fate> fates) {
  for (Placed& one : grid.records) {
    one.done = grid.buckets;
  }
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
std::vector<double> cheap_kinds(const std::vector<Droppable>& items) {
  std::vector<double> all;
  for (const Droppable& item : items) {
    all.insert(all.end(), item.records.size(), item.ns / item.bytes);
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

KnownStep with_records(const KnownStep& step, std::span<const KnownRecord> records) {
  KnownStep other = step;
  other.records = records;
  return other;
}

// The records with nothing that a call can make; none where no call can, where nothing else does,
// or where planning twice takes the host too long.
std::vector<KnownRecord> without_calls(const KnownStep& step) {
  const auto any = [&](auto what) {
    return std::any_of(step.records.begin(), step.records.end(), what);
  };
  std::vector<KnownRecord> records;
  if (step.records.size() <= kOnlyOnce &&
      any([](const KnownRecord& one) { return one.call != 0; }) &&
      any([](const KnownRecord& one) { return one.again_ns > 0; })) {
    records.assign(step.records.begin(), step.records.end());
    for (KnownRecord& one : records) {
      one.call = 0;
    }
  }
  return records;
}

// Beside what was done before.
double cost(const KnownStep& step, const Forecast& told, const Forecast& before, bool drops) {
  const double share = !step.idle.empty() && drops ? kCopyBesideWeights
                       : drops                     ? kCopyBesideDrops
                                                   : kCopyShare;
  const Bytes fewer = std::min(before.bytes - std::min(before.bytes, told.bytes + told.dropped),
                               before.bytes / kHoles);
  return told.takes() +
         (share * static_cast<double>(told.bytes) + kFewerBytes * static_cast<double>(fewer)) /
             step.out_bytes_per_ns;
}

}  // namespace

std::vector<Bytes> idle_bytes(const KnownStep& step) {
  const std::size_t moments = step.full.size();
  std::vector<Bytes> bytes(moments + 1, 0);  // changes first; unsigned, and sums come out right
  for (const IdleWeights& one : step.idle) {
    bytes[std::min<std::size_t>(one.from, moments)] += one.bytes;
    bytes[std::min<std::size_t>(one.until, moments)] -= one.bytes;
  }
  std::partial_sum(bytes.begin(), bytes.end(), bytes.begin());
  return bytes;
}

Forecast forecast(const KnownStep& step, std::span<const Fate> fates) {
  Grid grid(step);
  return forecast(grid, fates);
}

double noise(const KnownStep& step) {
  const double step_ns = step.at_ns.empty() ? 0 : static_cast<double>(step.at_ns.back());
  return std::max(kNoiseNs, kNoiseShare * step_ns);
}

std::vector<Proposal> proposals(const KnownStep& step, const Forecast& before, bool crowded) {
  std::vector<Proposal> all;
  Grid scratch(step);
  const auto find = [&](const Grid& grid, const std::vector<Droppable>& items, double idle,
                        double cheap) {
    std::vector<Fate> found = Search(grid, items, idle, cheap).run();
    const Forecast told = forecast(scratch, found);
    all.push_back({std::move(found), cost(step, told, before, !items.empty()), told});
  };
  const auto idles = std::span(kIdle).first(crowded ? std::size(kIdle) : kNotCrowded);
  const Grid grid(step);
  const std::vector<Droppable> items = droppable(grid);
  for (const double cheap : cheap_kinds(items)) {
    for (const double idle : idles) {
      if (idle < 1 && step.records.size() > Grid::kManyRecords) {
        break;  // it takes the host too long
      }
      find(grid, items, idle, cheap);
    }
  }
  if (const std::vector<KnownRecord> records = without_calls(step); !records.empty()) {
    const Grid nodes(with_records(step, records));
    const std::vector<Droppable> of_nodes = droppable(nodes);
    const double dearest = cheap_kinds(of_nodes).back();
    find(nodes, of_nodes, idles.front(), 0);
    find(nodes, of_nodes, idles.front(), dearest);
    find(nodes, of_nodes, idles.back(), dearest);
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.ns < b.ns; });
  return all;
}

Proposal moving_least(const KnownStep& step) {
  const auto find = [&](const KnownStep& of) {
    const Grid grid(of);
    Proposal found{Search(grid, droppable(grid), 0, 0).run()};
    found.told = forecast(step, found.fates);
    found.ns = found.told.takes();
    return found;
  };
  Proposal all = find(step);
  if (const std::vector<KnownRecord> records = without_calls(step); !records.empty()) {
    if (Proposal nodes = find(with_records(step, records)); nodes.ns < all.ns) {
      return nodes;
    }
  }
  return all;
}

double to_beat(const KnownStep& step, const Forecast& before) {
  const bool drops = std::any_of(step.records.begin(), step.records.end(), [](const auto& record) {
    return record.again_ns > 0 || record.call != 0;
  });
  const double unsure = kLateShare * static_cast<double>(before.late_ns);
  return cost(step, before, before, drops) -
         (drops ? kDropNoise * noise(step) + unsure : noise(step));
}

std::vector<Fate> choose_fates(const KnownStep& step, std::span<const Fate> was) {
  const Forecast before = forecast(step, was);
  if (const double least = to_beat(step, before); least > 0) {
    std::vector<Proposal> found = proposals(step, before, false);
    if (found.front().ns < least) {
      return std::move(found.front().fates);
    }
  }
  return {was.begin(), was.end()};
}

std::vector<Bytes> least_occupied(const KnownStep& step, std::span<const Fate> fates) {
  Grid grid(step);
  forecast(grid, fates);
  const std::vector<MadeAgain> again = made_again(grid, fates);
  std::vector<Bytes> beside(step.full.size() + 1, 0);  // what a call takes that runs again then
  std::vector<Bytes> away(step.full.size() + 1, 0);    // changes; unsigned, and sums come out right
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
    std::size_t end = record.used;
    if (fates[i] == Fate::drop) {
      end = step.records[again[i].by].used;
      // A call has made all of it before that moment begins.
      end -= again[i].by_call ? std::min<std::size_t>(end, 1) : 0;
    }
    end = std::min(end, step.full.size());
    beside[end] = std::max(beside[end], static_cast<Bytes>(again[i].beside));
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
    least[m] = std::min(step.full[m] + beside[m] - std::min(step.full[m], sum), step.high);
  }
  return least;
}

}  // namespace stagehand::core
