// An arena: one reserved address range of one device and stream, tiled by blocks in address order.
// It knows addresses and states, not the driver: mapping is device_heap's.
//
// Finding the block of an address: a page table over the range names, for each page, the block that
// covers the page's first byte; from there a short walk through the neighbours.
#pragma once

#include <deque>
#include <map>
#include <vector>

#include "core/block.hpp"
#include "core/free_index.hpp"

namespace stagehand::core {

// Blocks come from here and go back here; addresses of nodes are stable and reused.
class BlockNodes {
 public:
  Block* take();
  void give(Block* block) { spare_.push_back(block); }

 private:
  std::deque<Block> nodes_;
  std::vector<Block*> spare_;
};

// One cuMemCreate, mapped at one address.
struct Piece {
  Bytes size = 0;
  driver::PhysicalHandle handle = 0;
};

struct ArenaKey {
  driver::Stream stream = nullptr;
  bool small = false;
  std::uint64_t graph = 0;  // 0, or the CUDA graph pool it serves alone

  bool operator==(const ArenaKey&) const = default;
};

struct Arena {
  Arena(ArenaKey key, StreamClock& clock, BlockNodes& nodes, Address base, Bytes size);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  ArenaKey key;
  StreamClock& clock;
  BlockNodes& nodes;
  const Address base;
  const Bytes reserved;
  Block* first = nullptr;
  FreeIndex free;
  Block* evicting_first = nullptr;  // oldest first
  Block* evicting_last = nullptr;
  std::map<Address, Piece> pieces;  // by address; the ones of retiring blocks are not here
  std::vector<Block*> retiring;
  bool retired = false;  // served a graph that is gone: given up once it is empty

  bool contains(Address address) const { return address - base < reserved; }
  Block* find(Address address) const;
  // Every change of state goes through here, so that the lists agree with the states.
  void set_state(Block* block, BlockState state);
  // Cuts `bytes` off the front; the rest keeps the node `block`. Both keep the state.
  Block* split_front(Block* block, Bytes bytes);
  // Joins a free block (or hole) with its free (hole) neighbours; returns the one that covers all.
  Block* coalesce(Block* block);
  // Joins the run of free and evicting blocks first..last into one live block that nobody owns yet.
  // The caller has ordered the arena's stream behind every fence of the run.
  Block* join(Block* first_block, Block* last_block);

 private:
  void claim_pages(const Block* range, Block* owner);
  Block* merge_with_next(Block* block);
  void link_evicting(Block* block);
  void unlink_evicting(Block* block);

  const unsigned page_shift_;
  Block** pages_ = nullptr;  // lazily backed anonymous memory
  Bytes page_bytes_ = 0;
};

}  // namespace stagehand::core
