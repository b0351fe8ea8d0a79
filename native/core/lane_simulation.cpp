#include "core/lane_simulation.hpp"

#include <algorithm>
#include <utility>

namespace stagehand::core {

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

void place_copies(Grid& grid, std::span<const std::uint32_t> order) {
  double at = 0;
  for (const std::uint32_t i : order) {
    Placed& one = grid.records[i];
    at = std::max(at, static_cast<double>(one.retained)) + one.bytes / grid.out;
    one.done = static_cast<std::size_t>(std::min(at, static_cast<double>(grid.buckets)));
  }
}

Simulation::Simulation(Grid& grid, std::span<const Fate> fates)
    : grid_(grid),
      outs_(leaving(grid, fates)),
      over_(grid.over),
      more_ns_(grid.buckets, 0),
      spare_(grid.buckets, 0),
      back_(grid.records.size(), false),
      gone_(grid.records.size(), false),
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
  const std::vector<MadeAgain> again = made_again(grid, fates);
  for (std::size_t i = 0; i < fates.size(); ++i) {
    const Placed& one = grid_.records[i];
    if (fates[i] != Fate::drop || one.retained >= one.used) {
      continue;
    }
    const std::size_t used = grid_.records[again[i].by].used;
    for (std::size_t b = one.retained; b < used; ++b) {
      over_[b] -= one.bytes;
    }
    dropped_ += one.bytes;
    if (used < grid.buckets) {
      more_ns_[used] += again[i].ns;
      again_ns_ += again[i].ns;
      over_[used] += again[i].beside;
    }
  }
  for (std::size_t b = 0; b < grid.buckets; ++b) {
    spare_[b] += grid.ahead - std::max(0.0, over_[b]);
  }
  for (std::uint32_t i = static_cast<std::uint32_t>(grid.count); i < grid.records.size(); ++i) {
    if (grid_.records[i].retained < grid_.records[i].used) {
      idle_.push_back(i);
      if (grid_.records[i].returns) {
        ins_.push_back(i);
      }
    }
  }
  const auto sooner = [&](auto a, auto b) {
    return std::pair(grid_.records[a].used, a) < std::pair(grid_.records[b].used, b);
  };
  std::sort(ins_.begin(), ins_.end(), sooner);
  std::sort(idle_.rbegin(), idle_.rend(), sooner);
}

Forecast Simulation::run() {
  double late = 0;
  for (std::size_t t = 0; t < grid_.buckets; ++t) {
    now_ = t;
    const double for_in = arrive(t);  // each lane is idle while the GPU waits for the other one
    const double for_out = depart(t);
    late += for_in + for_out;
    copy_out(t, grid_.out * (1 + (for_in + more_ns_[t]) / grid_.bucket_ns));
    copy_in(t, grid_.in * (1 + (for_out + more_ns_[t]) / grid_.bucket_ns));
  }
  return {static_cast<std::uint64_t>(late), static_cast<Bytes>(bytes_),
          static_cast<Bytes>(dropped_), static_cast<std::uint64_t>(again_ns_),
          static_cast<Bytes>(weights_)};
}

// What is asked for now and is not there.
double Simulation::arrive(std::size_t t) {
  double ns = 0;
  for (; use_ < ins_.size() && grid_.records[ins_[use_]].used <= t; ++use_) {
    const std::uint32_t i = ins_[use_];
    const Placed& one = grid_.records[i];
    if (back_[i] || !gone_[i]) {
      back_[i] = true;
      continue;
    }
    const double missing = std::max(0.0, one.bytes - (coming_ == i ? begun_ : 0));
    ns += missing / grid_.in * grid_.bucket_ns;
    come(i, t);
  }
  return ns;
}

void Simulation::come(std::uint32_t i, std::size_t t) {
  back_[i] = true;
  begun_ = 0;
  away_ -= grid_.records[i].bytes;
  for (std::size_t b = t; b < grid_.records[i].used; ++b) {
    spare_[b] -= grid_.records[i].bytes;
  }
}

// What must be away now, and is not.
double Simulation::depart(std::size_t t) {
  double missing = std::max(0.0, over_[t]) - away_;
  double ns = 0;
  for (double before = away_; missing > 0 && weights_leave(t); before = away_) {
    missing -= away_ - before;
  }
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

// Those that are needed last.
bool Simulation::weights_leave(std::size_t t) {
  for (const std::uint32_t i : idle_) {
    const Placed& one = grid_.records[i];
    if (!gone_[i] && !back_[i] && one.retained <= t && t < one.used) {
      for (std::size_t b = t; b < one.used; ++b) {
        spare_[b] += one.bytes;
      }
      go(i);
      return true;
    }
  }
  return false;
}

void Simulation::go(std::uint32_t i) {
  const Placed& one = grid_.records[i];
  gone_[i] = true;
  away_ += one.bytes;
  weights_ += one.weights && one.returns ? one.bytes : 0;
}

void Simulation::leave(std::uint32_t i) {
  ++out_;
  done_ = 0;
  ends_[i] = now_;
  if (!back_[i]) {
    go(i);
  }
}

void Simulation::copy_out(std::size_t t, double room) {
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

void Simulation::copy_in(std::size_t t, double room) {
  for (std::size_t k = in_; room > 0 && k < ins_.size(); ++k) {
    const std::uint32_t i = ins_[k];
    const Placed& one = grid_.records[i];
    if (back_[i]) {
      in_ += k == in_ ? 1 : 0;
      continue;
    }
    if (!gone_[i] && one.weights) {
      continue;  // it may leave yet
    }
    if (!gone_[i]) {
      return;
    }
    begun_ = coming_ == i ? begun_ : 0;
    coming_ = i;
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

}  // namespace stagehand::core
