// The device heap: arenas, and the physical memory behind them.
//
// Physical memory comes in pieces (cuMemCreate). A piece may be mapped at a new address while its
// old one is still in use by queued work: stream order decides who sees what. So memory moves to
// where a hole is needed without any wait of the host (docs/decisions/0001). The old address stays
// mapped: memory that moves there again, as it does in a step like the one before, costs no call of
// the driver (docs/decisions/0014).
//
// Guarded by the device's lock. Nothing here waits for the GPU except `trim`.
#pragma once

#include <memory>
#include <vector>

#include "core/arena.hpp"
#include "core/counters.hpp"

namespace stagehand::core {

class DeviceHeap {
 public:
  DeviceHeap(int device, Bytes device_bytes, Bytes granularity, ClockBank& clocks,
             Counters& counters);

  static constexpr int kNotReady = 8;  // blocks that are looked at in vain, at most

  static Bytes block_bytes(Bytes requested);
  // The arena that serves this request; null when its address range cannot be reserved.
  Arena* arena_for(driver::Stream stream, Bytes bytes, std::uint64_t graph);
  Arena* arena_of(Address address) const;
  // The block that covers an address: any state but hole and retiring; null for foreign pointers.
  Block* find(Address address) const;

  // Step 2: the best free block, cut to size; live and nobody's yet. Null when none fits.
  Block* take(Arena& arena, Bytes bytes);
  // Makes the blocks first..last (free or evicting) one live block, cut to size, in stream order.
  Block* take_run(Arena& arena, Block* first, Block* last, Bytes bytes);
  // What comes before the first use of a lent block: its stream waits, or whoever writes it next
  // does, by the block's fence.
  enum class Behind : std::uint8_t { stream, fence };
  // Idle blocks of another stream's arena become one live block that serves the stream of `to`;
  // null where the driver refuses. device_heap_lend.cpp has this and what belongs to it.
  Block* lend(Arena& to, Block* first, Block* last, Bytes bytes, Behind behind = Behind::stream);
  // The same with the best free block of any arena that lends; null when none fits.
  Block* borrow(Arena& to, Bytes bytes, Behind behind = Behind::stream);
  bool lends(const Arena& from, const Arena& to) const {
    return &from != &to && from.key.small == to.key.small && from.key.graph == 0 &&
           to.key.graph == 0 && from.idle_bytes > 0;
  }
  // Back to the arena: free, or evicting until its fence is settled.
  void give(Block* block);
  // Evicting blocks whose fence is settled become free; old addresses whose use passed, holes.
  // Those that were not looked at for longest first, and no further than a few that are not ready.
  void settle(Arena& arena, int not_ready = kNotReady);
  // All of them, in the arenas of this stream: it waits for what their fences say. Pieces under
  // several small blocks can move then.
  void settle_in_order(StreamClock& clock);

  // Step 3: maps room for `bytes` while mapped stays at or below `ceiling`; it is free memory.
  // Rounds up to whole pieces where that stays below `spare_ceiling`.
  Status grow(Arena& arena, Bytes bytes, Bytes ceiling, Bytes spare_ceiling = kUnlimited);
  // Maps so much in one go, in pieces as for requests of `like`.
  Status grow_ahead(Arena& arena, Bytes bytes, Bytes like);
  // Step 6, first: a hole for `bytes` where former addresses, whose memory is idle elsewhere, and
  // idle blocks lie side by side. Calls nothing of the driver but waits of streams. Null when there
  // is none.
  Block* take_up(Arena& arena, Bytes bytes);
  // A block at this very address, of the arena's range, out of free memory and former addresses
  // whose memory is idle elsewhere; null where its stream would have to wait for any of it.
  Block* take_at(Arena& arena, Address address, Bytes bytes);
  // Whether nothing of that is a hole: it may be free later.
  static bool is_mapped_at(const Arena& arena, Address address, Bytes bytes);
  // Pieces are larger from here on, for steps whose blocks are mostly as large as `block`. False
  // where they are already, or so little is mapped that it makes no difference.
  bool coarsen(Bytes block);
  bool fine() const { return least_piece_ == granularity_; }
  // A step begins: idle memory serves where it was mapped first.
  void go_home();
  // Step 6: maps free pieces from elsewhere, and new memory under `ceiling` for what they lack,
  // into a hole for `bytes`. All or nothing.
  Status gather(Arena& arena, Bytes bytes, Bytes ceiling);

  // Releases free pieces of settled blocks until mapped <= target. The caller has made the GPU
  // pass `clock.upcoming()` of every arena. Returns the bytes released.
  Bytes trim(Bytes target);
  // A step ended: what each arena has is what `renew` gives it again.
  void end_step();
  // The same of all that is free; then each arena that was asked for memory in the step before has
  // as much again as it had then, in one place and mapped at once, while mapped stays at or below
  // `target`. What an earlier call put in one place stays, and costs no call of the driver. Returns
  // the bytes released.
  Bytes renew(Bytes target);

