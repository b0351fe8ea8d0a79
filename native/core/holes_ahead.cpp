#include "core/holes_ahead.hpp"

#include <algorithm>

namespace stagehand::core {

void HolesAhead::lacked(std::uint64_t plan, const Hole& hole, std::uint32_t step) {
  const auto [found, added] = known_.try_emplace({plan, hole.place}, Known{hole});
  if (!added) {
    Known& known = found->second;
    known.hole.bytes = std::max(known.hole.bytes, hole.bytes);
    known.hole.owner = hole.owner;
    if (!known.hole.first && known.postponed_in == step) {
      known.hole.first = true;
    } else {
      known.ahead += kEarlier;
    }
  } else if (known_.size() > kMost) {
    known_.erase(known_.begin());
  }
}

void HolesAhead::postponed(std::uint64_t plan, const Hole& hole, std::uint32_t step) {
  if (const auto found = known_.find({plan, hole.place}); found != known_.end()) {
    found->second.postponed_in = step;
  }
}

const HolesAhead::Hole* HolesAhead::wanted(std::uint64_t plan, std::size_t now, std::size_t from,
                                           bool* soon) const {
  const auto end = known_.upper_bound({plan, now + kEarliest + kForNothing});
  for (auto one = known_.lower_bound({plan, from}); one != end; ++one) {
    const Known& known = one->second;
    if (known.ahead <= kEarliest && now + known.ahead + kForNothing >= known.hole.place) {
      *soon = now + known.ahead >= known.hole.place;
      return &known.hole;
    }
  }
  return nullptr;
}

}  // namespace stagehand::core
