#include "core/held_blocks.hpp"

#include "core/check.hpp"

namespace stagehand::core {

namespace {

template <class Map, class Key>
Block* look_up(const Map& map, const Key& key) {
  const auto found = map.find(key);
  return found != map.end() ? found->second : nullptr;
}

}  // namespace

Block* HeldBlocks::find(const void* identity) const { return look_up(by_identity_, identity); }

Block* HeldBlocks::at(Address address) const { return look_up(by_address_, address); }

Arena& HeldBlocks::arena_of(driver::Stream stream) {
  for (const auto& arena : arenas_) {
    if (arena->key.stream == stream) {
      return *arena;
    }
  }
  // No address of it is ever handed out; one page is the least an arena has.
  arenas_.push_back(
      std::make_unique<Arena>(ArenaKey{stream, false, 0}, clocks_.of(stream), nodes_, 0, 2_MiB));
  return *arenas_.back();
}

Block* HeldBlocks::adopt(const HeldStorage& held) {
  Arena& arena = arena_of(held.stream);
  Block* block = nodes_.take();
  block->address = held.address;
  block->size = round_up(held.bytes, kBlockUnit);
  block->arena = &arena;
  block->state = BlockState::live;
  block->storage = held.storage;
  block->identity = held.identity;
  block->storage_bytes = held.bytes;
  block->idle_from = arena.clock.upcoming();
  by_identity_.emplace(held.identity, block);
  by_address_.insert_or_assign(held.address, block);
  return block;
}

bool HeldBlocks::alone(const Block& block) const {
  return side_.alone(block.storage, block.address, block.storage_bytes);
}

void* HeldBlocks::let_go(Block* block) {
  void* storage = block->storage;
  Arena* arena = block->arena;
  const Fence fence = block->fence;
  by_identity_.erase(block->identity);
  if (const auto found = by_address_.find(block->address);
      found != by_address_.end() && found->second == block) {
    by_address_.erase(found);
  }
  nodes_.give(block);
  // Rule S2: torch hands the memory out again to work on the block's own stream.
  if (holds(Rule::S2) && !clocks_.settled(arena->clock, fence) &&
      clocks_.order_after(arena->clock, fence) != Status::ok) {
    stuck_.push_back({storage, arena, fence});
    return nullptr;
  }
  return storage;
}

std::vector<void*> HeldBlocks::take_stuck() {
  std::vector<void*> free;
  for (std::size_t i = 0; i < stuck_.size();) {
    StreamClock& clock = stuck_[i].arena->clock;
    if (clocks_.settled(clock, stuck_[i].fence) ||
        clocks_.order_after(clock, stuck_[i].fence) == Status::ok) {
      free.push_back(stuck_[i].storage);
      stuck_[i] = stuck_.back();
      stuck_.pop_back();
    } else {
      ++i;
    }
  }
  return free;
}

const char* HeldBlocks::broken() const {
  for (const auto& [identity, block] : by_identity_) {
    if (block->identity != identity || (block->record == nullptr && block->aliases == 0)) {
      return "O1: a storage is held that no record names";
    }
    if (block->state != BlockState::live && block->state != BlockState::retained) {
      return "O1: a held block is neither live nor retained";
    }
  }
  return nullptr;
}

}  // namespace stagehand::core
