#include "core/usual_addresses.hpp"

#include <algorithm>
#include <new>
#include <utility>

namespace stagehand::core {

void UsualAddresses::begin_step(std::uint32_t trace, std::uint64_t plan, std::uint64_t gathers) {
  const bool gathered = std::exchange(gathers_, gathers) != gathers;
  if (now_ != nullptr && gathered) {
    now_->kept = true;
  }
  now_ = nullptr;
  place_ = number_ = 0;
  if (plan == 0) {
    return;
  }
  const auto known =
      std::find_if(all_.begin(), all_.end(), [&](const One& one) { return one.plan == plan; });
  if (known != all_.end()) {
    all_.splice(all_.begin(), all_, known);
  } else {
    try {
      all_.push_front({plan, trace});
    } catch (const std::bad_alloc&) {
      return;
    }
    if (all_.size() > kPlans) {
      all_.pop_back();
    }
  }
  now_ = &all_.front();
}

UsualAddresses::Key UsualAddresses::request(std::size_t place) {
  number_ = std::exchange(place_, place) == place ? number_ + 1 : 1;
  return number_ < kAtOnePlace ? static_cast<Key>(place) * kAtOnePlace + number_ : 0;
}

UsualAddresses::Usual UsualAddresses::of(Key key) const {
  const Usual* found = key != 0 && now_ != nullptr ? now_->usual.find(key) : nullptr;
  return found != nullptr ? *found : Usual{};
}

void UsualAddresses::note(Key key, const Usual& usual) {
  if (key == 0 || now_ == nullptr) {
    return;
  }
  try {
    now_->usual.put(key, usual);
  } catch (const std::bad_alloc&) {
    // It is not known then.
  }
}

void UsualAddresses::forget(Key key) {
  if (key != 0 && now_ != nullptr) {
    now_->usual.erase(key);
  }
}

}  // namespace stagehand::core
