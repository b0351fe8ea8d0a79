// The blocks of torch's own caching allocator whose storages the engine holds a reference to: what
// stands in for the device heap where nothing is installed (modes "native" and "mempool").
//
// Letting go of a block is dropping the reference: torch's free list then has it, in the order of
// its stream. Making one again is asking torch for memory. Both take torch's mutex, which comes
// before our locks, so neither is done here: blocks let go of wait for the caller to drop them.
//
// Guarded by the device's lock.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "core/arena.hpp"
#include "core/torch_side.hpp"

namespace stagehand::core {

class HeldBlocks {
 public:
  HeldBlocks(const TorchSide& side, ClockBank& clocks) : side_(side), clocks_(clocks) {}

  const TorchSide& side() const { return side_; }
  Block* find(const void* identity) const;
  Block* at(Address address) const;
  // A live block over a storage whose reference is ours from now on. `held.stream` is set.
  Block* adopt(const HeldStorage& held);
  // Whether nobody but us can reach the block.
  bool alone(const Block& block) const;
  // Takes the block off the books and puts its stream behind everything that still names it; the
  // caller drops the storage returned. Null where the stream cannot be made to wait now (it is
  // being captured into a graph): the storage is then kept until `take_stuck`.
  void* let_go(Block* block);
  // The storages that could not be let go of before and can be now.
  std::vector<void*> take_stuck();
  // Empty, or the first broken invariant.
  const char* broken() const;

 private:
  struct Stuck {
    void* storage;
    Arena* arena;
    Fence fence;
  };
  Arena& arena_of(driver::Stream stream);

  const TorchSide& side_;
  ClockBank& clocks_;
  BlockNodes nodes_;
  std::vector<std::unique_ptr<Arena>> arenas_;  // one a stream: they lend key and clock, no memory
  std::unordered_map<const void*, Block*> by_identity_;
  std::unordered_map<Address, Block*> by_address_;
  std::vector<Stuck> stuck_;
};

}  // namespace stagehand::core
