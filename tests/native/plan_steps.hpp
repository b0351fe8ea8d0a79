// Steps as the plan alone is told of them.
#pragma once

#include <vector>

#include "core/plan.hpp"

namespace stagehand::core::test {

inline constexpr Bytes kHigh = 64_MiB;

// A step's forward: records of these sizes are saved, those named leave.
inline std::vector<Plan::Place> forward(Plan& plan, const std::vector<Bytes>& sizes,
                                        const std::vector<std::size_t>& leave = {},
                                        Bytes live = 0) {
  plan.begin_step(kHigh, live);
  std::vector<Plan::Place> places;
  for (const Bytes size : sizes) {
    places.push_back(plan.saved(size, {static_cast<std::uint32_t>(places.size()), 1}));
  }
  for (const std::size_t i : leave) {
    plan.evicted(places[i]);
  }
  return places;
}

// Its backward: newest first, or in the order given; every record is asked for and dies.
inline void backward(Plan& plan, const std::vector<Plan::Place>& places,
                     std::vector<std::size_t> order = {}) {
  for (std::size_t i = places.size(); order.size() < places.size() && i-- > 0;) {
    order.push_back(i);
  }
  for (const std::size_t i : order) {
    plan.unpacked(places[i]);
    plan.closed(places[i]);
  }
}

inline void step(Plan& plan, const std::vector<Bytes>& sizes, const std::vector<std::size_t>& leave,
                 Bytes live = 0) {
  backward(plan, forward(plan, sizes, leave, live));
}

}  // namespace stagehand::core::test
