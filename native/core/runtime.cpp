// The walks. Making room is in runtime_reclaim.cpp; opening, budgets and reports in
// runtime_control.cpp.
#include "core/runtime.hpp"

#include <algorithm>
#include <thread>

#include "core/check.hpp"

namespace stagehand::core {

namespace {
constexpr std::size_t kPolled = 64;  // blocks asked at each unpack whether torch is done with them
// Records that prefetch looks at beyond the one unpacked: what is wanted first may be far ahead,
// but looking costs the host.
constexpr int kPrefetchReach = 64;
constexpr int kFarReach = 512;  // at every kFarTurn-th unpack
constexpr unsigned kFarTurn = 8;
}  // namespace

// Walk 1 ------------------------------------------------------------------------------------------

Status Runtime::allocate(Bytes bytes, driver::Stream stream, std::uint64_t graph,
                         Address* address) {
  Lock lock(mutex_);
  if (bytes > device_bytes_) {
    ++counters_.out_of_memory;
    return Status::out_of_memory;
  }
  if (debug_.evict_everything && graph == 0) {
    const driver::ContextGuard guard(table_, context_);
    evict_all(lock);
  }
  Status status = Status::ok;
  Block* block = acquire(lock, DeviceHeap::block_bytes(bytes), stream, graph, &status);
  if (block == nullptr) {
    return status;
  }
  block->owned_by_torch = true;
  block->fence.clear();  // the stream is behind all of it
  counters_.requested_bytes += bytes;
  *address = block->address;
  seal(lock);
  return Status::ok;
}

// A live block of `bytes` that nobody owns yet; the caller adds itself as the owner.
Block* Runtime::acquire(Lock& lock, Bytes bytes, driver::Stream stream, std::uint64_t graph,
                        Status* status) {
  ++counters_.allocations;
  Arena* arena = heap_.arena_for(stream, bytes, graph);
  if (arena == nullptr) {
    *status = Status::driver_failed;
    return nullptr;
  }
  Block* block = heap_.take(*arena, bytes);  // step 2: the hot path
  if (block != nullptr) {
    ++counters_.hits;
  } else {
    const driver::ContextGuard guard(table_, context_);
    block = reclaim(lock, *arena, bytes, status);  // steps 3 to 7
  }
  if (block != nullptr) {
    block->serial = ++serial_;
    counters_.occupy(block->size);
    note_live();
  }
  return block;
}

bool Runtime::free(Address address) {
  Lock lock(mutex_);
  Block* block = heap_.find(address);
  if (block == nullptr || !block->owned_by_torch || block->address != address) {
    return false;
  }
  ++counters_.frees;
  block->owned_by_torch = false;
  owner_left(block);
  seal(lock);
  return true;
}

// What the plan learns is what backward and forward need; not the optimizer, which runs disarmed.
void Runtime::note_live() {
  if (budget_.armed) {
    plan_.live(counters_.occupied - counters_.retained);
  }
}

// One of a block's owners is gone: torch, or an alias. With no owner it is retained while a record
// needs it, and free otherwise.
void Runtime::owner_left(Block* block) {
  if (block->aliases == 0 && held_ != nullptr && block->record == nullptr) {
    orphan(block);  // its record ended while a tensor was made over it
    return;
  }
  if (block->owned_by_torch || block->aliases > 0) {
    return;
  }
  block->idle_from = block->arena->clock.upcoming();
  if (block->users != 0) {
    record_users(block);
  }
  if (block->record != nullptr) {
    block->arena->set_state(block, BlockState::retained);
    counters_.retain(block->size);
    if (budget_.armed && saving_) {
      if (plan_.leaves(block->record->place)) {
        if (!write_back(*block->record)) {
          ++held_back_;
        }
        to_leave_.push_back(Ledger::id_of(*block->record));
      }
      write_back_ahead();
      let_leave();
    }
  } else {
    counters_.vacate(block->size);
    put_away(block);
  }
}

// Nobody needs the block any more: it is free, behind the work that names it.
void Runtime::put_away(Block* block) {
  if (held_ != nullptr) {
    let_go(block);
  } else {
    heap_.give(block);
  }
}

// Foreign streams get an event each where their work on the block ends: few blocks have any.
void Runtime::record_users(Block* block) {
  const driver::ContextGuard guard(table_, context_);
  for (std::uint32_t i = 0; i < clocks_.size(); ++i) {
    StreamClock& clock = clocks_.at(i);
    if (!block->used_by(i) || &clock == &block->arena->clock) {
      continue;
    }
    Tick tick = clock.now();
    if (block->arena->key.graph != 0) {
      tick.seq = kNever;  // inside a captured graph no event tells: not reused while it lives
    } else if (clock.record(&tick) != Status::ok) {
      tick = clock.now();
    }
    if (mover_->fence_block(block, tick) != Status::ok) {
      block->fence.clear();
      block->fence.add({i, kNever});  // a leak is better than reuse that nothing orders
    }
  }
  block->users = 0;
}

void Runtime::record_stream(Address address, driver::Stream stream) {
  Lock lock(mutex_);
  Block* block = heap_.find(address);
  if (block == nullptr || block->state != BlockState::live) {
    return;
  }
  const StreamClock& clock = clocks_.of(stream);
  if (&clock != &block->arena->clock) {
    block->add_user(clock.index());
  }
}

bool Runtime::base_of(Address address, Address* base, Bytes* bytes) {
  Lock lock(mutex_);
  const Block* block = heap_.find(address);
  if (block == nullptr) {
    return false;
  }
  *base = block->address;
  *bytes = block->size;
  return true;
}

// Walk 2 ------------------------------------------------------------------------------------------

Saved Runtime::save(Address data, Address first, Address last) {
  Lock lock(mutex_);
  Block* block = heap_.find(first);
  if (block == nullptr || block->state != BlockState::live || last > block->end()) {
    return {Refusal::foreign_storage, {}};
  }
  if (block->arena->key.graph != 0) {
    return {Refusal::graph_capture, {}};
  }
  if (block->keep) {
    return {Refusal::kept, {}};
  }
  // Parameters, buffers and inputs were there before the pool was entered (rule A2).
  if (block->record == nullptr && block->serial <= pool_serial_) {
    return {Refusal::older_than_pool, {}};
  }
  return tag(block, data, first, last);
}

// A record for the block, or one more handle for the one it has.
Saved Runtime::tag(Block* block, Address data, Address first, Address last) {
  Record* record = block->record;
  if (record == nullptr) {
    record = ledger_.open(block, first - block->address, last - block->address);
    record->place = plan_.saved(block->size, Ledger::id_of(*record));
    if (record->place.step != step_) {
      begin_step(record->place.step);
    }
    block->record = record;
  } else {
    // Saved again, by backward itself: since it was copied out it may have been changed in place,
    // which is legal where nobody asks for the old version any more. A copy still under way reads
    // what it finds, for nobody.
    if (record->copying) {
      record->outdated = true;
    } else {
      release_copy(*record);
    }
    const Bytes begin = first - block->address + record->block_begin;
    const Bytes end = last - block->address + record->block_begin;
    record->begin = std::min(record->begin, begin);
    record->end = std::max(record->end, end);
  }
  saving_ = true;
  ++record->handles;
  ++counters_.handles;
  ++counters_.activations_saved;
  counters_.records = ledger_.size();
  if (counters_.occupied > budget_.low) {
    // A fine clock while memory is short: copies out of what is freed from here on can then start
    // at this point of the stream instead of behind all that was queued.
    const driver::ContextGuard guard(table_, context_);
    Tick tick;
    block->arena->clock.record(&tick);
  }
  return {Refusal::none, Ledger::id_of(*record), data - block->address + record->block_begin};
}

// The first record of a step was saved. What was learned of the room to leave is forgotten slowly.
void Runtime::begin_step(std::uint32_t step) {
  step_ = step;
  prefetch_reserve_ = std::min(prefetch_reserve_ - prefetch_reserve_ / 8, budget_.low);
  to_leave_.clear();
  held_back_ = 0;
}

Unpacked Runtime::unpack(RecordId id, Bytes offset, driver::Stream consumer) {
  const Departing departing(*this);
  Lock lock(mutex_);
  Record* record = ledger_.find(id);
  if (record == nullptr) {
    return {Status::stale};
  }
  const driver::ContextGuard guard(table_, context_);
  if (held_ != nullptr) {
    refresh();
    plan_.requested(cache_->take_largest_request());
    poll_owners(kPolled);
    leave_later(lock);
    record = ledger_.find(id);  // the lock may have been given up, the handle is the caller's
  }
  if (counters_.evicted > 0) {
    Tick tick;
    clocks_.of(record->stream).record(&tick);  // a fine clock for restores, as in save
  }
  plan_.unpacked(record->place);
  saving_ = false;
  record->asked = true;
  const bool was_resident = record->block != nullptr;
  Status status = Status::ok;
  if (!was_resident && !restore(lock, *record, &status)) {
    seal(lock);
    return {status};
  }
  Block* block = record->block;
  if (was_resident) {
    ++counters_.alias_hits;
  }
  if (block->state == BlockState::retained) {
    block->arena->set_state(block, BlockState::live);
    counters_.release_retained(block->size);
    note_live();
  }
  ++block->aliases;
  ++counters_.aliases;
  StreamClock& clock = clocks_.of(consumer);
  if (record->arrived.seq != 0) {
    stalls_.asked(record->stall_pair, consumer, record->prefetched);
    record->stall_pair = StallMeter::kNone;
    record->prefetched = false;
    if (holds(Rule::S6) && clocks_.order_after(clock, record->arrived) != Status::ok) {
      --block->aliases;
      --counters_.aliases;
      owner_left(block);
      return {Status::driver_failed};
    }
  }
  if (held_ != nullptr) {
    block->owned_by_torch = true;  // as soon as the caller has made its tensor
    watch(*record);
  }
  if (&clock != &block->arena->clock) {
    block->add_user(clock.index());
  }
  prefetch(lock, *record);
  const Bytes inside = offset - record->block_begin;
  const bool elsewhere = block->made_again && &clock != &block->arena->clock;
  const Unpacked found{Status::ok, block->address + inside, block, block->storage, inside,
                       elsewhere};
  seal(lock);  // the alias holds the block meanwhile
  return found;
}

// A block that was acquired and is not used after all; work queued on its stream may name it.
void Runtime::give_back(Block* block) {
  counters_.vacate(block->size);
  block->idle_from = block->arena->clock.upcoming();
  put_away(block);
}

// The record's copy in fills the block, or has: from here on the block is the record's.
void Runtime::arrive(Record& record, Block* block) {
  record.block = block;
  block->record = &record;
  ++record.restores;
  counters_.evicted -= record.bytes();
  counters_.restored_bytes += record.bytes();
}

// Queues the copies back and puts them on the books; on failure the blocks are given back.
Status Runtime::bring_back(std::span<const Arrival> arrivals) {
  const Status status = mover_->copy_in(arrivals);
  const std::uint32_t pair = status == Status::ok && arrivals.size() == 1
                                 ? stalls_.copied(mover_->in().clock().stream())
                                 : StallMeter::kNone;  // small ones together: not worth an event
  for (const auto& [record, block] : arrivals) {
    if (status != Status::ok) {
      give_back(block);
      continue;
    }
    record->stall_pair = pair;
    arrive(*record, block);
  }
  return status;
}

// Brings an evicted record back. Another thread may do so first: the lock is given up when room
// has to be made outside it.
bool Runtime::restore(Lock& lock, Record& record, Status* status) {
  for (;;) {
    counters_.host_waits += record.copying ? 1 : 0;
    while (record.copying) {  // another thread waits for its copy: rare, and it ends on its own
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
    if (record.block != nullptr) {
      return true;
    }
    if (!intact(record)) {
      *status = Status::corrupted;
      return false;
    }
    Block* block = held_ != nullptr
                       ? make_again(lock, record, status)
                       : acquire(lock, DeviceHeap::block_bytes(record.returning_bytes()),
                                 record.stream, 0, status);
    if (block == nullptr) {
      return record.block != nullptr;
    }
    if (record.block != nullptr || record.copying) {
      give_back(block);
      continue;
    }
    record.block_begin = record.returning_begin();
    if (record.copy.slabs.front()->pageable) {
      *status = restore_pageable(lock, record, block);
    } else {
      const Arrival arrival{&record, block};
      *status = bring_back({&arrival, 1});
    }
    counters_.restores += *status == Status::ok ? 1 : 0;
    return *status == Status::ok;
  }
}

// The record that backward is expected to ask for next: by the plan, else the one saved before.
Record* Runtime::next_wanted(const Record& record) {
  if (!plan_.knows(record.place)) {
    return record.older;
  }
  Plan::Place place = record.place;
  RecordId id;
  while (plan_.next_after(place, &place, &id)) {
    if (Record* next = ledger_.find(id); next != nullptr) {
      return next;
    }
  }
  return nullptr;
}

// What comes next, into room that is free and stays so. Never evicts, never grows.
//
// The room is what is free below `low`, less what earlier steps turned out to need of it. A plan
// also knows what the step needs for itself until the record is asked for: what was live then the
// last time, and what is retained by then, must fit below the ceiling too.
void Runtime::prefetch(Lock& lock, Record& from) {
  if (!budget_.armed || counters_.evicted == 0) {
    return;
  }
  const bool far = ++prefetch_turn_ % kFarTurn == 0;
  resident_ahead_ -= std::min(resident_ahead_, 1);
  if (!far && resident_ahead_ >= kPrefetchReach) {
    return;
  }
  const Bytes from_live = plan_.live_after(from.place);
  const bool planned = from_live > 0;
  Bytes retained = counters_.retained;  // from here on: when the record looked at is asked for
  Bytes fullest = std::max(counters_.occupied, retained + from_live);
  const Bytes room = budget_.low - std::min(budget_.low, prefetch_reserve_);
  arrivals_.clear();
  Record* record = next_wanted(from);
  const int reach = far ? kFarReach : kPrefetchReach;
  resident_ahead_ = 0;
  for (int i = 0; record != nullptr && i < reach; ++i) {
    Record& one = *record;
    if (one.block != nullptr) {
      retained -= one.retained() ? one.block->size : 0;
      resident_ahead_ += resident_ahead_ == i ? 1 : 0;
    } else if (!one.copying && !one.copy.slabs.front()->pageable) {
      const Bytes bytes =
          held_ != nullptr ? one.returning_bytes() : DeviceHeap::block_bytes(one.returning_bytes());
      if (!fits_under(counters_.occupied, bytes, room) ||
          (planned && !fits_under(fullest, bytes, ceiling())) ||
          !prefetch_one(lock, one, bytes, i >= kPrefetchReach)) {
        break;
      }
      fullest += bytes;
    }
    if (planned) {
      fullest = std::max(fullest, retained + plan_.live_after(one.place));
    }
    record = next_wanted(one);
  }
  flush_prefetch();
}

// Takes a block for the record and queues its copy; small ones wait for others like them.
bool Runtime::prefetch_one(Lock& lock, Record& record, Bytes bytes, bool far) {
  if (mover_->in().full() || !intact(record)) {
    return false;
  }
  if (held_ != nullptr) {
    return prefetch_held(lock, record, bytes, far);
  }
  const bool alone = bytes >= kSmallCopy || arrivals_.size() == kSmallTogether;
  if (alone && !flush_prefetch()) {
    return false;
  }
  Arena* arena = heap_.arena_for(record.stream, bytes, 0);
  Block* block = arena != nullptr ? heap_.take(*arena, bytes) : nullptr;
  if (block == nullptr) {
    return false;
  }
  block->serial = ++serial_;
  counters_.occupy(block->size);
  record.block_begin = record.returning_begin();
  arrivals_.push_back({&record, block});
  return bytes < kSmallCopy || flush_prefetch();
}

bool Runtime::flush_prefetch() {
  const Status status = arrivals_.empty() ? Status::ok : bring_back(arrivals_);
  for (const auto& [record, block] : arrivals_) {
    if (status == Status::ok) {
      record->prefetched = true;
      block->arena->set_state(block, BlockState::retained);
      counters_.retain(block->size);
      ++counters_.prefetches;
    }
  }
  arrivals_.clear();
  return status == Status::ok;
}

bool Runtime::resident(RecordId id) {
  Lock lock(mutex_);
  const Record* record = ledger_.find(id);
  return record != nullptr && record->block != nullptr;
}

Bytes Runtime::bytes_of(RecordId id) {
  Lock lock(mutex_);
  const Record* record = ledger_.find(id);
  return record != nullptr ? record->bytes() : 0;
}

void Runtime::drop_alias(Block* block) {
  const Departing departing(*this);
  Lock lock(mutex_);
  SH_CHECK(block->aliases > 0);
  --block->aliases;
  --counters_.aliases;
  owner_left(block);
  seal(lock);
}

bool Runtime::shared(const Block* block) {
  Lock lock(mutex_);
  return block->record != nullptr || block->owned_by_torch || block->aliases > 1;
}

void Runtime::drop_handle(RecordId id) {
  const Departing departing(*this);
  Lock lock(mutex_);
  Record* record = ledger_.find(id);
  if (record == nullptr) {
    return;
  }
  --counters_.handles;
  if (--record->handles == 0 && !record->copying) {
    end_record(*record);
  }
}

// The last handle is gone: block and copy are given back, each behind the work that names it. The
// books forget the record before its address can be handed out again (rule O2).
void Runtime::end_record(Record& record) {
  Block* block = record.block;
  if (block == nullptr) {
    counters_.evicted -= record.bytes();
  }
  stalls_.forget(record.stall_pair);
  release_copy(record);
  plan_.closed(record.place);
  ledger_.close(&record);
  counters_.records = ledger_.size();
  if (block != nullptr) {
    block->record = nullptr;
    if (block->state == BlockState::retained) {
      counters_.vacate(block->size);
      counters_.retained -= block->size;
      put_away(block);
    } else if (held_ != nullptr && block->aliases == 0) {
      orphan(block);
    }
  }
  disarm_if_idle();
}

void Runtime::release_copy(Record& record) {
  for (Slab* slab : record.copy.slabs) {
    pinned_.give(slab);
  }
  record.copy.slabs.clear();
  record.copy.sealed = false;
}

bool Runtime::keep(Address address) {
  Lock lock(mutex_);
  if (held_ != nullptr) {
    const bool known = held_->side().triggers == 0 || cache_->owner_of(address).has_value();
    if (known) {
      cache_->keep(address);
    }
    return known;
  }
  Block* block = heap_.find(address);
  if (block == nullptr || block->state != BlockState::live) {
    return false;
  }
  block->keep = true;
  return true;
}

}  // namespace stagehand::core
