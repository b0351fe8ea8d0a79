#include "core/planner.hpp"

#include <algorithm>
#include <utility>

namespace stagehand::core {

namespace {

constexpr std::size_t kBuckets = 256;
constexpr std::size_t kFewBuckets = 64;  // of a step with more records than
constexpr std::size_t kManyRecords = 4096;
// A gain below both is noise.
constexpr double kNoiseShare = 0.01;  // of a step
constexpr double kNoiseNs = 1e6;
// What leaves more than must has to save this much of the time of its copy.
constexpr double kCopyShare = 1.0 / 16;
// What fewer bytes would save is mostly not to be had, up to a tenth: holes decide how many leave.
constexpr double kFewerBytes = 1.5;
constexpr Bytes kHoles = 10;
// Shares of the lanes' idle time that are planned with: less leaves room for what is not as known.
constexpr double kIdle[] = {1.0, 0.85};
using Row = std::vector<double>;

struct Placed {
  double bytes = 0;
  std::size_t retained = 0;  // buckets
  std::size_t used = 0;      // past the last: never
  std::size_t done = 0;      // in which its copy out ends, where it leaves
  bool returns = false;
};

// The step in equal times.
struct Grid {
  explicit Grid(const KnownStep& step)
      : buckets(step.records.size() > kManyRecords ? kFewBuckets : kBuckets), over(buckets, 0) {
    const std::size_t moments = step.full.size();
    const std::uint64_t end = moments > 0 ? step.at_ns.back() : 0;
    bucket_ns = std::max(1.0, static_cast<double>(end) / static_cast<double>(buckets));
    bucket_of.resize(moments);
    for (std::size_t m = 0; m < moments; ++m) {
      const auto bucket = static_cast<std::size_t>(static_cast<double>(step.at_ns[m]) / bucket_ns);
      bucket_of[m] = std::min(bucket, buckets - 1);
    }
    for (std::size_t m = 0; m < moments; ++m) {
      const std::size_t last = m + 1 < moments ? bucket_of[m + 1] : buckets - 1;
      const double above = static_cast<double>(step.full[m]) - static_cast<double>(step.high);
      for (std::size_t b = bucket_of[m]; b <= last; ++b) {
        over[b] = std::max(over[b], above);
      }
    }
    records.reserve(step.records.size());
    for (const KnownRecord& record : step.records) {
      Placed placed;
      placed.retained = placed.used = placed.done = buckets;
      placed.bytes = static_cast<double>(record.bytes);
      if (record.retained < moments) {
        placed.retained = bucket_of[record.retained];
      }
      if (record.used < moments) {
        placed.used = bucket_of[record.used];
        placed.returns = true;
      }
      records.push_back(placed);
    }
    out = step.out_bytes_per_ns * bucket_ns;
    in = step.in_bytes_per_ns * bucket_ns;
  }

  std::size_t buckets;
  double bucket_ns = 1;
  double out = 0;  // bytes in a bucket
  double in = 0;
  Row over;                            // how much must be away
  std::vector<std::size_t> bucket_of;  // of moments
  std::vector<Placed> records;
};

// In the order they are retained, which is that of their copies.
std::vector<std::uint32_t> leaving(const Grid& grid, std::span<const Fate> fates) {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < fates.size(); ++i) {
    if (fates[i] == Fate::leave && grid.records[i].retained < grid.records[i].used) {
      order.push_back(i);
    }
  }
  std::sort(order.begin(), order.end(), [&](auto a, auto b) {
    return std::pair(grid.records[a].retained, a) < std::pair(grid.records[b].retained, b);
  });
  return order;
}

// When each copy out ends if nothing ever waits: at the latest then.
void place_copies(Grid& grid, std::span<const std::uint32_t> order) {
  double at = 0;
  for (const std::uint32_t i : order) {
    Placed& one = grid.records[i];
    at = std::max(at, static_cast<double>(one.retained)) + one.bytes / grid.out;
    one.done = static_cast<std::size_t>(std::min(at, static_cast<double>(grid.buckets)));
  }
}

// Both lanes as the engine uses them, time by time.
class Simulation {
 public:
  Simulation(Grid& grid, std::span<const Fate> fates)
      : grid_(grid),
        outs_(leaving(grid, fates)),
        spare_(grid.buckets, 0),
        back_(fates.size(), false),
        gone_(fates.size(), false),
        ends_(fates.size(), grid.buckets) {
    for (const std::uint32_t i : outs_) {
      const Placed& one = grid_.records[i];
      for (std::size_t b = one.done; b < one.used; ++b) {
        spare_[b] += one.bytes;
      }
      if (one.returns) {
        ins_.push_back(i);
      }
      bytes_ += one.bytes;
    }
    for (std::size_t b = 0; b < grid.buckets; ++b) {
      spare_[b] -= std::max(0.0, grid_.over[b]);
    }
    std::sort(ins_.begin(), ins_.end(), [&](auto a, auto b) {
      return std::pair(grid_.records[a].used, a) < std::pair(grid_.records[b].used, b);
    });
  }

