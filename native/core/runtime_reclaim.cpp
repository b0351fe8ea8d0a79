// Steps 3 to 7 of walk 1: making room for one request.
#include <algorithm>
#include <span>
#include <utility>

#include "core/check.hpp"
#include "core/runtime.hpp"

namespace stagehand::core {

namespace {
constexpr Bytes kSmallVictims = 16_MiB;  // leave together
// Moving memory costs the host about as long as the link takes for this: 7 ms on an H200, where
// creating, mapping, opening and unmapping a piece are 50 us together.
constexpr Bytes kWorthMoving = 384_MiB;
constexpr Bytes kFreeAhead = 16_MiB;  // what a plan keeps free for the next requests
}  // namespace

// Where growth stops before anything is evicted: `high`, unless the step is known to need more live
// memory than that anyway; evicting then would move bytes and hold nothing down.
Bytes Runtime::ceiling() const {
  return std::min(std::max(budget_.high, plan_.unavoidable()), budget_.limit);
}

Block* Runtime::reclaim(Lock& lock, Arena& arena, Bytes bytes, Status* status) {
  bool pressed = false;  // something was evicted for this request
  bool waited = false;   // for old addresses to come free
  bool squeeze = false;  // no new pinned memory: spread copies over whatever slabs are left
  for (;;) {
    Block* block = room_without_evicting(arena, bytes);
    if (block == nullptr && arena.key.graph == 0) {
      Bytes missing = 0;
      const Evicted result = evict_for(arena, bytes, squeeze, &missing);
      pressed = pressed || result == Evicted::yes;
      if (helped(lock, result, missing, &squeeze)) {
        continue;
      }
    }
    if (block == nullptr && heap_.short_of_addresses(arena, bytes) && !waited) {
      waited = true;
      wait_for_gpu(lock);
      continue;
    }
    if (block == nullptr) {
      block = overshoot(arena, bytes, status);  // step 7
    }
    if (block != nullptr && pressed) {  // step 5
      if (plan_.follows()) {
        evict_next_small(arena);
      } else {
        evict_to_low(block->size);
      }
    }
    return block;
  }
}

// Whether to try again after an attempt to evict: it did, or there are slabs now, or a record was
// copied to pageable memory instead.
bool Runtime::helped(Lock& lock, Evicted result, Bytes missing, bool* squeeze) {
  if (result != Evicted::needs_slab) {
    return result == Evicted::yes;
  }
  if (make_slabs(lock, missing)) {
    return true;
  }
  if (!*squeeze) {
    *squeeze = true;
    return true;
  }
  return copy_out_pageable(lock);
}

Block* Runtime::room_without_evicting(Arena& arena, Bytes bytes) {
  heap_.settle(arena);
  if (Block* block = heap_.take(arena, bytes); block != nullptr) {
    return block;
  }
  if (heap_.grow(arena, bytes, ceiling()) == Status::ok) {  // step 3
    return heap_.take(arena, bytes);
  }
  if (arena.key.graph != 0) {
    return nullptr;
  }
  if (Block* block = take_idle_window(arena, bytes); block != nullptr) {
    return block;
  }
  if (heap_.gather(arena, bytes, ceiling()) == Status::ok) {  // step 6, without a wait
    if (Block* block = heap_.take(arena, bytes); block != nullptr) {
      return block;
    }
    return take_idle_window(arena, bytes);
  }
  return nullptr;
}

// Leaves in any case, and has not yet: in which order does not matter.
bool Runtime::planned_to_leave(const Record& record) const {
  return record.restores == 0 && !record.asked && plan_.leaves(record.place);
}

// A block, with what it is to a request, as choose_window sees it.
Candidate Runtime::candidate(const Block* block, Bytes bytes, bool idle, bool with_victims) const {
  Candidate found{Candidate::Kind::wall, bytes};
  if (idle) {
    found.kind = Candidate::Kind::idle;
  } else if (with_victims && block != nullptr && block->record != nullptr &&
             block->record->evictable()) {
    const Record& record = *block->record;
    found.kind = Candidate::Kind::victim;
    found.age = planned_to_leave(record) ? 0 : ~plan_.next_use(record.place, record.order);
    found.copy = record.clean() ? 0 : kNever;  // its copy would come behind all others
  }
  if (block != nullptr && found.copy == 0) {
    for (const Tick& tick : block->fence) {
      if (tick.clock == mover_->out().clock().index() &&
          block->arena->clock.waited(tick.clock) < tick.seq) {
        found.copy = tick.seq;
      }
    }
  }
  return found;
}

// The arena as choose_window sees it, in `candidates_`; the blocks beside it.
void Runtime::look(const Arena& arena, bool with_victims) {
  candidates_.clear();
  candidate_blocks_.clear();
  for (Block* b = arena.first; b != nullptr; b = b->next) {
    const bool idle = b->state == BlockState::free || b->state == BlockState::evicting;
    candidates_.push_back(candidate(b, b->size, idle, with_victims));
    candidate_blocks_.push_back(b);
  }
}

Block* Runtime::take_idle_window(Arena& arena, Bytes bytes) {
  look(arena, false);
  const Window window = choose_window(candidates_, bytes);
  if (!window.found) {
    return nullptr;
  }
  return heap_.take_run(arena, candidate_blocks_[window.begin], candidate_blocks_[window.end - 1],
                        bytes);
}

// Step 4: the victims that make a hole here. Where it would cost much more than the request lacks,
// victims that leave in any case, wherever they are: their pieces are moved here. So are those of
// what is needed last, where no hole can be made.
Runtime::Evicted Runtime::evict_for(Arena& arena, Bytes bytes, bool squeeze, Bytes* missing) {
  look(arena, true);
  const Window window = choose_window(candidates_, bytes);
  if (!window.found || bytes_leaving(window) > lacking(bytes) + kWorthMoving) {
    if (const Evicted moved = evict_planned(arena, bytes, squeeze, missing);
        moved != Evicted::none) {
      return moved;
    }
  }
  if (window.found) {
    return evict_window(window, squeeze, missing);
  }
  Record* last = last_needed(arena.key.small);
  return last != nullptr ? evict_for_pieces(arena, *last, squeeze, missing) : Evicted::none;
}

// Planned victims until the request lacks nothing but a hole; at least one.
Runtime::Evicted Runtime::evict_planned(Arena& arena, Bytes bytes, bool squeeze, Bytes* missing) {
  Evicted result = Evicted::none;
  do {
    Record* victim = planned_victim(lacking(bytes));
    if (victim == nullptr) {
      break;
    }
    const Evicted one = evict_for_pieces(arena, *victim, squeeze, missing);
    if (one != Evicted::yes) {
      return result == Evicted::yes ? result : one;
    }
    result = one;
  } while (lacking(bytes) > 0);
  return result;
}

// Evicts a record of any arena for the pieces under it. One of the request's own is settled at
// once: then its block can join its neighbours, and pieces that reach into both can move too.
Runtime::Evicted Runtime::evict_for_pieces(Arena& arena, Record& record, bool squeeze,
                                           Bytes* missing) {
  const bool here = record.block->arena == &arena;
  const Evicted result = evict(record, squeeze, missing);
  if (result == Evicted::yes && here) {
    clocks_.order_after(arena.clock, record.copy.written);  // or later: the fence stays
  }
  return result;
}

// What must leave at least, wherever it is.
Bytes Runtime::lacking(Bytes bytes) const {
  return bytes - std::min(bytes, ceiling() - std::min(counters_.occupied, ceiling()));
}

// What would leave with the window's victims: under a plan, for one that would have stayed, one
// that was copied out in vain too.
Bytes Runtime::bytes_leaving(const Window& window) const {
  Bytes bytes = 0;
  for (std::size_t i = window.begin; i < window.end; ++i) {
    const Candidate& one = candidates_[i];
    if (one.kind == Candidate::Kind::victim) {
      bytes += one.age != 0 && plan_.follows() ? 2 * one.size : one.size;
    }
  }
  return bytes;
}

// The smallest planned victim that frees `bytes`, the largest where none does; those whose copy
// is queued already before others. Null without any.
Record* Runtime::planned_victim(Bytes bytes) {
  Record* best = nullptr;
  const auto better = [&](const Record& one) {
    if (best == nullptr || one.clean() != best->clean()) {
      return best == nullptr || one.clean();
    }
    const Bytes size = one.block->size;
    const Bytes least = best->block->size;
    return least < bytes ? size > least : size >= bytes && size < least;
  };
  for (Record* r = ledger_.oldest(); r != nullptr; r = r->newer) {
    if (r->evictable() && !r->block->arena->key.small && planned_to_leave(*r) && better(*r)) {
      best = r;
    }
  }
  return best;
}

Runtime::Evicted Runtime::evict_window(const Window& window, bool squeeze, Bytes* missing) {
  Evicted result = Evicted::none;
  for (std::size_t i = window.begin; i < window.end; ++i) {
    if (candidates_[i].kind != Candidate::Kind::victim) {
      continue;
    }
    // Evicting may join free neighbours, but never moves or ends a block still in the list.
    const Evicted one = evict(*candidate_blocks_[i]->record, squeeze, missing);
    if (one != Evicted::yes) {
      return result == Evicted::yes ? result : one;
    }
    result = one;
  }
  return result;
}

// The evictable record whose next use is farthest; where nobody knows, the oldest. Records in small
// arenas free pieces for a large request only when whole pieces come free: last.
Record* Runtime::last_needed(bool small_first, bool of_mem_pools) {
  Record* found[2] = {nullptr, nullptr};  // of small arenas, of others
  Plan::Use latest[2] = {0, 0};
  for (Record* r = ledger_.oldest(); r != nullptr; r = r->newer) {
    if (!r->evictable() || (r->block->in_mem_pool && !of_mem_pools)) {
      continue;
    }
    const std::size_t kind = r->block->arena->key.small && !small_first ? 0 : 1;
    const Plan::Use use = plan_.next_use(r->place, r->order);
    if (found[kind] == nullptr || use > latest[kind]) {
      found[kind] = r;
      latest[kind] = use;
    }
  }
  return found[1] != nullptr ? found[1] : found[0];
}

// Device to host and release. A clean record's block is released at once.
Runtime::Evicted Runtime::evict(Record& record, bool squeeze, Bytes* missing) {
  Block* block = record.block;
  SH_CHECK(record.evictable());
  if (record.clean()) {
    ++counters_.clean_evictions;
  } else {
    if (!take_slabs(record, squeeze, missing)) {
      return Evicted::needs_slab;
    }
    if (!copy_out(record)) {
      return Evicted::none;
    }
    ++counters_.dirty_evictions;
  }
  if (debug_.poison) {
    const driver::ContextGuard guard(table_, context_);
    mover_->poison(block);
  }
  if (record.prefetched) {
    // Fetched too early: the step needed the room. Prefetch leaves more from here on.
    prefetch_reserve_ = std::min(prefetch_reserve_ + block->size, budget_.low);
  }
  stalls_.forget(record.stall_pair);
  record.stall_pair = StallMeter::kNone;
  record.prefetched = false;
  record.arrived = Tick{};
  record.block = nullptr;
  resident_ahead_ = 0;
  plan_.evicted(record.place);
  ++record.evictions;
  counters_.freed_bytes += block->size;
  counters_.vacate(block->size);
  counters_.retained -= block->size;
  counters_.evict(record.bytes());
  put_away(block);
  return Evicted::yes;
}

// Queues the copy of a record that has its slabs. With a small one go others like it: a copy costs
// the same however small, and theirs is then done when their turn comes. False: the driver refused;
// the slabs' fences cover what was queued, and the blocks stay as they are.
bool Runtime::copy_out(Record& record) {
  leaving_.assign(1, &record);
  if (record.bytes() < kSmallCopy) {
    Bytes missing = 0;
    for (Record* r = record.newer; r != nullptr && leaving_.size() < kSmallTogether; r = r->newer) {
      if (r->bytes() >= kSmallCopy || !r->evictable() || r->clean() || r->asked) {
        continue;
      }
      if (!take_slabs(*r, false, &missing)) {
        break;
      }
      leaving_.push_back(r);
    }
  }
  Status status = mover_->copy_out(leaving_);
  if (status != Status::ok && leaving_.size() > 1) {  // one of the others may be what cannot go
    for (Record* r : std::span(leaving_).subspan(1)) {
      release_copy(*r);
    }
    leaving_.resize(1);
    status = mover_->copy_out(leaving_);
  }
  if (status != Status::ok) {
    release_copy(record);
    return false;
  }
  counters_.write_backs += leaving_.size() - 1;
  for (Record* r : leaving_) {
    counters_.evicted_bytes += r->bytes();
    if (debug_.checksums) {
      unsealed_.push_back(Ledger::id_of(*r));
    }
  }
  return true;
}

// Makes a retained record clean ahead of need, so that evicting it costs nothing. With the slabs
// there are, and never after backward has asked for it. False: the lane's cap holds it back.
bool Runtime::write_back(Record& record) {
  Bytes missing = 0;
  if (record.clean() || record.copying || record.asked) {
    return true;
  }
  if (mover_->out().full()) {
    return false;
  }
  const driver::ContextGuard guard(table_, context_);
  if (take_slabs(record, false, &missing) && copy_out(record)) {
    ++counters_.write_backs;
  }
  return true;
}

// Copies out what is expected to leave: under a plan what a cap held back before; without one,
// while memory is short, as much of what is needed last as would bring it down to `low`.
void Runtime::write_back_ahead() {
  const bool planned = plan_.follows();
  if (planned ? held_back_ == 0 : counters_.occupied <= budget_.low) {
    return;
  }
  held_back_ = 0;
  Bytes wanted = planned ? kUnlimited : counters_.occupied - budget_.low;
  for (Record* r = ledger_.oldest(); r != nullptr && wanted > 0; r = r->newer) {
    if (!r->retained() || r->asked || (planned && !plan_.leaves(r->place))) {
      continue;
    }
    if (!write_back(*r)) {
      ++held_back_;
      return;
    }
    wanted -= std::min(wanted, r->block->size);
  }
}

// Whether the planned victim at the front of the queue can leave now; those that cannot, or need
// not, are taken off it.
Record* Runtime::next_to_leave() {
  for (; !to_leave_.empty(); to_leave_.pop_front()) {
    Record* record = ledger_.find(to_leave_.front());
    if (record != nullptr && record->evictable() && record->clean() && !record->asked) {
      return record;
    }
  }
  return nullptr;
}

// Under a plan, small victims leave a few at a time, and the stream is put behind their copies at
// once: the next requests then find free blocks, where each would have to search for room.
void Runtime::evict_next_small(Arena& arena) {
  Bytes missing = 0;
  Bytes room = kSmallVictims;
  Status status = Status::ok;
  for (Record* record = next_to_leave(); record != nullptr && record->block->size <= room &&
                                         record->block->arena == &arena && status == Status::ok;
       record = next_to_leave()) {
    room -= record->block->size;
    status = clocks_.order_after(arena.clock, record->copy.written);
    evict(*record, false, &missing);
    to_leave_.pop_front();
  }
  heap_.settle(arena);
}

// Planned victims leave as soon as their copies are known to be done, so that requests find free
// blocks instead of making room one victim at a time; not before memory is about to run short, or
// more would leave than must. Where the host is far ahead of the GPU none is, and requests take
// them behind their copies, in the order of these.
void Runtime::let_leave() {
  Bytes missing = 0;
  const Bytes room = std::min(kFreeAhead, (budget_.high - budget_.low) / 2);
  while (!fits_under(counters_.occupied, room, ceiling())) {
    Record* record = next_to_leave();
    if (record == nullptr ||
        !clocks_.at(record->copy.written.clock).passed(record->copy.written.seq)) {
      return;
    }
    evict(*record, false, &missing);
    to_leave_.pop_front();
  }
}

// Step 5: hysteresis, so that the next requests find room without evicting. Uses the slabs there
// are: it is not worth a wait.
void Runtime::evict_to_low(Bytes incoming) {
  Bytes missing = 0;
  while (!fits_under(counters_.occupied, incoming, budget_.low)) {
    Record* oldest = last_needed(false);
    if (oldest == nullptr || evict(*oldest, false, &missing) != Evicted::yes) {
      return;
    }
  }
}

void Runtime::evict_all(Lock& lock) {
  Bytes missing = 0;
  for (Record* record = last_needed(true); record != nullptr; record = last_needed(true)) {
    const Evicted result = evict(*record, true, &missing);
    if (result == Evicted::none || (result == Evicted::needs_slab && !make_slabs(lock, missing))) {
      return;
    }
  }
}

// Step 7.
Block* Runtime::overshoot(Arena& arena, Bytes bytes, Status* status) {
  const Bytes before = counters_.mapped;
  const Status grown = heap_.grow(arena, bytes, budget_.limit, 0);
  Block* block = nullptr;
  if (grown == Status::ok) {
    block = heap_.take(arena, bytes);
  } else if (arena.key.graph == 0 && heap_.gather(arena, bytes, budget_.limit) == Status::ok) {
    block = heap_.take(arena, bytes);
    if (block == nullptr) {
      block = take_idle_window(arena, bytes);
    }
  }
  if (block == nullptr) {
    *status = grown == Status::driver_failed ? grown : Status::out_of_memory;
    ++counters_.out_of_memory;
    return nullptr;
  }
  if (budget_.armed) {
    const Bytes over = counters_.mapped - std::min(counters_.mapped, budget_.high);
    counters_.overshoot_bytes += std::min(over, counters_.mapped - before);
    const Bytes live = counters_.occupied - counters_.retained + bytes;
    if (live > counters_.overshoot_live) {
      counters_.overshoot_live = live;
      counters_.overshoot_saved = saved_in_use();
    }
  }
  return block;
}

// The last resort for a copy: pageable memory, which the driver fills while the caller waits. Runs
// without the lock; the block stays where it is meanwhile, so its owners may come and go.
bool Runtime::copy_out_pageable(Lock& lock) {
  Record* record = ledger_.oldest();
  while (record != nullptr && (!record->evictable() || record->clean())) {
    record = record->newer;
  }
  Slab* slab = record != nullptr ? pinned_.take_pageable(record->bytes()) : nullptr;
  if (slab == nullptr) {
    return false;
  }
  bool copied = mover_->order_copy_out(*record) == Status::ok;
  const Copy copy{record->block->address + record->begin - record->block_begin, slab->host,
                  record->bytes()};
  const driver::Stream stream = mover_->out().clock().stream();
  record->copying = true;
  ++counters_.host_waits;
  ++counters_.pageable_copies;
  lock.unlock();
  {
    RankedMutex::expect_none_held();
    const driver::ContextGuard guard(table_, context_);
    copied = copied && mover_->out().copy_now(stream, copy);
  }
  lock.lock();
  record->copying = false;
  const bool outdated = std::exchange(record->outdated, false);
  if (copied && !outdated && record->handles > 0) {
    record->copy.slabs.push_back(slab);
    counters_.evicted_bytes += copy.bytes;
    if (debug_.checksums) {
      unsealed_.push_back(Ledger::id_of(*record));
    }
    return true;
  }
  pinned_.give(slab);
  if (record->handles == 0) {
    end_record(*record);
    return true;  // its block is free now
  }
  return outdated;  // it is in use again; there may be another
}

// The same way back, and onto the books. An alias stands for this thread meanwhile: the block is
// nobody else's.
Status Runtime::restore_pageable(Lock& lock, Record& record, Block* block) {
  Status status = mover_->order_copy_in(record, block);
  if (status == Status::ok) {
    const Copy copy{block->address + record.begin - record.block_begin,
                    record.copy.slabs.front()->host, record.bytes()};
    const driver::Stream stream = mover_->in().clock().stream();
    record.copying = true;
    ++block->aliases;
    ++counters_.aliases;
    ++counters_.host_waits;
    lock.unlock();
    bool copied = false;
    {
      RankedMutex::expect_none_held();
      const driver::ContextGuard guard(table_, context_);
      copied = mover_->in().copy_now(stream, copy);
    }
    lock.lock();
    --block->aliases;
    --counters_.aliases;
    record.copying = false;
    status = copied ? Status::ok : Status::driver_failed;
  }
  if (status != Status::ok) {
    give_back(block);
    return status;
  }
  arrive(record, block);
  return Status::ok;
}

}  // namespace stagehand::core
