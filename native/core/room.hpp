// Making room: evicting one record, and what to do where it cannot be copied out at once. Which
// records, and how their memory becomes a hole for a request, is the stores' business.
//
// Guarded by the device's lock. What takes an Entry may give it up.
#pragma once

#include <span>
#include <vector>

#include "core/ledger.hpp"

namespace stagehand::core {

struct Device;
class Entry;

enum class Evicted {
  yes,
  no_slab,  // there is no host memory for its copy; what was missing is in the Attempt
  refused,  // the driver refused its copy: no victim for the rest of this attempt
  nobody,   // there was no victim
};

// One attempt to make room for a request.
struct Attempt {
  bool squeeze = false;  // no new pinned memory: spread copies over whatever slabs are left
  RecordId lacking;      // the record that lacked host memory last,
  Bytes missing = 0;     // and how large a slab
};

class Room {
 public:
  explicit Room(Device& device) : d_(device) {}

  // Device to host and away. A clean record leaves at once; a dirty one's copy is queued first.
  // Where one is dropped in forward that its call makes again, in a step of sizes not seen before,
  // all that the call made are, unless it is most of that.
  Evicted evict(Record& record, Attempt& attempt);
  // All of them, the dirty ones' copies in one batch; up to the first that cannot go.
  Evicted evict_together(std::span<Record* const> records, Attempt& attempt);
  // A clean record leaves.
  void leave(Record& record);
  // Evicts a record that its recipe makes again.
  void drop(Record& record);
  // Whether to try again after an attempt to evict: it did, or there are slabs now, or the record
  // that lacked them was copied to pageable memory instead.
  bool helped(Entry& entry, Evicted result, Attempt& attempt);

  // Hysteresis, so that the next requests find room without evicting: until occupied and
  // `incoming` are at or below `low`. Uses the slabs there are: it is not worth a wait.
  void evict_to_low(Bytes incoming);
  // All that can leave; for tests.
  void evict_all(Entry& entry);

  // Waits, without the lock, until the GPU has passed all that was queued before the call, and the
  // clocks know it. False during a capture, which such a wait would break.
  bool wait_for_gpu(Entry& entry);

 private:
  bool copy_out_pageable(Entry& entry, RecordId id);
  void poison(const Record& record);
  void drop_rest_of_call(Plan::Place place, Bytes left);

  Device& d_;
  std::vector<RecordId> of_call_;  // scratch
};

}  // namespace stagehand::core
