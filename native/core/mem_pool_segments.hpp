// The segments of torch.cuda.MemPool that torch asks of us: cut from a heap of their own, refused
// above `limit`, and kept for the next pool once a MemPool gives them back. Also which MemPools are
// ours, and which one this thread allocates from between pool entry and exit.
//
// Guarded by the device's lock.
#pragma once

#include <array>
#include <memory>
#include <thread>
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

  void enter(Pool pool);
  // Whose blocks torch hands out to this thread for work on `stream`.
  CacheMap::Owner owner_here(driver::Stream stream) const;
  bool ours(const Pool& pool) const;
  // Whether a thread allocates from one now: torch gives no segment back meanwhile.
  bool entered() const { return thread_ != std::thread::id{}; }

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
  Pool pool_{};
  std::thread::id thread_;
  std::vector<Pool> pools_;  // those whose segments are there, and the newest
};

}  // namespace stagehand::core
