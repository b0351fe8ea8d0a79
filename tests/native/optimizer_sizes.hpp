// What an optimizer keeps. Apart: benchmarks/native/replay is built over older rigs, too.
#pragma once

#include <algorithm>
#include <vector>

#include "core/types.hpp"

namespace stagehand::core::test {

// As of AdamW: of a few sizes, in all so much.
inline std::vector<Bytes> optimizer_sizes(Bytes all) {
  std::vector<Bytes> sizes;
  for (Bytes i = 0; all > 0; ++i) {
    sizes.push_back(std::min(all, (4 + i % 5 * 4) * 1_MiB));
    all -= sizes.back();
  }
  return sizes;
}

}  // namespace stagehand::core::test
