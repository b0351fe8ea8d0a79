// Blocks lent: idle memory of one stream's arena serves another stream where it is mapped, so that
// nothing has to move. A lent block keeps its arena and has the borrower's clock.
#include "core/check.hpp"
#include "core/device_heap.hpp"

namespace stagehand::core {

// What work on first..last must wait for, as ticks in `fence`. Where they are of more clocks than a
// fence holds, the stream of `to` waits for the rest now, and `idle_from` says from where on.
Status DeviceHeap::fence_run(const Block* first, const Block* last, Arena& to, Fence* fence,
                             Seq* idle_from) {
  StreamClock& owner = first->arena->clock;
  for (const Block* b = first;; b = b->next) {
    Fence all = b->fence;
    if (!all.add(owner.tick(b->idle_from))) {
      if (const Status status = clocks_.order_after(to.clock, b->fence); status != Status::ok) {
        return status;
      }
      *idle_from = to.clock.upcoming();
      all.clear();
      all.add(owner.tick(b->idle_from));
    }
    for (const Tick& tick : all) {
      if (fence->add(tick)) {
        continue;
      }
      if (const Status status = clocks_.order_after(to.clock, tick); status != Status::ok) {
        return status;
      }
      *idle_from = to.clock.upcoming();
    }
    if (b == last) {
      return Status::ok;
    }
  }
}

Block* DeviceHeap::lend(Arena& to, Block* first, Block* last, Bytes bytes, Behind behind) {
  Arena& from = *first->arena;
  Bytes held = first->size;
  Block* end = first;
  for (; held < bytes && end != last; held += end->size) {
    end = end->next;
  }
  SH_CHECK(held >= bytes && &from != &to);
  Fence fence;
  Seq idle_from = 0;
  Status status = Status::ok;
  if (holds(Rule::S2)) {
    status = fence_run(first, end, to, &fence, &idle_from);
  }
  if (status == Status::ok && behind == Behind::stream) {
    status = clocks_.order_after(to.clock, fence);
  }
  if (status != Status::ok) {
    return nullptr;  // nothing has changed but waits queued for nothing
  }
  if (held > bytes) {
    Block* front = from.split_front(end, end->size - (held - bytes));
    first = first == end ? front : first;
    end = front;
  }
  Block* block = from.join(first, end);
  block->fence = fence;
  block->idle_from = idle_from;
  block->clock = &to.clock;
  clocks_.hold(to.clock);
  ++counters_.loans;
  return block;
}

Block* DeviceHeap::borrow(Arena& to, Bytes bytes, Behind behind) {
  for (const auto& from : arenas_) {
    Block* block = lends(*from, to) ? from->free.best_fit(bytes) : nullptr;
    if (block != nullptr && !block->fence.never()) {
      return lend(to, block, block, bytes, behind);
    }
  }
  return nullptr;
}

// Given back: its arena's stream comes behind what the borrower did with it. An event right away,
// while little is queued behind that; and the borrower may be gone when somebody has to wait.
void DeviceHeap::end_loan(Block* block) {
  Arena& arena = *block->arena;
  StreamClock& borrower = *block->clock;
  Tick last_use = borrower.tick(block->idle_from);
  if (last_use.seq >= borrower.upcoming()) {
    borrower.record(&last_use);  // refused in a capture: whoever waits records it later
  }
  block->clock = &arena.clock;
  block->idle_from = 0;
  if (!block->fence.add(last_use)) {
    const bool behind = clocks_.order_after(arena.clock, block->fence) == Status::ok &&
                        clocks_.order_after(arena.clock, last_use) == Status::ok;
    block->fence.clear();
    block->idle_from = arena.clock.upcoming();
    if (!behind) {
      block->fence.add(
          {last_use.clock, kNever});  // a leak is better than reuse that nothing orders
    }
  }
  clocks_.let_go(borrower);
}

}  // namespace stagehand::core
