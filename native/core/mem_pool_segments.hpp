// The segments of torch.cuda.MemPool that torch asks of us: cut from a heap of their own, refused
// above `limit`, and kept for the next pool once a MemPool gives them back. Also which MemPools are
// ours.
//
// Guarded by the device's lock.
#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "core/cache_map.hpp"
#include "core/device_heap.hpp"

namespace stagehand::core {

class MemPoolSegments {
 public:
  using Pool = std::array<std::uint64_t, 2>;  // torch's MempoolId_t; {0, 0} is none

  MemPoolSegments(int device, Bytes device_bytes, Bytes granularity, ClockBank& clocks,
                  CacheMap& cache)
      : cache_(cache), heap_(device, device_bytes, granularity, clocks, counters_) {}

  // From segments that an earlier MemPool gave back, else from the driver, while what torch has
  // reserved stays at or below `limit`. 0 where it would not.
  Address take(Bytes bytes, driver::Stream stream, Bytes limit);
  void give(Address address);

  // The pool is ours, and the newest.
  void own(Pool pool);
  Pool newest() const { return newest_; }
  // Whether the step that ends with this call had one.
  bool step_had_pool() { return std::exchange(in_step_, false); }
  bool ours(const Pool& pool) const;

  // Mapped, and of no MemPool now.
  Bytes spare() const { return counters_.mapped - counters_.occupied; }
  bool has_free_piece() const { return heap_.has_free_piece(); }
  Bytes trim() { return heap_.trim(0); }
  Status add_peer(int device) { return heap_.add_peer(device); }
  const char* broken() const { return heap_.broken(); }

 private:
  CacheMap& cache_;
  Counters counters_;
  DeviceHeap heap_;
  Pool newest_{};
  bool in_step_ = false;
  std::vector<Pool> pools_;  // those whose segments are there, and the newest
};

}  // namespace stagehand::core
