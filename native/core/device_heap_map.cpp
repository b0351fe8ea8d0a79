// The physical side of the device heap: growing, gathering and trimming.
#include <algorithm>
#include <bit>

#include "core/budget.hpp"
#include "core/check.hpp"
#include "core/device_heap.hpp"

namespace stagehand::core {

// Of a power of two, so that pieces of one size of request fit together with those of another.
// Small enough that a freed block of this size is whole pieces, which can move.
Bytes DeviceHeap::fine_piece(Bytes bytes) const {
  const Bytes least = bytes > kSmallLimit ? least_piece_ : granularity_;
  return std::clamp(round_up(std::bit_floor(bytes / 8), granularity_), least, kLargestPiece);
}

// What a piece costs is the same whatever its size: a call to make it and its share of one to open
// it, 15 and 30 us on an H200's host, or a millisecond beside a copy out. So a request of less than
// 64 MiB gets pieces of 8 MiB, or one, and not 8 to 16.
Bytes DeviceHeap::piece_for(Bytes bytes) const {
  const Bytes enough = std::min(8_MiB, device_bytes_ / 2048);
  const Bytes piece = round_up(std::bit_floor(std::min(bytes, enough)), granularity_);
  return std::max(piece, fine_piece(bytes));
}

// Where sizes differ in each step, its holes are elsewhere each time: pieces of small requests
// would move by the hundreds, and each takes the host as long to open as a large one. From here on
// they are larger, of what is mapped, or by the blocks: half of one is at least one whole piece.
bool DeviceHeap::coarsen(Bytes block) {
  constexpr Bytes kPieces = 512;
  if (!fine()) {
    return false;
  }
  least_piece_ = std::clamp(std::bit_floor(std::max(counters_.mapped / kPieces, block / 2)),
                            granularity_, kLargestPiece);
  return !fine();
}

namespace {
Bytes hole_behind(const Block* block) {
  const Block* next = block->next;
  return next != nullptr && next->state == BlockState::hole ? next->size : 0;
}
}  // namespace

// The hole that needs the least new memory, counting a free block that ends where it begins, with
// room for `slack` more than that.
DeviceHeap::Place DeviceHeap::place_for(const Arena& arena, Bytes bytes, Bytes slack) const {
  constexpr int kLooked = 64;  // holes, once one is found that does
  Place best;
  int looked = 0;
  for (Block* b = arena.holes.first(); b != nullptr && (looked < kLooked || best.hole == nullptr);
       b = b->bin_next, ++looked) {
    const Block* left = b->previous;
    const Bytes before = left != nullptr && left->state == BlockState::free ? left->size : 0;
    if (before >= bytes) {
      continue;
    }
    const Bytes missing = round_up(bytes - before, granularity_);
    if (missing + slack > b->size) {
      continue;
    }
    if (best.hole == nullptr || missing < best.missing ||
        (missing == best.missing && b->address < best.hole->address)) {
      best = {b, before, missing};
    }
  }
  return best;
}

driver::Result DeviceHeap::map(Address address, const Piece& piece) {
  ++counters_.map_calls;
  return gate_->mem_map(address, piece.size, 0, piece.handle, 0);
}

driver::Result DeviceHeap::unmap(Address address, Bytes bytes) {
  ++counters_.map_calls;
  return gate_->mem_unmap(address, bytes);
}

driver::Result DeviceHeap::set_access(Address address, Bytes bytes) {
  ++counters_.map_calls;
  return gate_->mem_set_access(address, bytes, access_.data(), access_.size());
}

void DeviceHeap::unmap_new(Address address, const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    unmap(address, piece.size);
    gate_->mem_release(piece.handle);
    address += piece.size;
  }
}

Status DeviceHeap::create_and_map(Address address, Bytes bytes, std::vector<Piece>* pieces,
                                  Bytes piece_bytes) {
  const Address begin = address;
  const std::size_t before = pieces->size();
  while (bytes > 0) {
    Piece piece{std::min(bytes, piece_bytes)};
    driver::Result result = gate_->mem_create(&piece.handle, piece.size, &prop_, 0);
    if (result == driver::kSuccess) {
      result = map(address, piece);
      if (result != driver::kSuccess) {
        gate_->mem_release(piece.handle);
      }
    }
    if (result != driver::kSuccess) {
      const std::vector<Piece> made(pieces->begin() + static_cast<std::ptrdiff_t>(before),
                                    pieces->end());
      unmap_new(begin, made);
      pieces->resize(before);
      return result == driver::kOutOfMemory ? Status::out_of_memory : Status::driver_failed;
    }
    pieces->push_back(piece);
    address += piece.size;
    bytes -= piece.size;
  }
  return Status::ok;
}

