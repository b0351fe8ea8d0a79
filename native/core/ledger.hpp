// The ledger: one record per saved storage, in the order of saving. A record lives as long as a
// handle names it; states.hpp says where its bytes are and what its host copy is.
#pragma once

#include <deque>
#include <vector>

#include "core/block.hpp"
#include "core/ordered.hpp"
#include "core/pinned_pool.hpp"
#include "core/plan.hpp"

namespace stagehand::core {

// The host's copy of the saved range of a storage: slabs filled one after the other.
struct HostCopy {
  Stated<CopyState> state{CopyState::none};
  std::vector<Slab*> slabs;
  Tick written;  // on the D2H lane: the copy out that filled it
  // With DebugModes::checksums: CRC of what was written, and of what the last look found.
  std::uint32_t checksum = 0;
  std::uint32_t checksum_found = 0;

  // Whether the bytes are there for whoever waits for `written`.
  bool holds_bytes() const { return state == CopyState::queued || state == CopyState::sealed; }
};

struct Record {
  std::uint32_t index = 0;
  std::uint32_t generation = 1;
  std::uint32_t handles = 0;
  std::uint64_t order = 0;  // of saving
  std::uint32_t evictions = 0;
  std::uint32_t restores = 0;  // prefetches too
  Plan::Place place;           // in the step that saved it
  Stated<RecordState> state{RecordState::device};
  bool alive = false;
  bool waited_for = false;   // a thread waits for its copy without the lock: leave it alone
  bool outdated = false;     // its storage may have changed meanwhile: that copy is no good
  bool asked = false;        // backward has unpacked it
  bool watched = false;      // TorchStore looks whether torch still uses its block
  bool prefetched = false;   // on the device ahead of need, and not yet asked for
  bool refused = false;      // the driver refused its copy in this attempt to make room
  bool recipe = false;       // whoever saved it can make its bytes again
  bool by_node = false;      // by the recipe of its node, which is proven; else by its call
  bool was_dropped = false;  // made again once, it stays or leaves by copy
  std::uint64_t call = 0;    // of the region that it was first saved in, which made it
  Block* block = nullptr;    // only while on the device
  // The bytes of the storage that were saved, from its first byte; what travels.
  Bytes begin = 0;
  Bytes end = 0;
  Bytes block_begin = 0;  // the storage's byte that the block's first byte holds
  HostCopy copy;
  Tick arrived;                     // of the copy in that filled the block
  std::uint32_t stall_pair = ~0u;   // the stall meter's note of that copy
  driver::Stream stream = nullptr;  // where the storage was made, and is made again
  Record* older = nullptr;          // neighbours in the order of saving
  Record* newer = nullptr;

  // VictimIndex's: what it was filed under, and the links.
  struct Filed {
    bool at_all = false;
    bool waiting = false;  // to be filed when somebody asks
    bool clean = false;
    bool small = false;
    bool pool = false;
    bool leaves = false;
    bool counted = false;  // among clean_bytes
    Plan::Use need = 0;    // those that leave in any case first
    Plan::Use use = 0;     // its next
    Bytes bytes = 0;
    Record* previous = nullptr;  // of those that wait
    Record* next = nullptr;
  };
  OrderedHook<Record> need_hook;
  OrderedHook<Record> leaves_hook;
  OrderedHook<Record> size_hook;
  OrderedHook<Record> dirty_hook;
  OrderedHook<Record> small_hook;
  Filed filed;

  bool clean() const { return copy.state != CopyState::none; }
  bool droppable() const { return recipe && !was_dropped && !clean(); }
  bool evicted() const { return alive && state != RecordState::device; }
  bool retained() const { return block != nullptr && block->state == BlockState::retained; }
  bool evictable() const { return retained() && !waited_for && !refused; }
  Bytes bytes() const { return end - begin; }
  // The saved range comes back from its first unit on, into a block for just that.
  Bytes returning_begin() const { return begin / kBlockUnit * kBlockUnit; }
  Bytes returning_bytes() const { return round_up(end - returning_begin(), kBlockUnit); }
};

class Ledger {
 public:
  // A record for a block's storage, newest in order; its generation is new.
  Record* open(Block* block, Bytes begin, Bytes end);
  // Takes a record out of the books (rule O2): its ids are stale from here on.
  void close(Record* record);
  // Null when the id is of a record that is gone.
  Record* find(RecordId id);
  static RecordId id_of(const Record& record) { return {record.index, record.generation}; }

  Record* oldest() const { return oldest_; }
  Record* newest() const { return newest_; }
  std::size_t size() const { return size_; }

 private:
  std::deque<Record> slots_;
  std::vector<std::uint32_t> spare_;
  Record* oldest_ = nullptr;
  Record* newest_ = nullptr;
  std::size_t size_ = 0;
  std::uint64_t order_ = 0;
};

}  // namespace stagehand::core
