// The lanes, and the copies on them. Every ordering a copy needs is queued here, on the device;
// nothing here waits on the host. Guarded by the device's lock.
#pragma once

#include "core/ledger.hpp"
#include "core/stream_clock.hpp"

namespace stagehand::core {

class Mover {
 public:
  Mover(const driver::Table& table, ClockBank& clocks, StreamClock& d2h, StreamClock& h2d)
      : table_(table), clocks_(clocks), d2h_(d2h), h2d_(h2d) {}

  StreamClock& d2h() { return d2h_; }
  StreamClock& h2d() { return h2d_; }

  // Queues the copy of the record's saved range out of its block into the slabs of record.copy.
  // Behind: the block's last work on its own and on foreign streams (S1), the slabs' last copies
  // (S5). The block and the slabs carry the copy's tick afterwards (S2), also when this fails
  // half-way: what was queued still runs.
  Status copy_out(Record& record);
  // Queues the copy of the slabs into `block`, which becomes the record's. Behind: the block's
  // previous user (S3) and the record's own copy out (S4).
  Status copy_in(Record& record, Block* block);
  // Fills a block that is leaving with a pattern no computation yields, for tests.
  Status poison(Block* block);
  // The waits of copy_out alone, for a copy that the caller makes without the lock.
  Status order_copy_out(const Record& record);

  // Adds a tick to a block's fence, or orders the block's own stream where the fence is full.
  Status fence_block(Block* block, Tick tick);

 private:
  Status finish(Status status, StreamClock& lane, Record& record, Block* block, Tick* tick);

  const driver::Table& table_;
  ClockBank& clocks_;
  StreamClock& d2h_;
  StreamClock& h2d_;
};

}  // namespace stagehand::core
