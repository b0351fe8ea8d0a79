#include "core/held_blocks.hpp"

#include "core/check.hpp"

namespace stagehand::core {

namespace {

Address number_of(const void* identity) { return reinterpret_cast<Address>(identity); }

Block* block_in(Block* const* found) { return found != nullptr ? *found : nullptr; }

}  // namespace

Block* HeldBlocks::find(const void* identity) const {
  return block_in(by_identity_.find(number_of(identity)));
}

Block* HeldBlocks::at(Address address) const { return block_in(by_address_.find(address)); }

// Either all of it, or nothing where the host is out of memory.
Block* HeldBlocks::adopt(const HeldStorage& held) {
  StreamClock& clock = clocks_.of(held.stream);
  stuck_.reserve(stuck_.size() + 1);  // so that letting go needs no memory
  Block* block = nodes_.take();
  try {
    by_address_.put(held.address, block);
    by_identity_.put(number_of(held.identity), block);
  } catch (...) {
    by_address_.erase(held.address);
    nodes_.give(block);
    throw;
  }
  block->address = held.address;
  block->size = round_up(held.bytes, kBlockUnit);
  block->clock = &clock;
  block->state = Stated(BlockState::live);
  block->storage = held.storage;
  block->identity = held.identity;
  block->storage_bytes = held.bytes;
  block->idle_from = clock.upcoming();
  clocks_.hold(clock);
  return block;
}

bool HeldBlocks::alone(const Block& block) const {
  return side_.alone(block.storage, block.address, block.storage_bytes);
}

void* HeldBlocks::let_go(Block* block, bool shared) {
  void* storage = block->storage;
  StreamClock* clock = block->clock;
  const Fence fence = block->fence;
  by_identity_.erase(number_of(block->identity));
  if (at(block->address) == block) {
    by_address_.erase(block->address);
  }
  clocks_.forget_users(block);
  nodes_.give(block);
  // Rule S2: torch hands the memory out again to work on the block's own stream.
  if (holds(Rule::S2) && !clocks_.settled(*clock, fence) &&
      clocks_.order_after(*clock, fence) != Status::ok) {
    stuck_.push_back({storage, clock, fence, shared});
    return nullptr;
  }
  clocks_.let_go(*clock);
  return storage;
}

void HeldBlocks::take_stuck(std::vector<Due::Storage>* alone, std::vector<void*>* shared) {
  for (std::size_t i = 0; i < stuck_.size();) {
    const Stuck& one = stuck_[i];
    if (!clocks_.settled(*one.clock, one.fence) &&
        clocks_.order_after(*one.clock, one.fence) != Status::ok) {
      ++i;
      continue;
    }
    if (one.shared) {
      shared->push_back(one.storage);
    } else {
      alone->push_back({one.storage, 0});
    }
    clocks_.let_go(*one.clock);
    stuck_[i] = stuck_.back();
    stuck_.pop_back();
  }
}

const char* HeldBlocks::broken() const {
  const char* broken = nullptr;
  by_identity_.for_each([&](Address identity, const Block* block) {
    if (number_of(block->identity) != identity ||
        (block->record == nullptr && block->aliases == 0 && !block->keep)) {
      broken = "O1: a storage is held that no record and no weight group names";
    } else if (block->state != BlockState::live && block->state != BlockState::retained) {
      broken = "O1: a held block is neither live nor retained";
    }
  });
  return broken;
}

}  // namespace stagehand::core
