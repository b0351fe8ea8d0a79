// In which order the planned copies out of a step are made. Each record can be copied once it is
// retained, and has to be before its memory is asked for; the lane takes one after the other. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

struct PlannedCopy {
  std::uint32_t index = 0;  // which record it is of
  std::uint64_t ready_ns = 0;
  Bytes bytes = 0;
  std::uint32_t left_as = 0;  // which of those that left it was, when such a step ran last
};

// Whenever the lane is free, the one that left first of those that are ready: Jackson's rule for
// due dates, with release times, not preempted. The lane never waits while one is ready. Indices.
std::vector<std::uint32_t> copy_order(std::vector<PlannedCopy> copies, double bytes_per_ns);

}  // namespace stagehand::core
