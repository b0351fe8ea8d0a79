// Bringing records back: when backward asks for one, and ahead of that.
//
// Guarded by the device's lock. What takes an Entry may give it up.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "core/ledger.hpp"
#include "core/prefetch_reserve.hpp"
#include "core/transfers.hpp"

namespace stagehand::core {

struct Device;

class Prefetcher {
 public:
  explicit Prefetcher(Device& device) : d_(device) {}

  // Brings an evicted record back, for who asks for it now. Another thread may do so first: the
  // lock is given up when room has to be made outside it.
  bool restore(Entry& entry, Record& record, Status* status);
  // What comes after the record that was asked for, into room that is free and stays so. Never
  // evicts, never grows.
  void run(Entry& entry, RecordId from);
  // So many bytes came too early, and had to leave again.
  void leave_more(Bytes bytes);
  // Something left: what was there ahead is to be looked at again.
  void look_again() { skip_ = 0, lasts_ = 0; }
  // The place of the next record that was not looked at, or lacked room, when it ran last.
  const std::optional<Plan::Place>& lacks() const { return lacks_; }
  // How many records were looked at, since the start.
  std::uint64_t looked() const { return looked_; }
  // As if nothing had come too early.
  void forget_steps() { reserves_ = {}; }
  // Somebody was given a record that this copy fills, and may be waiting for it.
  void awaited(Tick arrived);

 private:
  // What is to come back, and in the end the block for it. By its id: the lock may be given up
  // while blocks are taken.
  struct Wanted {
    RecordId record;
    Bytes bytes;
    bool far;
    bool overtakes = false;  // is wanted before some of what is queued on the lane
    Block* block = nullptr;
  };

  // A record that may still be on its way, and how many of those wanted come before it.
  struct Coming {
    Seq arrived;
    std::size_t after;
  };

  bool link_bounds() const;
  Bytes room(bool measured) const;
  bool lasts(const Record& from);
  Record* next_wanted(const Record& record);
  // Whether so much more fits; groups that are needed later than the record leave for it.
  bool room_for(const Record& record, Bytes bytes, Bytes room, Bytes* occupied);
  // What fits, in the order of use, from the one after `from` on. `ahead`: bytes that are there
  // already, before the first that is not.
  void choose(Record& from, bool far, std::vector<Wanted>* wanted, Bytes* ahead);
  void bring(Entry& entry, std::vector<Wanted>& wanted, bool soon);
  bool queue(std::span<const Wanted> batch);
  enum class Wants : std::uint8_t { now, before_others, in_turn };
  Status bring_back(std::span<const Arrival> arrivals, Wants wants);
  void overtake(std::vector<Wanted>& wanted);
  Status restore_pageable(Entry& entry, Record& record, Block* block);

  Device& d_;
  std::uint32_t step_ = 0;
  PlanReserves reserves_;
  unsigned turn_ = 0;
  std::optional<Plan::Place> lacks_;
  Seq newest_ = 0;              // of what was queued in turn
  Seq awaited_ = 0;             // the newest of those that somebody was given
  std::vector<Coming> coming_;  // scratch
  int skip_ = 0;                // so many calls have nothing to look for
  Bytes lasts_ = 0;             // so much of what is there may be asked for before one is due
  int far_records_ = 0;         // so many may still be looked at far ahead
  std::uint64_t looked_ = 0;
  std::vector<Wanted> spare_;      // for its room
  std::vector<Arrival> arrivals_;  // scratch
};

}  // namespace stagehand::core
