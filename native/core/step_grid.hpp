// A step as the planner looks at it: in a grid of equal times. Pure.
#pragma once

#include <algorithm>
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
  double again_ns = 0;  // to make it again; 0: nobody can
};

struct Grid {
  static constexpr std::size_t kBuckets = 256;
  static constexpr std::size_t kFewBuckets = 64;  // of a step with more records than
  static constexpr std::size_t kManyRecords = 4096;

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
      placed.again_ns = static_cast<double>(record.again_ns);
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

}  // namespace stagehand::core
