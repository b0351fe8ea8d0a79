// What torch's caching allocator holds on one device, followed event by event: how much, where the
// holes are, and which stream a block belongs to. It decides nothing.
//
// Has a lock of its own, the innermost: events come under torch's mutex at every allocation, and
// must not wait for the device's lock. Addresses of freed memory may be in use again by the time an
// answer is read; answers guide choices, and nothing is accessed by them.
#pragma once

#include <array>
#include <compare>
#include <map>
#include <memory_resource>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/address_list.hpp"
#include "core/alarm.hpp"
#include "core/flat_map.hpp"
#include "core/kept_gradients.hpp"
#include "core/ranked_mutex.hpp"
#include "core/survivors.hpp"
#include "core/torch_side.hpp"
#include "core/walls.hpp"

namespace stagehand::core {

class CacheMap {
 public:
  static constexpr Bytes kSmallBuffer = 2_MiB;  // c10: a segment of small blocks, or its page
  static constexpr Bytes kPage = 20_MiB;        // and a page of an expandable one of large blocks
  struct Owner {                                // of a block
    driver::Stream stream = nullptr;
    std::array<std::uint64_t, 2> pool{};  // torch's MempoolId_t; {0, 0} is the default pool

    auto operator<=>(const Owner&) const = default;
  };
  struct Usage {
    Bytes reserved = 0;   // what the driver sees
    Bytes allocated = 0;  // in blocks that torch has handed out
    Bytes aside = 0;      // in those of them that are set aside: not in `allocated`
    Bytes reserved_peak = 0;
    Bytes allocated_peak = 0;
    Bytes over_mark = 0;  // bytes of segments asked for above the mark, since the start
  };
  // A stretch of a segment of large blocks, in address order: one block, or a hole.
  struct Stretch {
    Address address = 0;
    Bytes bytes = 0;
    bool hole = false;
    bool begins_segment = false;
    bool of_owner = false;    // of the owner asked for
    bool releasable = false;  // its segment goes back to the driver once it is wholly free,
    bool by_pages = false;    // or, expandable, each whole page of it
    Address segment = 0;      // where its segment begins
  };

  void apply(const CacheEvent& event);
  // What comes by `known` was there before all events since `snapshot`, which wait for `told`.
  void snapshot();
  void known(const CacheEvent& event);
  void told();

