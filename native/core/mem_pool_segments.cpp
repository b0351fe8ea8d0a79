#include "core/mem_pool_segments.hpp"

#include <algorithm>

namespace stagehand::core {

Address MemPoolSegments::take(Bytes bytes, driver::Stream stream, Bytes limit) {
  Arena* arena = heap_.arena_for(stream, bytes, 0);
  if (arena == nullptr) {
    return 0;
  }
  bytes = DeviceHeap::block_bytes(bytes);
  heap_.settle(*arena);
  Block* block = heap_.take(*arena, bytes);
  if (block == nullptr) {
    const Bytes reserved = cache_.usage().reserved;
    const Bytes others = reserved - std::min(reserved, counters_.occupied);
    const Bytes ceiling = limit - std::min(limit, others);
    // No spare memory beside it: `high` counts that, and the next segment may be of any size.
    if (heap_.grow(*arena, bytes, ceiling, 0) == Status::ok ||
        heap_.gather(*arena, bytes, ceiling) == Status::ok) {
      block = heap_.take(*arena, bytes);
    }
  }
  if (block == nullptr) {
    return 0;
  }
  counters_.occupy(block->size);
  block->owned_by_torch = true;
  return block->address;
}

void MemPoolSegments::give(Address address) {
  Block* block = heap_.find(address);
  if (block != nullptr && block->state == BlockState::live) {
    counters_.vacate(block->size);
    block->owned_by_torch = false;
    block->idle_from = block->clock->upcoming();
    heap_.give(block);
  }
}

void MemPoolSegments::own(Pool pool) {
  newest_ = pool;
  in_step_ = true;
  if (!ours(pool)) {
    std::erase_if(pools_, [&](const Pool& old) { return !cache_.has_pool(old); });
    pools_.push_back(pool);
  }
}

bool MemPoolSegments::ours(const Pool& pool) const {
  return std::find(pools_.begin(), pools_.end(), pool) != pools_.end();
}

}  // namespace stagehand::core