  // Of each record that leaves: when its copy out ended.
  const std::vector<std::size_t>& ends() const { return ends_; }

  Forecast run() {
    double late = 0;
    for (std::size_t t = 0; t < grid_.buckets; ++t) {
      now_ = t;
      const double for_in = arrive(t);  // each lane is idle while the GPU waits for the other one
      const double for_out = depart(t);
      late += for_in + for_out;
      copy_out(t, grid_.out * (1 + for_in / grid_.bucket_ns));
      copy_in(t, grid_.in * (1 + for_out / grid_.bucket_ns));
    }
    return {static_cast<std::uint64_t>(late), static_cast<Bytes>(bytes_)};
  }

 private:
  // What is asked for now and is not there.
  double arrive(std::size_t t) {
    double ns = 0;
    for (; use_ < ins_.size() && grid_.records[ins_[use_]].used <= t; ++use_) {
      const std::uint32_t i = ins_[use_];
      const Placed& one = grid_.records[i];
      if (back_[i] || !gone_[i]) {
        back_[i] = true;
        continue;
      }
      const double missing =
          std::max(0.0, one.bytes - (in_ < ins_.size() && ins_[in_] == i ? begun_ : 0));
      ns += missing / grid_.in * grid_.bucket_ns;
      come(i, t);
    }
    return ns;
  }

  void come(std::uint32_t i, std::size_t t) {
    back_[i] = true;
    away_ -= grid_.records[i].bytes;
    for (std::size_t b = t; b < grid_.records[i].used; ++b) {
      spare_[b] -= grid_.records[i].bytes;
    }
  }

  // What must be away now, and is not.
  double depart(std::size_t t) {
    double missing = std::max(0.0, grid_.over[t]) - away_;
    double ns = 0;
    while (missing > 0 && out_ < outs_.size() && grid_.records[outs_[out_]].retained <= t) {
      const std::uint32_t i = outs_[out_];
      const double rest = grid_.records[i].bytes - done_;
      ns += rest / grid_.out * grid_.bucket_ns;
      missing -= grid_.records[i].bytes;
      leave(i);
    }
    if (missing > 0) {  // others leave
      ns += missing / grid_.out * grid_.bucket_ns;
      bytes_ += missing;
      away_ += missing;
    }
    return ns;
  }

  void leave(std::uint32_t i) {
    ++out_;
    done_ = 0;
    ends_[i] = now_;
    if (!back_[i]) {
      gone_[i] = true;
      away_ += grid_.records[i].bytes;
    }
  }

  void copy_out(std::size_t t, double room) {
    while (room > 0 && out_ < outs_.size() && grid_.records[outs_[out_]].retained <= t) {
      const std::uint32_t i = outs_[out_];
      const double rest = grid_.records[i].bytes - done_;
      if (rest > room) {
        done_ += room;
        return;
      }
      room -= rest;
      leave(i);
    }
  }

  void copy_in(std::size_t t, double room) {
    while (room > 0 && in_ < ins_.size()) {
      const std::uint32_t i = ins_[in_];
      const Placed& one = grid_.records[i];
      if (back_[i]) {
        ++in_;
        begun_ = 0;
        continue;
      }
      if (!gone_[i]) {
        return;
      }
      if (begun_ == 0) {
        for (std::size_t b = t; b < one.used; ++b) {
          if (spare_[b] < one.bytes) {
            return;
          }
        }
      }
      const double rest = one.bytes - begun_;
      if (rest > room) {
        begun_ += room;
        return;
      }
      room -= rest;
      come(i, t);
    }
  }

  Grid& grid_;
  std::vector<std::uint32_t> outs_;
  std::vector<std::uint32_t> ins_;
  Row spare_;  // that could come back at once
  std::vector<bool> back_;
  std::vector<bool> gone_;
  std::size_t out_ = 0;
  std::size_t in_ = 0;
  std::size_t use_ = 0;
  double done_ = 0;   // of the copy out under way
  double begun_ = 0;  // of the copy in under way
  double away_ = 0;
  double bytes_ = 0;
  std::size_t now_ = 0;
  std::vector<std::size_t> ends_;
};

// From the first moment that lacks room to the last: what leaves for it is the record asked for
// last among those whose copies fit into idle time of both lanes; where none does, that is late by
// the least.
class Search {
 public:
  Search(const Grid& grid, double idle)
      : grid_(grid),
        out_(grid.buckets, grid.out * idle),
        in_(grid.buckets, grid.in * idle),
        away_(grid.buckets, 0),
        in_until_(grid.buckets + 1, 0),
        lists_(grid.buckets),
        next_(grid.buckets, 0),
        fates_(grid.records.size(), Fate::stay) {
    for (std::uint32_t i = 0; i < grid.records.size(); ++i) {
      if (grid.records[i].retained < grid.records[i].used) {
        lists_[grid.records[i].retained].push_back(i);
      }
    }
    for (auto& list : lists_) {
      std::sort(list.begin(), list.end(), [&](auto a, auto b) {
        return std::pair(grid.records[b].used, a) < std::pair(grid.records[a].used, b);
      });
    }
  }

