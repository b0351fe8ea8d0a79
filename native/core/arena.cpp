#include "core/arena.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "core/check.hpp"

namespace stagehand::core {

namespace {
// Small blocks: 8 of them at most start in a page. Large ones: a page is a mapping granule.
constexpr unsigned kSmallPageShift = 12;
constexpr unsigned kLargePageShift = 21;
}  // namespace

Block* BlockNodes::take() {
  if (spare_.empty()) {
    return &nodes_.emplace_back();
  }
  Block* block = spare_.back();
  spare_.pop_back();
  *block = Block{};
  return block;
}

Arena::Arena(ArenaKey arena_key, StreamClock& arena_clock, BlockNodes& block_nodes,
             Address arena_base, Bytes size)
    : key(arena_key),
      clock(arena_clock),
      nodes(block_nodes),
      base(arena_base),
      reserved(size),
      page_shift_(arena_key.small ? kSmallPageShift : kLargePageShift) {
  page_bytes_ = (reserved >> page_shift_) * sizeof(Block*);
  void* memory = mmap(nullptr, page_bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::bad_alloc();  // caught where the arena is made
  }
  pages_ = static_cast<Block**>(memory);
  first = nodes.take();
  first->address = base;
  first->size = reserved;
  first->arena = this;
  // Pages of holes are not filled in: a lookup there finds nothing.
}

Arena::~Arena() {
  for (Block* b = first; b != nullptr;) {
    Block* next = b->next;
    nodes.give(b);
    b = next;
  }
  munmap(pages_, page_bytes_);
}

Block* Arena::find(Address address) const {
  Block* block = pages_[(address - base) >> page_shift_];
  if (block == nullptr) {
    return nullptr;
  }
  while (block != nullptr && block->end() <= address) {
    block = block->next;
  }
  return block != nullptr && is_mapped(block->state) ? block : nullptr;
}

// The pages whose first byte lies in `range` now belong to `owner`.
void Arena::claim_pages(const Block* range, Block* owner) {
  const Bytes page = Bytes{1} << page_shift_;
  const Bytes begin = (range->address - base + page - 1) >> page_shift_;
  const Bytes end = (range->end() - base + page - 1) >> page_shift_;
  std::fill(pages_ + begin, pages_ + end, owner);
}

void Arena::link_evicting(Block* block) {
  block->bin_previous = evicting_last;
  block->bin_next = nullptr;
  (evicting_last != nullptr ? evicting_last->bin_next : evicting_first) = block;
  evicting_last = block;
}

void Arena::unlink_evicting(Block* block) {
  (block->bin_previous != nullptr ? block->bin_previous->bin_next : evicting_first) =
      block->bin_next;
  (block->bin_next != nullptr ? block->bin_next->bin_previous : evicting_last) =
      block->bin_previous;
  block->bin_previous = block->bin_next = nullptr;
}

void Arena::set_state(Block* block, BlockState state) {
  if (block->state == BlockState::free) {
    free.remove(block);
  } else if (block->state == BlockState::evicting) {
    unlink_evicting(block);
  }
  const bool was_mapped = is_mapped(block->state);
  block->state = state;
  if (state == BlockState::free) {
    free.insert(block);
  } else if (state == BlockState::evicting) {
    link_evicting(block);
  }
  if (was_mapped != is_mapped(state)) {
    claim_pages(block, was_mapped ? nullptr : block);
  }
}

Block* Arena::split_front(Block* block, Bytes bytes) {
  SH_CHECK(bytes > 0 && bytes < block->size && bytes % kBlockUnit == 0);
  const BlockState state = block->state;
  if (state == BlockState::free) {
    free.remove(block);
  }
  Block* front = nodes.take();
  front->address = block->address;
  front->size = bytes;
  front->arena = this;
  front->state = state;
  front->idle_from = block->idle_from;
  front->fence = block->fence;
  front->previous = block->previous;
  front->next = block;
  (block->previous != nullptr ? block->previous->next : first) = front;
  block->previous = front;
  block->address += bytes;
  block->size -= bytes;
  if (is_mapped(state)) {
    claim_pages(front, front);
  }
  if (state == BlockState::free) {
    free.insert(front);
    free.insert(block);
  } else if (state == BlockState::evicting) {
    link_evicting(front);
  }
  return front;
}

// The larger of the two keeps its node, so that few pages change hands.
Block* Arena::merge_with_next(Block* block) {
  Block* left = block;
  Block* right = block->next;
  Block* kept = left->size >= right->size ? left : right;
  Block* gone = kept == left ? right : left;
  if (is_mapped(kept->state)) {
    claim_pages(gone, kept);
  }
  kept->address = left->address;
  kept->size = left->size + right->size;
  kept->idle_from = std::max(left->idle_from, right->idle_from);
  if (!kept->fence.add(gone->fence)) {
    // Both are settled for the arena's stream, so a point it has not reached covers every tick.
    kept->idle_from = clock.upcoming();
  }
  kept->previous = left->previous;
  kept->next = right->next;
  (kept->previous != nullptr ? kept->previous->next : first) = kept;
  if (kept->next != nullptr) {
    kept->next->previous = kept;
  }
  nodes.give(gone);
  return kept;
}

Block* Arena::coalesce(Block* block) {
  const BlockState state = block->state;
  SH_CHECK(state == BlockState::free || state == BlockState::hole);
  const bool listed = state == BlockState::free;
  if (listed) {
    free.remove(block);
  }
  if (block->next != nullptr && block->next->state == state) {
    if (listed) {
      free.remove(block->next);
    }
    block = merge_with_next(block);
  }
  if (block->previous != nullptr && block->previous->state == state) {
    if (listed) {
      free.remove(block->previous);
    }
    block = merge_with_next(block->previous);
  }
  if (listed) {
    free.insert(block);
  }
  return block;
}

Block* Arena::join(Block* first_block, Block* last_block) {
  // Out of every list first, so that the sizes the lists know stay true.
  const Address end = last_block->end();
  for (Block* b = first_block; b != nullptr && b->address < end; b = b->next) {
    SH_CHECK(b->state == BlockState::free || b->state == BlockState::evicting);
    set_state(b, BlockState::live);
  }
  Block* joined = first_block;
  while (joined->end() < end) {
    joined = merge_with_next(joined);
  }
  return joined;
}

}  // namespace stagehand::core
