// The copies of records on the lanes, in batches: one event stands for all copies of a batch,
// and one wait for all work they come behind. Every ordering a copy needs is queued here, on the
// device; nothing here waits on the host. Guarded by the device's lock.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "core/counters.hpp"
#include "core/lane.hpp"
#include "core/ledger.hpp"

namespace stagehand::core {

// A record on its way back, and the block it will be in.
struct Arrival {
  Record* record = nullptr;
  Block* block = nullptr;
};

// Two of each lane: see Lane.
using LaneStreams = std::array<driver::Stream, 6>;

class Transfers {
 public:
  Transfers(ClockBank& clocks, const LaneStreams& streams)
      : clocks_(clocks),
        gate_(clocks.gate()),
        out_(gate_, Lane::Way::out, clocks.of(streams[0]), streams[1]),
        in_(gate_, Lane::Way::in, clocks.of(streams[2]), streams[3]),
        express_(gate_, Lane::Way::in, clocks.of(streams[4]), streams[5]) {
    for (Lane* lane : {&out_, &in_, &express_}) {
      clocks_.hold(lane->clock());
      lane->clock().never_captured();
    }
  }

  Lane& out() { return out_; }
  Lane& in() { return in_; }
  // For what is wanted before all that is queued to come back: between two pieces of that. Where
  // the lane has a cap, that lane: it is one cap.
  Lane& in(bool overtakes) {
    return overtakes && !in_.capped() && !in_.pacer().paced() ? express_ : in_;
  }

  // What is queued next on that lane, of the two, comes behind what is to be there before it: on
  // the express lane behind the copies in turn up to `awaited`, in turn behind all express ones.
  Status keep_order(Lane& lane, Seq awaited);

  // Queues the copies of the records' saved ranges out of their blocks into the slabs of their
  // copies. Behind: the blocks' last work on their own and on foreign streams (S1), the slabs' last
  // copies (S5). Blocks and slabs carry the copies' tick afterwards (S2), also when this fails
  // half-way: what was queued still runs.
  Status copy_out(std::span<Record* const> records);
  // Queues the copies of the slabs into the blocks, which become the records'. Behind: the blocks'
  // previous users (S3) and the records' own copies out (S4).
  Status copy_in(std::span<const Arrival> arrivals, Lane& lane);
  // The same for bytes that are no record's: the block's first ones to `host`, behind all who work
  // on the block, who go on working on it; and `host` into the block.
  Status copy_out(Block* block, std::byte* host, Bytes bytes, Tick* written);
  Status copy_in(Block* block, std::byte* host, Bytes bytes, Lane& lane, Tick* arrived);
  // The waits of the two, for a copy through pageable memory that the caller makes without the
  // lock.
  Status order_copy_out(const Record& record);
  Status order_copy_in(const Record& record, const Block* block, Lane& lane);

  // What the lanes have moved.
  Bytes bytes_back() const { return in_.moved_bytes() + express_.moved_bytes(); }
  void add_to(Counters* counters) const {
    counters->d2h_bytes = out_.moved_bytes();
    counters->express_bytes = express_.moved_bytes();
    counters->h2d_bytes = bytes_back();
  }

  // `large`: pieces, where nobody asks for smaller ones.
  void limit(const LaneLimits& limits, bool large) {
    out_.limit(limits.inflight_d2h, limits.piece, large);
    in_.limit(limits.inflight_h2d, limits.piece, large);
    express_.limit(0, limits.piece, large);
  }

  // Fills a block that is leaving with a pattern no computation yields, for tests.
  Status poison(Block* block);
  // Adds a tick to a block's fence, or orders the block's own stream where the fence is full.
  Status fence_block(Block* block, Tick tick);
  // The block's foreign users have their last work on it queued: it is fenced behind that.
  void fence_users(Block* block);

 private:
  Status order_behind(Lane& lane, const Block& block);
  Status order_behind_newest(Lane& lane);
  Status order_behind_users(Lane& lane, const Block& block);
  void collect(const Record& record, Address address);
  Status queue(Lane& lane, StepClock::Kind begins);
  Status finish(Status status, Lane& lane, Tick* tick);
  Status fence_copy(Status status, Record& record, Block* block, Tick tick);

  ClockBank& clocks_;
  Gate& gate_;
  Lane out_;
  Lane in_;
  Lane express_;
  Seq newest_express_ = 0;
  Seq express_waits_for_ = 0;         // on the lane out
  std::vector<Copy> copies_;          // scratch
  std::vector<const Block*> blocks_;  // scratch: the other side of a batch
};

}  // namespace stagehand::core
