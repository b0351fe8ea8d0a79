// Who is copied out ahead of need, and who leaves before anybody asks for room. Copies are staged
// and go in batches: an event and a wait for each batch, not for each tensor.
//
// Guarded by the device's lock.
#pragma once

#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "core/ledger.hpp"

namespace stagehand::core {

struct Device;

class Departures {
 public:
  explicit Departures(Device& device) : d_(device) {}

  // A pool was entered, with so much in use.
  void begin_step(Bytes occupied) {
    occupied_before_ = occupied;
    map_ahead_ = 0;  // of another budget
  }
  // Once, in the first step inside a budget, when half of the step's room is in use: up to where
  // memory should be mapped now, before copies are under way. Else nothing.
  Bytes take_map_ahead() { return std::exchange(map_ahead_, 0); }
  // A record was retained. In forward, what the plan expects to leave is copied out when its turn
  // has come, at once where the plan knows of none;
  // without a plan, while memory is short, as much of what is needed last as would bring it down
  // to `low`. In a step that is new, where memory will run short, a part of what was saved before
  // that too. Planned victims whose copy is done leave where memory is about to run short.
  void retained(Record& record);

  enum class Staged { yes, held_back, no_slab };
  // Takes the slabs there are for a dirty record, and has its copy go with the next batch.
  // `squeeze` and `missing` as Tier::take.
  Staged stage(Record& record, bool squeeze, Bytes* missing);
  // A dirty record's copy, now, and those of small ones like it: a copy costs the same however
  // small, and theirs is then done when their turn comes.
  Staged copy_out(Record& record, bool squeeze, Bytes* missing);
  // Stages what leaves first until so much of it is clean, one batch at most, and queues it.
  void copy_ahead(Bytes bytes);
  // Queues what is staged. Whose copy the driver refuses stays dirty.
  void flush();
  // No more is saved, or, `for_now`, unless the plan knows of more: whose turn has not come is
  // copied out as well. Queues what is staged.
  void no_more_saves(bool for_now);

  // The planned victim whose copy was queued first and that can leave now; null without.
  Record* next_to_leave();
  void left() { to_leave_.pop_front(); }

 private:
  static constexpr Bytes kBatch = 16_MiB;
  static constexpr std::size_t kBatchCopies = 64;

  // A planned victim whose copy is not made yet, since others' turns come before.
  struct Turn {
    std::uint32_t turn = 0;
    RecordId id;
    bool operator>(const Turn& other) const { return turn > other.turn; }
  };

  bool write_back(Record& record);
  void copy_in_turn(Record& record);
  void copy_those_due(bool all);
  void copy_planned(Record& record);
  void write_back_ahead(const Record& newest);
  Bytes over_low();
  Bytes ahead_of_need(const Record& record);
  void let_leave();
  bool queue(std::span<Record* const> records);

  Device& d_;
  std::uint32_t step_ = 0;         // of which the following are
  std::deque<RecordId> to_leave_;  // planned victims, in the order of their copies
  std::vector<Turn> turns_;        // a heap, the least first
  std::uint32_t next_turn_ = 0;    // the copies before it were made, or are passed over
  std::uint64_t version_ = 0;      // Plan::turns_version
  Bytes occupied_before_ = 0;      // the step
  Bytes map_ahead_ = 0;            // is due, up to so much
  Bytes ahead_for_ = 0;            // the last `high` of which it was due
  std::size_t held_back_ = 0;      // planned write-backs that a cap held back
  std::vector<RecordId> staged_;
  Bytes staged_bytes_ = 0;
  std::vector<Record*> batch_;  // scratch of flush
};

}  // namespace stagehand::core
