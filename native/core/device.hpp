// What the pieces of one device share: its lock, its clocks, its books, its settings. Data only;
// who changes what is said beside each. Guarded by the device's lock (Gate).
#pragma once

#include <algorithm>

#include "core/books.hpp"
#include "core/budget.hpp"
#include "core/counters.hpp"
#include "core/departures.hpp"
#include "core/pinned_tier.hpp"
#include "core/prefetcher.hpp"
#include "core/room.hpp"
#include "core/sealer.hpp"
#include "core/stall_meter.hpp"
#include "core/transfers.hpp"
#include "core/weights.hpp"

namespace stagehand::core {

struct DebugModes {
  bool evict_everything = false;  // every allocation first evicts all that is retained
  bool poison = false;            // evicted memory is overwritten once its copy is done
  bool checksums = false;         // every host copy is checked before it is restored
};

struct Device {
  Device(const driver::Table& table, int number, driver::Context context, Bytes bytes,
         Bytes granularity, const LaneStreams& lanes)
      : number(number),
        bytes(bytes),
        granularity(granularity),
        gate(table, context),
        clocks(gate),
        host(gate),
        stalls(gate, clocks.events, counters),
        transfers(clocks, lanes),
        books(*this),
        departures(*this),
        room(*this),
        prefetcher(*this),
        sealer(*this),
        weights(*this) {}

  // Where growth stops before anything is evicted: `high`, unless the step is known to need more
  // live memory than that anyway; evicting then would move bytes and hold nothing down.
  Bytes ceiling() const {
    return std::min(std::max(budget.high, plan.unavoidable()), budget.limit);
  }
  // What nothing can leave of: neither saved nor weights that nobody holds.
  Bytes live() const { return live_of(counters.occupied, counters.retained); }
  Bytes live_of(Bytes occupied, Bytes retained) const {
    const Bytes may_leave = retained + weights.idle_bytes();
    return occupied - std::min(occupied, may_leave);
  }

  // Of what is occupied, all but weights that nobody holds.
  Bytes without_idle(Bytes occupied) const {
    return occupied - std::min(occupied, weights.idle_bytes());
  }

  const int number;
  const Bytes bytes;  // of the device
  const Bytes granularity;
  Gate gate;
  ClockBank clocks;
  Counters counters;  // beside what each piece counts
  PinnedTier host;
  StallMeter stalls;
  Transfers transfers;
  Plan plan;      // told by Books and the stores
  Ledger ledger;  // changed by Books
  Budget budget;  // changed by Books
  DebugModes debug;
  Bytes ahead = 0;      // came back ahead of need, and not asked for yet; changed by Books
  bool saving = false;  // the last that happened to a record: saved, not asked for
  Store* store = nullptr;
  Books books;
  Departures departures;
  Room room;
  Prefetcher prefetcher;
  Sealer sealer;
  Weights weights;
};

}  // namespace stagehand::core
