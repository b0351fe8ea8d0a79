#include "core/free_runs.hpp"

#include <algorithm>

#include "core/cache_map.hpp"

namespace stagehand::core {

std::int64_t growth_of(std::vector<FreeRun>& runs, std::span<const Bytes> requests, bool by_pages) {
  Bytes growth = 0;
  for (const Bytes request : requests) {
    if (request <= kSmallLimit) {
      continue;
    }
    FreeRun* best = nullptr;
    FreeRun* last = nullptr;
    for (FreeRun& one : runs) {
      const bool holds = one.bytes >= request;
      best = holds && (best == nullptr || one.bytes < best->bytes) ? &one : best;
      last = one.at_end ? &one : last;
    }
    if (best == nullptr && last == nullptr) {
      best = &runs.emplace_back(FreeRun{0, 0, by_pages});
    } else if (best == nullptr) {
      best = last;
    }
    if (best->bytes < request) {
      const Bytes mapped = CacheMap::mapped_for(request - best->bytes, by_pages);
      growth += mapped;
      best->bytes += mapped;
    }
    best->bytes -= request;
    best->gives_back = 0;
  }
  Bytes back = 0;
  for (const FreeRun& one : runs) {
    back += one.gives_back;
  }
  return static_cast<std::int64_t>(growth) - static_cast<std::int64_t>(back);
}

}  // namespace stagehand::core