void DeviceHeap::add_pieces(Arena& arena, Address address, const std::vector<Piece>& pieces) {
  for (const Piece& made : pieces) {
    Piece& piece = arena.pieces.emplace(address, made).first->second;
    piece.arena = &arena;
    piece.address = address;
    address += piece.size;
  }
}

// A hole or a former address becomes idle memory behind these ticks.
void DeviceHeap::make_idle(Block* block, const Fence& fence, Seq idle_from) {
  Arena& arena = *block->arena;
  block->fence = fence;
  block->idle_from = idle_from;
  const bool settled = clocks_.settled(arena.clock, fence);
  arena.set_state(block, settled ? BlockState::free : BlockState::evicting);
}

// The same for the front of a hole, which joins its neighbours.
void DeviceHeap::add_mapped(Arena& arena, Block* hole, Bytes bytes, const Fence& fence,
                            Seq idle_from) {
  Block* block = bytes < hole->size ? arena.split_front(hole, bytes) : hole;
  make_idle(block, fence, idle_from);
  if (block->state == BlockState::free) {
    arena.coalesce(block);
  }
}

Status DeviceHeap::grow(Arena& arena, Bytes bytes, Bytes ceiling, Bytes spare_ceiling) {
  if (!fits_under(counters_.mapped, granularity_, ceiling)) {
    return Status::out_of_memory;  // the least there is; looking for the place costs more
  }
  const Place place = place_for(arena, bytes, 0);
  if (place.hole == nullptr || !fits_under(counters_.mapped, place.missing, ceiling)) {
    return Status::out_of_memory;
  }
  // Whole pieces where there is room: fewer calls now, and the rest serves the next request.
  const Bytes piece = piece_for(bytes);
  Bytes growth = round_up(place.missing, piece);
  if (growth > place.hole->size ||
      !fits_under(counters_.mapped, growth, std::min(ceiling, spare_ceiling))) {
    growth = place.missing;
  }
  const Status status = map_new(arena, place.hole, growth, piece);
  return status == Status::out_of_memory && growth > place.missing
             ? map_new(arena, place.hole, place.missing, piece)
             : status;
}

Status DeviceHeap::grow_ahead(Arena& arena, Bytes bytes, Bytes like) {
  return map_ahead(arena, bytes, piece_for(like), nullptr);
}

// Behind `stretch`, where there is room.
Status DeviceHeap::map_ahead(Arena& arena, Bytes bytes, Bytes piece, Block* stretch) {
  const Bytes growth = bytes / granularity_ * granularity_;
  Block* hole =
      stretch != nullptr && hole_behind(stretch) >= growth ? stretch->next : arena.holes.first();
  while (hole != nullptr && hole->size < growth) {
    hole = hole->bin_next;
  }
  return hole != nullptr && growth > 0 ? map_new(arena, hole, growth, piece)
                                       : Status::out_of_memory;
}

// New memory at the front of a hole.
Status DeviceHeap::map_new(Arena& arena, Block* hole, Bytes bytes, Bytes piece) {
  std::vector<Piece> pieces;
  const Address address = hole->address;
  if (const Status status = create_and_map(address, bytes, &pieces, piece); status != Status::ok) {
    return status;
  }
  if (set_access(address, bytes) != driver::kSuccess) {
    unmap_new(address, pieces);
    return Status::driver_failed;
  }
  add_mapped(arena, hole, bytes, Fence{}, 0);
  add_pieces(arena, address, pieces);
  counters_.map(bytes);
  ++counters_.grows;
  return Status::ok;
}

// Those that may move and may hold a whole piece, until the next call. Graph arenas keep theirs: a
// captured graph will use those addresses again.
std::vector<Block*>& DeviceHeap::idle_blocks(const Arena& arena) {
  idle_.clear();
  if (arena.key.graph != 0 || arena.idle_bytes < granularity_) {
    return idle_;
  }
  const auto add = [&](Block* block) {
    if (!block->fence.never()) {
      idle_.push_back(block);
    }
    return true;
  };
  arena.free.from_smallest(granularity_, add);
  for (Block* b = arena.evicting.first(); b != nullptr; b = b->bin_next) {
    add(b);
  }
  return idle_;
}

