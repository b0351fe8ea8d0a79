// A block: a stretch of memory that is handed out, kept or evicted as a whole. Of our heap, a
// stretch of an arena's addresses; of torch's cache, a storage that we hold a reference to. All
// fields are guarded by the device's lock.
//
// Rule O1: exactly one of the states of states.hpp at a time.
#pragma once

#include "core/states.hpp"
#include "core/stream_clock.hpp"
#include "core/types.hpp"

namespace stagehand::core {

struct Arena;
struct Piece;
struct Record;

struct Block {
  Address address = 0;
  Bytes size = 0;
  StreamClock* clock = nullptr;  // of the stream whose work may use it without a wait
  Record* record = nullptr;      // the saved storage it holds, if any
  std::uint64_t serial = 0;   // order of allocation; tells what existed before a pool was entered,
                              // or a region; 0 where nobody knows
  std::uint64_t users = 0;    // clocks (bit = index) beside its own that work on it now
  Seq idle_from = 0;          // on its clock: all work on the contents was queued before
  Fence fence;                // the same on other clocks (lanes and foreign streams)
  std::uint32_t aliases = 0;  // tensors re-made over it that torch has not dropped
  Stated<BlockState> state{BlockState::hole};
  bool owned_by_torch = false;
  bool keep = false;         // no record is made of it: the user asked so, or it has weights
  bool small = false;        // shares whole pieces with many others
  bool in_graph = false;     // of a captured CUDA graph's own memory
  bool made_again = false;   // for a record that comes back, and not by whoever computed it
  bool in_mem_pool = false;  // its memory serves nothing outside that torch.cuda.MemPool
  // Of our heap.
  Arena* arena = nullptr;
  Block* previous = nullptr;  // neighbours in address order
  Block* next = nullptr;
  Block* bin_previous = nullptr;  // free list, or the list of evicting, former ones or holes
  Block* bin_next = nullptr;
  Piece* piece = nullptr;        // of a former address: what is still mapped there,
  Block* next_former = nullptr;  // and the next former address of that
  std::uint64_t seen = 0;        // the search (WindowSearch) that has been here,
  Block* run_other = nullptr;    // and the other end of the run it is an end of
  // Of torch's cache: the storage, and its size.
  void* storage = nullptr;
  const void* identity = nullptr;
  Bytes storage_bytes = 0;

  Address end() const { return address + size; }
  bool owned() const { return owned_by_torch || aliases > 0; }

  // Bit i is clock i; the last bit stands for every clock from there on.
  static constexpr std::uint32_t kLastUserBit = 63;
  static constexpr std::uint64_t user_bit(std::uint32_t clock) {
    return std::uint64_t{1} << (clock < kLastUserBit ? clock : kLastUserBit);
  }
  bool used_by(std::uint32_t clock) const { return (users & user_bit(clock)) != 0; }
};

}  // namespace stagehand::core
