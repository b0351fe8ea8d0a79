#include "core/torch_limit.hpp"

#include <algorithm>

namespace stagehand::core {

bool TorchLimit::want(Bytes limit, Bytes device_bytes) {
  const std::lock_guard lock(mutex_);
  wanted_ =
      limit < device_bytes ? static_cast<double>(limit) / static_cast<double>(device_bytes) : kNone;
  turn_ += wanted_ != kNone || turn_ != 0 ? 1 : 0;
  return turn_ != applied_;
}

void TorchLimit::apply(const TorchSide& side, int device) {
  const auto due = [&] {
    const std::lock_guard lock(mutex_);
    return turn_ != applied_;
  };
  while (due()) {
    if (applying_.exchange(true)) {
      return;  // who is at it looks again
    }
    const double now = side.fraction(device);
    double share = 0;
    {
      const std::lock_guard lock(mutex_);
      applied_ = turn_;
      if (now != told_) {
        before_ = now;  // the user's own, also where it was changed meanwhile
      }
      share = wanted_ == kNone ? before_ : std::min(wanted_, before_);
    }
    side.set_fraction(device, share);
    const double told = side.fraction(device);
    {
      const std::lock_guard lock(mutex_);
      told_ = told;
    }
    applying_.store(false);
  }
}

}  // namespace stagehand::core
