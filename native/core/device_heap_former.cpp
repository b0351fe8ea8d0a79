// Former addresses of pieces: where memory served before it moved, and is mapped still.
#include <limits>
#include <utility>

#include "core/check.hpp"
#include "core/device_heap.hpp"

namespace stagehand::core {

// The piece serves at another address from here on, and its old one becomes a former address. The
// new one is mapped, and what is queued there comes behind all work on the old one.
void DeviceHeap::move_to(Piece& piece, Arena& arena, Address address) {
  Arena& from = *piece.arena;
  Block* block = carve(from, piece.address, piece.size);
  SH_CHECK(block->address == piece.address && block->size == piece.size);
  const bool fits = block->fence.add({from.clock.index(), block->idle_from});
  SH_CHECK(fits);  // fence_moves has seen to it
  (void)fits;
  from.set_state(block, BlockState::former);
  block->piece = &piece;
  block->next_former = piece.former;
  piece.former = block;
  piece.home = piece.home == nullptr ? block : piece.home;
  counters_.former_bytes += piece.size;
  auto node = from.pieces.extract(piece.address);  // the piece stays where it is in memory
  piece.arena = &arena;
  piece.address = address;
  node.key() = address;
  arena.pieces.insert(std::move(node));
}

// An event close behind, so that the last use of addresses that were just left is seen to pass:
// their stream may be used no more. That of `to` is.
void DeviceHeap::mark_last_uses(const Arena& to) {
  Tick soon;
  for (const auto& from : arenas_) {
    if (from.get() != &to && from->formers > 0 &&
        from->former.last()->idle_from >= from->clock.upcoming()) {
      from->clock.record(&soon);
    }
  }
}

// The block is no former address of its piece any more.
void DeviceHeap::forget_former(Block* block) {
  Block** link = &block->piece->former;
  while (*link != block) {
    link = &(*link)->next_former;
  }
  *link = block->next_former;
  block->piece->home = block->piece->home == block ? nullptr : block->piece->home;
  block->piece = nullptr;
  block->next_former = nullptr;
  counters_.former_bytes -= block->size;
}

// The piece serves at one of its former addresses again.
void DeviceHeap::take_back(Block* block, const Fence& fence, Seq idle_from) {
  Piece& piece = *block->piece;
  const bool home = piece.home == block;
  forget_former(block);
  move_to(piece, *block->arena, block->address);
  piece.home = home ? nullptr : piece.home;
  make_idle(block, fence, idle_from);
}

// Idle memory that waits for other streams' work becomes free: its stream waits for it now. Both
// are of steps that have ended, as far as the host knows.
void DeviceHeap::come_to_rest() {
  for (const auto& arena : arenas_) {
    for (const Block* b = arena->evicting.first(); b != nullptr; b = b->bin_next) {
      if (!b->fence.never()) {
        clocks_.order_after(arena->clock, b->fence);  // refused: it stays as it is
      }
    }
    settle(*arena, std::numeric_limits<int>::max());
  }
}

// Idle pieces serve where they were mapped first again: a step that begins as the one before began
// finds the same holes, and takes up the addresses that the one before had to map. Not those of
// streams that nobody used in that step: what is empty of them can go.
void DeviceHeap::go_home() {
  if (counters_.former_bytes > 0) {
    come_to_rest();  // a piece goes whole
  }
  moves_.clear();
  for (const auto& arena : arenas_) {
    for (auto& [address, piece] : arena->pieces) {
      if (piece.home != nullptr && piece.home->arena->asked && usable(*piece.home)) {
        moves_.push_back(&piece);
      }
    }
  }
  std::vector<Piece*> one(1);
  for (Piece* piece : moves_) {
    Block* home = piece->home;
    Fence fence;
    Seq idle_from = 0;
    one.front() = piece;
    if (fence_moves(one, *home->arena, &fence, &idle_from) != Status::ok) {
      break;
    }
    take_back(home, fence, idle_from);
    if (home->state == BlockState::free) {
      home->arena->coalesce(home);
    }
  }
  for (const auto& arena : arenas_) {
    arena->asked_before = std::exchange(arena->asked, false);
  }
  if (counters_.former_bytes > 0) {
    come_to_rest();
  }
}

// Idle, or a former address whose piece lies whole in idle memory that may move.
bool DeviceHeap::usable(const Block& block) const {
  if (is_idle(block.state)) {
    return !block.fence.never();
  }
  if (block.state != BlockState::former) {
    return false;
  }
  const Piece& piece = *block.piece;
  const Block* now = piece.arena->find(piece.address);
  return piece.arena->key.graph == 0 && is_idle(now->state) && !now->fence.never() &&
         now->address <= piece.address && piece.address + piece.size <= now->end();
}

// Whether no two blocks of the run are the same memory.
bool DeviceHeap::sound(const Run& run) {
  ++turn_;
  for (const Block* b = run.first;; b = b->next) {
    if (b->state == BlockState::former) {
      Piece& piece = *b->piece;
      const bool inside = piece.address >= run.first->address && piece.address < run.last->end();
      if (inside || std::exchange(piece.seen, turn_) == turn_) {
        return false;
      }
    }
    if (b == run.last) {
      return true;
    }
  }
}

// Marks the arena's former addresses whose pieces are idle elsewhere, and gathers them in
// `formers_`. Found from idle memory, of which there is little where a request finds no hole: a
// process collects thousands of former addresses.
void DeviceHeap::find_usable(const Arena& arena, std::uint64_t mark) {
  formers_.clear();
  for (const auto& from : arenas_) {
    for (const Block* block : idle_blocks(*from)) {
      for (auto piece = from->pieces.lower_bound(block->address);
           piece != from->pieces.end() && piece->first + piece->second.size <= block->end();
           ++piece) {
        for (Block* former = piece->second.former; former != nullptr;
             former = former->next_former) {
          if (former->arena == &arena) {
            former->seen = mark;
            formers_.push_back(former);
          }
        }
      }
    }
  }
}

// The shortest run that holds the request, so that a step takes what the one before took; of those
// the one at the lowest address.
DeviceHeap::Run DeviceHeap::best_run(Arena& arena, Bytes bytes) {
  constexpr int kUnsound = 64;  // runs that turn out to be no good, at most
  const std::uint64_t mark = ++turn_ | kOfHeap;
  const std::uint64_t search = ++turn_ | kOfHeap;
  const auto joins = [&](const Block& block) {
    return is_idle(block.state)
               ? !block.fence.never()
               : block.state == BlockState::former && (block.seen == mark || block.seen == search);
  };
  find_usable(arena, mark);
  Run best;
  int unsound = 0;
  for (Block* former : formers_) {
    if (former->seen == search) {
      continue;
    }
    Block* first = former;
    while (first->previous != nullptr && joins(*first->previous)) {
      first = first->previous;
    }
    // Two ends that only move forward: from each first block on the shortest that holds it.
    Run run{first, first, 0};
    for (Block* last = first; last != nullptr && joins(*last); last = last->next) {
      last->seen = search;
      run.last = last;
      run.bytes += last->size;
      for (; run.bytes >= bytes; run.first = run.first->next) {
        const bool better = !best.found() || run.bytes < best.bytes ||
                            (run.bytes == best.bytes && run.first->address < best.first->address);
        if (better && unsound < kUnsound) {
          const bool good = sound(run);
          best = good ? run : best;
          unsound += good ? 0 : 1;
        }
        run.bytes -= run.first->size;
      }
    }
  }
  return best;
}

Block* DeviceHeap::take_up(Arena& arena, Bytes bytes) {
  if (arena.formers == 0 || idle_bytes() < bytes) {
    return nullptr;
  }
  const Run run = best_run(arena, bytes);
  return run.found() ? take_run_from(arena, run, run.first->address, bytes) : nullptr;
}

// Whether its memory can serve there at once: the arena's stream waits for nothing.
bool DeviceHeap::ready(const Arena& arena, const Block& block) const {
  if (block.state != BlockState::former) {
    return is_idle(block.state) && clocks_.settled(arena.clock, block.fence);
  }
  if (!usable(block)) {
    return false;
  }
  const Piece& piece = *block.piece;
  const Block& now = *piece.arena->find(piece.address);
  return piece.arena == &arena ? clocks_.settled(arena.clock, now.fence) : passed(now);
}

// Of a former address no part is taken.
DeviceHeap::Run DeviceHeap::run_at(const Arena& arena, Address address, Bytes bytes) const {
  Run run{arena.at(address), nullptr, 0};
  for (Block* b = run.first; b != nullptr; b = b->next) {
    const bool part = b->state == BlockState::former && b->address < address;
    if (part || !ready(arena, *b)) {
      break;
    }
    if (b->end() >= address + bytes) {
      run.last = b;
      return run;
    }
  }
  return {};
}

bool DeviceHeap::is_mapped_at(const Arena& arena, Address address, Bytes bytes) {
  const Block* b = arena.at(address);
  while (b != nullptr && b->state != BlockState::hole && b->end() < address + bytes) {
    b = b->next;
  }
  return b != nullptr && b->state != BlockState::hole;
}

Block* DeviceHeap::take_at(Arena& arena, Address address, Bytes bytes) {
  const Run run = run_at(arena, address, bytes);
  return run.found() && sound(run) ? take_run_from(arena, run, address, bytes) : nullptr;
}

// All of a sound run, or what of its first block is left from `address` on.
Block* DeviceHeap::take_run_from(Arena& arena, const Run& run, Address address, Bytes bytes) {
  moves_.clear();
  for (Block* b = run.first;; b = b->next) {
    if (b->state == BlockState::former) {
      moves_.push_back(b->piece);
    }
    if (b == run.last) {
      break;
    }
  }
  Fence fence;
  Seq idle_from = 0;
  if (fence_moves(moves_, arena, &fence, &idle_from) != Status::ok) {
    return nullptr;
  }
  for (Block* b = run.first;; b = b->next) {
    if (b->state == BlockState::former) {
      take_back(b, fence, idle_from);
    }
    if (b == run.last) {
      break;
    }
  }
  if (!moves_.empty()) {
    mark_last_uses(arena);
    ++counters_.take_ups;
  }
  if (run.first->address < address) {
    arena.split_front(run.first, address - run.first->address);
  }
  return take_run(arena, run.first, run.last, bytes);
}

// False where its last use is not known to be past, or the driver refuses.
bool DeviceHeap::drop_former(Block* block) {
  if (!passed(*block) || unmap(block->address, block->size) != driver::kSuccess) {
    return false;
  }
  forget_former(block);
  block->fence.clear();
  block->idle_from = 0;
  block->arena->set_state(block, BlockState::hole);
  block->arena->coalesce(block);
  return true;
}

// Those over the caps, or all, those first that were made first.
void DeviceHeap::drop_formers(Arena& arena, bool all, int not_ready) {
  for (std::size_t left = arena.formers; left > 0 && not_ready > 0; --left) {
    if (!all && arena.formers <= kMostFormers && arena.former_bytes <= arena.reserved / 2) {
      return;
    }
    Block* block = arena.former.first();
    if (!drop_former(block)) {
      arena.former.move_to_back(block);  // later; the address stays unused until then
      --not_ready;
    }
  }
}

void DeviceHeap::free_addresses(Arena& arena) {
  drop_formers(arena, true, std::numeric_limits<int>::max());
}

}  // namespace stagehand::core
