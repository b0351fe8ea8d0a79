#include "core/usual_addresses.hpp"

#include <algorithm>
#include <new>
#include <utility>

namespace stagehand::core {

// What goes over `high` is mapped and given back in each step, so that none is like another.
void UsualAddresses::begin_step(std::uint64_t plan, const Done& done) {
  const Done before = std::exchange(done_, done);
  if (now_ != nullptr) {
    const bool over = done.over_bytes != before.over_bytes;
    now_->kept = !over && (now_->kept || done.gathers != before.gathers);
    if (over) {
      now_->usual.clear();
    }
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
      all_.push_front({plan});
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

UsualAddresses::Usual UsualAddresses::of(Key key, Bytes bytes) const {
  const Usual* found = key != 0 && now_ != nullptr ? now_->usual.find(key) : nullptr;
  return found != nullptr && found->bytes == bytes ? *found : Usual{};
}

// When it came first at this address stays: each step would wait a little longer else.
void UsualAddresses::note(Key key, const Usual& usual) {
  if (key == 0 || now_ == nullptr) {
    return;
  }
  const Usual* found = now_->usual.find(key);
  if (found != nullptr && found->at == usual.at && found->bytes == usual.bytes &&
      found->when <= usual.when) {
    return;
  }
  try {
    now_->usual.put(key, usual);
  } catch (const std::bad_alloc&) {
    // It is not known then.
  }
}

}  // namespace stagehand::core
