#include "core/mover.hpp"

#include <algorithm>

#include "core/arena.hpp"
#include "core/check.hpp"

namespace stagehand::core {

namespace {
constexpr unsigned char kPoison = 0xFF;  // every float type reads it as NaN
}  // namespace

Status Mover::fence_block(Block* block, Tick tick) {
  if (block->fence.add(tick)) {
    return Status::ok;
  }
  StreamClock& own = block->arena->clock;
  const Status status = clocks_.order_after(own, tick);
  block->idle_from = own.upcoming();  // who waits for the block's own stream waits for the tick too
  return status;
}

// What the lane does next comes behind the block's last work, on its own and on foreign streams.
Status Mover::order_behind(Lane& lane, const Block& block) {
  const Status status =
      clocks_.order_after(lane.clock(), {block.arena->clock.index(), block.idle_from});
  return status == Status::ok ? clocks_.order_after(lane.clock(), block.fence) : status;
}

// One copy for each stretch of the saved range that lies in one piece on the host.
void Mover::collect(const Record& record, Address address) {
  Bytes done = 0;
  const Slab* previous = nullptr;
  for (const Slab* slab : record.copy.slabs) {
    const Bytes bytes = std::min(slab->size, record.bytes() - done);
    if (previous != nullptr && previous->runs_into(*slab)) {
      copies_.back().bytes += bytes;
    } else {
      copies_.push_back({address + done, slab->host, bytes});
    }
    previous = slab;
    done += bytes;
  }
  SH_CHECK(done == record.bytes());
}

// Records the event behind what was queued.
Status Mover::finish(Status status, Lane& lane, Tick* tick) {
  const Status recorded = lane.clock().record(tick);
  if (recorded != Status::ok) {
    *tick = lane.clock().now();  // the next event on the lane covers it
  }
  lane.note(*tick);
  return status != Status::ok ? status : recorded;
}

// Leaves the copy's tick on everything the copy names.
Status Mover::fence_copy(Status status, Record& record, Block* block, Tick tick) {
  for (Slab* slab : record.copy.slabs) {
    slab->fence.add(tick);  // lanes only: two clocks, always room
  }
  const Status fenced = fence_block(block, tick);
  return status != Status::ok ? status : fenced;
}

Status Mover::order_copy_out(const Record& record) {
  Status status = holds(Rule::S1) ? order_behind(out_, *record.block) : Status::ok;
  for (const Slab* slab : record.copy.slabs) {
    if (status == Status::ok && holds(Rule::S5)) {
      status = clocks_.order_after(out_.clock(), slab->fence);
    }
  }
  return status;
}

Status Mover::copy_out(std::span<Record* const> records) {
  copies_.clear();
  for (Record* record : records) {
    if (const Status status = order_copy_out(*record); status != Status::ok) {
      return status;  // nothing was queued but waits
    }
    collect(*record, record->block->address + record->begin - record->block_begin);
  }
  Tick tick;
  Status status = finish(out_.queue(copies_), out_, &tick);
  for (Record* record : records) {
    record->copy.written = tick;
    status = fence_copy(status, *record, record->block, tick);
  }
  return status;
}

Status Mover::order_copy_in(const Record& record, const Block* block) {
  Status status = holds(Rule::S3) ? order_behind(in_, *block) : Status::ok;
  if (status == Status::ok && holds(Rule::S4)) {
    status = clocks_.order_after(in_.clock(), record.copy.written);
  }
  return status;
}

Status Mover::copy_in(std::span<const Arrival> arrivals) {
  copies_.clear();
  for (const auto& [record, block] : arrivals) {
    if (const Status status = order_copy_in(*record, block); status != Status::ok) {
      return status;
    }
    collect(*record, block->address + record->begin - record->block_begin);
  }
  Tick tick;
  Status status = finish(in_.queue(copies_), in_, &tick);
  for (const auto& [record, block] : arrivals) {
    record->arrived = tick;
    block->fence.clear();  // the copy runs behind all of it, and leaves its own tick
    status = fence_copy(status, *record, block, tick);
  }
  return status;
}

Status Mover::poison(Block* block) {
  StreamClock& lane = out_.clock();
  Status status = order_behind(out_, *block);
  if (status == Status::ok) {
    status = table_.memset_d8_async(block->address, kPoison, block->size, lane.stream()) ==
                     driver::kSuccess
                 ? Status::ok
                 : Status::driver_failed;
  }
  Tick tick;
  if (lane.record(&tick) != Status::ok) {
    tick = lane.now();
  }
  const Status fenced = fence_block(block, tick);
  return status != Status::ok ? status : fenced;
}

}  // namespace stagehand::core
