// Whether what the steps of a settled plan cost has moved: one of them is measured again from time
// to time. Pure.
#pragma once

#include <cstdint>

#include "core/planner.hpp"

namespace stagehand::core {

class Watch {
 public:
  // Whether the step of this number is to be measured.
  bool due(std::uint32_t step) const { return step >= next_; }
  // One was. Whether computing, or what a lane carries, differs by a fifth from what it was when
  // the plan was new, or the step spends a fifth of computing more than the plan's did, in two
  // looks in a row: then the plan is to be made anew, and the next look is twice as far off, so
  // that a host whose speed comes and goes is not always trying plans. Where memory lies once plans
  // are no longer tried may not fit the one that is kept: that is seen by the first two looks, and
  // counts the first two times. `spent_ns`: Trials::best_spent_ns; kUnknown where none was tried.
  static constexpr std::uint64_t kUnknown = ~std::uint64_t{0};
  bool moved(const StepTimes& times, std::uint64_t spent_ns, std::uint32_t step);
  // No look before that step.
  void wait_until(std::uint32_t step) { next_ = step; }

 private:
  struct Costs {
    double compute_ns = 0;
    double out = 0;  // bytes per ns; 0: not measured
    double in = 0;
  };
  static bool differ(const Costs& a, const Costs& b);

  static constexpr std::uint32_t kEvery = 64;  // steps
  static constexpr std::uint32_t kRarest = 1 << 16;
  static constexpr int kAtOnce = 2;

  Costs then_;
  std::uint32_t every_ = kEvery;
  std::uint32_t next_ = 0;
  int looks_ = 0;    // of this plan
  int at_once_ = 0;  // plans that were left by their first two
  bool once_ = false;
};

}  // namespace stagehand::core
