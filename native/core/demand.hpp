// How many storages of each size hold host memory at once, at most: what the classes of the pinned
// pool could be chosen by. Bounded: past kExact distinct sizes, new ones are rounded up to an
// eighth of their power of two.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

class Demand {
 public:
  struct Entry {
    std::uint32_t now = 0;
    std::uint32_t peak = 0;  // so far
  };
  struct Peak {
    Bytes bytes = 0;
    std::uint32_t count = 0;
  };

  // One more storage of this size; `drop` takes what this returned.
  Entry* add(Bytes bytes);
  static void drop(Entry* entry) { --entry->now; }
  // Sizes of which there was one, ascending.
  std::vector<Peak> peaks() const;

 private:
  static constexpr std::size_t kExact = 256;

  std::map<Bytes, Entry> entries_;  // never erased from: entries stay where they are
};

}  // namespace stagehand::core
