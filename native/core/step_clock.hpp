// When the GPU got to the moments of a step, without its waits for the lanes, and what the lanes
// carry: from timing events in a few steps of each kind, read once all have passed. Nothing waits
// for them: where the host is ahead, several steps are measured whose times are not known yet.
//
// Guarded by the device's lock.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/gate.hpp"
#include "core/planner.hpp"
#include "core/spare_events.hpp"
#include "core/trials.hpp"
#include "core/types.hpp"

namespace stagehand::core {

class Plan;

class StepClock {
 public:
  StepClock(Gate& gate, SpareEvents& spare) : gate_(gate), spare_(spare) {}

  // A step is over: of those that the GPU is through with, what was measured goes to the plan.
  void tell(Plan& plan);
  // A step began: likewise; and the plan says whether to measure this one.
  void step_began(Plan& plan);
  // The step has gone another way: nothing more is noted, and nothing told.
  void forget();
  // Whether the moment of this number is to be noted; on a stream that is not captured.
  bool due(std::size_t number) const { return measuring_ && number >= due_; }
  void note_moment(std::size_t number, driver::Stream stream);
  // Whether a wait of this stream for a lane is to be measured, and copies are.
  bool watches(driver::Stream stream) const { return measuring_ && stream == newest().stream; }

  enum class Kind : std::uint8_t {
    moment,
    waits,
    waited,
    out,
    out_ends,
    in,
    in_ends,
    again,
    made,
    rerun
  };
  bool watches_copies(Kind begins) {
    return measuring_ && !newest().marks.empty() && copies_[begins == Kind::in]++ < kCopies;
  }
  // A record is about to be made again on that stream; it was, and is that one of its step.
  void making(driver::Stream stream);
  void made(driver::Stream stream, std::uint32_t index, bool rerun);
  // False where it was not noted; then its other end is not to be either.
  bool note(Kind kind, driver::Stream stream, Bytes bytes = 0);

 private:
  static constexpr std::size_t kSteps = 4;  // that are measured at once
  static constexpr std::size_t kPoints = 64;
  static constexpr std::size_t kMarks = 4096;
  static constexpr int kAgain = 1024;  // are measured
  static constexpr int kCopies = 64;   // are measured, each way
  struct Mark {
    Kind kind;
    std::size_t moment;
    Bytes bytes;
  };

  struct Measured {
    StepToTime step;
    driver::Stream stream = nullptr;
    std::vector<Mark> marks;
    std::vector<driver::Event> events;  // one for each mark, kept
  };

  Measured& newest() { return measured_[(oldest_ + count_ + kSteps - 1) % kSteps]; }
  const Measured& newest() const { return const_cast<StepClock*>(this)->newest(); }
  bool read(const Measured& of, StepTimes* times);

  Gate& gate_;
  SpareEvents& spare_;
  std::array<Measured, kSteps> measured_;  // a ring
  std::size_t oldest_ = 0;
  std::size_t count_ = 0;
  bool open_ = false;       // the newest is the step that runs
  bool measuring_ = false;  // and more of it is to be noted
  bool full_ = false;       // and there was more than can be
  std::size_t due_ = 0;     // the next moment to note
  std::size_t every_ = 1;
  int copies_[2] = {0, 0};
  int again_ = 0;
  bool making_ = false;
};

}  // namespace stagehand::core
