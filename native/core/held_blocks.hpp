// The blocks that are storages of torch's which we hold a reference to. Letting go of one is
// dropping the reference: torch's free list then has it, in the order of its stream. That takes
// torch's mutex, which comes before our locks, so it is not done here: the caller drops what
// `let_go` returns.
//
// Guarded by the device's lock.
#pragma once

#include <deque>
#include <vector>

#include "core/block_nodes.hpp"
#include "core/flat_map.hpp"
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
  // being captured into a graph): the storage is then kept until `take_stuck`. `shared`: others may
  // refer to it, so that only a thread with the GIL may drop it.
  void* let_go(Block* block, bool shared);
  // The storages that could not be let go of before and can be now.
  void take_stuck(std::vector<Due::Storage>* alone, std::vector<void*>* shared);
  // Null, or an invariant that is broken.
  const char* broken() const;

 private:
  struct Stuck {
    void* storage;
    StreamClock* clock;
    Fence fence;
    bool shared;
  };

  const TorchSide& side_;
  ClockBank& clocks_;
  BlockNodes nodes_;
  FlatMap<Block*> by_identity_;
  FlatMap<Block*> by_address_;
  std::vector<Stuck> stuck_;
};

}  // namespace stagehand::core
