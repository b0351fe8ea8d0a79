// Taking and giving blocks. Mapping is in device_heap_map.cpp.
#include "core/device_heap.hpp"

#include <algorithm>
#include <bit>

#include "core/check.hpp"

namespace stagehand::core {

namespace {
driver::AllocationProp prop_for(int device) {
  driver::AllocationProp prop;
  prop.location.id = device;
  return prop;
}
driver::AccessDesc access_for(int device) {
  driver::AccessDesc access;
  access.location.id = device;
  return access;
}

// Rule O6.
const char* broken_piece(const Arena& arena, Address address, const Piece& piece) {
  if (piece.arena != &arena || piece.address != address) {
    return "O6: a piece does not know where it serves";
  }
  bool home = piece.home == nullptr;
  for (const Block* b = piece.former; b != nullptr; b = b->next_former) {
    home |= b == piece.home;
    if (b->state != BlockState::former || b->piece != &piece || b->size != piece.size) {
      return "O6: a piece and its former address do not agree";
    }
  }
  return home ? nullptr : "O6: a piece's home is no former address of it";
}
}  // namespace

DeviceHeap::DeviceHeap(int device, Bytes device_bytes, Bytes granularity, ClockBank& clocks,
                       Counters& counters)
    : gate_(clocks.gate()),
      prop_(prop_for(device)),
      access_{access_for(device)},
      device_bytes_(device_bytes),
      granularity_(granularity),
      clocks_(clocks),
      counters_(counters) {}

// 512 bytes, and for large blocks 1/64 of the power of two below, up to 2 MiB: at most 1.6 % is
// lost, and sizes that differ by a few bytes share holes.
Bytes DeviceHeap::block_bytes(Bytes requested) {
  if (requested <= kSmallLimit) {
    return round_up(requested, kBlockUnit);
  }
  return round_up(requested, std::min<Bytes>(std::bit_floor(requested) / 64, 2_MiB));
}

Arena* DeviceHeap::arena_for(driver::Stream stream, Bytes bytes, std::uint64_t graph) {
  const ArenaKey key{stream, bytes <= kSmallLimit, graph};
  for (const auto& arena : arenas_) {
    if (arena->key == key && !arena->retired) {
      arena->asked = true;
      return arena.get();
    }
  }
  drop_empty_arenas();
  // More than the device: memory moves while old addresses are in use. A process may have a hundred
  // streams and 128 TiB of addresses in all: take less where there is no more.
  Bytes reserve = round_up((key.small ? 1 : 4) * device_bytes_, granularity_);
  driver::DevicePtr base = 0;
  while (gate_->address_reserve(&base, reserve, 0, 0, 0) != driver::kSuccess) {
    reserve = round_up(reserve / 2, granularity_);
    if (reserve < device_bytes_ / 8) {
      return nullptr;
    }
  }
  try {
    arenas_.push_back(std::make_unique<Arena>(key, clocks_.of(stream), nodes_, base, reserve));
  } catch (const std::bad_alloc&) {
    gate_->address_free(base, reserve);
    return nullptr;
  }
  clocks_.hold(arenas_.back()->clock);
  arenas_.back()->asked = true;
  return arenas_.back().get();
}

// Of streams that are not used any more: their memory has moved to where it was needed.
void DeviceHeap::drop_empty_arenas() {
  if (arenas_.size() < kManyArenas) {
    return;
  }
  std::erase_if(arenas_, [&](const auto& arena) { return gave_up(*arena); });
}

// An arena in which nothing is left goes: the driver has its addresses again.
bool DeviceHeap::gave_up(Arena& arena) {
  if (!arena.pieces.empty() || arena.pins > 0) {
    return false;
  }
  free_addresses(arena);
  const bool gone =
      arena.formers == 0 && gate_->address_free(arena.base, arena.reserved) == driver::kSuccess;
  if (gone) {
    clocks_.let_go(arena.clock);
  }
  return gone;
}

Arena* DeviceHeap::arena_of(Address address) const {
  for (const auto& arena : arenas_) {
    if (arena->contains(address)) {
      return arena.get();
    }
  }
  return nullptr;
}

Block* DeviceHeap::find(Address address) const {
  const Arena* arena = arena_of(address);
  return arena != nullptr ? arena->find(address) : nullptr;
}

Block* DeviceHeap::cut(Arena& arena, Block* block, Bytes bytes) {
  return block->size == bytes ? block : arena.split_front(block, bytes);
}

Block* DeviceHeap::take(Arena& arena, Bytes bytes) {
  Block* block = arena.free.best_fit(bytes);
  if (block == nullptr) {
    return nullptr;
  }
  block = cut(arena, block, bytes);
  arena.set_state(block, BlockState::live);
  return block;
}

Block* DeviceHeap::take_run(Arena& arena, Block* first, Block* last, Bytes bytes) {
  for (Block* b = first;; b = b->next) {
    if (holds(Rule::S2) && clocks_.order_after(arena.clock, b->fence) != Status::ok) {
      return nullptr;  // nothing has changed but waits queued for nothing
    }
    if (b == last) {
      break;
    }
  }
  Block* block = arena.join(first, last);
  if (block->size > bytes) {
    Block* front = arena.split_front(block, bytes);
    arena.set_state(block, BlockState::free);
    arena.coalesce(block);
    block = front;
  }
  return block;
}

void DeviceHeap::give(Block* block) {
  Arena& arena = *block->arena;
  block->record = nullptr;
  clocks_.forget_users(block);
  block->keep = false;
  if (block->clock != &arena.clock) {
    end_loan(block);
  }
  if (clocks_.settled(arena.clock, block->fence)) {
    arena.set_state(block, BlockState::free);
    arena.coalesce(block);
  } else {
    arena.set_state(block, BlockState::evicting);
  }
}

void DeviceHeap::settle(Arena& arena, int not_ready) {
  Block* block = arena.evicting.first();
  const Block* turned = nullptr;  // the first that was put behind the others
  for (int left = not_ready; block != nullptr && block != turned && left > 0;
       block = arena.evicting.first()) {
    if (clocks_.settled(arena.clock, block->fence)) {
      arena.set_state(block, BlockState::free);
      arena.coalesce(block);
      continue;
    }
    arena.evicting.move_to_back(block);
    turned = turned == nullptr ? block : turned;
    --left;
  }
  drop_formers(arena, false, not_ready);
}

void DeviceHeap::settle_in_order(StreamClock& clock) {
  for (const auto& arena : arenas_) {
    if (&arena->clock != &clock || arena->key.graph != 0) {
      continue;
    }
    // The newest first: what it waits for covers most others.
    for (const Block* b = arena->evicting.last(); b != nullptr; b = b->bin_previous) {
      clocks_.order_after(clock, b->fence);  // or later: the fence stays
    }
    settle(*arena, std::numeric_limits<int>::max());
  }
}

const char* DeviceHeap::broken() const {
  Bytes mapped = 0;
  Bytes former = 0;
  Bytes held = 0;
  Bytes retained = 0;
  for (const auto& arena : arenas_) {
    Address at = arena->base;
    const Block* previous = nullptr;
    Bytes arena_mapped = 0;
    Bytes idle = 0;
    std::size_t blocks = 0;
    for (const Block* b = arena->first; b != nullptr; previous = b, b = b->next) {
      if (b->address != at || b->previous != previous || b->arena != arena.get()) {
        return "blocks do not tile their arena";
      }
      if (b->size == 0 || b->size % kBlockUnit != 0) {
        return "a block's size is not whole units";
      }
      at = b->end();
      ++blocks;
      idle += is_idle(b->state) ? b->size : 0;
      if (b->state == BlockState::former && arena->at(b->address) != b) {
        return "the page table does not find a former address";
      }
      if (!is_mapped(b->state)) {
        continue;
      }
      arena_mapped += b->size;
      if (arena->find(b->address) != b || arena->find(b->end() - 1) != b) {
        return "the page table does not find a block";
      }
      const bool held_now = b->state == BlockState::live || b->state == BlockState::retained;
      if (b->clock != &arena->clock && !held_now) {
        return "S2: an idle block has another clock than its arena";
      }
      if ((b->state == BlockState::live) != b->owned()) {
        return "O1: a live block nobody can reach, or a reachable block that is not live";
      }
      if (b->state == BlockState::retained && b->record == nullptr) {
        return "O1: a retained block without a record";
      }
      held += held_now ? b->size : 0;
      retained += b->state == BlockState::retained ? b->size : 0;
    }
    if (at != arena->base + arena->reserved) {
      return "blocks do not tile their arena";
    }
    if (idle != arena->idle_bytes || blocks != arena->blocks) {
      return "an arena's counts differ from its blocks";
    }
    Bytes physical = 0;
    for (const auto& [address, piece] : arena->pieces) {
      physical += piece.size;
      if (const char* wrong = broken_piece(*arena, address, piece); wrong != nullptr) {
        return wrong;
      }
      for (const Block* b = piece.former; b != nullptr; b = b->next_former) {
        former += b->size;
      }
    }
    if (physical != arena_mapped) {
      return "mapped blocks and physical pieces of an arena differ";
    }
    mapped += arena_mapped;
  }
  if (former != counters_.former_bytes) {
    return "O6: a former address that no piece knows";
  }
  if (mapped != counters_.mapped) {
    return "mapped != free + live + retained + evicting";
  }
  if (held != counters_.occupied || retained != counters_.retained) {
    return "occupied != live + retained";
  }
  return counters_.occupied <= counters_.mapped ? nullptr : "occupied > mapped";
}

}  // namespace stagehand::core