  Usage usage();
  // What a call of the engine begins with, in one: the usage, the largest request and the most that
  // was allocated since it was asked last.
  struct Since {
    Usage usage;
    Bytes largest_request = 0;
    Bytes allocated_peak = 0;
  };
  Since since();
  // What is known of the block at an address, before it is held.
  struct Known {
    std::optional<Owner> owner;  // nothing where no segment has it
    std::uint64_t serial = 0;    // order of allocation since the last step began; 0: before
    bool kept = false;
  };
  Known known_of(Address address);
  // Of a memory pool's segments: all, and those that are wholly free.
  struct PoolUsage {
    Bytes reserved = 0;
    Bytes free = 0;
  };
  PoolUsage usage_of(const std::array<std::uint64_t, 2>& pool);
  // Whether any segment is of this pool.
  bool has_pool(const std::array<std::uint64_t, 2>& pool);
  // Where no events tell.
  void set_usage(Bytes reserved, Bytes allocated);
  void forget_allocated(Bytes bytes);
  void reset_peaks();
  // Growth above `bytes` counts as over the mark; kUnlimited counts none.
  void set_mark(Bytes bytes);
  // Looks at what is allocated, event by event: under this lock and torch's.
  void set_alarm(const Alarm& alarm);
  bool rang();
  // The largest request since the last call.
  Bytes take_largest_request();
  // A request of the engine's own is over: as if it had not been.
  void forget_request(Bytes allocated_peak_before);
  // The same for a block that was just handed out and will not be used: until torch frees it, its
  // bytes count as not allocated.
  void set_aside(Address address, Bytes allocated_peak_before);
  // A pool is entered: from here on it is known which blocks are younger than this call, and in
  // which order they were handed out.
  void begin_step();
  // What is asked for from here on, until the next step begins, is no survivor, but may be for a
  // gradient that stays, if those may take any: so much at most. For such torch reserves no more
  // than `roof`. `walls`: what of `young` is there and cannot leave, and how much may be wanted.
  void end_saving(Bytes gradients, Bytes roof, std::vector<Walls::One> walls = {},
                  Bytes walls_most = 0);
  // As of KeptGradients.
  void end_backward();
  bool follows();
  bool knows_gradients();
  // What segments of large blocks grow by until those gradients and walls have room that are known,
  // and not there. None for the stream that they are served from.
  Bytes growth_apart(driver::Stream stream);
  // The same once all that is free has gone back.
  Bytes missing_apart();
  bool is_apart(driver::Stream stream);
  // Before begin_step: what may be survivors of the step that ends, or its gradients, as far as any
  // can be. Then those that are. Walls may take `walls_most`, and torch reserves no more than
  // `walls_roof` for them.
  struct Young {
    Address address = 0;
    Survivors::One block;
    bool of_backward = false;   // then `nth` is KeptGradients'
    std::uint32_t request = 0;  // Walls' number of it; 0: none
  };
  std::vector<Young> young();
  void serve_apart(const std::vector<Survivors::One>& survivors, Bytes most,
                   const std::vector<KeptGradients::Left>& gradients, Bytes walls_most = 0,
                   Bytes walls_roof = 0);
  bool wants_walls();
  // On whose blocks a request that the program makes on that stream now should be served.
  driver::Stream place(Bytes bytes, driver::Stream stream);
  // As of Survivors, and of KeptGradients.
  std::uint64_t survivor_sizes();
  std::optional<driver::Stream> lacks_apart();
  void give_apart(driver::Stream stream, driver::Stream apart);
  void serve_all_apart(driver::Stream stream, Bytes roof);
  void serve_few_apart();
  std::uint64_t serial();  // of the newest
  // Whether torch has handed out a large block at the address.
  bool live(Address address);
  // The block at the address is to be left alone until torch frees it.
  void keep(Address address);
  // Where no events tell that it was freed.
  void forget_kept();
  // Of the segment that has the address; nothing where no segment has it.
  std::optional<Owner> owner_of(Address address);
  // The largest hole of a segment for large blocks.
  Bytes largest_hole(const Owner& owner);
  // Whether torch has a hole of `kept` bytes left beside the one that so many bytes would take.
  bool fits_beside(const Owner& owner, Bytes bytes, Bytes kept);
  // Whether there are holes for both at once. Where none has `bytes`, the largest is part of what
  // would be made one.
  bool both_fit(const Owner& owner, Bytes bytes, Bytes other);
  // The largest of all that release_cached would give back, and whose it is.
  struct Hole {
    Owner owner;
    Bytes bytes = 0;
  };
  Hole largest_hole();
  // What is mapped in segments for large blocks of the default pool, by owner, and at most was from
  // when the step before began to when this one did; and in that time or the same of the step
  // before that one, whichever was less.
  struct Large {
    Owner owner;
    Bytes mapped = 0;
    Bytes peak = 0;
    Bytes lesser_peak = 0;
  };
  std::vector<Large> large();
  // Whether the newest segment for large blocks of the default pool is expandable.
  bool by_pages();
  // The owner finds no hole in its large segments, and grows next. What it has now and what it
  // grows by count as its peak, though free memory goes back before.
  void lacks_hole(const Owner& owner);
  // Bytes in segments that are wholly free: what release_cached gives back. torch keeps those of
  // any but the default pool for as long as the pool lives.
  Bytes releasable();
  // Of that, in segments of small blocks, but for expandable ones. Walks all.
  Bytes small_releasable();
  // All segments for large blocks, walked.
  void walk(const Owner& owner, std::vector<Stretch>* stretches);

  // The most that the cache grows by for a request that no hole serves: a segment of its own, or
  // the pages that an expandable one lacks (c10's kSmallBuffer, kLargeBuffer, kMinLargeAlloc,
  // kRoundLarge).
  Bytes growth_for(Bytes request);
  static Bytes mapped_for(Bytes large, bool by_pages);
  // What segments of small blocks grow by until they are what they were at most in the last two
  // steps.
  Bytes small_growth();
  // What segments of large blocks of all streams but this one grow by until each has what it had at
  // most in this step or the two before it.
  Bytes growth_of_others(driver::Stream stream);
  // The whole pages of an expandable segment for large blocks between two offsets in it.
  static Bytes whole_pages(Bytes begin, Bytes end);

 private:
  struct Segment {
    Address base = 0;
    Bytes bytes = 0;
    Owner owner;
    bool small = false;
    bool expandable = false;
    Bytes live = 0;

