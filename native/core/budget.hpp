// The budget of one device: the two watermarks and the hard limit.
#pragma once

#include "core/types.hpp"

namespace stagehand::core {

struct Budget {
  Bytes high = kUnlimited;   // mapped stays at or below, as long as evicting can make it so
  Bytes low = kUnlimited;    // reactive eviction goes on until occupied is at or below
  Bytes limit = kUnlimited;  // mapped never crosses
  bool armed = false;        // a pool is open, or records of one are alive
};

// How much physical memory a request may add: all it wants while that stays under `ceiling`.
constexpr bool fits_under(Bytes mapped, Bytes growth, Bytes ceiling) {
  return growth <= ceiling && mapped <= ceiling - growth;
}

// What of so much one stream's memory takes in one piece: the others have requests, too.
constexpr Bytes but_for_others(Bytes bytes) { return bytes - bytes / 16; }

}  // namespace stagehand::core
