// Where torch maps pages of its expandable segments. Pure.
#pragma once

#include <span>

#include "core/cache_map.hpp"

namespace stagehand::core {

struct PageGrowth {
  Bytes bytes = 0;
  bool at_end = false;  // behind the last mapped page, not in a gap between two
};

// For a request that no hole serves: at the lowest address where free memory and gaps side by side
// hold it (c10's find_expandable_block). `stretches` are in address order; those of the owner asked
// for count, and so do blocks at the addresses of `departing`, sorted, as free. Nothing where the
// owner has no expandable segment, or a hole is there.
PageGrowth growth_of(std::span<const CacheMap::Stretch> stretches,
                     std::span<const Address> departing, Bytes request);

}  // namespace stagehand::core
