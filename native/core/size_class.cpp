#include "core/size_class.hpp"

#include <algorithm>

namespace stagehand::core {

SlabSizes::SlabSizes(const SizeClasses& classes) : bytes(classes.bytes) {
  Bytes cell = bytes.front() / 2;
  for (; cells < kMostCells && cell >= kSmallestCell && cell % 512 == 0; cell /= 2) {
    bytes.insert(bytes.begin(), cell);
    ++cells;
  }
}

std::size_t SlabSizes::choose(Bytes left, Bytes total) const {
  const auto found = std::lower_bound(bytes.begin(), bytes.end(), left);
  if (found == bytes.end()) {
    return bytes.size() - 1;
  }
  const auto fit = static_cast<std::size_t>(found - bytes.begin());
  const Bytes all = total - left + bytes[fit];
  const bool tight = (bytes[fit] - left) * kWaste <= all;
  return fit == 0 || tight || total <= kUndivided ? fit : fit - 1;
}

}  // namespace stagehand::core
