// What is counted, per device. Plain numbers, changed only under the device's lock.
//
// Algebra, asserted by Runtime::invariants_broken():
//   mapped   == free + live + retained + evicting     (in every arena, and in total)
//   occupied == live + retained                        <= mapped
#pragma once

#include <algorithm>

#include "core/types.hpp"

namespace stagehand::core {

// The lists are the single source of the names that stats() shows, and of which kind each is.
// clang-format off
#define STAGEHAND_GAUGES(X)                                                                     \
  /* bytes now */                                                                               \
  X(mapped) X(occupied) X(retained) X(evicted) X(pinned_bytes) X(pinned_used_bytes)             \
  X(pinned_waste_bytes) X(pageable_bytes) X(former_bytes) X(dropped)                            \
  /* of all weight groups; and of those, at home */                                             \
  X(weights_bytes) X(weights_home)                                                              \
  /* of their host copies; and what these and slabs may have together: 0 where slabs alone keep */ \
  /* to a limit */                                                                              \
  X(weights_pinned_bytes) X(host_limit)                                                         \
  /* counts now */                                                                              \
  X(records) X(handles) X(aliases)                                                              \
  /* bytes per second that the lanes carry, as measured last; 0: not yet */                     \
  X(d2h_rate) X(h2d_rate)

/* bytes at most, since the last reset */
#define STAGEHAND_PEAKS(X)                                                                      \
  X(mapped_peak) X(occupied_peak) X(retained_peak) X(evicted_peak) X(live_peak)                 \
  X(weights_home_peak)                                                                          \
  /* live bytes with the request, at the worst overshoot: no eviction can hold less */          \
  X(overshoot_live)                                                                             \
  /* of it, saved activations still in use */                                                   \
  X(overshoot_saved)

#define STAGEHAND_SUMS(X)                                                                       \
  /* bytes since the start */                                                                   \
  X(overshoot_bytes) X(evicted_bytes) X(freed_bytes) X(restored_bytes) X(requested_bytes)       \
  X(dropped_bytes) X(recomputed_bytes)                                                          \
  /* moved by each lane; the express lane's are in h2d_bytes too */                             \
  X(d2h_bytes) X(h2d_bytes) X(express_bytes)                                                    \
  /* events since the start */                                                                  \
  X(host_waits) X(clean_evictions) X(dirty_evictions) X(write_backs) X(restores) X(prefetches)  \
  X(prefetch_hits) X(prefetch_lates) X(alias_hits) X(activations_saved) X(allocations) X(frees) \
  X(hits) X(grows) X(gathers) X(take_ups) X(loans) X(pool_hits) X(pool_misses)                  \
  X(pageable_copies) X(out_of_memory) X(stall_ns) X(stall_count) X(misses) X(map_calls)         \
  X(drops) X(recomputes) X(reruns) X(overtakes)                                                 \
  /* of host_waits, how long: for pinned memory, for a copy, for all work of the GPU */         \
  X(pinning_wait_ns) X(copy_wait_ns) X(gpu_wait_ns)                                             \
  /* weight groups: they came, of them when they were needed; their bytes; they left; bytes     \
     that went back to the host; of stall_ns, for them */                                       \
  X(weights_loads) X(weights_late) X(weights_loaded_bytes) X(weights_left)                      \
  X(weights_written_bytes) X(weights_wait_ns)

#define STAGEHAND_COUNTERS(X) STAGEHAND_GAUGES(X) STAGEHAND_PEAKS(X) STAGEHAND_SUMS(X)
// clang-format on

struct Counters {
#define STAGEHAND_FIELD(name) Bytes name = 0;
  STAGEHAND_COUNTERS(STAGEHAND_FIELD)
#undef STAGEHAND_FIELD

  void occupy(Bytes bytes) {
    occupied += bytes;
    occupied_peak = std::max(occupied_peak, occupied);
    live_peak = std::max(live_peak, occupied - retained);
  }
  void vacate(Bytes bytes) { occupied -= bytes; }
  void retain(Bytes bytes) {
    retained += bytes;
    retained_peak = std::max(retained_peak, retained);
  }
  // Backward can reach it again.
  void release_retained(Bytes bytes) {
    retained -= bytes;
    live_peak = std::max(live_peak, occupied - retained);
  }
  void map(Bytes bytes) {
    mapped += bytes;
    mapped_peak = std::max(mapped_peak, mapped);
  }
  void evict(Bytes bytes) {
    evicted += bytes;
    evicted_peak = std::max(evicted_peak, evicted);
  }
  // Of records that have left so far, by a copy or dropped.
  Bytes gone_bytes() const { return evicted_bytes + dropped_bytes; }
  void weights_are(Bytes home) {
    weights_home = home;
    weights_home_peak = std::max(weights_home_peak, home);
  }
  void reset_peaks() {
    weights_home_peak = weights_home;
    mapped_peak = mapped;
    occupied_peak = occupied;
    retained_peak = retained;
    evicted_peak = evicted;
    live_peak = occupied - retained;
    overshoot_live = 0;
    overshoot_saved = 0;
  }
  // Those of another stretch of time count too.
  void raise_peaks(const Counters& other) {
    // The saved part is that of the worst overshoot.
    const Bytes saved =
        other.overshoot_live > overshoot_live ? other.overshoot_saved : overshoot_saved;
#define STAGEHAND_RAISE(name) name = std::max(name, other.name);
    STAGEHAND_PEAKS(STAGEHAND_RAISE)
#undef STAGEHAND_RAISE
    overshoot_saved = saved;
  }
  // What was counted after `begun`; all else as here.
  Counters since(const Counters& begun) const {
    Counters found = *this;
#define STAGEHAND_TAKE(name) found.name -= begun.name;
    STAGEHAND_SUMS(STAGEHAND_TAKE)
#undef STAGEHAND_TAKE
    return found;
  }
};

}  // namespace stagehand::core
