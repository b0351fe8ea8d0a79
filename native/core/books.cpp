#include "core/books.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "core/device.hpp"
#include "core/wait_timer.hpp"

namespace stagehand::core {

Books::Books(Device& device) : d_(device), victims_(device.plan), process_limit_(device.bytes) {
  d_.budget = {d_.bytes, d_.bytes, d_.bytes, false};
}

// Blocks ------------------------------------------------------------------------------------------

void Books::hand_out(Block* block) {
  block->serial = ++serial_;
  d_.counters.occupy(block->size);
  note_live();
}

void Books::note_live() {
  if (d_.budget.armed) {
    const Bytes live = d_.live();
    d_.plan.live(live);
    d_.weights.note_live(live);
  }
}

// Not told while a record comes back: it has its block then, and counts as away still.
void Books::note_occupied() {
  if (d_.budget.armed) {
    d_.plan.occupied(d_.without_idle(d_.counters.occupied), d_.without_idle(d_.counters.mapped));
  }
}

// The worst one says why: how much of what is live are saved activations that torch or backward
// still uses.
void Books::note_overshoot(Bytes live) {
  if (live > d_.counters.overshoot_live) {
    d_.counters.overshoot_live = live;
    d_.counters.overshoot_saved = saved_in_use_;
  }
}

void Books::owner_left(Block* block) {
  if (block->aliases == 0 && block->record == nullptr && d_.store->disown(block)) {
    return;
  }
  if (block->owned()) {
    return;
  }
  block->idle_from = block->clock->upcoming();
  d_.transfers.fence_users(block);
  if (block->record == nullptr) {
    vacate(block);
    return;
  }
  d_.store->set_state(block, BlockState::retained);
  d_.counters.retain(block->size);
  d_.plan.retained(block->record->place);
  saved_in_use_ -= block->size;
  if (block->record->evictable()) {
    victims_.put(*block->record);
  }
  d_.departures.retained(*block->record);
}

// Off the books: its memory serves again, behind the work that names it.
void Books::vacate(Block* block) {
  d_.counters.vacate(block->size);
  d_.counters.retained -= block->state == BlockState::retained ? block->size : 0;
  d_.store->put_away(block);
}

void Books::revive(Block* block) {
  if (block->state != BlockState::retained) {
    return;
  }
  Record& record = *block->record;
  victims_.remove(record);
  d_.store->set_state(block, BlockState::live);
  d_.counters.release_retained(block->size);
  saved_in_use_ += block->size;
  if (record.copy.state == CopyState::staged) {
    drop_copy(record);  // nothing was queued, and from here on it may change
  }
  note_live();
}

void Books::give_back(Block* block) {
  block->idle_from = block->clock->upcoming();  // work queued on its stream may name it
  vacate(block);
}

// Records -----------------------------------------------------------------------------------------

namespace {
// Whether what can be made again is all that was saved of the storage, from its first byte on.
bool covers(const Record& record, const Block* block, const Made& made) {
  return made.first == block->address && made.bytes >= record.end && record.block_begin == 0;
}
}  // namespace

// By its node, where that is sure to make the same bytes, or by its call.
void Books::note_recipe(Record& record, const Block* block, const Made& made, bool of_call) const {
  const bool proven = d_.plan.proven(record.place) && d_.plan.made_by(record.place, made.kind);
  const bool by_node = covers(record, block, made) && (made.exact || proven);
  record.by_node = record.by_node && by_node;
  record.recipe = record.recipe && (by_node || (of_call && record.block_begin == 0));
}

Record& Books::save(Block* block, Address first, Address last, Made made, Inside inside) {
  const bool of_call = made_in(*block, inside);
  Record* record = block->record;
  if (record == nullptr) {
    record = d_.ledger.open(block, first - block->address, last - block->address);
    if (!covers(*record, block, made)) {
      made = Made{.sought = made.sought};
    }
    try {
      record->place = d_.plan.saved(
          block->size, Ledger::id_of(*record), made,
          {inside.call, of_call && record->block_begin == 0, inside.op, inside.region});
    } catch (...) {
      d_.ledger.close(record);  // the host has no memory for the trace
      throw;
    }
    record->recipe = record->by_node = true;
    note_recipe(*record, block, made, of_call);
    for (std::size_t i = 0; i < Made::kInputs && made.bytes != 0; ++i) {
      if (const Record* input = d_.ledger.find(made.of[i]); input != nullptr) {
        d_.plan.made_of(record->place, i, input->place);
      }
    }
    if (step_ != record->place.step) {
      step_ = record->place.step;
      d_.clocks.steps.step_began(d_.plan);
    } else if (!d_.plan.measures()) {
      d_.clocks.steps.forget();
    }
    note_occupied();
    d_.clocks.moment(d_.plan.moment(), block->clock->stream());
    block->record = record;
    record->call = of_call ? inside.call : 0;
    saved_in_use_ += block->size;
  } else {
    // A copy still under way reads what it finds, for nobody.
    record->outdated |= record->waited_for;
    if (!record->waited_for && record->clean()) {
      drop_copy(*record);
    }
    const Bytes begin = first - block->address + record->block_begin;
    const Bytes end = last - block->address + record->block_begin;
    record->begin = std::min(record->begin, begin);
    record->end = std::max(record->end, end);
    note_recipe(*record, block, made, of_call);
  }
  ++record->handles;
  ++d_.counters.handles;
  ++d_.counters.activations_saved;
  d_.counters.records = d_.ledger.size();
  d_.saving = true;
  return *record;
}

bool Books::made_in(const Block& block, Inside call) {
  return call.call != 0 && block.serial > call.since && !block.made_again &&
         (block.record == nullptr || block.record->call == call.call);
}

void Books::forget_recipe(Record& record) {
  record.recipe = false;
  if (record.evictable()) {
    victims_.put(record);
  }
}

// Small budgets are held to the byte: a MiB for each whole GiB.
bool Books::ignore(Bytes bytes) {
  if (!d_.budget.armed || d_.debug.evict_everything || bytes >= kSmallCopy ||
      ignored_ + bytes > d_.budget.high / 1_GiB * 1_MiB) {
    return false;
  }
  ignored_ += bytes;
  return true;
}

void Books::drop_handle(Record& record) {
  --d_.counters.handles;
  if (--record.handles == 0 && !record.waited_for) {
    close(record);
  }
}

// The last handle is gone: block and copy are given back, each behind the work that names it. The
// books forget the record before its address can be handed out again (rule O2).
void Books::close(Record& record) {
  Block* block = record.block;
  if (record.clean()) {
    drop_copy(record);
  }
  victims_.remove(record);
  if (block == nullptr) {
    Bytes& elsewhere =
        record.state == RecordState::dropped ? d_.counters.dropped : d_.counters.evicted;
    elsewhere -= record.bytes();
  } else {
    no_more_ahead(record);
    block->record = nullptr;
    saved_in_use_ -= block->state == BlockState::live ? block->size : 0;
  }
  d_.stalls.forget(record.stall_pair);
  d_.plan.closed(record.place);
  d_.ledger.close(&record);
  d_.counters.records = d_.ledger.size();
  if (block != nullptr && block->state == BlockState::retained) {
    vacate(block);
  } else if (block != nullptr && block->aliases == 0) {
    d_.store->disown(block);
  }
  disarm_if_idle();
}

void Books::leave(Record& record) {
  SH_CHECK(record.evictable() && record.copy.holds_bytes());
  Block* block = part(record, RecordState::away);
  ++record.evictions;
  d_.plan.evicted(record.place);
  d_.counters.evict(record.bytes());
  vacate(block);
  d_.clocks.timeline.note(Timeline::What::evicted, record.bytes(), record.order, d_.counters);
}

void Books::drop(Record& record) {
  SH_CHECK(record.evictable() && record.droppable());
  Block* block = part(record, RecordState::dropped);
  record.was_dropped = true;
  d_.plan.dropped(record.place);
  ++d_.counters.drops;
  d_.counters.dropped += record.bytes();
  d_.counters.dropped_bytes += record.bytes();
  vacate(block);
  d_.clocks.timeline.note(Timeline::What::dropped, record.bytes(), record.order, d_.counters);
}

// The record and its block go their own ways; the block is to be put away.
Block* Books::part(Record& record, RecordState state) {
  Block* block = record.block;
  victims_.remove(record);
  if (record.prefetched) {
    // Fetched too early: the step needed the room. Prefetch leaves more from here on.
    d_.prefetcher.leave_more(block->size);
  }
  no_more_ahead(record);
  d_.stalls.forget(record.stall_pair);
  record.stall_pair = StallMeter::kNone;
  record.arrived = Tick{};
  record.block = nullptr;
  record.state.move_to(state);
  d_.prefetcher.look_again();
  block->record = nullptr;
  d_.counters.freed_bytes += block->size;
  return block;
}

void Books::refill(Record& record, Block* block) {
  SH_CHECK(block->state == BlockState::live && block->record == nullptr);
  record.block = block;
  record.block_begin = 0;
  record.state.move_to(RecordState::device);
  block->record = &record;
  d_.plan.returned(record.place);
  ++d_.counters.recomputes;
  d_.counters.dropped -= record.bytes();
  d_.counters.recomputed_bytes += record.bytes();
  saved_in_use_ += block->size;
  d_.clocks.timeline.note(Timeline::What::made_again, record.bytes(), record.order, d_.counters);
}

void Books::arrive(Record& record, Block* block, bool ahead) {
  record.block = block;
  record.state.move_to(RecordState::device);
  block->record = &record;
  block->made_again = true;
  ++record.restores;
  d_.plan.returned(record.place);
  d_.counters.evicted -= record.bytes();
  d_.counters.restored_bytes += record.bytes();
  d_.clocks.timeline.note(ahead ? Timeline::What::prefetched : Timeline::What::restored,
                          record.bytes(), record.order, d_.counters);
  if (!ahead) {
    ++d_.counters.restores;
    saved_in_use_ += block->size;
    return;
  }
  ++d_.counters.prefetches;
  record.prefetched = true;
  d_.ahead += block->size;
  d_.store->set_state(block, BlockState::retained);
  d_.counters.retain(block->size);
  victims_.put(record);
}

void Books::no_more_ahead(Record& record) {
  d_.ahead -= std::exchange(record.prefetched, false) ? record.block->size : 0;
}

void Books::refuse(Record& record) {
  victims_.remove(record);
  record.refused = true;
  refused_.push_back(Ledger::id_of(record));
}

void Books::forgive() {
  for (const RecordId id : refused_) {
    Record* record = d_.ledger.find(id);
    if (record != nullptr && std::exchange(record->refused, false) && record->evictable()) {
      victims_.put(*record);
    }
  }
  refused_.clear();
}

// Host copies -------------------------------------------------------------------------------------

void Books::stage(Record& record) {
  record.copy.state.move_to(CopyState::staged);
  if (record.evictable()) {
    victims_.put(record);
  }
}

void Books::queued(Record& record) {
  record.copy.state.move_to(CopyState::queued);
  d_.counters.evicted_bytes += record.bytes();
  if (record.evictable()) {
    victims_.put(record);
  }
  d_.sealer.note(record);
}

void Books::drop_copy(Record& record) {
  for (Slab* slab : record.copy.slabs) {
    d_.host.give(slab);
  }
  record.copy.slabs.clear();
  record.copy.state.move_to(CopyState::none);
  if (record.evictable()) {
    victims_.put(record);
  }
}

void Books::sealed(Record& record, std::uint32_t checksum) {
  record.copy.checksum = checksum;
  record.copy.state.move_to(CopyState::sealed);
}

void Books::wait(Entry& entry, Record& record, const std::function<bool()>& body,
                 const std::function<void(bool)>& after) {
  victims_.remove(record);
  record.waited_for = true;
  ++d_.counters.host_waits;
  bool done = false;
  const WaitTimer timer;
  {
    const Unlocked unlocked(entry);
    RankedMutex::expect_none_held();
    done = body();
  }
  d_.counters.copy_wait_ns += timer.ns();
  record.waited_for = false;
  const bool outdated = std::exchange(record.outdated, false);
  after(done && !outdated && record.handles > 0);
  if (outdated && record.clean()) {
    drop_copy(record);
  }
  if (record.handles == 0) {
    close(record);
  } else if (record.evictable()) {
    victims_.put(record);
  }
}

// The budget --------------------------------------------------------------------------------------

void Books::arm(const Budget& budget) {
  d_.budget = budget;
  d_.budget.limit = std::min(budget.limit, process_limit_);
  d_.budget.armed = true;
  pool_open_ = true;
}

void Books::pool_left() {
  pool_open_ = false;
  disarm_if_idle();
}

// Disarmed, `high` is still where growth looks for free memory elsewhere first, so that what runs
// between two pools (the optimizer) does not map more than it must; going over it is no overshoot.
void Books::disarm_if_idle() {
  if (d_.ledger.size() == 0 && !pool_open_) {
    d_.budget.armed = false;
    d_.budget.limit = process_limit_;
    d_.store->end_step();
  }
}

void Books::set_process_limit(Bytes limit) {
  process_limit_ = std::min(limit, d_.bytes);
  d_.budget.limit = d_.budget.armed ? std::min(d_.budget.limit, process_limit_) : process_limit_;
}

const char* Books::broken() {
  Bytes handles = 0;
  Bytes evicted = 0;
  Bytes dropped = 0;
  Bytes in_use = 0;
  Bytes ahead = 0;
  std::size_t records = 0;
  for (const Record* r = d_.ledger.oldest(); r != nullptr; r = r->newer) {
    ++records;
    handles += r->handles;
    ahead += r->prefetched ? r->block->size : 0;
    in_use += r->block != nullptr && r->block->state == BlockState::live ? r->block->size : 0;
    if (!r->alive || (r->handles == 0 && !r->waited_for)) {
      return "a record without handles is in the ledger";
    }
    if ((r->state == RecordState::device) != (r->block != nullptr)) {
      return "O1: a record's state and its block do not agree";
    }
    if (r->clean() == r->copy.slabs.empty()) {
      return "O3: a host copy's state and its slabs do not agree";
    }
    if (r->state == RecordState::away) {
      evicted += r->bytes();
      if (!r->copy.holds_bytes()) {
        return "O3: an evicted record has no host copy";
      }
    } else if (r->state == RecordState::dropped) {
      dropped += r->bytes();
      if (!r->recipe || !r->was_dropped || r->clean()) {
        return "a dropped record has a host copy, or nobody who can make it again";
      }
    } else if (r->block->record != r) {
      return "O1: a record and its block do not name each other";
    }
    if (r->copy.state == CopyState::staged && !r->retained()) {
      return "a copy is staged of a block that is in use";
    }
  }
  if (records != d_.ledger.size() || handles != d_.counters.handles ||
      records != d_.counters.records) {
    return "ledger counts differ from the counters";
  }
  if (in_use != saved_in_use_) {
    return "bytes saved and in use differ from the blocks";
  }
  if (ahead != d_.ahead) {
    return "bytes that came back ahead of need differ from the records";
  }
  if (evicted != d_.counters.evicted || dropped != d_.counters.dropped) {
    return "evicted or dropped bytes differ from the counters";
  }
  return victims_.broken(d_.ledger);
}

}  // namespace stagehand::core
