// What was counted in one step, and peaks of the run that outlive it. The counters' own peaks begin
// again at every reset, of either kind.
//
// Guarded by the device's lock.
#pragma once

#include "core/counters.hpp"

namespace stagehand::core {

class StepBook {
 public:
  // `now` with the peaks of the run, or of the step.
  Counters of_run(Counters now) const {
    now.raise_peaks(run_);
    return now;
  }
  Counters of_step(const Counters& now) const {
    Counters found = now.since(began_);
    found.raise_peaks(step_);
    return found;
  }
  // Before the counters' peaks are reset: a step begins, or the peaks of the run do.
  void begin_step(const Counters& now) {
    run_.raise_peaks(now);
    step_ = {};
    began_ = now;
  }
  void reset_run(const Counters& now) {
    step_.raise_peaks(now);
    run_ = {};
  }

 private:
  Counters run_;    // its peaks, of stretches that are over
  Counters step_;   // likewise
  Counters began_;  // as the step began
};

}  // namespace stagehand::core
