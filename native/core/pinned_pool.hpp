// The pinned pool: slabs of page-locked host memory in size classes.
//
// A slab carries the ticks of the last copies that name it and is used again only behind them
// (rule S5), by waits on the device. Growing maps and registers memory, which takes the driver
// milliseconds: `prepare` does that without the device's lock, `adopt` puts it on the books.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "core/counters.hpp"
#include "core/size_class.hpp"
#include "core/stream_clock.hpp"

namespace stagehand::core {

struct Slab {
  std::byte* host = nullptr;
  Bytes size = 0;
  std::uint32_t size_class = 0;
  bool pageable = false;
  Fence fence;  // the copies that named it last
};

class PinnedPool {
 public:
  // One piece of host memory, registered or, where the driver refuses, pageable.
  struct Chunk {
    std::byte* host = nullptr;
    Bytes size = 0;
    Bytes slab_bytes = 0;
    std::uint32_t size_class = 0;
    bool registered = false;
  };

  PinnedPool(const driver::Table& table, Counters& counters) : table_(table), counters_(counters) {}

  // Before the first slab is taken, or while none is. Slabs of other sizes are released.
  void configure(const SizeClasses& classes, Bytes host_limit);
  const SizeClasses& classes() const { return classes_; }

  // A slab for up to `wanted` bytes (a larger request takes the largest class and comes again):
  // the smallest class that fits, else the next larger that has one. Null when all are in use.
  Slab* take(Bytes wanted);
  // The largest slab there is, for a copy spread over several, when the pool cannot grow.
  Slab* take_smaller();
  void give(Slab* slab);

  // What to make so that `take(wanted)` succeeds: the classes' own first slabs, then growth.
  Chunk plan_growth(Bytes wanted) const;
  // Maps and registers; waits for the driver, needs the context, holds no lock. False: no memory.
  bool prepare(Chunk* chunk) const;
  void adopt(const Chunk& chunk);
  // The driver refused to pin more: do not ask again, it costs milliseconds each time.
  void refused() { host_limit_ = counters_.pinned_bytes; }
  // A slab outside the pool, used when nothing can be pinned. Null when the host has no memory.
  Slab* take_pageable(Bytes wanted);

  bool idle() const { return counters_.pinned_used_bytes == 0; }
  // Unregisters and unmaps everything; only while idle and no copy is in flight. Needs the context.
  void release();

 private:
  Slab* take_from(std::size_t size_class);

  const driver::Table& table_;
  Counters& counters_;
  SizeClasses classes_;
  Bytes host_limit_ = kUnlimited;
  std::deque<Slab> nodes_;
  std::vector<Slab*> spare_nodes_;
  std::vector<std::deque<Slab*>> free_;  // by class, longest unused first
  std::vector<std::uint32_t> made_;      // slabs made, by class
  std::vector<Chunk> chunks_;
};

}  // namespace stagehand::core