// Whole pieces inside free and evicting blocks until they hold `wanted`: those that are all wanted
// before one that is larger than what is left, this arena's before others'.
std::vector<Piece*> DeviceHeap::free_pieces(Arena& arena, const Block* spared, Bytes wanted) {
  std::vector<Piece*> moves;
  Bytes found = 0;
  Piece* larger = nullptr;  // the first of all that are
  const auto collect = [&](Arena& from, const Block* block) {
    if (block == spared) {
      return true;
    }
    for (auto piece = from.pieces.lower_bound(block->address);
         piece != from.pieces.end() && found < wanted &&
         piece->first + piece->second.size <= block->end();
         ++piece) {
      if (piece->second.size <= wanted - found) {
        moves.push_back(&piece->second);
        found += piece->second.size;
      } else if (larger == nullptr) {
        larger = &piece->second;
      }
    }
    return found < wanted;
  };
  const auto search = [&](Arena& from) {
    // In the order of addresses: what is left stays together.
    std::vector<Block*>& idle = idle_blocks(from);
    std::sort(idle.begin(), idle.end(),
              [](const Block* a, const Block* b) { return a->address < b->address; });
    for (const Block* block : idle) {
      if (!collect(from, block)) {
        return;
      }
    }
  };
  search(arena);
  for (const auto& from : arenas_) {
    if (from.get() != &arena && found < wanted) {
      search(*from);
    }
  }
  if (found < wanted && larger != nullptr) {
    moves.push_back(larger);
  }
  return moves;
}

Bytes DeviceHeap::idle_bytes() const {
  Bytes bytes = 0;
  for (const auto& arena : arenas_) {
    bytes += arena->key.graph == 0 ? arena->idle_bytes : 0;
  }
  return bytes;
}

// Cuts a stretch out of the middle of an idle block and returns it, in the block's state.
Block* DeviceHeap::carve(Arena& arena, Address address, Bytes bytes) {
  Block* block = arena.find(address);
  if (block->address < address) {
    arena.split_front(block, address - block->address);
  }
  if (block->size > bytes) {
    block = arena.split_front(block, bytes);
  }
  return block;
}

