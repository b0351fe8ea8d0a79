// Free blocks by size: best fit, without allocating. Bins are logarithmic with 32 steps an octave,
// so sizes up to 16 KiB have a bin each and larger bins span 1/32 of their size.
// The two-level bitmap follows the TLSF allocator (Masmano et al., 2004).
#pragma once

#include <array>
#include <bit>

#include "core/block.hpp"

namespace stagehand::core {

class FreeIndex {
 public:
  void insert(Block* block);
  void remove(Block* block);
  // The smallest block of at least `bytes` among those looked at; the lower address on a tie.
  // Looks at no more than kScan blocks of a bin, so the time is bounded.
  Block* best_fit(Bytes bytes) const;
  // Hands out blocks of at least `bytes`, from the smallest bin up, until `take` answers false.
  template <class Take>
  void from_smallest(Bytes bytes, Take take) const {
    const Bin least = bin_of(bytes);
    for (unsigned octave = least.octave; octave < kOctaves; ++octave) {
      if ((octaves_ >> octave & 1) == 0) {
        continue;
      }
      for (unsigned step = octave == least.octave ? least.step : 0; step < kSteps; ++step) {
        for (Block* b = heads_[octave][step]; b != nullptr; b = b->bin_next) {
          if (b->size >= bytes && !take(b)) {
            return;
          }
        }
      }
    }
  }

 private:
  static constexpr unsigned kSteps = 32;
  static constexpr unsigned kOctaves = 42;  // up to 2^42 units of 512 bytes
  static constexpr unsigned kScan = 64;

  struct Bin {
    unsigned octave;
    unsigned step;
  };
  static constexpr Bin bin_of(Bytes bytes) {
    const Bytes units = bytes / kBlockUnit;
    if (units < kSteps) {
      return {0, static_cast<unsigned>(units)};
    }
    const unsigned top = static_cast<unsigned>(std::bit_width(units)) - 1;  // >= 5
    return {top - 4, static_cast<unsigned>((units >> (top - 5)) & (kSteps - 1))};
  }
  Block* smallest_in(Bin bin, Bytes bytes) const;

  std::array<std::array<Block*, kSteps>, kOctaves> heads_{};
  std::array<std::uint32_t, kOctaves> steps_{};  // bit: that bin is not empty
  std::uint64_t octaves_ = 0;                    // bit: that octave is not empty
};

}  // namespace stagehand::core
