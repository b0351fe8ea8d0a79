// Which slabs hold so many bytes: a pure decision.
#pragma once

#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

// The classes of the pinned pool, ascending, and how many slabs of each are made at the start.
struct SizeClasses {
  std::vector<Bytes> bytes{1_MiB, 4_MiB, 16_MiB, 64_MiB, 256_MiB};
  std::vector<std::uint32_t> counts{512, 2, 2, 2, 2};
};

// Every size a slab comes in, ascending: first the cells, which are equal parts (1/2, 1/4, …) of a
// slab of the smallest class, then the classes.
struct SlabSizes {
  std::vector<Bytes> bytes;
  std::size_t cells = 0;  // how many of them are cells

  SlabSizes() = default;
  explicit SlabSizes(const SizeClasses& classes);

  bool is_cell(std::size_t size) const { return size < cells; }
  // The class to have more of when a slab of this size is wanted.
  std::size_t class_of(std::size_t size) const { return is_cell(size) ? cells : size; }
  // The size of the next slab for a storage of `total` bytes of which `left` have none yet: the
  // smallest that holds them, if at most kWaste of the storage's slabs is empty then; else the
  // largest that they fill. 5 MiB are 4 + 1; 15 MiB are one of 16.
  std::size_t choose(Bytes left, Bytes total) const;

  static constexpr Bytes kWaste = 7;             // one part in so many
  static constexpr Bytes kUndivided = 64_KiB;    // up to here one slab, whatever it wastes: a copy
                                                 // costs the same however small
  static constexpr Bytes kSmallestCell = 4_KiB;  // also the least that a class is cut to,
  static constexpr std::size_t kMostCells = 8;   // and so many halvings: 256 cells a slab at most
};

}  // namespace stagehand::core
