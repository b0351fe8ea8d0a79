// A block: a stretch of one arena's address range. All fields are guarded by the device's lock.
//
// States (rule O1: exactly one at a time)
//   hole      address only, nothing mapped
//   retiring  its physical memory has been mapped elsewhere; unmapped once its last use has passed
//   free      mapped, reusable by the arena's own stream at once
//   evicting  mapped, reusable behind `fence`: a copy out of it, or another stream, may not be done
//   live      torch, or a tensor re-made over it, can reach it
//   retained  torch has freed it, a record still needs it: only we hold it
#pragma once

#include "core/stream_clock.hpp"
#include "core/types.hpp"

namespace stagehand::core {

struct Arena;
struct Record;

enum class BlockState : std::uint8_t { hole, retiring, free, evicting, live, retained };

constexpr bool is_mapped(BlockState state) {
  return state != BlockState::hole && state != BlockState::retiring;
}

struct Block {
  Address address = 0;
  Bytes size = 0;
  Arena* arena = nullptr;
  Block* previous = nullptr;  // neighbours in address order
  Block* next = nullptr;
  Block* bin_previous = nullptr;  // free list or evicting list
  Block* bin_next = nullptr;
  Record* record = nullptr;   // the saved storage it holds, if any
  std::uint64_t serial = 0;   // order of allocation; tells what existed before a pool was entered
  std::uint64_t users = 0;    // clocks (bit = index) beside the arena's own that work on it now
  Seq idle_from = 0;          // on the arena's clock: all work on the contents was queued before
  Fence fence;                // the same on other clocks (lanes and foreign streams)
  std::uint32_t aliases = 0;  // tensors re-made over it that torch has not dropped
  BlockState state = BlockState::hole;
  bool owned_by_torch = false;
  bool keep = false;  // the user asked to leave it on the GPU
  // Of torch's own allocator (held_blocks.hpp): the storage we hold a reference to, and its size.
  void* storage = nullptr;
  const void* identity = nullptr;
  Bytes storage_bytes = 0;
  bool made_again = false;   // asked of torch by us, for a record that comes back
  bool in_mem_pool = false;  // its memory serves nothing outside that torch.cuda.MemPool

  Address end() const { return address + size; }

  // Bit i is clock i; the last bit stands for every clock from there on.
  static constexpr std::uint32_t kLastUserBit = 63;
  void add_user(std::uint32_t clock) {
    users |= std::uint64_t{1} << (clock < kLastUserBit ? clock : kLastUserBit);
  }
  bool used_by(std::uint32_t clock) const {
    return (users >> (clock < kLastUserBit ? clock : kLastUserBit) & 1) != 0;
  }
};

}  // namespace stagehand::core