// What work on the moved memory must wait for, as ticks in `fence`. Where they are of more clocks
// than a fence holds, the stream of `to` waits for the rest now, and `idle_from` says from where
// on.
Status DeviceHeap::fence_moves(const std::vector<Piece*>& moves, Arena& to, Fence* fence,
                               Seq* idle_from) {
  for (const Piece* piece : moves) {
    Arena& from = *piece->arena;
    Block* block = from.find(piece->address);
    Fence all = block->fence;
    if (!all.add(from.clock.tick(block->idle_from))) {
      if (const Status status = clocks_.order_after(from.clock, block->fence);
          status != Status::ok) {
        return status;
      }
      block->fence.clear();
      block->idle_from = from.clock.upcoming();
      all.clear();
      all.add(from.clock.now());
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
  }
  return Status::ok;
}

// The pieces of `moves` and `lacking` bytes of new memory, mapped side by side from `address` on.
Status DeviceHeap::map_moved(Address address, const std::vector<Piece*>& moves, Bytes lacking,
                             std::vector<Piece>* made) {
  std::vector<Bytes> mapped;  // sizes
  Address end = address;
  Status status = Status::ok;
  for (const Piece* piece : moves) {
    if (map(end, *piece) != driver::kSuccess) {
      status = Status::driver_failed;
      break;
    }
    mapped.push_back(piece->size);
    end += piece->size;
  }
  if (status == Status::ok && lacking > 0) {
    status = create_and_map(end, lacking, made, fine_piece(lacking));
  }
  if (status == Status::ok && set_access(address, end - address + lacking) != driver::kSuccess) {
    status = Status::driver_failed;
  }
  if (status != Status::ok) {
    unmap_new(end, *made);
    for (const Bytes size : mapped) {
      unmap(address, size);
      address += size;
    }
  }
  return status;
}

Status DeviceHeap::gather(Arena& arena, Bytes bytes, Bytes ceiling) {
  const Place place = place_for(arena, bytes, kLargestPiece);  // the last piece may be too large
  if (place.hole == nullptr) {
    return Status::out_of_memory;
  }
  const Bytes room = ceiling - std::min(ceiling, counters_.mapped);
  if (place.missing > room && idle_bytes() < place.missing - room) {
    return Status::out_of_memory;  // looking for the pieces costs more
  }
  const Block* left = place.before > 0 ? place.hole->previous : nullptr;
  const std::vector<Piece*> moves = free_pieces(arena, left, place.missing);
  Bytes moved = 0;
  for (const Piece* piece : moves) {
    moved += piece->size;
  }
  const Bytes lacking = place.missing - std::min(moved, place.missing);
  if (lacking > 0 && !fits_under(counters_.mapped, lacking, ceiling)) {
    return Status::out_of_memory;
  }
  // Driver calls first; the books change only when all of them have succeeded (rule O4).
  Fence fence;
  Seq idle_from = 0;
  std::vector<Piece> made;
  const Address begin = place.hole->address;
  Status status = fence_moves(moves, arena, &fence, &idle_from);
  if (status == Status::ok) {
    status = map_moved(begin, moves, lacking, &made);
  }
  if (status != Status::ok) {
    return status;
  }
  Address address = begin;
  for (Piece* piece : moves) {
    move_to(*piece, arena, address);
    address += piece->size;
  }
  mark_last_uses(arena);
  add_pieces(arena, address, made);
  add_mapped(arena, place.hole, moved + lacking, fence, idle_from);
  if (lacking > 0) {
    counters_.map(lacking);
  }
  ++counters_.gathers;
  return Status::ok;
}

// Whether all work on the block's memory is known to be done.
bool DeviceHeap::passed(const Block& block) const {
  const auto done = [&](const Tick& t) { return t.seq == 0 || clocks_.at(t.clock).passed(t.seq); };
  return done({block.arena->clock.index(), block.idle_from}) &&
         std::all_of(block.fence.begin(), block.fence.end(), done);
}

Status DeviceHeap::add_peer(int device) {
  const auto names = [device](const driver::AccessDesc& one) { return one.location.id == device; };
  if (std::any_of(access_.begin(), access_.end(), names)) {
    return Status::ok;
  }
  driver::AccessDesc peer;
  peer.location.id = device;
  access_.push_back(peer);
  for (const auto& arena : arenas_) {
    for (const auto& [address, piece] : arena->pieces) {
      if (set_access(address, piece.size) != driver::kSuccess) {
        access_.pop_back();
        return Status::driver_failed;
      }
      for (const Block* block = piece.former; block != nullptr; block = block->next_former) {
        if (set_access(block->address, block->size) != driver::kSuccess) {
          access_.pop_back();
          return Status::driver_failed;
        }
      }
    }
  }
  return Status::ok;
}

bool DeviceHeap::short_of_addresses(const Arena& arena, Bytes bytes) const {
  return arena.formers > 0 && place_for(arena, bytes, kLargestPiece).hole == nullptr;
}

bool DeviceHeap::has_free_piece() const {
  return std::any_of(arenas_.begin(), arenas_.end(), [](const auto& arena) {
    return std::any_of(arena->pieces.begin(), arena->pieces.end(), [&](const auto& entry) {
      const Block* block = arena->find(entry.first);
      return arena->key.graph == 0 && block->end() >= entry.first + entry.second.size &&
             (block->state == BlockState::free || block->state == BlockState::evicting);
    });
  });
}

// Gives one piece, free and out of use, back to the driver, with its former addresses: mapped at
// one of them its memory would not be free. False where the driver refuses, or one is in use still.
bool DeviceHeap::release_piece(Arena& arena, Address address) {
  Piece& piece = arena.pieces.at(address);
  while (piece.former != nullptr) {
    if (!drop_former(piece.former)) {
      return false;
    }
  }
  if (unmap(address, piece.size) != driver::kSuccess) {
    return false;
  }
  gate_->mem_release(piece.handle);
  Block* block = carve(arena, address, piece.size);
  block->fence.clear();
  block->idle_from = 0;
  arena.set_state(block, BlockState::hole);
  arena.coalesce(block);
  counters_.mapped -= piece.size;
  arena.pieces.erase(address);
  return true;
}

Bytes DeviceHeap::trim(Bytes target) {
  settle_all();
  return release_free(target, {});
}

void DeviceHeap::settle_all() {
  for (const auto& arena : arenas_) {
    settle(*arena, std::numeric_limits<int>::max());
  }
}

// All but the blocks of `kept`.
Bytes DeviceHeap::release_free(Bytes target, const std::vector<Block*>& kept) {
  const Bytes before = counters_.mapped;
  for (const auto& arena : arenas_) {
    for (auto piece = arena->pieces.begin();
         arena->key.graph == 0 && piece != arena->pieces.end() && counters_.mapped > target;) {
      const Address address = piece->first;
      const Bytes size = (piece++)->second.size;
      const Block* block = arena->find(address);
      // Free may mean that the arena's stream waits for a copy: unmapping takes more, that it is
      // done.
      if (block->state == BlockState::free && block->end() >= address + size && passed(*block) &&
          std::find(kept.begin(), kept.end(), block) == kept.end()) {
        release_piece(*arena, address);
      }
    }
  }
  return before - counters_.mapped;
}

// The longest free block, where it is of about such pieces, and what else is idle has room behind
// it or is next to nothing.
Block* DeviceHeap::stretch_of(const Arena& arena, Bytes piece_bytes) const {
  constexpr Bytes kNextToNothing = 16;  // a 16th of it
  Block* longest = nullptr;
  for (Block* b = arena.first; b != nullptr; b = b->next) {
    if (b->state == BlockState::free && (longest == nullptr || b->size > longest->size)) {
      longest = b;
    }
  }
  if (longest == nullptr) {
    return nullptr;
  }
  Bytes count = 0;
  for (auto piece = arena.pieces.lower_bound(longest->address);
       piece != arena.pieces.end() && piece->first < longest->end(); ++piece) {
    if (piece->second.size > piece_bytes) {
      return nullptr;
    }
    ++count;
  }
  const bool small_ones = 2 * count * piece_bytes > 3 * longest->size;
  const Bytes rest = arena.idle_bytes - longest->size;
  const bool joins = hole_behind(longest) >= rest || rest <= longest->size / kNextToNothing;
  return joins && !small_ones ? longest : nullptr;
}

void DeviceHeap::end_step() {
  for (const auto& arena : arenas_) {
    arena->held = arena->mapped_bytes();
  }
}

// Mapped as requests come it would be opened beside copies out, at up to a millisecond a piece. In
// pieces of 8 MiB, or a heap's 2,048th: in larger ones less of what leaves is whole pieces, which
// can move. What was renewed before and is idle stays. Where nobody asked in the step before, or
// the graph is gone, nobody is about to.
Bytes DeviceHeap::renew(Bytes target) {
  constexpr Bytes kRequest = 64_MiB;
  constexpr Bytes kRequests = 256;
  struct Renewed {
    Bytes before = 0;
    Bytes piece = 0;
    Block* stretch = nullptr;  // that stays
  };
  settle_all();
  std::vector<Renewed> all;
  std::vector<Block*> kept;
  for (const auto& arena : arenas_) {
    Renewed& one = all.emplace_back();
    if (arena->retired || !arena->asked_before) {
      continue;
    }
    one.before = std::max(arena->mapped_bytes(), arena->held);
    one.piece =
        piece_for(arena->key.small ? kSmallLimit : std::max(kRequest, one.before / kRequests));
    one.stretch = stretch_of(*arena, one.piece);
    kept.push_back(one.stretch);
  }
  const Bytes released = release_free(0, kept);
  if (counters_.mapped >= target) {
    return released + release_free(target, {});
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Bytes room = target - std::min(target, counters_.mapped);
    const Bytes lost = all[i].before - std::min(all[i].before, arenas_[i]->mapped_bytes());
    map_ahead(*arenas_[i], std::min(lost, room), all[i].piece,
              all[i].stretch);  // refused: as requests come
  }
  return released;
}

// The graph is gone and the GPU idle: what is free goes back to the driver, and so does the address
// range once nothing is left in it; the rest serves others through `gather`.
void DeviceHeap::release_graph(std::uint64_t graph) {
  for (const auto& arena : arenas_) {
    if (arena->key.graph != graph) {
      continue;
    }
    arena->key.graph = 0;
    for (Block* block = arena->first; block != nullptr; block = block->next) {
      block->in_graph = false;
    }
    while (Block* block = arena->evicting.first()) {
      block->fence.clear();
      arena->set_state(block, BlockState::free);
      arena->coalesce(block);
    }
    for (auto piece = arena->pieces.begin(); piece != arena->pieces.end();) {
      const Address address = piece->first;
      const Bytes size = (piece++)->second.size;
      const Block* block = arena->find(address);
      if (block->state == BlockState::free && block->end() >= address + size) {
        release_piece(*arena, address);
      }
    }
    arena->retired = true;
  }
  std::erase_if(arenas_, [&](const auto& arena) { return arena->retired && gave_up(*arena); });
}

}  // namespace stagehand::core
