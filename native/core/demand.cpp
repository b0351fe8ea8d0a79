#include "core/demand.hpp"

#include <algorithm>
#include <bit>

namespace stagehand::core {

Demand::Entry* Demand::add(Bytes bytes) {
  auto found = entries_.find(bytes);
  if (found == entries_.end()) {
    const Bytes eighth = std::max<Bytes>(std::bit_floor(bytes) / 8, 1);
    const Bytes key = entries_.size() < kExact ? bytes : round_up(bytes, eighth);
    found = entries_.try_emplace(key).first;
  }
  Entry& entry = found->second;
  entry.peak = std::max(entry.peak, ++entry.now);
  return &entry;
}

std::vector<Demand::Peak> Demand::peaks() const {
  std::vector<Peak> found;
  for (const auto& [bytes, entry] : entries_) {
    if (entry.peak > 0) {
      found.push_back({bytes, entry.peak});
    }
  }
  return found;
}

}  // namespace stagehand::core
