#include "core/fate_search.hpp"

#include <algorithm>
#include <utility>

namespace stagehand::core {

namespace {

// From when on nearly all of it is retained: autocast holds the weights it has cast, a small part
// of what a call makes, until forward ends.
std::size_t mostly_retained(const Grid& grid, const Droppable& item) {
  constexpr double kRest = 1.0 / 8;
  std::vector<std::uint32_t> order = item.records;
  std::sort(order.begin(), order.end(), [&](auto a, auto b) {
    return std::pair(grid.records[b].retained, b) < std::pair(grid.records[a].retained, a);
  });
  double rest = item.bytes * kRest;
  for (const std::uint32_t i : order) {
    rest -= grid.records[i].bytes;
    if (rest < 0) {
      return grid.records[i].retained;
    }
  }
  return 0;
}

// Of one call's records, sorted by how far it has to run for them.
void add_call(const Grid& grid, const std::vector<std::uint32_t>& all,
              std::vector<Droppable>* items) {
  const auto ns = [&](std::size_t k) { return grid.records[all[k]].rerun_ns; };
  std::size_t used = grid.buckets;
  for (const std::uint32_t i : all) {
    used = std::min(used, grid.records[i].used);
  }
  double before = 0;
  for (std::size_t k = 0; k < all.size();) {
    std::size_t end = k + 1;
    double least = 0;
    double bytes = 0;
    for (std::size_t n = k; n < all.size(); ++n) {
      bytes += grid.records[all[n]].bytes;
      if (const double cost = (ns(n) - before) / bytes; n == k || cost <= least) {
        least = cost;
        end = n + 1;
      }
    }
    Droppable item;
    item.used = used;
    item.ns = std::max(1.0, ns(end - 1) - before);
    for (; k < end; ++k) {
      item.records.push_back(all[k]);
      item.bytes += grid.records[all[k]].bytes;
    }
    item.retained = mostly_retained(grid, item);
    item.call = grid.records[all.front()].call;
    before = ns(end - 1);
    items->push_back(std::move(item));
  }
}

}  // namespace

std::vector<Droppable> droppable(const Grid& grid) {
  std::vector<Droppable> items;
  std::vector<std::vector<std::uint32_t>> calls(grid.calls);
  for (std::uint32_t i = 0; i < grid.count; ++i) {
    const Placed& one = grid.records[i];
    if (one.retained >= one.used || one.bytes <= 0) {
      continue;
    }
    if (one.again_ns > 0) {
      items.push_back({{i}, one.again_ns, one.bytes, one.retained, one.used});
    } else if (one.call != 0) {
      calls[one.call - 1].push_back(i);
    }
  }
  for (std::vector<std::uint32_t>& all : calls) {
    std::sort(all.begin(), all.end(), [&](auto a, auto b) {
      return std::pair(grid.records[a].rerun_ns, a) < std::pair(grid.records[b].rerun_ns, b);
    });
    add_call(grid, all, &items);
  }
  return items;
}

Search::Search(const Grid& grid, const std::vector<Droppable>& items, double idle, double cheap)
    : grid_(grid),
      items_(items),
      out_(grid.buckets, grid.out * idle),
      in_(grid.buckets, grid.in * idle),
      away_(grid.buckets, 0),
      in_until_(grid.buckets + 1, 0),
      lists_(2 * grid.buckets),
      next_(2 * grid.buckets, 0),
      again_(grid.buckets),
      runs_again_(grid.calls + 1, false),
      fates_(grid.records.size(), Fate::stay) {
  std::vector<bool> only_dropped(grid.records.size(), false);
  for (std::uint32_t k = 0; k < items.size(); ++k) {
    again_[items[k].retained].push_back(k);
    for (const std::uint32_t i : items[k].records) {
      only_dropped[i] = items[k].ns / items[k].bytes <= cheap;
    }
  }
  for (std::uint32_t i = 0; i < grid.records.size(); ++i) {
    const Placed& one = grid.records[i];
    if (one.retained < one.used && !only_dropped[i]) {
      lists_[one.retained + (one.weights ? grid.buckets : 0)].push_back(i);
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
    for (const std::uint32_t k : again_[t]) {
      droppable_.emplace(items_[k].ns / items_[k].bytes, k);
    }
    while (grid_.over[t] > away_[t] && take_one(t)) {
    }
  }
  fates_.resize(grid_.count);
  return std::move(fates_);
}

bool Search::take_one(std::size_t t) {
  const Leaving found = best_leaving(t);
  if (drop_one(t, found)) {
    return true;
  }
  if (found.list == lists_.size()) {
    return false;
  }
  leave(found.list, t);
  return true;
}

// The cheapest to make again, if that is cheaper than what would leave instead.
bool Search::drop_one(std::size_t t, const Leaving& instead) {
  const bool none = instead.list == lists_.size();
  while (!droppable_.empty() && (none || instead.late_ns > droppable_.top().first)) {
    const auto [cost, k] = droppable_.top();
    droppable_.pop();
    const Droppable& item = items_[k];
    double bytes = 0;  // some may have left by copy meanwhile
    for (const std::uint32_t i : item.records) {
      bytes += fates_[i] == Fate::stay ? grid_.records[i].bytes : 0;
    }
    if (bytes <= 0 || item.used <= t + 1) {
      continue;
    }
    if (item.ns / bytes > cost) {
      droppable_.emplace(item.ns / bytes, k);
      continue;
    }
    for (const std::uint32_t i : item.records) {
      if (fates_[i] == Fate::stay) {
        drop(i, item.used);
      }
    }
    run_again(item);
    return true;
  }
  return false;
}

Search::Leaving Search::best_leaving(std::size_t t) {
  in_until_[t + 1] = 0;
  for (std::size_t b = t + 1; b < grid_.buckets; ++b) {
    in_until_[b + 1] = in_until_[b] + in_[b];
  }
  Leaving best{lists_.size(), 0};
  double out_since = 0;
  std::pair<int, std::int64_t> least{};
  for (std::size_t f = t + 1; f-- > 0;) {
    out_since += f < t ? out_[f] : 0;
    for (const std::size_t of_list : {f, f + grid_.buckets}) {
      auto& list = lists_[of_list];
      std::size_t& next = next_[of_list];
      while (next < list.size() && fates_[list[next]] != Fate::stay) {
        ++next;  // dropped meanwhile
      }
      if (next >= list.size() || grid_.records[list[next]].used <= t + 1) {
        continue;
      }
      const Placed& one = grid_.records[list[next]];
      const double out = one.weights ? 0 : std::max(0.0, one.bytes - out_since);
      const double in = one.returns ? std::max(0.0, one.bytes - in_until_[one.used]) : 0;
      const std::pair<int, std::int64_t> cost{static_cast<int>(8 * (out + in) / one.bytes),
                                              -static_cast<std::int64_t>(one.used)};
      if (best.list == lists_.size() || cost < least) {
        best = {of_list, (out / grid_.out + in / grid_.in) * grid_.bucket_ns / one.bytes};
        least = cost;
      }
    }
  }
  return best;
}

// And what is like it, while that is little: many small records cost no more than few large.
void Search::leave(std::size_t of_list, std::size_t t) {
  const std::vector<std::uint32_t>& list = lists_[of_list];
  std::size_t& next = next_[of_list];
  const std::size_t used = grid_.records[list[next]].used;
  double little = std::min(grid_.over[t] - away_[t], grid_.out / 16);
  do {
    little -= grid_.records[list[next]].bytes;
    take(list[next++], t);
  } while (little > 0 && next < list.size() && fates_[list[next]] == Fate::stay &&
           grid_.records[list[next]].used == used);
}

void Search::drop(std::uint32_t i, std::size_t used) {
  const Placed& one = grid_.records[i];
  fates_[i] = Fate::drop;
  for (std::size_t b = one.retained; b < used; ++b) {
    away_[b] += one.bytes;
  }
}

// When it is needed; that is later than the time that room is sought for.
void Search::run_again(const Droppable& item) {
  if (item.call != 0 && item.used < grid_.buckets && !runs_again_[item.call]) {
    away_[item.used] -= grid_.records[item.records.front()].rerun_bytes;
    runs_again_[item.call] = true;
  }
}

void Search::take(std::uint32_t i, std::size_t t) {
  const Placed& one = grid_.records[i];
  fates_[i] = Fate::leave;
  double rest = one.weights ? 0 : one.bytes;
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
