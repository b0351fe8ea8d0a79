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
  // Between these two the pool is not idle: its classes stay as planned.
  void begin_growth() { ++growing_; }
  void end_growth() { --growing_; }
  // Maps and registers; waits for the driver, needs the context, holds no lock. False: no memory.
  bool prepare(Chunk* chunk) const;
  void adopt(const Chunk& chunk);
  // The driver refused to pin more: do not ask again, it costs milliseconds each time.
  void refused() { host_limit_ = counters_.pinned_bytes; }
  // A slab outside the pool, used when nothing can be pinned. Null when the host has no memory.
  Slab* take_pageable(Bytes wanted);

  // No slab is taken, pageable ones included, and none is being made.
  bool idle() const {
    return counters_.pinned_used_bytes == 0 && counters_.pageable_bytes == 0 && growing_ == 0;
  }
  // Whether no copy still names a slab that was given back.
  bool quiet(ClockBank& clocks) const;
  // Forgets every slab, only while idle and quiet, and returns their memory for `unmap`.
  std::vector<Chunk> take_chunks();
  // Unregisters and unmaps; waits for the driver, needs the context, holds no lock.
  void unmap(const std::vector<Chunk>& chunks) const;

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
  int growing_ = 0;
};

}  // namespace stagehand::core
