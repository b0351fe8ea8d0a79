// The weight groups of a device as the decisions see them: which is at home, which is held, which
// leaves and which comes next. A group stands for good: unlike a record it is used again and again,
// and its host copy never goes; where its bytes changed at home, the host copy is behind until they
// are written back. Pure: no driver, no lock; core/weights.hpp acts on it.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "core/plan.hpp"
#include "core/use_order.hpp"

namespace stagehand::core {

struct Block;

struct WeightGroup {
  std::uint32_t generation = 0;  // of the groups that had this id
  Bytes bytes = 0;
  std::byte* host = nullptr;    // the host copy: the same bytes, but
  Bytes dirty = 0;              // for so many of the first ones, which changed at home since
  Block* block = nullptr;       // its memory on the device; null: it is away
  std::uint32_t clock = 0;      // the copy in that filled it: of which clock,
  Seq arrived = 0;              // and its event there
  std::uint32_t out_clock = 0;  // the newest copy out: the same
  Seq written = 0;
  std::uint64_t turn = 0;  // which of all copies out it was; 0: there was none
  std::uint32_t holds = 0;
  bool alive = false;
  bool refused = false;     // its copy out was; it does not leave until `forgive`
  bool far = false;         // it came far ahead of need, or early, and was not used since
  bool written_to = false;  // its bytes have changed at home, ever: an optimizer's step, mostly
  bool trains = false;      // a forward with gradients, or a backward, has used it
  // Of its last uses, by kind: the most that was live beside all weights,
  std::array<Bytes, 3> beside{};
  // and what was saved as they began, wherever it was. Before the first: as much as can be.
  std::array<Bytes, 3> saved{~Bytes{0}, ~Bytes{0}, ~Bytes{0}};

  bool home() const { return block != nullptr; }
  bool may_leave() const { return home() && holds == 0; }
};

class Standing {
 public:
  static constexpr std::size_t kAhead = 2;  // groups that come before they are used

  GroupId add(Bytes bytes, std::byte* host);
  // It is away, and nobody holds it: from here on nobody can. Its id is free once it is removed.
  void retire(GroupId id);
  void remove(GroupId id);
  WeightGroup& at(GroupId id) { return groups_[id]; }
  const WeightGroup& at(GroupId id) const { return groups_[id]; }
  bool alive(GroupId id) const { return id < groups_.size() && groups_[id].alive; }
  bool empty() const { return count_ == 0; }
  UseOrder& order() { return order_; }
  const UseOrder& order() const { return order_; }
  std::size_t size() const { return groups_.size(); }  // of ids that were ever given
  std::size_t count() const { return count_; }
  Bytes bytes() const { return bytes_; }  // of all

  // A group is used from here on, with `saved` bytes to be used by backward; what is saved next has
  // places from `saves` on. False: it goes on.
  bool used(Use use, Plan::Place saves, Bytes saved);
  // The group that leaves first: at home, not held, its next use the farthest; of several a clean
  // one, then the largest. In forward and backward state is farther than anything else, all of it
  // alike: a clean one leaves first, in forward the one that was copied out first. kNoGroup without
  // any.
  GroupId farthest() const;
  // Of those with so many bytes or more the one whose next use is the farthest.
  GroupId farthest_as_large(Bytes bytes) const;
  // The one whose copy out is made ahead: of those that are dirty and not held the one that leaves
  // first, where it is none of the next few, and where what leaves for nothing before it is less
  // than `leaving` bytes. kNoGroup without any.
  GroupId written_next(Bytes leaving) const;
  // The same in an optimizer's step: of what that has used, and nothing else uses until the next
  // one, the nearest, so that copies begin with the first; while what is clean of it is less than
  // `leaving` bytes.
  GroupId stepped_next(Bytes leaving) const;
  // Whether this optimizer's step, or forward without gradients, uses it no more, nor anything else
  // until the next one.
  bool stepped(GroupId id) const;
  // The driver refused a group's copy out: it stays until all are forgiven.
  void refuse(WeightGroup& group) { group.refused = refused_ = true; }
  void wrote_back(WeightGroup& group) { group.turn = ++turns_; }
  void forgive();
  // The nearest group that is away: of the next few, or before anything else that the link could
  // bring: in forward until the next backward, which memory fills up until; in backward until the
  // use in which a record that is away is needed. kNoGroup where all are home. `far`: it is not of
  // the next few.
  GroupId next_ahead(std::uint32_t record, bool* far) const;
  // So much is live now beside all weights.
  void live_beside(Bytes bytes) { beside_ = std::max(beside_, bytes); }
  // The most that is live or saved beside all weights until the group is used, as far as that is
  // known from the last time: of `saved` bytes, which backward uses one by one, and no more.
  Bytes live_until(GroupId id, Bytes saved) const;
  // What must be there until the group is used, itself too: what is held and what is used before
  // it, and the most that is live beside them, as far as that is known from the last time.
  Bytes needed_until(GroupId id) const;
  // In how many uses a record of that place is needed: when the group is, that it was saved in.
  std::uint32_t needed_in(Plan::Place place) const;

  // Empty, or the first broken invariant.
  const char* broken() const;

 private:
  static constexpr std::size_t kMarks = 4096;  // of uses, by what was saved then

  struct Mark {
    Plan::Place from;
    GroupId group;
  };

  std::uint32_t counted_distance(GroupId id) const;
  bool leaves_later(GroupId id, GroupId other) const;
  bool may_go(GroupId id) const { return groups_[id].may_leave() && !groups_[id].refused; }
  // What an optimizer keeps: nothing else uses it, and it is written to.
  bool is_state(GroupId id) const {
    return !groups_[id].trains && (groups_[id].dirty > 0 || groups_[id].turn > 0);
  }

  std::deque<WeightGroup> groups_;  // a deque: they stay where they are
  std::vector<GroupId> spare_;
  std::size_t count_ = 0;
  Bytes bytes_ = 0;
  bool refused_ = false;  // any
  std::uint64_t turns_ = 0;
  UseOrder order_;
  std::deque<Mark> marks_;
  Bytes beside_ = 0;  // the most so far in the use that goes on
};

}  // namespace stagehand::core
