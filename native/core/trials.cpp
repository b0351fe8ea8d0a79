#include "core/trials.hpp"

#include <algorithm>
#include <utility>

namespace stagehand::core {

namespace {
constexpr std::uint64_t kNoise = 128;  // a step that is longer by less than one part is as long
constexpr std::uint64_t kWorse = 4;    // not worth another step: longer by one part
constexpr std::uint64_t kAgree = 32;   // two steps took as long: they differ by less than one part
constexpr std::uint64_t kFar = 32;     // what steps differ by counts up to one part
constexpr int kSettled = 2;            // steps, of which the first pays for the change
constexpr int kLongest = 6;
constexpr std::size_t kNewest = 4;  // steps count
constexpr Bytes kAlike = 16;        // plans differ where one part of what leaves does
}  // namespace

std::pair<Trials::Took, Trials::Took> Trials::Tried::least_two() const {
  if (newest.empty()) {
    constexpr Took kNone{~std::uint64_t{0}, 0};
    return {kNone, kNone};
  }
  std::vector<Took> sorted = newest;
  std::sort(sorted.begin(), sorted.end());
  return {sorted.front(), sorted[std::min<std::size_t>(1, sorted.size() - 1)]};
}

// What two steps did: one alone may have been lucky. A pause of the host's passes for computing, so
// the one with less of that says what both spent.
Trials::Took Trials::Tried::takes() const {
  const auto [one, two] = least_two();
  return {two.ns, std::max(one.spent_ns, two.spent_ns)};
}

bool Trials::Tried::agrees() const {
  const auto [one, two] = least_two();
  return two.ns - one.ns <= one.ns / kAgree;
}

void Trials::begin(RunPlan plan, std::uint32_t id) {
  const auto same =
      std::find_if(all_.begin(), all_.end(), [&](const Tried& one) { return one.plan == plan; });
  now_ = static_cast<std::size_t>(same - all_.begin());
  returns_ += same != all_.end() ? 1 : 0;
  if (same == all_.end()) {
    all_.push_back({plan, id, std::move(plan)});
  }
  steps_ = 0;
  last_ns_ = 0;
}

// A plan has its time as long as it gains by what its own steps teach. One that is preferred has it
// until two steps agree: none but one like it is tried after it, so nothing makes good what one bad
// step says.
bool Trials::took(const RunPlan& plan, std::uint64_t ns, std::uint64_t spent_ns) {
  if (++steps_ < kSettled) {
    return false;
  }
  const bool first = all_.empty();  // it is to be replaced at once
  if (first) {
    all_.push_back({plan, first_});
  }
  Tried& now = all_[now_];
  if (now.newest.empty() || ns <= std::min_element(now.newest.begin(), now.newest.end())->ns) {
    now.plan = plan;
  }
  if (now.newest.size() == kNewest) {
    now.newest.erase(now.newest.begin());
  }
  now.newest.push_back({ns, spent_ns});
  const std::uint64_t before = std::exchange(last_ns_, ns);
  if (before != 0 && last_ == plan) {
    const std::uint64_t differ = std::max(ns, before) - std::min(ns, before);
    now.differ_ns = std::max(now.differ_ns, std::min(differ, ns / kFar));  // one may be far longer
  }
  last_ = plan;
  const bool gains = before == 0 || ns + before / kNoise < before;
  const bool enough = !gains && (!now.preferred || now.agrees());
  return first || enough || steps_ >= kLongest || ns > best_ns() + best_ns() / kWorse;
}

void Trials::begin_first_of_all(RunPlan plan, std::uint32_t id) {
  begin(std::move(plan), id);
  prefer();
  first_of_all_ = true;
}

const RunPlan& Trials::keep_first_of_all() {
  Tried kept = std::move(all_[now_]);
  all_.clear();
  all_.push_back(std::move(kept));
  now_ = 0;
  first_of_all_ = false;
  return all_.front().plan;
}

void Trials::refuse_first_of_all() {
  all_.resize(1);
  all_.front().preferred = false;
  now_ = 0;
  steps_ = returns_ = 0;
  last_ns_ = 0;
  first_of_all_ = false;
}

bool Trials::tried(const RunPlan& plan, std::span<const KnownRecord> records) const {
  return std::any_of(all_.begin(), all_.end(), [&](const Tried& one) {
    if (one.begun == plan) {
      return true;
    }
    if (&one == all_.data() || one.plan.drops_late != plan.drops_late ||
        one.plan.fates.size() != plan.fates.size()) {
      return false;
    }
    Bytes leaves = 0;
    Bytes differs = 0;
    for (std::size_t i = 0; i < plan.fates.size(); ++i) {
      leaves += plan.fates[i] != Fate::stay ? records[i].bytes : 0;
      differs += plan.fates[i] != one.plan.fates[i] ? records[i].bytes : 0;
    }
    return differs <= leaves / kAlike;
  });
}

bool Trials::tried(bool drops_late) const {
  return std::any_of(all_.begin(), all_.end(),
                     [drops_late](const Tried& one) { return one.plan.drops_late == drops_late; });
}

const Trials::Tried* Trials::fastest() const {
  const auto least = std::min_element(all_.begin(), all_.end(), [](const Tried& a, const Tried& b) {
    return a.takes() < b.takes();
  });
  if (least == all_.end()) {
    return nullptr;
  }
  const std::uint64_t as_good = least->takes().ns + least->differ_ns;
  const auto preferred = std::find_if(all_.begin(), all_.end(), [&](const Tried& one) {
    return one.preferred && one.takes().ns <= as_good;
  });
  return preferred != all_.end() ? &*preferred : &*least;
}

bool Trials::prefers() const {
  return std::any_of(all_.begin(), all_.end(), [](const Tried& one) { return one.preferred; });
}

bool Trials::prefers_best() const {
  const Tried* found = fastest();
  return found != nullptr && found->preferred;
}

const RunPlan& Trials::best() const {
  static const RunPlan none;
  const Tried* found = fastest();
  return found != nullptr ? found->plan : none;
}

std::uint64_t Trials::best_ns() const {
  const Tried* found = fastest();
  return found != nullptr ? found->takes().ns : 0;
}

std::uint64_t Trials::best_spent_ns() const {
  const Tried* found = fastest();
  return found != nullptr ? found->takes().spent_ns : 0;
}

bool Trials::sure_of_best() const {
  return fastest() == all_.data() + now_ || returns_ >= kReturns;
}

}  // namespace stagehand::core