  // The graph is gone and the GPU idle: its arenas' memory may serve others.
  void release_graph(std::uint64_t graph);

  // Whether addresses run out for `bytes` while former ones are there.
  bool short_of_addresses(const Arena& arena, Bytes bytes) const;
  // Unmaps the arena's former addresses whose last use is past.
  void free_addresses(Arena& arena);
  // Whether trimming could give anything back.
  bool has_free_piece() const;
  // Free and evicting, in arenas whose memory may move.
  Bytes idle_bytes() const;
  // Maps all memory, present and to come, for one more device; nothing where it is done.
  Status add_peer(int device);
  // The same devices as another heap. Only before anything is mapped.
  void add_peers_of(const DeviceHeap& other) { access_ = other.access_; }

  const std::vector<std::unique_ptr<Arena>>& arenas() const { return arenas_; }
  // The algebra of counters.hpp and the tiling of every arena; empty when it holds.
  const char* broken() const;

 private:
  struct Place {
    Block* hole = nullptr;
    Bytes before = 0;   // free bytes that end where the hole begins
    Bytes missing = 0;  // bytes to map, whole granules
  };
  // Former addresses and idle blocks side by side.
  struct Run {
    Block* first = nullptr;
    Block* last = nullptr;
    Bytes bytes = 0;
    bool found() const { return first != nullptr; }
  };

  Bytes fine_piece(Bytes bytes) const;
  Bytes piece_for(Bytes bytes) const;
  Place place_for(const Arena& arena, Bytes bytes, Bytes slack) const;
  driver::Result map(Address address, const Piece& piece);
  driver::Result unmap(Address address, Bytes bytes);
  driver::Result set_access(Address address, Bytes bytes);
  Status map_ahead(Arena& arena, Bytes bytes, Bytes piece, Block* stretch);
  void settle_all();
  Bytes release_free(Bytes target, const std::vector<Block*>& kept);
  Block* stretch_of(const Arena& arena, Bytes piece_bytes) const;
  Status map_new(Arena& arena, Block* hole, Bytes bytes, Bytes piece);
  Status create_and_map(Address address, Bytes bytes, std::vector<Piece>* pieces, Bytes piece);
  void unmap_new(Address address, const std::vector<Piece>& pieces);
  void add_pieces(Arena& arena, Address address, const std::vector<Piece>& pieces);
  std::vector<Block*>& idle_blocks(const Arena& arena);
  std::vector<Piece*> free_pieces(Arena& arena, const Block* spared, Bytes wanted);
  Status map_moved(Address address, const std::vector<Piece*>& moves, Bytes lacking,
                   std::vector<Piece>* made);
  void make_idle(Block* block, const Fence& fence, Seq idle_from);
  void add_mapped(Arena& arena, Block* hole, Bytes bytes, const Fence& fence, Seq idle_from);
  Block* carve(Arena& arena, Address address, Bytes bytes);
  Status fence_moves(const std::vector<Piece*>& moves, Arena& to, Fence* fence, Seq* idle_from);
  bool passed(const Block& block) const;
  bool release_piece(Arena& arena, Address address);
  Block* cut(Arena& arena, Block* block, Bytes bytes);
  void drop_empty_arenas();
  bool gave_up(Arena& arena);
  Status fence_run(const Block* first, const Block* last, Arena& to, Fence* fence, Seq* idle_from);
  void end_loan(Block* block);
  // device_heap_former.cpp
  void come_to_rest();
  void move_to(Piece& piece, Arena& arena, Address address);
  void mark_last_uses(const Arena& to);
  void forget_former(Block* block);
  void take_back(Block* block, const Fence& fence, Seq idle_from);
  bool usable(const Block& block) const;
  bool ready(const Arena& arena, const Block& block) const;
  bool sound(const Run& run);
  void find_usable(const Arena& arena, std::uint64_t mark);
  Run best_run(Arena& arena, Bytes bytes);
  Run run_at(const Arena& arena, Address address, Bytes bytes) const;
  Block* take_run_from(Arena& arena, const Run& run, Address address, Bytes bytes);
  bool drop_former(Block* block);
  void drop_formers(Arena& arena, bool all, int not_ready);

  static constexpr std::size_t kMostFormers = 8192;                 // of an arena: page tables
  static constexpr std::uint64_t kOfHeap = std::uint64_t{1} << 63;  // marks its blocks as seen
  static constexpr std::size_t kManyArenas = 32;

  Gate& gate_;
  const driver::AllocationProp prop_;
  std::vector<driver::AccessDesc> access_;  // this device, then its peers
  const Bytes device_bytes_;
  const Bytes granularity_;
  Bytes least_piece_ = granularity_;  // of large blocks
  ClockBank& clocks_;
  Counters& counters_;
  BlockNodes nodes_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::uint64_t turn_ = 0;  // of searches
  // Scratch of them.
  std::vector<Piece*> moves_;
  std::vector<Block*> idle_;
  std::vector<Block*> formers_;
};

}  // namespace stagehand::core