  std::vector<Fate> run() {
    for (std::size_t t = 0; t < grid_.buckets; ++t) {
      while (grid_.over[t] > away_[t] && take_one(t)) {
      }
    }
    return std::move(fates_);
  }

 private:
  bool take_one(std::size_t t) {
    in_until_[t + 1] = 0;
    for (std::size_t b = t + 1; b < grid_.buckets; ++b) {
      in_until_[b + 1] = in_until_[b] + in_[b];
    }
    double out_since = 0;
    std::size_t best = grid_.buckets;
    std::pair<int, std::int64_t> least{};
    for (std::size_t f = t + 1; f-- > 0;) {
      out_since += f < t ? out_[f] : 0;
      auto& list = lists_[f];
      if (next_[f] >= list.size() || grid_.records[list[next_[f]]].used <= t + 1) {
        continue;
      }
      const Placed& one = grid_.records[list[next_[f]]];
      double missing = std::max(0.0, one.bytes - out_since);
      if (one.returns) {
        missing += std::max(0.0, one.bytes - in_until_[one.used]);
      }
      const std::pair<int, std::int64_t> cost{static_cast<int>(8 * missing / one.bytes),
                                              -static_cast<std::int64_t>(one.used)};
      if (best == grid_.buckets || cost < least) {
        best = f;
        least = cost;
      }
    }
    if (best == grid_.buckets) {
      return false;
    }
    // And what is like it, while that is little: many small records cost no more than few large.
    const std::vector<std::uint32_t>& list = lists_[best];
    const std::size_t used = grid_.records[list[next_[best]]].used;
    double little = std::min(grid_.over[t] - away_[t], grid_.out / 16);
    do {
      little -= grid_.records[list[next_[best]]].bytes;
      take(list[next_[best]++], t);
    } while (little > 0 && next_[best] < list.size() &&
             grid_.records[list[next_[best]]].used == used);
    return true;
  }

  void take(std::uint32_t i, std::size_t t) {
    const Placed& one = grid_.records[i];
    fates_[i] = Fate::leave;
    double rest = one.bytes;
    for (std::size_t b = one.retained; b < t && rest > 0; ++b) {
      const double some = std::min(rest, out_[b]);
      out_[b] -= some;
      rest -= some;
    }
    in_[t] += rest / grid_.out * grid_.in;  // a moment that waits for one lane lengthens for both
    if (one.returns) {
      std::size_t back = one.used;
      rest = one.bytes;
      while (back > t + 1 && rest > 0) {
        --back;
        const double some = std::min(rest, in_[back]);
        in_[back] -= some;
        rest -= some;
      }
      out_[std::min(one.used, grid_.buckets - 1)] += rest / grid_.in * grid_.out;
    }
    for (std::size_t b = t; b < one.used; ++b) {
      away_[b] += one.bytes;
    }
  }

  const Grid& grid_;
  Row out_;  // idle time of the lanes, in bytes
  Row in_;
  Row away_;
  Row in_until_;  // idle time of the H2D lane from the moment looked at to before this one
  std::vector<std::vector<std::uint32_t>> lists_;  // by the bucket in which they are retained
  std::vector<std::size_t> next_;
  std::vector<Fate> fates_;
};

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

}  // namespace

Forecast forecast(const KnownStep& step, std::span<const Fate> fates) {
  Grid grid(step);
  return forecast(grid, fates);
}

std::vector<Fate> choose_fates(const KnownStep& step, std::span<const Fate> was) {
  std::vector<Fate> best(was.begin(), was.end());
  const double ns_per_byte = 1 / step.out_bytes_per_ns;
  const Forecast before = forecast(step, was);
  const auto cost = [&](const Forecast& told) {
    const Bytes fewer =
        std::min(before.bytes - std::min(before.bytes, told.bytes), before.bytes / kHoles);
    return static_cast<double>(told.late_ns) +
           ns_per_byte * (kCopyShare * static_cast<double>(told.bytes) +
                          kFewerBytes * static_cast<double>(fewer));
  };
  const double step_ns = step.at_ns.empty() ? 0 : static_cast<double>(step.at_ns.back());
  double least = cost(before) - std::max(kNoiseNs, kNoiseShare * step_ns);
  const Grid grid(step);
  for (const double idle : kIdle) {
    if (least <= 0 || (idle < 1 && step.records.size() > kManyRecords)) {
      break;  // nothing to gain, or it takes the host too long
    }
    std::vector<Fate> found = Search(grid, idle).run();
    if (const double one = cost(forecast(step, found)); one < least) {
      best = std::move(found);
      least = one;
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
    if (fates[i] != Fate::leave || one.done >= grid.buckets) {
      continue;
    }
    const auto from = std::lower_bound(grid.bucket_of.begin(), grid.bucket_of.end(), one.done) -
                      grid.bucket_of.begin();
    const std::size_t begin =
        std::max<std::size_t>(static_cast<std::size_t>(from), record.retained);
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
