#include "core/trials.hpp"

#include <algorithm>
#include <utility>

namespace stagehand::core {

namespace {
constexpr std::uint64_t kNoise = 128;  // a step that is longer by less than one part is as long
constexpr std::uint64_t kWorse = 4;    // not worth another step: longer by one part
constexpr int kSettled = 2;            // steps, of which the first pays for the change
constexpr int kLongest = 6;
constexpr Bytes kAlike = 16;  // plans differ where one part of what leaves does
}  // namespace

void Trials::begin(std::vector<Fate> plan) {
  plans_.push_back(std::move(plan));
  steps_ = 0;
  last_ns_ = 0;
}

// A plan has its time as long as it gains by what its own steps teach.
bool Trials::took(const std::vector<Fate>& plan, std::uint64_t ns) {
  if (++steps_ < kSettled) {
    return false;
  }
  const std::uint64_t before = std::exchange(last_ns_, ns);
  if (best_ns_ == 0 || ns < best_ns_) {
    best_ = plan;
    best_ns_ = ns;
  }
  const bool gains = before == 0 || ns + before / kNoise < before;
  const bool first = plans_.empty();  // it is to be replaced at once
  return first || !gains || steps_ >= kLongest || ns > best_ns_ + best_ns_ / kWorse;
}

bool Trials::tried(const std::vector<Fate>& plan, std::span<const KnownRecord> records) const {
  return std::any_of(plans_.begin(), plans_.end(), [&](const std::vector<Fate>& one) {
    if (one.size() != plan.size()) {
      return false;
    }
    Bytes leaves = 0;
    Bytes differs = 0;
    for (std::size_t i = 0; i < plan.size(); ++i) {
      leaves += plan[i] != Fate::stay ? records[i].bytes : 0;
      differs += plan[i] != one[i] ? records[i].bytes : 0;
    }
    return differs <= leaves / kAlike;
  });
}

void Trials::refuse(std::size_t record) {
  if (record < best_.size() && best_[record] == Fate::drop) {
    best_[record] = Fate::leave;
  }
}

}  // namespace stagehand::core
