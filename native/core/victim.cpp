#include "core/victim.hpp"

#include <deque>

namespace stagehand::core {

namespace {

// The greatest of one number in a window that only moves forward: candidates for the maximum, in
// falling order.
class SlidingMaximum {
 public:
  explicit SlidingMaximum(std::uint64_t Candidate::* of) : of_(of) {}
  void enter(std::span<const Candidate> blocks, std::size_t i) {
    while (!falling_.empty() && blocks[falling_.back()].*of_ <= blocks[i].*of_) {
      falling_.pop_back();
    }
    falling_.push_back(i);
  }
  void leave(std::size_t i) {
    if (!falling_.empty() && falling_.front() == i) {
      falling_.pop_front();
    }
  }
  std::uint64_t value(std::span<const Candidate> blocks) const {
    return falling_.empty() ? 0 : blocks[falling_.front()].*of_;
  }
  void clear() { falling_.clear(); }

 private:
  std::uint64_t Candidate::* of_;
  std::deque<std::size_t> falling_;
};

}  // namespace

// Two ends that only move forward: for every first block the shortest run that holds `bytes`.
Window choose_window(std::span<const Candidate> blocks, Bytes bytes, bool copies_first) {
  Window best;
  SlidingMaximum ages(&Candidate::age);
  SlidingMaximum copies(&Candidate::copy);
  SlidingMaximum nears(&Candidate::near);
  Bytes held = 0;
  Bytes victim_bytes = 0;
  std::size_t victim_count = 0;
  std::size_t begin = 0;
  for (std::size_t end = 0; end < blocks.size(); ++end) {
    const Candidate& last = blocks[end];
    if (last.kind == Candidate::Kind::wall) {
      ages.clear();
      copies.clear();
      nears.clear();
      held = victim_bytes = 0;
      victim_count = 0;
      begin = end + 1;
      continue;
    }
    const bool is_victim = last.kind == Candidate::Kind::victim;
    if (is_victim) {
      ages.enter(blocks, end);
      nears.enter(blocks, end);
    }
    copies.enter(blocks, end);
    held += last.size;
    victim_bytes += is_victim ? last.size : 0;
    victim_count += is_victim ? 1 : 0;
    for (; held >= bytes; ++begin) {
      const std::uint64_t soonest = ages.value(blocks);
      const std::uint64_t copy = copies.value(blocks);
      const std::uint64_t wait = copies_first && soonest == 0 ? copy : 0;
      const std::uint64_t near = soonest == 0 ? nears.value(blocks) : 0;
      const WindowCost cost{victim_count > 0, soonest, wait, near, victim_bytes, copy, held};
      if (!best.found || cost < best.cost) {
        best = {begin, end + 1, true, victim_count, cost};
      }
      const bool victim_leaves = blocks[begin].kind == Candidate::Kind::victim;
      ages.leave(begin);
      nears.leave(begin);
      copies.leave(begin);
      held -= blocks[begin].size;
      victim_bytes -= victim_leaves ? blocks[begin].size : 0;
      victim_count -= victim_leaves ? 1 : 0;
    }
  }
  return best;
}

}  // namespace stagehand::core
