#include "core/fate_search.hpp"

#include <algorithm>
#include <utility>

namespace stagehand::core {

Search::Search(const Grid& grid, double idle, double cheap)
    : grid_(grid),
      out_(grid.buckets, grid.out * idle),
      in_(grid.buckets, grid.in * idle),
      away_(grid.buckets, 0),
      in_until_(grid.buckets + 1, 0),
      lists_(grid.buckets),
      next_(grid.buckets, 0),
      again_(grid.buckets),
      fates_(grid.records.size(), Fate::stay) {
  for (std::uint32_t i = 0; i < grid.records.size(); ++i) {
    const Placed& one = grid.records[i];
    if (one.retained >= one.used) {
      continue;
    }
    const bool can = one.again_ns > 0;
    if (can) {
      again_[one.retained].push_back(i);
    }
    if (!can || again(i) > cheap) {
      lists_[one.retained].push_back(i);
    }
  }
  for (auto& list : lists_) {
    std::sort(list.begin(), list.end(), [&](auto a, auto b) {
      return std::pair(grid.records[b].used, a) < std::pair(grid.records[a].used, b);
    });
  }
}

std::vector<Fate> Search::run() {
  for (std::size_t t = 0; t < grid_.buckets; ++t) {
    for (const std::uint32_t i : again_[t]) {
      droppable_.emplace(again(i), i);
    }
    while (grid_.over[t] > away_[t] && take_one(t)) {
    }
  }
  return std::move(fates_);
}

bool Search::take_one(std::size_t t) {
  const Leaving found = best_leaving(t);
  const bool none = found.bucket == grid_.buckets;
  while (!droppable_.empty() && (none || found.late_ns > droppable_.top().first)) {
    const std::uint32_t i = droppable_.top().second;
    droppable_.pop();
    if (fates_[i] == Fate::stay && grid_.records[i].used > t + 1) {
      drop(i);
      return true;
    }
  }
  if (none) {
    return false;
  }
  leave(found.bucket, t);
  return true;
}

Search::Leaving Search::best_leaving(std::size_t t) {
  in_until_[t + 1] = 0;
  for (std::size_t b = t + 1; b < grid_.buckets; ++b) {
    in_until_[b + 1] = in_until_[b] + in_[b];
  }
  Leaving best{grid_.buckets, 0};
  double out_since = 0;
  std::pair<int, std::int64_t> least{};
  for (std::size_t f = t + 1; f-- > 0;) {
    out_since += f < t ? out_[f] : 0;
    auto& list = lists_[f];
    while (next_[f] < list.size() && fates_[list[next_[f]]] != Fate::stay) {
      ++next_[f];  // dropped meanwhile
    }
    if (next_[f] >= list.size() || grid_.records[list[next_[f]]].used <= t + 1) {
      continue;
    }
    const Placed& one = grid_.records[list[next_[f]]];
    const double out = std::max(0.0, one.bytes - out_since);
    const double in = one.returns ? std::max(0.0, one.bytes - in_until_[one.used]) : 0;
    const std::pair<int, std::int64_t> cost{static_cast<int>(8 * (out + in) / one.bytes),
                                            -static_cast<std::int64_t>(one.used)};
    if (best.bucket == grid_.buckets || cost < least) {
      best = {f, (out / grid_.out + in / grid_.in) * grid_.bucket_ns / one.bytes};
      least = cost;
    }
  }
  return best;
}

// And what is like it, while that is little: many small records cost no more than few large.
void Search::leave(std::size_t bucket, std::size_t t) {
  const std::vector<std::uint32_t>& list = lists_[bucket];
  std::size_t& next = next_[bucket];
  const std::size_t used = grid_.records[list[next]].used;
  double little = std::min(grid_.over[t] - away_[t], grid_.out / 16);
  do {
    little -= grid_.records[list[next]].bytes;
    take(list[next++], t);
  } while (little > 0 && next < list.size() && fates_[list[next]] == Fate::stay &&
           grid_.records[list[next]].used == used);
}

void Search::drop(std::uint32_t i) {
  const Placed& one = grid_.records[i];
  fates_[i] = Fate::drop;
  for (std::size_t b = one.retained; b < one.used; ++b) {
    away_[b] += one.bytes;
  }
}

void Search::take(std::uint32_t i, std::size_t t) {
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

}  // namespace stagehand::core
