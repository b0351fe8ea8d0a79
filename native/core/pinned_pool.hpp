// The pinned pool: slabs of page-locked host memory in size classes, and cells, the parts that a
// slab of the smallest class is cut into for what is smaller. Only the books: who makes the memory
// (core/pinner) does so without a lock, between `start_growth` and `finish_growth`. Guarded by the
// lock of the tier that owns it (core/pinned_tier).
//
// A slab carries the ticks of the last copies that name it and is used again only behind them
// (rule S5), by waits on the device. A slab that was cut is behind the copies of all its cells.
//
// Algebra, asserted by `broken`:
//   free slabs + taken slabs + cut slabs   == pinned_bytes   == all chunks
//   free cells + taken cells               == cut slabs
//   taken slabs + taken cells              == pinned_used_bytes >= pinned_waste_bytes
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <vector>

#include "core/counters.hpp"
#include "core/demand.hpp"
#include "core/pinner.hpp"
#include "core/size_class.hpp"
#include "core/stream_clock.hpp"

namespace stagehand::core {

struct Slab {
  std::byte* host = nullptr;
  Bytes size = 0;
  Bytes filled = 0;           // while taken: how many bytes of it are used
  std::size_t slab_size = 0;  // as SlabSizes counts them
  std::uint32_t chunk = 0;    // the number of its chunk; 0: pageable
  std::uint32_t taken_cells = 0;
  bool pageable = false;
  Slab* parent = nullptr;           // of a cell: the slab it is a part of
  Demand::Entry* demand = nullptr;  // of a storage's first slab
  Fence fence;                      // the copies that named it last

  // Whether one copy can fill this slab and go on in `next`.
  bool runs_into(const Slab& next) const {
    return !pageable && chunk == next.chunk && host + size == next.host;
  }
};

class PinnedPool {
 public:
  explicit PinnedPool(Counters& counters) : counters_(counters) { configure({}, kUnlimited); }

  // Other sizes only while there is no chunk. Slabs of the initial counts are due from here on, and
  // more until there are `first` bytes.
  // `with_weights`: the limit counts the host copies of weights, too.
  void configure(const SizeClasses& classes, Bytes host_limit, Bytes first = 0,
                 bool with_weights = false);
  const SizeClasses& classes() const { return classes_; }

  // Slabs for `bytes`, appended to `slabs`: as SlabSizes chooses them, or where there is none of
  // a size, smaller ones of at least kFill. With `squeeze` any that there is, larger ones first.
  // False: none were taken, and one of `missing` bytes is what was not there.
  bool take(Bytes bytes, bool squeeze, std::vector<Slab*>* slabs, Bytes* missing);
  // A slab outside the pool, used when nothing can be pinned: over `host`, which map_host made.
  Slab* add_pageable(std::byte* host, Bytes bytes);
  static Bytes pageable_bytes(Bytes bytes) { return round_up(bytes, 4_KiB); }
  // The memory of a pageable slab is the caller's again, to be unmapped.
  void give(Slab* slab);

  // Growth: what to map and pin now so that `take(wanted)` goes on; its bytes count against the
  // host limit from here on. Of size 0 when the limit is reached.
  Chunk start_growth(Bytes wanted);
  // One in `of` storages of that size will be asked for in this step.
  void expect(Bytes bytes, Bytes of);
  // Of the initial counts and of `first`, what is lacking waits for the next slab that is taken or
  // expected, unless `first` is 0.
  void begin_step();
  // What is lacking of them is wanted now.
  void want_first();
  // The same for who grows ahead of need: spare slabs where slabs were taken last, what is
  // expected, then the initial counts, then what `first` lacks.
  Chunk start_growth_ahead();
  // Not pinned: the driver refuses more. It is asked again after a while (`retry`), since asking
  // costs milliseconds.
  void finish_growth(Chunk chunk, bool pinned);
  // Whether slabs of the class that serves `wanted` are being made.
  bool coming(Bytes wanted) const { return coming_[class_for(wanted)] > 0; }
  // A step begins, or a copy found no slab: after so many of them what was refused is asked for
  // again, then after twice as many.
  void retry();
  // Whether start_growth_ahead may have something to do.
  bool growth_due() const { return due_; }
  bool growing() const { return growing_ > 0; }
  // No growth is started while held.
  void hold(bool held) { held_ = held; }
  bool held() const { return held_; }

