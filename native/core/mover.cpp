#include "core/mover.hpp"

#include <algorithm>

#include "core/arena.hpp"
#include "core/check.hpp"

namespace stagehand::core {

namespace {

constexpr unsigned char kPoison = 0xFF;  // every float type reads it as NaN

Status from(driver::Result result) {
  return result == driver::kSuccess ? Status::ok : Status::driver_failed;
}

// Calls copy(slab, offset in the saved range, bytes) for each slab's share of the range.
template <class Copy>
Status each_slab(const Record& record, Copy copy) {
  Bytes done = 0;
  for (Slab* slab : record.copy.slabs) {
    const Bytes bytes = std::min(slab->size, record.bytes() - done);
    if (const Status status = copy(*slab, done, bytes); status != Status::ok) {
      return status;
    }
    done += bytes;
  }
  SH_CHECK(done == record.bytes());
  return Status::ok;
}

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

// Records the copy's event and leaves its tick on everything the copy names.
Status Mover::finish(Status status, StreamClock& lane, Record& record, Block* block, Tick* tick) {
  const Status recorded = lane.record(tick);
  if (recorded != Status::ok) {
    *tick = lane.now();  // the next event on the lane covers it
  }
  for (Slab* slab : record.copy.slabs) {
    slab->fence.add(*tick);  // lanes only: two clocks, always room
  }
  const Status fenced = fence_block(block, *tick);
  return status != Status::ok ? status : (recorded != Status::ok ? recorded : fenced);
}

Status Mover::order_copy_out(const Record& record) {
  const Block* block = record.block;
  Status status = Status::ok;
  if (holds(Rule::S1)) {
    status = clocks_.order_after(d2h_, {block->arena->clock.index(), block->idle_from});
    if (status == Status::ok) {
      status = clocks_.order_after(d2h_, block->fence);
    }
  }
  for (const Slab* slab : record.copy.slabs) {
    if (status == Status::ok && holds(Rule::S5)) {
      status = clocks_.order_after(d2h_, slab->fence);
    }
  }
  return status;
}

Status Mover::copy_out(Record& record) {
  if (const Status status = order_copy_out(record); status != Status::ok) {
    return status;
  }
  const Address from_address = record.block->address + record.begin - record.block_begin;
  const Status status = each_slab(record, [&](Slab& slab, Bytes at, Bytes bytes) {
    return from(table_.memcpy_dtoh_async(slab.host, from_address + at, bytes, d2h_.stream()));
  });
  return finish(status, d2h_, record, record.block, &record.copy.written);
}

Status Mover::copy_in(Record& record, Block* block) {
  Status status = Status::ok;
  if (holds(Rule::S3)) {
    status = clocks_.order_after(h2d_, {block->arena->clock.index(), block->idle_from});
    if (status == Status::ok) {
      status = clocks_.order_after(h2d_, block->fence);
    }
  }
  if (status == Status::ok && holds(Rule::S4)) {
    status = clocks_.order_after(h2d_, record.copy.written);
  }
  if (status != Status::ok) {
    return status;
  }
  const Address to_address = block->address + record.begin - record.block_begin;
  status = each_slab(record, [&](Slab& slab, Bytes at, Bytes bytes) {
    return from(table_.memcpy_htod_async(to_address + at, slab.host, bytes, h2d_.stream()));
  });
  block->fence.clear();  // the copy runs behind all of it, and leaves its own tick
  return finish(status, h2d_, record, block, &record.arrived);
}

Status Mover::poison(Block* block) {
  Status status = clocks_.order_after(d2h_, {block->arena->clock.index(), block->idle_from});
  if (status == Status::ok) {
    status = clocks_.order_after(d2h_, block->fence);
  }
  if (status == Status::ok) {
    status = from(table_.memset_d8_async(block->address, kPoison, block->size, d2h_.stream()));
  }
  Tick tick;
  if (d2h_.record(&tick) != Status::ok) {
    tick = d2h_.now();
  }
  const Status fenced = fence_block(block, tick);
  return status != Status::ok ? status : fenced;
}

}  // namespace stagehand::core
