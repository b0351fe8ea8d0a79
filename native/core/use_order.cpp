#include "core/use_order.hpp"

#include <algorithm>

namespace stagehand::core {

void UseOrder::presume(std::span<const GroupId> groups) {
  for (const GroupId group : groups) {
    past_.push_back({group, UseKind::forward});
  }
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
    past_.push_back({*group, UseKind::backward});
  }
  expect();
}

bool UseOrder::used(Use use) {
  if (!past_.empty() && past_.back() == use) {
    return false;
  }
  past_.push_back(use);
  if (past_.size() > kRemembered) {
    past_.pop_front();
  }
  expect();
  return true;
}

void UseOrder::forget(GroupId group) {
  std::erase_if(past_, [&](const Use& use) { return use.group == group; });
  expect();
}

// The place in the past that is most like now: the same use, and the most of what came before it;
// of several the newest. past_.size() where there is none.
std::size_t UseOrder::likeliest(bool any_kind) const {
  const std::size_t now = past_.size() - 1;
  std::size_t found = past_.size();
  std::size_t most = 0;
  std::size_t places = 0;
  for (std::size_t i = now; i-- > 0 && places < kPlaces;) {
    if (past_[i].group != past_[now].group || (!any_kind && past_[i] != past_[now])) {
      continue;
    }
    ++places;
    std::size_t same = 1;
    while (same < kContext && same <= i && past_[i - same] == past_[now - same]) {
      ++same;
    }
    if (same > most) {
      most = same;
      found = i;
    }
  }
  return found;
}

// What followed that place, up to now: then it would begin again.
void UseOrder::expect() {
  upcoming_.clear();
  rest_ = 0;
  std::fill(next_.begin(), next_.end(), kNever);
  std::fill(backward_.begin(), backward_.end(), kNever);
  if (past_.empty()) {
    return;
  }
  std::size_t place = likeliest(false);
  if (place == past_.size()) {
    place = likeliest(true);
  }
  for (std::size_t i = place + 1; i < past_.size(); ++i) {
    const Use use = past_[i];
    upcoming_.push_back(use);
    const auto count = static_cast<std::uint32_t>(upcoming_.size());
    rest_ += rest_ + 1 == count && use.kind == past_.back().kind ? 1 : 0;
    if (use.group >= next_.size()) {
      next_.resize(use.group + 1, kNever);
      backward_.resize(use.group + 1, kNever);
    }
    next_[use.group] = std::min(next_[use.group], count);
    if (use.kind == UseKind::backward) {
      backward_[use.group] = std::min(backward_[use.group], count);
    }
  }
}

}  // namespace stagehand::core
