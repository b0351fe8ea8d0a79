#include "core/copy_order.hpp"

#include <algorithm>
#include <queue>
#include <tuple>

namespace stagehand::core {

std::vector<std::uint32_t> copy_order(std::vector<PlannedCopy> copies, double bytes_per_ns) {
  std::sort(copies.begin(), copies.end(), [](const PlannedCopy& a, const PlannedCopy& b) {
    return std::tuple(a.ready_ns, a.index) < std::tuple(b.ready_ns, b.index);
  });
  const auto later = [&](std::size_t a, std::size_t b) {
    return std::tuple(copies[a].left_as, a) > std::tuple(copies[b].left_as, b);
  };
  std::priority_queue<std::size_t, std::vector<std::size_t>, decltype(later)> ready(later);
  std::vector<std::uint32_t> order;
  order.reserve(copies.size());
  double free_ns = 0;
  for (std::size_t next = 0; next < copies.size() || !ready.empty();) {
    if (ready.empty()) {
      free_ns = std::max(free_ns, static_cast<double>(copies[next].ready_ns));
    }
    for (; next < copies.size() && static_cast<double>(copies[next].ready_ns) <= free_ns; ++next) {
      ready.push(next);
    }
    const PlannedCopy& one = copies[ready.top()];
    ready.pop();
    order.push_back(one.index);
    free_ns += static_cast<double>(one.bytes) / bytes_per_ns;
  }
  return order;
}

}  // namespace stagehand::core
