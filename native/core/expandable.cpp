#include "core/expandable.hpp"

#include <algorithm>

namespace stagehand::core {

PageGrowth growth_of(std::span<const CacheMap::Stretch> stretches,
                     std::span<const Address> departing, Bytes request) {
  Address end = 0;  // of the stretch before
  Bytes have = 0;   // free or unmapped, up to there
  Bytes growth = 0;
  const auto grow = [&](Bytes gap) {
    const Bytes pages = std::min(gap, round_up(request - have, CacheMap::kPage));
    have += pages;
    growth += pages;
  };
  for (const CacheMap::Stretch& one : stretches) {
    if (!one.of_owner || !one.by_pages) {
      continue;
    }
    if (end != 0 && one.address != end && have < request) {
      grow(one.address - end);
    }
    end = one.address + one.bytes;
    if (one.hole || std::binary_search(departing.begin(), departing.end(), one.address)) {
      have += one.bytes;
    } else if (have >= request) {
      return {growth, false};
    } else {
      have = growth = 0;
    }
  }
  if (end == 0 || have >= request) {
    return {growth, false};
  }
  grow(kUnlimited);
  return {growth, true};
}

}  // namespace stagehand::core
