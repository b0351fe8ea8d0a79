#include "core/plan.hpp"

namespace stagehand::core {

void Plan::begin_step() {
  if (used_ && !now_.empty()) {
    last_.swap(now_);
  }
  now_.clear();
  used_ = false;
  diverged_ = false;
  ++step_;
}

Plan::Place Plan::saved(Bytes block_bytes) {
  const auto index = static_cast<std::uint32_t>(now_.size());
  if (index >= last_.size() || last_[index].block_bytes != block_bytes) {
    diverged_ = true;
  }
  now_.push_back({block_bytes, false});
  return {step_, index};
}

void Plan::evicted(Place place) {
  if (place.step == step_ && place.index < now_.size()) {
    now_[place.index].evicted = true;
  }
}

bool Plan::leaves(Place place) const {
  return follows() && place.step == step_ && last_[place.index].evicted;
}

}  // namespace stagehand::core
