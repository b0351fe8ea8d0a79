// What torch's cache would grow by for some requests, once all has left that can. Pure.
#pragma once

#include <span>
#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

// Stretches of one segment side by side that are free, or can be.
struct FreeRun {
  Bytes bytes = 0;       // that can serve whoever asks
  Bytes gives_back = 0;  // that torch can give back, as long as it serves nobody
  bool at_end = false;   // of pages, and more can be mapped behind it
};

// Each request is served by the smallest run that holds it, as torch does; else torch maps a
// segment of its own for it, or the pages that the run at the end lacks. Small ones lie elsewhere,
// and count nothing. Less than 0: it gives back more than it maps. `runs` is used up.
std::int64_t growth_of(std::vector<FreeRun>& runs, std::span<const Bytes> requests, bool by_pages);

}  // namespace stagehand::core