    bool releasable() const { return owner.pool == Owner{}.pool; }
    bool counts_as_large() const { return !small && releasable(); }
  };
  struct Order {  // of a block among those since the step began
    std::uint64_t serial = 0;
    Bytes bytes = 0;            // that were asked for, in whole units
    std::uint32_t nth = 0;      // of that size; 0 where it is not counted
    std::uint32_t request = 0;  // Walls' number of it; 0: none
  };
  using Lives = std::pmr::map<Address, Bytes>;
  using Holes = std::pmr::multiset<Bytes>;

  void do_apply(const CacheEvent& event);
  void add_segment(const CacheEvent& event);
  void remove_range(const CacheEvent& event);
  void allocate(const CacheEvent& event);
  void free(const CacheEvent& event);
  Bytes largest_hole_of(const Owner& owner) const;
  Bytes growth_of(Bytes request) const;
  // The hole between the blocks around `address`, where none is at it.
  void hole_around(const Segment& segment, Lives::iterator after, Address* begin, Address* end);
  Holes::const_iterator fit(const Owner& owner, const Holes& holes, Bytes bytes);
  // Whether there is one of `other` beside the one that so many bytes take.
  static bool has_beside(const Holes& holes, Holes::const_iterator taken, Bytes bytes, Bytes other);
  void add_hole(const Segment& segment, Bytes bytes);
  void remove_hole(const Segment& segment, Bytes bytes);
  void note_reserved(Bytes before);
  void add_releasable(const Segment& segment, Bytes bytes);
  void remove_releasable(const Segment& segment, Bytes bytes);
  // cache_map_pages.cpp
  void add_large(const Segment& segment, Bytes bytes);
  void remove_large(const Segment& segment, Bytes bytes);
  void begin_large();
  void add_to_stream(const Segment& segment, Bytes bytes);
  void remove_from_stream(const Segment& segment, Bytes bytes);
  void begin_streams();
  // cache_map_survivors.cpp
  std::uint32_t number(const CacheEvent& event, Bytes bytes);
  bool has_room_apart(driver::Stream apart, Bytes bytes, Bytes roof) const;

  static constexpr std::uint64_t kSaving = ~std::uint64_t{0};

  RankedMutex mutex_{Rank::cache};
  // All below: guarded by mutex_.
  AddressList<Segment> segments_;
  std::pmr::unsynchronized_pool_resource nodes_;  // of the trees: an event allocates nothing
  Lives lives_{&nodes_};                          // large blocks only
  std::pmr::set<Address> kept_{&nodes_};
  FlatMap<Order> young_;
  std::uint64_t serial_ = 0;
  std::uint64_t saving_until_ = kSaving;  // the serial then
  Alarm alarm_;
  Survivors survivors_;
  Walls walls_;
  KeptGradients gradients_{&nodes_};
  Bytes gradients_roof_ = 0;
  Bytes walls_roof_ = 0;
  bool marks_young_ = false;
  Bytes small_ = 0;                     // reserved in segments of small blocks
  Bytes small_peak_ = 0;                // since the step began
  std::array<Bytes, 2> small_peaks_{};  // of the last two
  bool expandable_ = false;             // torch has made expandable segments
  struct LargeCount {
    Bytes mapped = 0;
    Bytes peak = 0;                              // since the step began
    std::array<Bytes, 2> before{0, kUnlimited};  // in the two steps before
    Bytes lacking = 0;  // what was mapped when it found no hole; 0 once it has grown
  };
  std::pmr::map<Owner, LargeCount> large_{&nodes_};
  bool by_pages_ = false;  // the newest of those is expandable
  struct StreamCount {     // of segments of large blocks, whatever pool they are in
    Bytes mapped = 0;
    Bytes live = 0;                 // of that
    Bytes peak = 0;                 // since the step began
    std::array<Bytes, 2> before{};  // in the two steps before
  };
  std::pmr::map<driver::Stream, StreamCount> streams_{&nodes_};
  std::pmr::map<Owner, Holes> holes_{&nodes_};  // none is empty
  // Holes that could grow, and to how much. Only for `fit`, kept for its memory.
  std::vector<std::pair<Bytes, Bytes>> growing_;
  Usage usage_;
  Bytes mark_ = kUnlimited;
  Bytes largest_request_ = 0;
  Bytes peak_since_ = 0;
  Bytes releasable_ = 0;
  std::pmr::set<Address> aside_{&nodes_};
  bool waiting_ = false;  // for `told`
  std::vector<CacheEvent> queue_;
};

}  // namespace stagehand::core
