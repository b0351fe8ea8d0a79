// What a device's memory holds now, for people: a snapshot. Data.
#pragma once

#include <cstdint>
#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

struct SeenRecord {
  std::uint64_t order = 0;  // of saving
  Bytes bytes = 0;
  std::uint8_t state = 0;  // RecordState's
  Address address = 0;     // of its block; 0: it has none
  Bytes block_bytes = 0;
  bool retained = false;  // only the record needs the block
  const char* op = nullptr;
  const char* region = nullptr;
};

struct SeenBlock {
  Address address = 0;
  Bytes bytes = 0;
  std::uint8_t state = 0;  // BlockState's
};

// An address range of ours, tiled by blocks.
struct SeenArena {
  Address base = 0;
  std::uintptr_t stream = 0;
  bool small = false;
  std::vector<SeenBlock> blocks;
};

struct Contents {
  std::vector<SeenRecord> records;
  std::vector<SeenArena> arenas;  // none where torch's own allocator cuts the blocks
};

}  // namespace stagehand::core
