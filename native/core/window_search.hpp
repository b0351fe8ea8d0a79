// Where in an arena victims and idle blocks side by side make a hole: the search around those that
// are needed last, so that its cost hangs on how many must leave and not on how many blocks there
// are. Which of the runs it finds is the best, `choose_window` (core/victim) says.
//
// Guarded by the device's lock; changes nothing but its marks on the blocks.
#pragma once

#include <vector>

#include "core/arena.hpp"
#include "core/victim.hpp"
#include "core/victim_index.hpp"

namespace stagehand::core {

struct FoundWindow {
  bool found = false;
  std::vector<Block*>* blocks = nullptr;  // in address order; good until the next search
  Bytes leaving =
      0;  // with its victims; for one that would have stayed what was copied in vain too
};

// A block that is idle, or whose record can leave, as choose_window sees it. `out` is the lane
// whose copies may still read it.
Candidate candidate_of(const Block& block, std::uint32_t out);

class WindowSearch {
 public:
  WindowSearch(VictimIndex& victims, const Plan& plan, const ClockBank& clocks)
      : victims_(victims), plan_(plan), clocks_(clocks) {}

  // A run without victims; `out` is the lane whose copies may still read idle blocks.
  FoundWindow idle(const Arena& arena, Bytes bytes, std::uint32_t out);
  // The run whose soonest-needed victim is needed latest.
  FoundWindow with_victims(const Arena& arena, Bytes bytes, std::uint32_t out);

 private:
  // What one search looks at, at most.
  static constexpr int kVictims = 1024;
  static constexpr int kAlike = 64;  // further ones as good as the first that did
  static constexpr int kIdle = 256;
  static constexpr int kSide = 512;  // neighbours to either side of one

  struct Run {
    Block* first;
    Block* last;
    Bytes bytes() const { return last->end() - first->address; }
  };
  bool usable(const Block& block) const { return is_idle(block.state) && !block.fence.never(); }
  Run add(Block* block);
  void consider(const Run& run, Block* around, Bytes bytes, std::uint32_t out);
  FoundWindow result();

  VictimIndex& victims_;
  const Plan& plan_;
  const ClockBank& clocks_;
  std::uint64_t turn_ = 0;
  Window best_;
  std::vector<Block*> best_blocks_;
  std::vector<Block*> blocks_;         // scratch
  std::vector<Candidate> candidates_;  // beside them
};

}  // namespace stagehand::core
