// What whoever else uses the link asks the lanes to keep to.
#pragma once

#include "core/types.hpp"

namespace stagehand::core {

// 0 is no limit, and of `piece` the lane's own.
struct LaneLimits {
  // Copies queued on a lane and not yet finished, from which on copies made ahead of need
  // (write-back, prefetch) hold back. A copy somebody waits for always goes.
  std::uint32_t inflight_d2h = 0;
  std::uint32_t inflight_h2d = 0;
  // Bytes per second, over all copies of a lane.
  Bytes rate_d2h = 0;
  Bytes rate_h2d = 0;
  // The most of ours that a copy of somebody else's has to wait behind on the same copy engine.
  // A small one costs bandwidth: lane.hpp.
  Bytes piece = 0;

  friend bool operator==(const LaneLimits&, const LaneLimits&) = default;
};

}  // namespace stagehand::core
