// An arena: one reserved address range of one device and stream, tiled by blocks in address order.
// It knows addresses and states, not the driver: mapping is device_heap's.
//
// Finding the block of an address: a page table over the range names, for each page, the block that
// covers the page's first byte; from there a short walk through the neighbours.
#pragma once

#include <map>
#include <numeric>
#include <vector>

#include "core/block_nodes.hpp"
#include "core/free_index.hpp"

namespace stagehand::core {

// A list through the blocks' bin links.
class BlockList {
 public:
  Block* first() const { return first_; }
  Block* last() const { return last_; }
  void push_back(Block* block);
  void push_front(Block* block);
  void remove(Block* block);
  void move_to_back(Block* block) {
    remove(block);
    push_back(block);
  }

 private:
  Block* first_ = nullptr;
  Block* last_ = nullptr;
};

struct Arena;

// One cuMemCreate. It serves at one address, and stays mapped at those where it did before.
struct Piece {
  Bytes size = 0;
  driver::PhysicalHandle handle = 0;
  Arena* arena = nullptr;   // where it serves,
  Address address = 0;      // and its key in the arena's `pieces`
  Block* former = nullptr;  // its former addresses, through next_former;
  Block* home = nullptr;   // of those the one where it was mapped first; null where it serves there
  std::uint64_t seen = 0;  // the search of DeviceHeap that has been here
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
  BlockList evicting;    // those longest without a look first
  BlockList former;      // those made first first
  BlockList holes;       // those made last first
  Bytes idle_bytes = 0;  // free and evicting
  std::size_t blocks = 1;
  std::map<Address, Piece> pieces;  // that serve here, by address
  Bytes mapped_bytes() const {
    return std::accumulate(pieces.begin(), pieces.end(), Bytes{0},
                           [](Bytes all, const auto& piece) { return all + piece.second.size; });
  }
  Bytes former_bytes = 0;
  std::size_t formers = 0;
  bool asked = false;         // for memory, since a step began;
  bool asked_before = false;  // in the step before
  Bytes held = 0;             // mapped as that ended
  unsigned pins = 0;          // requests under way in it, which may give the lock up: it stays
  bool retired = false;       // served a graph that is gone: given up once it is empty

  bool contains(Address address) const { return address - base < reserved; }
  // The block that covers an address: any state but hole and former.
  Block* find(Address address) const;
  // The same, or the former address that does.
  Block* at(Address address) const;
  // Every change of a block's state goes through here, so that the lists agree with the states.
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
  BlockList* list_of(BlockState state) {
    return state == BlockState::evicting ? &evicting
           : state == BlockState::former ? &former
           : state == BlockState::hole   ? &holes
                                         : nullptr;
  }

  const unsigned page_shift_;
  Block** pages_ = nullptr;  // lazily backed anonymous memory
  Bytes page_bytes_ = 0;
};

}  // namespace stagehand::core
