// A step as the planner looks at it: in a grid of equal times. Pure.
#pragma once

#include <algorithm>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/planner.hpp"

namespace stagehand::core {

using Row = std::vector<double>;

struct Placed {
  double bytes = 0;
  std::size_t retained = 0;  // buckets
  std::size_t used = 0;      // past the last: never
  std::size_t done = 0;      // in which its copy out ends, where it leaves
  bool returns = false;
  bool weights = false;                    // idle ones: they leave for nothing
  double again_ns = 0;                     // to make it again; 0: no recipe can
  const std::uint32_t* made_of = nullptr;  // KnownRecord's
  std::size_t call = 0;                    // that can be run again for it, from 1 on; 0: none
  double rerun_ns = 0;
  double rerun_bytes = 0;
};

// When a dropped record is made again, and what is computed for it then.
struct MadeAgain {
  std::uint32_t by = 0;  // the record whose use that is at; itself but where a call makes several
  double ns = 0;
  double beside = 0;  // KnownRecord::rerun_bytes of the call that runs for it
  bool by_call = false;
};

struct Grid {
  static constexpr std::size_t kBuckets = 256;
  static constexpr std::size_t kFewBuckets = 64;  // of a step with more records than
  static constexpr std::size_t kManyRecords = 4096;

  explicit Grid(const KnownStep& step)
      : buckets(step.records.size() > kManyRecords ? kFewBuckets : kBuckets),
        over(buckets, 0),
        count(step.records.size()) {
    const std::size_t moments = step.full.size();
    const std::uint64_t end = moments > 0 ? step.at_ns.back() : 0;
    bucket_ns = std::max(1.0, static_cast<double>(end) / static_cast<double>(buckets));
    bucket_of.resize(moments);
    for (std::size_t m = 0; m < moments; ++m) {
      const auto bucket = static_cast<std::size_t>(static_cast<double>(step.at_ns[m]) / bucket_ns);
      bucket_of[m] = std::min(bucket, buckets - 1);
    }
    const std::vector<Bytes> idle = idle_bytes(step);
    for (std::size_t m = 0; m < moments; ++m) {
      const std::size_t last = m + 1 < moments ? bucket_of[m + 1] : buckets - 1;
      const double above =
          static_cast<double>(step.full[m] + idle[m] + step.ahead) - static_cast<double>(step.high);
      for (std::size_t b = bucket_of[m]; b <= last; ++b) {
        over[b] = std::max(over[b], above);
      }
    }
    records.reserve(step.records.size() + step.idle.size());
    std::unordered_map<std::uint64_t, std::size_t> numbers;
    for (const KnownRecord& record : step.records) {
      Placed placed;
      placed.bytes = static_cast<double>(record.bytes);
      placed.again_ns = static_cast<double>(record.again_ns);
      placed.made_of = record.made_of;
      if (record.call != 0) {
        placed.call = numbers.try_emplace(record.call, numbers.size() + 1).first->second;
        placed.rerun_ns = static_cast<double>(record.rerun_ns);
        placed.rerun_bytes = static_cast<double>(record.rerun_bytes);
      }
      place(placed, record.retained, record.used);
      records.push_back(placed);
    }
    for (const IdleWeights& one : step.idle) {
      Placed placed;
      placed.bytes = static_cast<double>(one.bytes);
      placed.weights = true;
      place(placed, one.from, one.until);
      records.push_back(placed);
    }
    calls = numbers.size();
    ahead = static_cast<double>(step.ahead);
    out = step.out_bytes_per_ns * bucket_ns;
    in = step.in_bytes_per_ns * bucket_ns;
  }

  // From which bucket to which it may be away.
  void place(Placed& one, std::uint32_t from, std::uint32_t until) const {
    const std::size_t moments = bucket_of.size();
    one.done = buckets;
    one.retained = from < moments ? bucket_of[from] : buckets;
    one.used = until < moments ? bucket_of[until] : buckets;
    one.returns = until < moments;
  }

  std::size_t buckets;
  double bucket_ns = 1;
  double out = 0;  // bytes in a bucket
  double in = 0;
  double ahead = 0;                    // that is free for what comes next
  Row over;                            // how much must be away
  std::vector<std::size_t> bucket_of;  // of moments
  std::vector<Placed> records;         // and behind them idle weights
  std::size_t count;                   // of records
  std::size_t calls = 0;
};

// Of each dropped record. A call runs once, at the first use of what it has to make, up to the last
// of that: of what no recipe can make while its inputs were dropped too. What a recipe can make
// comes with it where it is on the way.
std::vector<MadeAgain> made_again(const Grid& grid, std::span<const Fate> fates);

}  // namespace stagehand::core
