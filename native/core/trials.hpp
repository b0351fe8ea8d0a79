// Plans that steps of one kind ran with, and how long such steps took: what is forecast leaves out
// holes, mapping and the host, so the one that took the least is kept. Pure.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/planner.hpp"

namespace stagehand::core {

// A plan as steps run it.
struct RunPlan {
  std::vector<Fate> fates;
  // What is dropped stays until a request needs its place, and does not leave that to whatever
  // comes next. In memory that is not moved: which of the two wastes less of it, only a trial says.
  bool drops_late = false;

  RunPlan() = default;
  explicit RunPlan(std::vector<Fate> of, bool late = false)
      : fates(std::move(of)), drops_late(late) {}
  bool operator==(const RunPlan&) const = default;
  // Records that leave by one.
  std::ptrdiff_t copies() const { return std::count(fates.begin(), fates.end(), Fate::leave); }
};

// A step that is to be measured. The host is ahead of the GPU by whole steps: when its times are
// known, others have begun, maybe with another plan.
struct StepToTime {
  std::uint32_t trace = 0;
  std::size_t moments = 0;
  std::uint32_t plans = 0;  // Trace's, when it began
  bool look = false;        // at a settled plan
  bool proving = false;     // then its time is no plan's
  RunPlan ran;              // what it ran with; empty without a plan
};

class Trials {
 public:
  Trials() = default;
  // `id`: of the plan that is in use before the first trial, among all of its trace.
  explicit Trials(std::uint32_t id) : first_(id) {}
  // This plan is in use from the next step on, which pays for the change; again, where it was
  // tried: then it keeps the id that it had.
  void begin(RunPlan plan, std::uint32_t id);
  // The plan in use is the best as long as it takes longer by no more than steps of another differ
  // that did the same, and by no more than a 32nd: where the host is what a step waits for, and not
  // equally in each, two or three say too little.
  void prefer() { all_[now_].preferred = true; }
  // A plan that is kept, and then is the best, or is as if it had not been tried.
  void begin_first_of_all(RunPlan plan, std::uint32_t id);
  bool tries_first_of_all() const { return first_of_all_; }
  const RunPlan& keep_first_of_all();  // as its fastest step ran
  void refuse_first_of_all();
  // Whether any is preferred; whether the best is.
  bool prefers() const;
  bool prefers_best() const;
  // Of the plan in use.
  std::uint32_t id() const { return all_.empty() ? first_ : all_[now_].id; }
  // A step took so long, with this plan, which its own steps may have changed since it began; and
  // so much of that was spent on what the plan chose: waits for the lanes, and making again.
  // Whether that is how long such steps take.
  bool took(const RunPlan& plan, std::uint64_t ns, std::uint64_t spent_ns);
  // Whether this one was, or one hardly different; or was begun: its own steps then made the same
  // of it again, five times over.
  bool tried(const RunPlan& plan, std::span<const KnownRecord> records) const;
  // Whether any was that drops late; or any that does not.
  bool tried(bool drops_late) const;
  // Whether there may be more: not once plans come up again that were left before.
  bool more() const { return all_.size() <= kPlans && returns_ < kReturns; }

  // The one that took the least; empty before the first.
  const RunPlan& best() const;
  std::uint64_t best_ns() const;
  // Of the plan in use; all there is before its first step.
  std::uint64_t spent_ns() const {
    return all_[now_].newest.empty() ? ~std::uint64_t{0} : all_[now_].takes().spent_ns;
  }
  // What the best one's steps spend: all that another plan could save. The rest of their time is
  // computing, the host's, and whatever else comes and goes.
  std::uint64_t best_spent_ns() const;
  // Whether this is what the plan in use has become.
  bool in_use(const RunPlan& plan) const { return now_ < all_.size() && all_[now_].plan == plan; }
  // Whether the best is the one in use, or was gone back to so often that another step would say
  // nothing.
  bool sure_of_best() const;

 private:
  static constexpr std::size_t kPlans = 5;
  static constexpr int kReturns = 2;

  struct Took {
    std::uint64_t ns = 0;
    std::uint64_t spent_ns = 0;
    auto operator<=>(const Took&) const = default;
  };
  struct Tried {
    RunPlan plan;  // as its fastest step ran
    std::uint32_t id = 0;
    RunPlan begun{};             // as it was proposed
    std::vector<Took> newest{};  // steps
    // What two in a row differed by at most that ran with the same.
    std::uint64_t differ_ns = 0;
    bool preferred = false;

    Took takes() const;
    bool agrees() const;                      // the two steps that took the least
    std::pair<Took, Took> least_two() const;  // of one step both are that
  };
  const Tried* fastest() const;

  std::vector<Tried> all_;  // from what was in use before the first on
  std::size_t now_ = 0;
  std::uint32_t first_ = 0;
  int steps_ = 1;  // with the plan in use; the first one of all was in use before
  int returns_ = 0;
  bool first_of_all_ = false;  // begin_first_of_all
  std::uint64_t last_ns_ = 0;
  RunPlan last_;
};

}  // namespace stagehand::core
