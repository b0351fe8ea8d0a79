#include "core/transfers.hpp"

#include <algorithm>

#include "core/check.hpp"

namespace stagehand::core {

namespace {
constexpr unsigned char kPoison = 0xFF;  // every float type reads it as NaN
}  // namespace

Status Transfers::fence_block(Block* block, Tick tick) {
  if (block->fence.add(tick)) {
    return Status::ok;
  }
  StreamClock& own = *block->clock;
  const Status status = clocks_.order_after(own, tick);
  block->idle_from = own.upcoming();  // who waits for the block's own stream waits for the tick too
  return status;
}

// Foreign streams get an event each where their work on the block ends: few blocks have any.
void Transfers::fence_users(Block* block) {
  if (block->users == 0) {
    return;
  }
  for (std::uint32_t i = 0; i < clocks_.size(); ++i) {
    StreamClock& clock = clocks_.at(i);
    if (!block->used_by(i) || &clock == block->clock) {
      continue;
    }
    Tick tick = clock.now();
    if (block->in_graph) {
      tick.seq = kNever;  // inside a captured graph no event tells: not reused while it lives
    } else if (clock.record(&tick) != Status::ok) {
      tick = clock.now();
    }
    if (fence_block(block, tick) != Status::ok) {
      block->fence.clear();
      block->fence.add({i, kNever});  // a leak is better than reuse that nothing orders
    }
  }
  clocks_.forget_users(block);
}

// What the lane does next comes behind the block's last work, on its own and on foreign streams.
Status Transfers::order_behind(Lane& lane, const Block& block) {
  const Status status = clocks_.order_after(lane.clock(), {block.clock->index(), block.idle_from});
  return status == Status::ok ? clocks_.order_after(lane.clock(), block.fence) : status;
}

// And behind what its foreign users have queued by now. They stay its users.
Status Transfers::order_behind_users(Lane& lane, const Block& block) {
  Status status = Status::ok;
  for (std::uint32_t i = 0; i < clocks_.size() && block.users != 0 && status == Status::ok; ++i) {
    StreamClock& clock = clocks_.at(i);
    if (block.used_by(i) && &clock != block.clock) {
      status = clocks_.order_after(lane.clock(), clock.now());
    }
  }
  return status;
}

// The same for all of `blocks_`, of each clock the newest point first: it covers the others'.
Status Transfers::order_behind_newest(Lane& lane) {
  constexpr std::size_t kClocks = 8;  // blocks of further ones are ordered one by one
  std::array<Tick, kClocks> newest{};
  std::size_t count = 0;
  for (const Block* block : blocks_) {
    const std::uint32_t clock = block->clock->index();
    std::size_t i = 0;
    while (i < count && newest[i].clock != clock) {
      ++i;
    }
    if (i == kClocks) {
      continue;
    }
    newest[i] = {clock, std::max(i < count ? newest[i].seq : 0, block->idle_from)};
    count = std::max(count, i + 1);
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (const Status status = clocks_.order_after(lane.clock(), newest[i]); status != Status::ok) {
      return status;
    }
  }
  return Status::ok;
}

// One copy for each stretch of the saved range that lies in one piece on the host.
void Transfers::collect(const Record& record, Address address) {
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

// Large copies are measured while a step is: small ones say little of the link.
Status Transfers::queue(Lane& lane, StepClock::Kind begins) {
  constexpr Bytes kMeasured = 4_MiB;
  Bytes bytes = 0;
  for (const Copy& copy : copies_) {
    bytes += copy.bytes;
  }
  const bool measured = bytes >= kMeasured && clocks_.steps.watches_copies(begins) &&
                        clocks_.steps.note(begins, lane.clock().stream());
  Timeline& timeline = clocks_.timeline;
  const bool out = begins == StepClock::Kind::out;
  const bool shown = timeline.on() && timeline.copy_begins(lane.clock().stream());
  const Status status = lane.queue(copies_);
  if (shown) {
    timeline.copy_ends(lane.clock().stream(), out ? 0 : &lane == &express_ ? 2 : 1, bytes);
  }
  if (measured) {
    clocks_.steps.note(out ? StepClock::Kind::out_ends : StepClock::Kind::in_ends,
                       lane.clock().stream(), bytes);
  }
  return status;
}

// Records the event behind what was queued.
Status Transfers::finish(Status status, Lane& lane, Tick* tick) {
  const Status recorded = lane.clock().record(tick);
  if (recorded != Status::ok) {
    *tick = lane.clock().now();  // the next event on the lane covers it
  }
  lane.note(*tick);
  return status != Status::ok ? status : recorded;
}

// Leaves the copy's tick on everything the copy names.
Status Transfers::fence_copy(Status status, Record& record, Block* block, Tick tick) {
  for (Slab* slab : record.copy.slabs) {
    static_assert(std::tuple_size_v<LaneStreams> / 2 <= Fence::kCapacity);
    slab->fence.add(tick);  // lanes only: always room
  }
  const Status fenced = fence_block(block, tick);
  return status != Status::ok ? status : fenced;
}

Status Transfers::order_copy_out(const Record& record) {
  Status status = holds(Rule::S1) ? order_behind(out_, *record.block) : Status::ok;
  for (const Slab* slab : record.copy.slabs) {
    if (status == Status::ok && holds(Rule::S5)) {
      status = clocks_.order_after(out_.clock(), slab->fence);
    }
  }
  return status;
}

Status Transfers::copy_out(std::span<Record* const> records) {
  copies_.clear();
  blocks_.clear();
  for (const Record* record : records) {
    blocks_.push_back(record->block);
  }
  if (holds(Rule::S1)) {
    if (const Status status = order_behind_newest(out_); status != Status::ok) {
      return status;
    }
  }
  for (Record* record : records) {
    if (const Status status = order_copy_out(*record); status != Status::ok) {
      return status;  // nothing was queued but waits
    }
    collect(*record, record->block->address + record->begin - record->block_begin);
  }
  Tick tick;
  Status status = finish(queue(out_, StepClock::Kind::out), out_, &tick);
  for (Record* record : records) {
    record->copy.written = tick;
    status = fence_copy(status, *record, record->block, tick);
  }
  return status;
}

// Both ways only behind what was queued before, so neither lane ever waits for itself. It is for
// who comes first alone: what is safe rests on the waits of `order_copy_in`.
Status Transfers::keep_order(Lane& lane, Seq awaited) {
  if (&lane == &express_) {
    return clocks_.order_after(express_.clock(), {in_.clock().index(), awaited});
  }
  // One that waits for its own copy out, as under a rate, leaves the link idle meanwhile: what
  // comes in turn uses it, and shares it later.
  return out_.clock().passed(express_waits_for_)
             ? clocks_.order_after(in_.clock(), {express_.clock().index(), newest_express_})
             : Status::ok;
}

Status Transfers::order_copy_in(const Record& record, const Block* block, Lane& lane) {
  Status status = holds(Rule::S3) ? order_behind(lane, *block) : Status::ok;
  if (status == Status::ok && holds(Rule::S4)) {
    status = clocks_.order_after(lane.clock(), record.copy.written);
  }
  return status;
}

Status Transfers::copy_in(std::span<const Arrival> arrivals, Lane& lane) {
  copies_.clear();
  blocks_.clear();
  for (const auto& [record, block] : arrivals) {
    blocks_.push_back(block);
  }
  if (holds(Rule::S3)) {
    if (const Status status = order_behind_newest(lane); status != Status::ok) {
      return status;
    }
  }
  for (const auto& [record, block] : arrivals) {
    if (const Status status = order_copy_in(*record, block, lane); status != Status::ok) {
      return status;
    }
    collect(*record, block->address + record->begin - record->block_begin);
  }
  Tick tick;
  Status status = finish(queue(lane, StepClock::Kind::in), lane, &tick);
  if (&lane == &express_) {
    newest_express_ = tick.seq;
    express_waits_for_ = 0;
    for (const auto& [record, block] : arrivals) {
      express_waits_for_ = std::max(express_waits_for_, record->copy.written.seq);
    }
  }
  for (const auto& [record, block] : arrivals) {
    record->arrived = tick;
    block->fence.clear();  // the copy runs behind all of it, and leaves its own tick
    status = fence_copy(status, *record, block, tick);
  }
  return status;
}

Status Transfers::copy_in(Block* block, std::byte* host, Bytes bytes, Lane& lane, Tick* arrived) {
  if (holds(Rule::S3)) {
    if (const Status status = order_behind(lane, *block); status != Status::ok) {
      return status;
    }
  }
  copies_.assign(1, Copy{block->address, host, bytes});
  const Status status = finish(queue(lane, StepClock::Kind::in), lane, arrived);
  newest_express_ = &lane == &express_ ? arrived->seq : newest_express_;
  block->fence.clear();  // the copy runs behind all of it, and leaves its own tick
  const Status fenced = fence_block(block, *arrived);
  return status != Status::ok ? status : fenced;
}

Status Transfers::copy_out(Block* block, std::byte* host, Bytes bytes, Tick* written) {
  if (holds(Rule::S1)) {
    Status status = order_behind(out_, *block);
    if (status == Status::ok) {
      status = order_behind_users(out_, *block);
    }
    if (status != Status::ok) {
      return status;  // nothing was queued but waits
    }
  }
  copies_.assign(1, Copy{block->address, host, bytes});
  const Status status = finish(queue(out_, StepClock::Kind::out), out_, written);
  const Status fenced = fence_block(block, *written);
  return status != Status::ok ? status : fenced;
}

Status Transfers::poison(Block* block) {
  StreamClock& lane = out_.clock();
  Status status = order_behind(out_, *block);
  if (status == Status::ok) {
    status = gate_->memset_d8_async(block->address, kPoison, block->size, lane.stream()) ==
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
