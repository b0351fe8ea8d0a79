#include "core/heap_store.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "core/device.hpp"

namespace stagehand::core {

namespace {
constexpr Bytes kSmallVictims = 16_MiB;  // leave together
// Moving memory costs the host about as long as the link takes for this: 7 ms on an H200, where
// creating, mapping, opening and unmapping a piece are 50 us together.
constexpr Bytes kWorthMoving = 384_MiB;
}  // namespace

HeapStore::HeapStore(Device& device)
    : d_(device),
      heap_(device.number, device.bytes, device.granularity, device.clocks, device.counters),
      search_(device.books.victims(), device.plan, device.clocks) {}

void HeapStore::set_state(Block* block, BlockState state) { block->arena->set_state(block, state); }

// torch's pluggable interface does not say of which device a stream is, and the default streams of
// all are null. Said of a block of the default stream, it is another device's that is meant.
void HeapStore::record_stream(Block* block, driver::Stream stream) {
  if (stream == nullptr && block->clock->stream() == nullptr) {
    for (driver::Context peer : peers_) {
      d_.clocks.add_user(block, d_.clocks.of(nullptr, peer));
    }
    return;
  }
  const StreamClock& clock = d_.clocks.of(stream);
  if (&clock != block->clock) {
    d_.clocks.add_user(block, clock);
  }
}

bool HeapStore::keep(Address address) {
  Block* block = heap_.find(address);
  if (block == nullptr || block->state != BlockState::live) {
    return false;
  }
  block->keep = true;
  return true;
}

Bytes HeapStore::bytes_for(const Record& record) const {
  return DeviceHeap::block_bytes(record.returning_bytes());
}

// Small memory hardly ever moves.
bool HeapStore::has_usual(Bytes bytes) const {
  return usual_.kept() && bytes > kSmallLimit && d_.plan.in_use() == usual_.plan();
}

UsualAddresses::Key HeapStore::comes_back(const Record& record) const {
  const bool has = has_usual(bytes_for(record)) && d_.plan.of_newest(record.place);
  return has ? UsualAddresses::comes_back(record.place.index) : 0;
}

// What was lent serves another stream at its address.
void HeapStore::note_usual(UsualAddresses::Key key, const Arena& arena, const Block& block) {
  const bool here = block.arena == &arena;
  usual_.note(key, {here ? block.address : 0, block.size, d_.plan.place()});
}

Block* HeapStore::take_usual(Arena& arena, const UsualAddresses::Usual& usual) {
  return usual.at != 0 && arena.contains(usual.at) ? heap_.take_at(arena, usual.at, usual.bytes)
                                                   : nullptr;
}

// It did not come ahead: the next time it does not wait for its address.
Block* HeapStore::make(Entry& entry, Record& record, Status* status) {
  usual_.note(comes_back(record), {});
  return serve(entry, bytes_for(record), record.stream, 0, 0, status);
}

Block* HeapStore::make_ahead(Entry&, RecordId id, Bytes bytes, bool) {
  const Record* record = d_.ledger.find(id);
  Arena* arena = heap_.arena_for(record->stream, bytes, 0);
  if (arena == nullptr) {
    return nullptr;
  }
  const UsualAddresses::Key key = comes_back(*record);
  const UsualAddresses::Usual usual = usual_.of(key, bytes);
  Block* block = take_usual(*arena, usual);
  if (block == nullptr && UsualAddresses::may_come(usual, d_.plan.place()) &&
      arena->contains(usual.at) && DeviceHeap::is_mapped_at(*arena, usual.at, bytes)) {
    return nullptr;  // it waits for that
  }
  if (block == nullptr) {
    block = heap_.take(*arena, bytes);
  }
  if (block == nullptr) {
    block = heap_.borrow(*arena, bytes, DeviceHeap::Behind::fence);
  }
  if (block != nullptr) {
    d_.books.hand_out(block);
    note_usual(key, *arena, *block);
  }
  return block;
}

// Ahead of need memory may move for it, but nothing leaves.
Block* HeapStore::make_weights(Entry& entry, Bytes bytes, driver::Stream stream, bool ahead,
                               Status* status) {
  const Bytes size = DeviceHeap::block_bytes(bytes);
  if (!ahead) {
    return serve(entry, size, stream, 0, 0, status);
  }
  Arena* arena = heap_.arena_for(stream, size, 0);
  if (arena == nullptr) {
    return nullptr;
  }
  const Bytes mapped = d_.counters.mapped;
  Block* block = heap_.take(*arena, size);
  if (block == nullptr) {
    block = room_without_evicting(*arena, size);
  }
  if (block != nullptr) {
    count_overshoot(mapped, size);
    d_.books.hand_out(block);
  }
  return block;
}

bool HeapStore::begin_step(Bytes target) {
  // Weights come and go where there is room: what waited for its own address would let them in.
  const std::uint64_t plan = d_.weights.standing().empty() ? d_.plan.kept() : 0;
  usual_.begin_step(plan, {d_.counters.gathers, d_.counters.overshoot_bytes});
  heap_.go_home();
  // What was cut under one plan leaves holes under another, and what that takes would tell nothing.
  // What the program has given back since would come back in pieces of its requests.
  const bool another = d_.plan.takes_other_plan();
  const bool emptied = gave_back(d_.counters.mapped, target, std::exchange(mapped_at_end_, 0)) &&
                       d_.weights.standing().empty();
  const bool other = (another || emptied) && d_.plan.far_from_free();
  const bool varies = d_.plan.varies();
  const bool coarser = varies && heap_.fine() && heap_.coarsen(d_.plan.typical_block());
  gives_all_ = other || coarser;
  other_plan_ = other && !varies;
  return gives_all_ || (d_.counters.mapped > target && heap_.has_free_piece());
}

void HeapStore::end_step() {
  heap_.end_step();
  mapped_at_end_ = d_.counters.mapped;
}

Bytes HeapStore::in_use() const { return d_.counters.occupied; }

bool HeapStore::fits(std::span<const Bytes> sizes, driver::Stream) {
  return fits_under(d_.live(), std::accumulate(sizes.begin(), sizes.end(), Bytes{0}), d_.ceiling());
}

Bytes HeapStore::trim(Entry& entry, Bytes target) {
  const bool all = std::exchange(gives_all_, false);
  const bool other_plan = std::exchange(other_plan_, false);
  if (!d_.room.wait_for_gpu(entry)) {
    return 0;
  }
  // Where weights come and go as well, what is mapped as they come lies better. Another thread may
  // have lowered the limit meanwhile; and what is above `high` is counted as a request needs it.
  return other_plan && d_.weights.standing().empty()
             ? heap_.renew(std::min(d_.budget.high, d_.budget.limit))
             : heap_.trim(all ? 0 : target);
}

void HeapStore::map_ahead(Entry&, RecordId id, Bytes target) {
  constexpr Bytes kRequests = 32;  // of which the pieces are
  const Record& record = *d_.ledger.find(id);
  const Bytes growth = target - std::min(target, d_.counters.mapped);
  // Whatever was saved now: what is large takes most of it, and the small ones' arena is no place.
  const Bytes like = std::max({record.block->size, growth / kRequests, kSmallLimit + 1});
  Arena* arena = heap_.arena_for(record.stream, like, 0);
  if (arena != nullptr) {
    heap_.grow_ahead(*arena, growth, like);
  }
}

Status HeapStore::add_peer(int device) {
  driver::Context context = nullptr;
  const Status status = heap_.add_peer(device);
  if (status == Status::ok && device != d_.number &&
      d_.gate->primary_ctx_retain(&context, device) == driver::kSuccess &&
      std::find(peers_.begin(), peers_.end(), context) == peers_.end()) {
    peers_.push_back(context);
  }
  return status;
}

namespace {
// Rule O7: an arena that a request is under way in stays, also while that gives the lock up.
class Pinned {
 public:
  explicit Pinned(Arena& arena) : arena_(arena) { ++arena_.pins; }
  ~Pinned() { --arena_.pins; }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  Arena& arena_;
};
}  // namespace

// Walk 1 ------------------------------------------------------------------------------------------

Block* HeapStore::allocate(Entry& entry, Bytes bytes, driver::Stream stream, std::uint64_t graph,
                           Status* status) {
  const bool has = graph == 0 && has_usual(bytes);
  const UsualAddresses::Key key = has ? usual_.request(d_.plan.place()) : 0;
  return serve(entry, bytes, stream, graph, key, status);
}

Block* HeapStore::serve(Entry& entry, Bytes bytes, driver::Stream stream, std::uint64_t graph,
                        UsualAddresses::Key key, Status* status) {
  ++d_.counters.allocations;
  Arena* arena = heap_.arena_for(stream, bytes, graph);
  if (arena == nullptr) {
    *status = Status::driver_failed;
    return nullptr;
  }
  Block* block = take_usual(*arena, usual_.of(key, bytes));
  if (block == nullptr) {
    block = heap_.take(*arena, bytes);  // step 2: the hot path
  }
  if (block != nullptr) {
    ++d_.counters.hits;
  } else {
    const Pinned pinned(*arena);
    block = reclaim(entry, *arena, bytes, status);  // steps 3 to 7
  }
  if (block != nullptr) {
    note_usual(key, *arena, *block);
    block->in_graph = graph != 0;
    d_.books.hand_out(block);
    alarm_.look(d_.counters.occupied);
  }
  return block;
}

Block* HeapStore::reclaim(Entry& entry, Arena& arena, Bytes bytes, Status* status) {
  d_.books.forgive();
  bool pressed = false;  // something was evicted for this request
  bool freed = false;    // old addresses, as far as that needs no wait
  bool waited = false;   // for the rest of them
  const auto more_addresses = [&] {
    if (waited || !heap_.short_of_addresses(arena, bytes)) {
      return false;
    }
    waited = std::exchange(freed, true);
    if (waited) {
      d_.room.wait_for_gpu(entry);
    }
    heap_.free_addresses(arena);
    return true;
  };
  Attempt attempt;
  for (;;) {
    const Bytes mapped = d_.counters.mapped;
    Block* block = room_without_evicting(arena, bytes);
    if (block != nullptr) {
      count_overshoot(mapped, bytes);
    }
    // Memory is there, and no addresses to map it at: whoever left now would leave for nothing.
    if (block == nullptr && lacking(bytes) == 0 && more_addresses()) {
      continue;
    }
    const bool may_leave = block == nullptr && arena.key.graph == 0;
    if (may_leave && d_.weights.make_way(arena.key.small) != 0) {
      continue;
    }
    if (may_leave) {
      const Evicted result = evict_for(arena, bytes, attempt);
      pressed = pressed || result == Evicted::yes;
      if (d_.room.helped(entry, result, attempt)) {
        continue;
      }
    }
    if (block == nullptr && more_addresses()) {
      continue;
    }
    if (may_leave && d_.weights.make_way(arena.key.small, true) != 0) {
      continue;
    }
    if (block == nullptr) {
      block = overshoot(arena, bytes, status);  // step 7
    }
    if (block == nullptr && !waited && heap_.idle_bytes() > 0) {
      // Idle memory of a stream that is gone can move once all work is known to be done.
      waited = true;
      if (d_.room.wait_for_gpu(entry)) {
        *status = Status::ok;
        continue;
      }
    }
    d_.counters.out_of_memory += block == nullptr ? 1 : 0;
    if (block != nullptr && pressed) {  // step 5
      if (d_.plan.follows()) {
        evict_next_small(arena);
      } else {
        d_.room.evict_to_low(block->size);
      }
    }
    return block;
  }
}

Block* HeapStore::room_without_evicting(Arena& arena, Bytes bytes) {
  heap_.settle(arena);
  if (Block* block = heap_.take(arena, bytes); block != nullptr) {
    return block;
  }
  if (heap_.grow(arena, bytes, d_.ceiling()) == Status::ok) {  // step 3
    return heap_.take(arena, bytes);
  }
  if (arena.key.graph != 0) {
    return nullptr;
  }
  if (Block* block = take_idle_window(arena, bytes); block != nullptr) {
    return block;
  }
  if (Block* block = borrow(arena, bytes); block != nullptr) {
    return block;
  }
  if (Block* block = heap_.take_up(arena, bytes); block != nullptr) {  // step 6, without a wait
    return block;
  }
  if (heap_.gather(arena, bytes, d_.ceiling()) == Status::ok) {
    if (Block* block = heap_.take(arena, bytes); block != nullptr) {
      return block;
    }
    return take_idle_window(arena, bytes);
  }
  return nullptr;
}

Block* HeapStore::take_idle_window(Arena& arena, Bytes bytes) {
  const FoundWindow window = search_.idle(arena, bytes, d_.transfers.out().clock().index());
  return window.found ? heap_.take_run(arena, window.blocks->front(), window.blocks->back(), bytes)
                      : nullptr;
}

// Idle memory of other streams, where it is mapped.
Block* HeapStore::borrow(Arena& arena, Bytes bytes) {
  if (Block* block = heap_.borrow(arena, bytes); block != nullptr) {
    return block;
  }
  for (const auto& from : heap_.arenas()) {
    if (!heap_.lends(*from, arena)) {
      continue;
    }
    const FoundWindow window = search_.idle(*from, bytes, d_.transfers.out().clock().index());
    if (window.found) {
      return heap_.lend(arena, window.blocks->front(), window.blocks->back(), bytes);
    }
  }
  return nullptr;
}

// Step 4: the victims that make a hole here. Where it would cost much more than the request lacks,
// victims that leave in any case, wherever they are: their pieces are moved here. So are those of
// what is needed last, where no hole can be made.
Evicted HeapStore::evict_for(Arena& arena, Bytes bytes, Attempt& attempt) {
  const std::uint32_t out = d_.transfers.out().clock().index();
  const auto cheap = [&](const FoundWindow& found) {
    return found.found && found.leaving <= lacking(bytes) + kWorthMoving;
  };
  FoundWindow window = search_.with_victims(arena, bytes, out);
  if (!cheap(window)) {
    for (const auto& from : heap_.arenas()) {
      if (from.get() == &arena || from->key.small != arena.key.small || from->key.graph != 0) {
        continue;
      }
      if (const FoundWindow there = search_.with_victims(*from, bytes, out); cheap(there)) {
        return evict_window(there, attempt);  // and borrow what they leave
      }
    }
    if (const Evicted moved = evict_planned(arena, bytes, attempt); moved != Evicted::nobody) {
      return moved;
    }
    window = search_.with_victims(arena, bytes, out);
  }
  if (window.found) {
    return evict_window(window, attempt);
  }
  Record* last = d_.books.victims().last_needed(arena.key.small);
  return last != nullptr ? evict_for_pieces(arena, *last, attempt) : Evicted::nobody;
}

// Planned victims until the request lacks nothing but a hole; at least one.
Evicted HeapStore::evict_planned(Arena& arena, Bytes bytes, Attempt& attempt) {
  Evicted result = Evicted::nobody;
  do {
    Record* victim = d_.books.victims().planned(lacking(bytes));
    if (victim == nullptr) {
      break;
    }
    const Evicted one = evict_for_pieces(arena, *victim, attempt);
    if (one == Evicted::no_slab) {
      return result == Evicted::yes ? result : one;
    }
    result = result == Evicted::yes ? result : one;
  } while (lacking(bytes) > 0);
  return result;
}

// Evicts a record of any arena for the pieces under it. One of the request's own is settled at
// once: then its block can join its neighbours, and pieces that reach into both can move too.
Evicted HeapStore::evict_for_pieces(Arena& arena, Record& record, Attempt& attempt) {
  const bool here = record.block->arena == &arena;
  const Evicted result = d_.room.evict(record, attempt);
  if (result == Evicted::yes && here) {
    d_.clocks.order_after(arena.clock, record.copy.written);  // or later: the fence stays
  }
  return result;
}

// What must leave at least, wherever it is.
Bytes HeapStore::lacking(Bytes bytes) const {
  const Bytes room = d_.ceiling() - std::min(d_.counters.occupied, d_.ceiling());
  return bytes - std::min(bytes, room);
}

// Evicting may join free neighbours, so the window's own blocks are not looked at again.
Evicted HeapStore::evict_window(const FoundWindow& window, Attempt& attempt) {
  victims_.clear();
  for (const Block* block : *window.blocks) {
    if (block->state == BlockState::retained) {
      victims_.push_back(block->record);
    }
  }
  return d_.room.evict_together(victims_, attempt);
}

// Under a plan, small victims leave a few at a time, and the stream is put behind their copies at
// once: the next requests then find free blocks, where each would have to search for room.
void HeapStore::evict_next_small(Arena& arena) {
  Bytes room = kSmallVictims;
  for (Record* record = d_.departures.next_to_leave();
       record != nullptr && record->block->size <= room && record->block->arena == &arena;
       record = d_.departures.next_to_leave()) {
    if (!record->copy.holds_bytes()) {
      d_.departures.flush();
    }
    if (!record->copy.holds_bytes() ||
        d_.clocks.order_after(arena.clock, record->copy.written) != Status::ok) {
      break;
    }
    room -= record->block->size;
    d_.room.leave(*record);
    d_.departures.left();
  }
  heap_.settle(arena);
}

// Step 7.
Block* HeapStore::overshoot(Arena& arena, Bytes bytes, Status* status) {
  const Bytes before = d_.counters.mapped;
  Status grown = Status::ok;
  Block* block = nullptr;
  // What is free elsewhere first: above `high` by what is lacking, not by all that is asked for.
  // Where live memory alone is above it, nothing that waits for copies would help.
  const bool gathers = arena.key.graph == 0;
  if (gathers && lacking(bytes) < bytes) {
    heap_.settle_in_order(arena.clock);
  }
  if (gathers && heap_.gather(arena, bytes, d_.budget.limit) == Status::ok) {
    block = heap_.take(arena, bytes);
    if (block == nullptr) {
      block = take_idle_window(arena, bytes);
    }
  }
  if (block == nullptr) {
    grown = heap_.grow(arena, bytes, d_.budget.limit, 0);
    block = grown == Status::ok ? heap_.take(arena, bytes) : nullptr;
  }
  if (block == nullptr) {
    *status = grown == Status::driver_failed ? grown : Status::out_of_memory;
    return nullptr;
  }
  count_overshoot(before, bytes);
  return block;
}

// A plan whose live memory alone is above `high` raises the ceiling: what is mapped below that one
// is over `high` all the same.
void HeapStore::count_overshoot(Bytes before, Bytes bytes) {
  const Bytes over = d_.counters.mapped - std::min(d_.counters.mapped, d_.budget.high);
  const Bytes grown = d_.counters.mapped - std::min(d_.counters.mapped, before);
  if (d_.budget.armed && over > 0 && grown > 0) {
    d_.counters.overshoot_bytes += std::min(over, grown);
    d_.books.note_overshoot(d_.live() + bytes);
  }
}

}  // namespace stagehand::core
