// Weight groups come and go: walks 6 "a block is entered" and 7 "a weight group leaves". What is
// decided is core/standing.hpp's; the memory is the store's, like a record's; the copies go on the
// lanes, behind the same waits. A clean group leaves for nothing, since its host copy has the same
// bytes: nothing but its memory's fences is in the way. A dirty one leaves by a copy into its host
// copy, which its memory's next use and its own next copy in are behind.
//
// Guarded by the device's lock. What takes an Entry may give it up.
#pragma once

#include <algorithm>
#include <atomic>

#include "core/prefetch_reserve.hpp"
#include "core/standing.hpp"
#include "core/stream_clock.hpp"

namespace stagehand::core {

struct Device;
class Entry;

class Weights {
 public:
  // What was counted, since the start.
  struct Counts {
    Bytes loaded_bytes = 0;
    std::uint64_t loads = 0;  // the group came back, ahead of need or when it was
    std::uint64_t late = 0;   // of them when it was
    std::uint64_t dropped = 0;
    Bytes written_bytes = 0;  // back to the host
  };

  explicit Weights(Device& device) : d_(device) {}

  Standing& standing() { return standing_; }
  const Counts& counts() const { return counts_; }
  Bytes home_bytes() const { return home_bytes_; }
  // Of them, what nobody holds.
  Bytes idle_bytes() const { return idle_bytes_ + arriving_idle_; }

  // Walk 6. Holds the group, which is at home for work queued on `consumer` from now on.
  Status enter(Entry& entry, GroupId id, UseKind kind, driver::Stream consumer, Address* address);
  void leave(GroupId id);
  // Work queued on `writer` so far writes to the group's first `bytes`, which somebody holds.
  Status wrote(GroupId id, Bytes bytes, driver::Stream writer);
  // Its host copy is as new as it is once this returns: waits for the copy, with the lock given up.
  Status to_host(Entry& entry, GroupId id);
  // Whether the next group found no room: it is asked for again as a block goes on, whose work
  // gives memory up. Without the lock.
  bool lacks_room() const { return lacks_room_.load(std::memory_order_relaxed); }
  // The next few come, into room below `high`; for that, groups leave that are needed later, and
  // records that are, if they can for nothing: the others' copies begin.
  void bring_ahead(Entry& entry, driver::Stream stream);

  // So much is live, of the weights what is held.
  void note_live(Bytes live) {
    if (!standing_.empty()) {
      const Bytes held = home_bytes_ - idle_bytes_ + arriving_held_;
      standing_.live_beside(live - std::min(live, held));
    }
  }

  // Walk 7. A request lacks room: a group leaves where it is needed no sooner than the record that
  // would leave else; before one whose copy out has to be waited for also where it is not needed in
  // what is left of this forward or backward; or as the last that can leave at all. What it had; 0:
  // none.
  Bytes make_way(bool small_too, bool last = false);
  Bytes would_give(bool small_too);
  // The same ahead of need, for a record of that place that is needed soon: a group that is later.
  Bytes make_way_for(Plan::Place record);
  // The group that is used last leaves, and comes again: sooner than the host has waited for the
  // GPU until torch's segments are back. In steps that follow a plan, where only weights come and
  // go, and none that is used soon or that was written to. What it had; 0: none leaves.
  Bytes spares_a_wait();
  // A pool is entered: groups leave until no more than `most` is in use.
  void fit(Entry& entry, Bytes most);
  // All that are not held; one that nobody holds.
  void leave_all();
  // Nobody asks for its bytes any more.
  void drop(GroupId id);
  // The last group is gone: what came early of it holds for no other model's.
  void forget_early();

  const char* broken() const;

 private:
  // A hold that ends with it unless it is kept: also where host memory has run out. Not where the
  // id is another group's by then.
  class Holding {
   public:
    Holding(Weights& weights, GroupId id);
    ~Holding();
    Holding(const Holding&) = delete;
    Holding& operator=(const Holding&) = delete;
    bool still() const;
    void keep() { kept_ = true; }

   private:
    Weights& weights_;
    const GroupId id_;
    const std::uint32_t generation_;
    bool kept_ = false;
  };

  Status wait_for(const WeightGroup& group, StreamClock& clock);
  Status wait_for_copy_out(const WeightGroup& group, StreamClock& clock);
  GroupId leaver(bool small_too);
  bool fits_beside(GroupId id, Bytes high) const;
  bool fits_instead(GroupId id, Bytes high) const;
  bool alone() const;
  bool record_leaves(GroupId id, Bytes* occupied);
  Status bring(Entry& entry, GroupId id, driver::Stream stream, bool ahead);
  bool comes_early(GroupId id, bool far) const;
  bool bring_next(Entry& entry, GroupId id, bool far, driver::Stream stream);
  bool bring_instead(Entry& entry, GroupId id, driver::Stream stream);
  GroupId in_its_place(GroupId id) const;
  Bytes saved() const;
  bool put_away(WeightGroup& group);
  bool give_way(WeightGroup& group);
  Status write_back(WeightGroup& group);
  void write_ahead();

  Device& d_;
  Standing standing_;
  Counts counts_;
  Bytes home_bytes_ = 0;
  Bytes idle_bytes_ = 0;     // of those
  Bytes arriving_idle_ = 0;  // their memory is being made, and may be on the books already
  Bytes arriving_held_ = 0;
  static constexpr unsigned kLeftInstead = 2;
  unsigned left_instead_ = 0;  // groups, in the use that goes on, for others' holes
  // A round begins with the first forward after a backward. What left in it and in the one before,
  // of groups, outside of optimizers' steps; and what had left of records as it began.
  bool went_back_ = false;
  Bytes left_ = 0;
  Bytes left_before_ = 0;
  Bytes gone_before_ = 0;
  // Groups that came far ahead and had to leave before they were used, in this forward or backward.
  // After so many none comes far ahead in it, where nobody knows what will be asked for: there is
  // room, but a request needs it in one piece.
  static constexpr unsigned kForNothing = 3;
  unsigned came_for_nothing_ = 0;
  PrefetchReserve leaves_free_;  // what comes early does, for what had to leave unused
  std::size_t uses_ = 0;         // since a part of that was forgotten
  std::atomic<bool> lacks_room_{false};
};

}  // namespace stagehand::core
