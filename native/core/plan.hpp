// The plan: what the last step taught about the next. Pure and deterministic: it is told what
// happens, in order, and asked what to expect.
//
// A step's records are known by their place in the order of saving and the size of their block. As
// long as a step repeats the last one's sizes, a record that left the GPU then is expected to leave
// now, so its copy out can start as soon as it is retained (write-back) instead of when the room is
// needed. On the first different size the rest of the step is reactive.
#pragma once

#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

// In the words of PoolStats.plan_state.
enum class PlanState {
  none,       // no step has been seen
  learning,   // no step to go by yet
  following,  // this step repeats one that was learned
  diverged,   // it did not: reactive for the rest of it
  declined,   // moving bytes cannot help: what is saved does not set the peak
};

class Plan {
 public:
  struct Place {
    std::uint32_t step = 0;
    std::uint32_t index = 0;
  };

  // A pool was entered. A step whose records nobody asked for (no backward) teaches nothing.
  void begin_step();
  // A record was opened over a block of this size.
  Place saved(Bytes block_bytes);
  // A record left the GPU; one was asked for by backward.
  void evicted(Place place);
  void unpacked() { used_ = true; }

  // Whether this record is expected to leave.
  bool leaves(Place place) const;
  // Whether the step has followed the last one so far.
  bool follows() const { return !last_.empty() && !diverged_; }
  PlanState state() const {
    if (last_.empty()) {
      return step_ == 0 ? PlanState::none : PlanState::learning;
    }
    return diverged_ ? PlanState::diverged : PlanState::following;
  }

 private:
  struct Entry {
    Bytes block_bytes;
    bool evicted;
  };
  std::vector<Entry> last_;  // the newest step that had a backward
  std::vector<Entry> now_;
  std::uint32_t step_ = 0;
  bool diverged_ = false;
  bool used_ = false;
};

}  // namespace stagehand::core
