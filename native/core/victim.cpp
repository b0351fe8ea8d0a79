#include "core/victim.hpp"

#include <deque>
#include <tuple>

namespace stagehand::core {

namespace {

struct Cost {
  bool any_victim;
  std::uint64_t soonest;    // the greatest age among the victims
  std::uint64_t last_copy;  // the same among the idle
  Bytes victim_bytes;
  Bytes bytes;

  auto key() const { return std::tie(any_victim, soonest, last_copy, victim_bytes, bytes); }
};

// The greatest age of one kind in a window that only moves forward: candidates for the maximum, in
// falling order.
class SlidingMaximum {
 public:
  void enter(std::span<const Candidate> blocks, std::size_t i) {
    while (!falling_.empty() && blocks[falling_.back()].age <= blocks[i].age) {
      falling_.pop_back();
    }
    falling_.push_back(i);
  }
  void leave(std::size_t i) {
    if (!falling_.empty() && falling_.front() == i) {
      falling_.pop_front();
    }
  }
  bool empty() const { return falling_.empty(); }
  std::uint64_t value(std::span<const Candidate> blocks) const {
    return empty() ? 0 : blocks[falling_.front()].age;
  }
  void clear() { falling_.clear(); }

 private:
  std::deque<std::size_t> falling_;
};

}  // namespace

// Two ends that only move forward: for every first block the shortest run that holds `bytes`.
Window choose_window(std::span<const Candidate> blocks, Bytes bytes) {
  Window best;
  Cost best_cost{};
  SlidingMaximum victims;
  SlidingMaximum idle;
  Bytes held = 0;
  Bytes victim_bytes = 0;
  std::size_t victim_count = 0;
  std::size_t begin = 0;
  for (std::size_t end = 0; end < blocks.size(); ++end) {
    const Candidate& last = blocks[end];
    if (last.kind == Candidate::Kind::wall) {
      victims.clear();
      idle.clear();
      held = victim_bytes = 0;
      victim_count = 0;
      begin = end + 1;
      continue;
    }
    const bool is_victim = last.kind == Candidate::Kind::victim;
    (is_victim ? victims : idle).enter(blocks, end);
    held += last.size;
    victim_bytes += is_victim ? last.size : 0;
    victim_count += is_victim ? 1 : 0;
    for (; held >= bytes; ++begin) {
      const Cost cost{victim_count > 0, victims.value(blocks), idle.value(blocks), victim_bytes,
                      held};
      if (!best.found || cost.key() < best_cost.key()) {
        best = {begin, end + 1, true, victim_count};
        best_cost = cost;
      }
      const bool victim_leaves = blocks[begin].kind == Candidate::Kind::victim;
      (victim_leaves ? victims : idle).leave(begin);
      held -= blocks[begin].size;
      victim_bytes -= victim_leaves ? blocks[begin].size : 0;
      victim_count -= victim_leaves ? 1 : 0;
    }
  }
  return best;
}

}  // namespace stagehand::core
