// Which slabs hold so many bytes: a pure decision.
#pragma once

#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

// The classes of the pinned pool, ascending, and how many slabs of each are made at the start.
struct SizeClasses {
  std::vector<Bytes> bytes{1_MiB, 4_MiB, 16_MiB, 64_MiB, 256_MiB};
  std::vector<std::uint32_t> counts{512, 2, 2, 2, 2};

  std::size_t size() const { return bytes.size(); }
  // The smallest class that holds `wanted`; the largest where none does.
  std::size_t fit(Bytes wanted) const {
    std::size_t i = 0;
    while (i + 1 < bytes.size() && bytes[i] < wanted) {
      ++i;
    }
    return i;
  }
};

}  // namespace stagehand::core
