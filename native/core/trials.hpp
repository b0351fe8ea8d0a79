// Plans that steps of one kind ran with, and how long such steps took: what is forecast leaves out
// holes, mapping and the host, so the one that took the least is kept. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/planner.hpp"

namespace stagehand::core {

class Trials {
 public:
  // Another plan is in use from the next step on, which pays for the change.
  void begin(std::vector<Fate> plan);
  // A step took so long, with this plan. Whether that is how long such steps take.
  bool took(const std::vector<Fate>& plan, std::uint64_t ns);
  // Whether this one was, or one hardly different.
  bool tried(const std::vector<Fate>& plan, std::span<const KnownRecord> records) const;
  // Whether there may be more.
  bool more() const { return plans_.size() < kPlans; }

  // The one that took the least; empty before the first.
  const std::vector<Fate>& best() const { return best_; }
  std::uint64_t best_ns() const { return best_ns_; }
  // The record is not to be dropped after all.
  void refuse(std::size_t record);

 private:
  static constexpr std::size_t kPlans = 5;

  std::vector<std::vector<Fate>> plans_;
  std::vector<Fate> best_;
  std::uint64_t best_ns_ = 0;
  int steps_ = 1;  // with the plan in use; the first one of all was in use before
  std::uint64_t last_ns_ = 0;
};

}  // namespace stagehand::core
