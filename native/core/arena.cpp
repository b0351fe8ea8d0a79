#include "core/arena.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "core/check.hpp"

namespace stagehand::core {

namespace {
// Small blocks: 16 of them at most start in a page, and 1 MiB is 128 pages to fill in. Large ones:
// a page is a mapping granule.
constexpr unsigned kSmallPageShift = 13;
constexpr unsigned kLargePageShift = 21;

// Whether the page table knows it.
constexpr bool in_pages(BlockState state) { return state != BlockState::hole; }
}  // namespace

void BlockList::push_back(Block* block) {
  block->bin_previous = last_;
  block->bin_next = nullptr;
  (last_ != nullptr ? last_->bin_next : first_) = block;
  last_ = block;
}

void BlockList::push_front(Block* block) {
  block->bin_previous = nullptr;
  block->bin_next = first_;
  (first_ != nullptr ? first_->bin_previous : last_) = block;
  first_ = block;
}

void BlockList::remove(Block* block) {
  (block->bin_previous != nullptr ? block->bin_previous->bin_next : first_) = block->bin_next;
  (block->bin_next != nullptr ? block->bin_next->bin_previous : last_) = block->bin_previous;
  block->bin_previous = block->bin_next = nullptr;
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
  first->clock = &clock;
  first->small = key.small;
  holes.push_back(first);
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

Block* Arena::at(Address address) const {
  Block* block = pages_[(address - base) >> page_shift_];
  while (block != nullptr && block->end() <= address) {
    block = block->next;
  }
  return block != nullptr && in_pages(block->state) ? block : nullptr;
}

Block* Arena::find(Address address) const {
  Block* block = at(address);
  return block != nullptr && is_mapped(block->state) ? block : nullptr;
}

// The pages whose first byte lies in `range` now belong to `owner`.
void Arena::claim_pages(const Block* range, Block* owner) {
  const Bytes page = Bytes{1} << page_shift_;
  const Bytes begin = (range->address - base + page - 1) >> page_shift_;
  const Bytes end = (range->end() - base + page - 1) >> page_shift_;
  std::fill(pages_ + begin, pages_ + end, owner);
}

void Arena::set_state(Block* block, BlockState state) {
  const BlockState before = block->state;
  if (before == BlockState::free) {
    free.remove(block);
  } else if (BlockList* list = list_of(before); list != nullptr) {
    list->remove(block);
  }
  idle_bytes -= is_idle(before) ? block->size : 0;
  block->state.move_to(state);
  idle_bytes += is_idle(state) ? block->size : 0;
  if (before == BlockState::former || state == BlockState::former) {
    const bool more = state == BlockState::former;
    former_bytes = more ? former_bytes + block->size : former_bytes - block->size;
    formers = more ? formers + 1 : formers - 1;
  }
  if (state == BlockState::free) {
    free.insert(block);
  } else if (state == BlockState::evicting) {
    evicting.push_back(block);
  } else if (state == BlockState::former) {
    former.push_back(block);
  } else if (state == BlockState::hole) {
    holes.push_front(block);
  }
  if (in_pages(before) != in_pages(state)) {
    claim_pages(block, in_pages(state) ? block : nullptr);
  }
}

Block* Arena::split_front(Block* block, Bytes bytes) {
  SH_CHECK(bytes > 0 && bytes < block->size && bytes % kBlockUnit == 0);
  const BlockState state = block->state;
  if (state == BlockState::free) {
    free.remove(block);
  }
  Block* front = nodes.take();
  ++blocks;
  front->address = block->address;
  front->size = bytes;
  front->arena = this;
  front->clock = &clock;
  front->small = key.small;
  front->state = block->state;
  front->idle_from = block->idle_from;
  front->fence = block->fence;
  front->previous = block->previous;
  front->next = block;
  (block->previous != nullptr ? block->previous->next : first) = front;
  block->previous = front;
  block->address += bytes;
  block->size -= bytes;
  if (in_pages(state)) {
    claim_pages(front, front);
  }
  if (state == BlockState::free) {
    free.insert(front);
    free.insert(block);
  } else if (BlockList* list = list_of(state); list != nullptr) {
    list->push_front(front);
  }
  return front;
}

// The larger of the two keeps its node, so that few pages change hands.
Block* Arena::merge_with_next(Block* block) {
  Block* left = block;
  Block* right = block->next;
  Block* kept = left->size >= right->size ? left : right;
  Block* gone = kept == left ? right : left;
  if (in_pages(kept->state)) {
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
  --blocks;
  return kept;
}

Block* Arena::coalesce(Block* block) {
  const BlockState state = block->state;
  SH_CHECK(state == BlockState::free || state == BlockState::hole);
  const auto unlist = [&](Block* one) {
    state == BlockState::free ? free.remove(one) : holes.remove(one);
  };
  unlist(block);
  if (block->next != nullptr && block->next->state == state) {
    unlist(block->next);
    block = merge_with_next(block);
  }
  if (block->previous != nullptr && block->previous->state == state) {
    unlist(block->previous);
    block = merge_with_next(block->previous);
  }
  state == BlockState::free ? free.insert(block) : holes.push_front(block);
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
