// The walks. Opening, settings and reports are in runtime_settings.cpp.
#include "core/runtime.hpp"

#include <algorithm>
#include <new>

#include "core/check.hpp"

namespace stagehand::core {

// Walk 1 ------------------------------------------------------------------------------------------

Status Runtime::allocate(Bytes bytes, driver::Stream stream, std::uint64_t graph,
                         Address* address) {
  Entry entry(d_.gate);
  if (bytes > d_.bytes) {
    ++d_.counters.out_of_memory;
    return Status::out_of_memory;
  }
  if (d_.debug.evict_everything && graph == 0) {
    d_.room.evict_all(entry);
    d_.weights.leave_all();
  }
  Status status = Status::ok;
  Block* block = heap_.allocate(entry, DeviceHeap::block_bytes(bytes), stream, graph, &status);
  if (block == nullptr) {
    return status;
  }
  block->owned_by_torch = true;
  block->made_again = false;
  block->fence.clear();  // the stream is behind all of it
  d_.counters.requested_bytes += bytes;
  d_.books.note_occupied();
  *address = block->address;
  d_.sealer.seal(entry);
  return Status::ok;
}

bool Runtime::free(Address address) {
  Entry entry(d_.gate);
  Block* block = heap_.find(address);
  if (block == nullptr || !block->owned_by_torch || block->address != address) {
    return false;
  }
  ++d_.counters.frees;
  block->owned_by_torch = false;
  d_.books.owner_left(block);
  d_.sealer.seal(entry);
  return true;
}

void Runtime::record_stream(Address address, driver::Stream stream) {
  Entry entry(d_.gate);
  Block* block = heap_.find(address);
  if (block != nullptr && block->state == BlockState::live) {
    heap_.record_stream(block, stream);
  }
}

bool Runtime::base_of(Address address, Address* base, Bytes* bytes) {
  Entry entry(d_.gate);
  const Block* block = heap_.find(address);
  if (block == nullptr) {
    return false;
  }
  *base = block->address;
  *bytes = block->size;
  return true;
}

// Walk 2 ------------------------------------------------------------------------------------------

Saved Runtime::save(Address data, Address first, Address last, bool may_ignore, Made made,
                    Inside inside) {
  Entry entry(d_.gate);
  Block* block = heap_.find(first);
  if (block == nullptr || block->state != BlockState::live || last > block->end()) {
    return {Refusal::foreign_storage, {}};
  }
  if (block->in_graph) {
    return {Refusal::graph_capture, {}};
  }
  if (block->keep) {
    return {Refusal::kept, {}, 0, Books::made_in(*block, inside)};
  }
  // Parameters, buffers and inputs were there before the pool was entered (rule A2).
  if (block->record == nullptr && block->serial <= pool_serial_) {
    return {Refusal::older_than_pool, {}};
  }
  if (may_ignore && block->record == nullptr && d_.books.ignore(block->size)) {
    return {Refusal::small, {}, 0, Books::made_in(*block, inside), false, block->size};
  }
  Saved saved;
  try {
    saved = tagged(block, data, first, last, made, inside);
  } catch (const std::bad_alloc&) {
    return {Refusal::no_memory, {}};
  }
  map_ahead(entry, saved.record);
  return saved;
}

// Never above what the budget is by now, nor more than the driver has.
void Runtime::map_ahead(Entry& entry, RecordId record) {
  const Bytes wanted = d_.departures.take_map_ahead();
  std::size_t driver_free = 0;
  std::size_t total = 0;
  if (wanted == 0 || d_.gate->mem_get_info(&driver_free, &total) != driver::kSuccess) {
    return;
  }
  const Bytes target = std::min({wanted, d_.budget.high, d_.budget.limit});
  if (!fits_under(0, target - std::min(target, d_.counters.mapped), driver_free)) {
    return;
  }
  try {
    d_.store->map_ahead(entry, record, target);
  } catch (const std::bad_alloc&) {  // it comes as it is asked for
  }
}

void Runtime::ignored_ended(Bytes bytes) {
  Entry entry(d_.gate);
  d_.books.ignored_ended(bytes);
}

void Runtime::look_for_recipes() {
  const bool is_short = d_.counters.occupied > d_.budget.low || d_.debug.evict_everything;
  wants_recipes_.store(is_short || d_.plan.wants_recipes(), std::memory_order_relaxed);
  if (is_short) {
    wants_regions_.store(true, std::memory_order_relaxed);
  }
}

// A record for the block, or one more handle for the one it has.
Saved Runtime::tagged(Block* block, Address data, Address first, Address last, Made made,
                      Inside inside) {
  const bool of_call = Books::made_in(*block, inside);
  const Record& record = d_.books.save(block, first, last, made, inside);
  look_for_recipes();
  if (d_.counters.occupied > d_.budget.low) {
    // A fine clock while memory is short: copies out of what is freed from here on can then start
    // at a point of the stream instead of behind all that was queued.
    block->clock->note_work(block->size);
  }
  return {Refusal::none,
          Ledger::id_of(record),
          data - block->address + record.block_begin,
          of_call,
          false,
          0,
          d_.plan.looks_at(record.place)};
}

Unpacked Runtime::unpack(RecordId id, Bytes offset, driver::Stream consumer, bool by_recipe) {
  Entry entry(d_.gate);
  if (d_.ledger.find(id) == nullptr) {
    return {Status::stale};
  }
  return unpack_in(entry, id, offset, consumer, by_recipe);
}

std::optional<Unpacked> Runtime::unpack_resident(RecordId id, Bytes offset, driver::Stream consumer,
                                                 bool by_recipe) {
  Entry entry(d_.gate);
  const Record* record = d_.ledger.find(id);
  if (record == nullptr || record->state != RecordState::device) {
    return std::nullopt;
  }
  return unpack_in(entry, id, offset, consumer, by_recipe);
}

Unpacked Runtime::unpack_in(Entry& entry, RecordId id, Bytes offset, driver::Stream consumer,
                            bool by_recipe) {
  d_.departures.no_more_saves(true);
  d_.store->look_around(entry);
  Record& record = *d_.ledger.find(id);  // the handle is the caller's
  if (record.state == RecordState::dropped) {
    return {Status::recompute};
  }
  if (d_.counters.evicted > 0) {
    d_.clocks.of(record.stream).note_work(record.bytes());  // a fine clock for restores, as in save
  }
  d_.plan.unpacked(record.place, by_recipe);
  d_.books.note_occupied();
  d_.clocks.moment(d_.plan.moment(), consumer);
  d_.saving = false;
  Status status = Status::ok;
  if (record.state == RecordState::device) {
    ++d_.counters.alias_hits;
    d_.books.revive(record.block);
  } else if (!d_.prefetcher.restore(entry, record, &status)) {
    d_.sealer.seal(entry);
    return {status};
  } else {
    d_.books.revive(record.block);  // another thread may have brought it back, and dropped it
  }
  const bool asked = std::exchange(record.asked, true);
  Unpacked found = hand_out(entry, record, offset, consumer);
  if (found.status == Status::ok && !asked) {
    found.proof = to_prove(record, consumer);
  }
  if (found.proof.trace != 0) {
    found.saved = found.block->address + record.begin - record.block_begin;
    found.begin = record.begin;
    found.bytes = record.bytes();
  }
  d_.sealer.seal(entry);  // the alias holds the block meanwhile
  return found;
}

// None that has no room: what is made again is there beside the record, and what that is made of.
Plan::ToProve Runtime::to_prove(const Record& record, driver::Stream consumer) {
  const Plan::ToProve proof = d_.plan.to_prove(record.place);
  if (proof.trace == 0 || d_.clocks.of(consumer).captured()) {
    return {};
  }
  std::array<Bytes, kMostToMake> sizes{};
  const std::size_t count = blocks_to_make(record, sizes);
  try {
    if (count != 0 && d_.store->fits(std::span(sizes).first(count), record.stream)) {
      return proof;
    }
  } catch (const std::bad_alloc&) {  // it is asked for again
    return {};
  }
  d_.plan.no_room_to_prove(record.place);
  return {};
}

// Of what is made again, and of all that it is made of but is not in use anyway: what was dropped
// has to be made first. How many; 0 where they are more than are looked at.
std::size_t Runtime::blocks_to_make(const Record& record, std::array<Bytes, kMostToMake>& sizes) {
  std::array<const Record*, kMostToMake> made{&record};
  std::size_t count = 1;
  for (std::size_t i = 0; i < count; ++i) {
    sizes[i] = made[i]->returning_bytes();
    if (i > 0 && made[i]->state != RecordState::dropped) {
      continue;
    }
    for (const RecordId id : d_.plan.inputs(made[i]->place)) {
      const Record* input = d_.ledger.find(id);
      const auto end = made.begin() + static_cast<std::ptrdiff_t>(count);
      if (input == nullptr || (input->block != nullptr && !input->retained()) ||
          std::find(made.begin(), end, input) != end) {
        continue;
      }
      if (count == made.size()) {
        return 0;
      }
      made[count++] = input;
    }
  }
  return count;
}

// An alias of the record's block for `consumer`, behind its copy in.
Unpacked Runtime::hand_out(Entry& entry, Record& record, Bytes offset, driver::Stream consumer) {
  Block* block = record.block;
  ++block->aliases;
  ++d_.counters.aliases;
  StreamClock& clock = d_.clocks.of(consumer);
  if (record.arrived.seq != 0) {
    if (clock.captured()) {
      d_.stalls.forget(record.stall_pair);  // an event there would be the graph's
    } else {
      d_.stalls.asked(record.stall_pair, consumer, record.prefetched);
    }
    record.stall_pair = StallMeter::kNone;
    d_.books.no_more_ahead(record);
    d_.prefetcher.awaited(record.arrived);
    if (holds(Rule::S6) && d_.clocks.order_after(clock, record.arrived) != Status::ok) {
      --block->aliases;
      --d_.counters.aliases;
      d_.books.owner_left(block);
      return {Status::driver_failed};
    }
  }
  d_.store->handed_out(record);
  if (&clock != block->clock) {
    d_.clocks.add_user(block, clock);
  }
  const Bytes inside = offset - record.block_begin;
  const bool elsewhere = block->made_again && &clock != block->clock;
  const Unpacked found{Status::ok, block->address + inside, block, block->storage, inside,
                       elsewhere};
  d_.prefetcher.run(entry, Ledger::id_of(record));
  return found;
}

void Runtime::made(RecordId id, driver::Stream stream, bool rerun) {
  Entry entry(d_.gate);
  if (const Record* record = d_.ledger.find(id); record != nullptr) {
    const bool newest = record->place.step == d_.books.step();
    d_.clocks.steps.made(stream, newest ? record->place.index : KnownRecord::kNever, rerun);
    if (rerun) {
      d_.plan.rerun_made(record->place);
    }
  }
}

void Runtime::proved(Plan::ToProve what, bool same) {
  Entry entry(d_.gate);
  d_.plan.proved(what, same);
}

void Runtime::making(RecordId, driver::Stream stream) {
  Entry entry(d_.gate);
  if (!d_.clocks.of(stream).captured()) {
    d_.clocks.steps.making(stream);
  }
}

bool Runtime::refill(RecordId id, Address first, driver::Stream stream) {
  Entry entry(d_.gate);
  Record* record = d_.ledger.find(id);
  if (record == nullptr || record->state != RecordState::dropped) {
    return true;
  }
  Block* block = heap_.find(first);
  if (block == nullptr || block->state != BlockState::live || block->address != first ||
      block->size < record->end || block->record != nullptr || block->in_graph || block->keep) {
    return false;
  }
  fill(*record, block, stream);
  return true;
}

// Whoever asks for it is behind the work that makes it, like behind a copy in.
void Runtime::fill(Record& record, Block* block, driver::Stream stream) {
  const Tick made = d_.clocks.of(stream).now();
  d_.books.refill(record, block);
  record.stream = block->clock->stream();
  record.arrived = made;
  block->made_again = true;
}

std::uint64_t Runtime::serial() {
  Entry entry(d_.gate);
  return torch_ != nullptr ? torch_->serial() : d_.books.serial();
}

bool Runtime::dropped(RecordId id) {
  Entry entry(d_.gate);
  const Record* record = d_.ledger.find(id);
  return record != nullptr && record->state == RecordState::dropped;
}

bool Runtime::by_node(RecordId id) {
  Entry entry(d_.gate);
  const Record* record = d_.ledger.find(id);
  return record != nullptr && record->by_node;
}

void Runtime::forget_recipes(std::span<const RecordId> records) {
  Entry entry(d_.gate);
  for (const RecordId id : records) {
    if (Record* record = d_.ledger.find(id);
        record != nullptr && record->state != RecordState::dropped) {
      d_.books.forget_recipe(*record);
    }
  }
}

void Runtime::note_rerun() {
  Entry entry(d_.gate);
  ++d_.counters.reruns;
}

void Runtime::rerun_begins() {
  Entry entry(d_.gate);
  d_.store->look();
  d_.plan.rerun_begins(d_.without_idle(d_.counters.occupied));
}

void Runtime::rerun_ends() {
  Entry entry(d_.gate);
  d_.store->look();
  d_.plan.rerun_ends();
}

bool Runtime::resident(RecordId id) {
  Entry entry(d_.gate);
  const Record* record = d_.ledger.find(id);
  return record != nullptr && record->state == RecordState::device;
}

Bytes Runtime::bytes_of(RecordId id) {
  Entry entry(d_.gate);
  const Record* record = d_.ledger.find(id);
  return record != nullptr ? record->bytes() : 0;
}

void Runtime::drop_alias(Block* block) {
  Entry entry(d_.gate);
  SH_CHECK(block->aliases > 0);
  --block->aliases;
  --d_.counters.aliases;
  d_.books.owner_left(block);
  d_.sealer.seal(entry);
}

bool Runtime::shared(const Block* block) {
  Entry entry(d_.gate);
  return block->record != nullptr || block->owned_by_torch || block->aliases > 1;
}

void Runtime::drop_handle(RecordId id) {
  Entry entry(d_.gate);
  if (Record* record = d_.ledger.find(id); record != nullptr) {
    d_.books.drop_handle(*record);
  }
}

bool Runtime::keep(Address address) {
  Entry entry(d_.gate);
  return d_.store->keep(address);
}

// Walks 4 and 5 -----------------------------------------------------------------------------------

void Runtime::use_torch(const TorchSide& side, CacheMap& cache) {
  Entry entry(d_.gate);
  if (torch_ == nullptr) {
    torch_ = std::make_unique<TorchStore>(d_, side, cache);
    d_.store = torch_.get();
    d_.clocks.capture(1);  // nobody tells of torch's captures: ask each stream before an event
    Gate::captures().fetch_add(1);
    uses_torch_.store(true, std::memory_order_release);
  }
}

// Where the host has no memory for our books, the tensor stays with torch.
Saved Runtime::save_held(const HeldStorage& held, driver::Stream stream, Address data,
                         Address first, Address last, bool may_ignore, Made made, Inside inside) {
  Entry entry(d_.gate);
  if (first < held.address || last > held.address + held.bytes) {
    return {Refusal::foreign_storage, {}};
  }
  Refusal refusal = Refusal::none;
  bool fresh = false;
  Block* block = nullptr;
  Saved saved;
  try {
    std::uint64_t serial = 0;
    block = torch_->hold(held, stream, may_ignore, &fresh, &refusal, &serial);
    if (block == nullptr) {
      const bool of_call = inside.call != 0 && serial > inside.since;
      return {refusal, {}, 0, of_call, false, refusal == Refusal::small ? held.bytes : 0};
    }
    block->owned_by_torch = true;
    saved = tagged(block, data, first, last, made, inside);
  } catch (const std::bad_alloc&) {
    if (block != nullptr && fresh && block->record == nullptr) {
      torch_->forget(block);
    }
    return {Refusal::no_memory, {}};
  }
  saved.took_reference = fresh;
  try {
    torch_->saved(entry, *block->record, stream, fresh);
    map_ahead(entry, saved.record);
    if (d_.debug.evict_everything) {
      d_.room.evict_all(entry);
    }
    d_.sealer.seal(entry);
  } catch (const std::bad_alloc&) {  // it is saved; what could leave now leaves later
  }
  return saved;
}

bool Runtime::refill_held(RecordId id, const HeldStorage& held, driver::Stream stream,
                          bool* took_reference) {
  Entry entry(d_.gate);
  *took_reference = false;
  Record* record = d_.ledger.find(id);
  if (record == nullptr || record->state != RecordState::dropped) {
    return true;
  }
  if (held.bytes < record->end) {
    return false;
  }
  Refusal refusal = Refusal::none;
  bool fresh = false;
  Block* block = nullptr;
  try {
    std::uint64_t serial = 0;
    block = torch_->hold(held, stream, false, &fresh, &refusal, &serial);
    if (block == nullptr || block->record != nullptr) {
      return false;
    }
    block->owned_by_torch = true;
    fill(*record, block, stream);
  } catch (const std::bad_alloc&) {
    if (block != nullptr && fresh && block->record == nullptr) {
      torch_->forget(block);
    }
    return false;
  }
  *took_reference = fresh;
  try {
    torch_->saved(entry, *record, stream, fresh);
  } catch (const std::bad_alloc&) {  // it is there; what could leave now leaves later
  }
  return true;
}

bool Runtime::missed(driver::Stream stream, Bytes request) {
  Entry entry(d_.gate);
  return torch_->missed(entry, stream, request);
}

void Runtime::asks() {
  Entry entry(d_.gate, std::try_to_lock);
  if (entry.open() && torch_ != nullptr) {
    torch_->look_for_owners();
    d_.sealer.seal(entry);
  }
}

void Runtime::await_optimizer(bool due) {
  if (uses_torch()) {
    torch_->await_optimizer(due);
  }
}

void Runtime::optimizer_makes(driver::Stream stream) {
  if (uses_torch()) {
    Entry entry(d_.gate);
    torch_->optimizer_makes(entry, stream);
  }
}

void Runtime::optimizer_made() {
  if (uses_torch()) {
    const Entry entry(d_.gate);
    torch_->optimizer_made();
  }
}

void Runtime::optimizer_steps() {
  if (uses_torch() && torch_->counts_gradients()) {
    const Entry entry(d_.gate);
    torch_->optimizer_steps();
  }
}

void Runtime::drop_orphans() {
  if (uses_torch()) {
    torch_->drop_orphans();
  }
}

Address Runtime::segment(Bytes bytes, driver::Stream stream) {
  Entry entry(d_.gate);
  const Address address = torch_->segments().take(bytes, stream, d_.budget.limit);
  d_.counters.out_of_memory += address == 0 ? 1 : 0;
  return address;
}

void Runtime::free_segment(Address address) {
  Entry entry(d_.gate);
  torch_->segments().give(address);
}

void Runtime::set_torch_pool(MemPoolSegments::Pool pool, driver::Stream stream) {
  if (pool == MemPoolSegments::Pool{}) {
    torch_->route().leave();
    return;
  }
  {
    Entry entry(d_.gate);
    torch_->segments().own(pool);
    if (!torch_->may_serve(entry)) {
      return;
    }
  }
  torch_->route().enter(pool);
  Entry entry(d_.gate);
  torch_->entered_pool(entry, stream);
}

bool Runtime::outgrown(MemPoolSegments::Pool pool, Bytes high) {
  const Entry entry(d_.gate);
  return torch_->route().idle() && torch_->outgrown(pool, high);
}

}  // namespace stagehand::core