  // No slab is taken, pageable ones included, and none is being made.
  bool idle() const {
    return counters_.pinned_used_bytes == 0 && counters_.pageable_bytes == 0 && growing_ == 0;
  }
  // Whether no copy still names a slab that was given back.
  bool quiet(ClockBank& clocks) const;
  // Forgets every slab, only while idle and quiet, and returns their memory to be unpinned.
  std::vector<Chunk> take_chunks();
  // Forgets the newest chunks of which no slab is taken or named by a copy under way, until
  // pinned_bytes <= keep, and returns them. The initial counts are not made up for.
  std::vector<Chunk> take_chunks_above(Bytes keep, ClockBank& clocks);

  // So much more host memory is pinned for weights, outside of the pool. False, and it is not
  // counted: the limit counts it and leaves no room.
  bool add_weights(Bytes bytes);
  void remove_weights(Bytes bytes) { counters_.weights_pinned_bytes -= bytes; }

  Demand& demand() { return demand_; }
  // Null, or what is wrong. Walks everything.
  const char* broken() const;

 private:
  static constexpr Bytes kFill = 1_MiB;     // a large storage is not spread over smaller slabs
  static constexpr Bytes kFirst = 16_MiB;   // slabs that most storages fill; smaller ones do not
  static constexpr Bytes kPiece = 256_MiB;  // one growth pins so much, or one slab
  static constexpr Bytes kSpare = 256_MiB;  // free slabs to keep ahead of need,
  static constexpr Bytes kSpareShare = 4;   // and this share of what is taken

  Slab* take_free(std::size_t size);
  Slab* take_filling(std::size_t size, Bytes left);
  Slab* take_any(std::size_t size);
  void put_back(Slab* slab);
  bool cut(std::size_t cell);
  bool make_whole(Slab* parent, std::size_t cell);
  bool make_whole_any();
  std::size_t class_for(Bytes wanted) const {
    return sizes_.class_of(sizes_.choose(wanted, wanted));
  }
  Chunk reserve(std::size_t size, Bytes want);
  void want_spare(std::size_t size);
  bool first_waits() const;
  Slab* node();
  bool passed(const Fence& fence, ClockBank& clocks) const;
  Bytes free_bytes(std::size_t size) const { return free_[size].size() * sizes_.bytes[size]; }
  Bytes planned() const;
  Bytes room() const;
  Bytes limit() const;

  Counters& counters_;
  SizeClasses classes_;
  SlabSizes sizes_;
  Demand demand_;
  Bytes host_limit_ = kUnlimited;
  bool with_weights_ = false;
  Bytes refused_at_ = kUnlimited;  // pinned bytes beyond which the driver made no more
  std::uint32_t patience_ = 1;     // how often `retry` is called before it is asked again
  std::uint32_t retries_ = 0;
  std::deque<Slab> nodes_;
  std::vector<Slab*> spare_nodes_;
  std::vector<Chunk> chunks_;
  // By size. Free slabs are handed out round in the order of addresses: a storage of several gets
  // neighbours, and the one unused longest comes first.
  std::vector<std::map<std::byte*, Slab*>> free_;
  std::vector<std::byte*> next_;
  std::vector<Slab*> uncut_later_;  // a slab all of whose cells are back: kept for the next ones
  Bytes first_ = 0;
  bool first_due_ = true;        // not once a step has begun that needs none
  std::vector<Bytes> initial_;   // bytes of the initial counts that were not started yet
  std::vector<Bytes> made_;      // bytes of all chunks
  std::vector<Bytes> coming_;    // bytes being made
  std::vector<Bytes> expected_;  // bytes that this step is likely to take
  std::vector<bool> spare_due_;
  Bytes cut_bytes_ = 0;         // slabs that are cut,
  Bytes taken_cell_bytes_ = 0;  // and what of them is taken
  std::uint32_t chunk_numbers_ = 0;
  int growing_ = 0;
  bool due_ = false;
  bool held_ = false;
};

}  // namespace stagehand::core
