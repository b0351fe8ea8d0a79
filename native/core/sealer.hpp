// Checksums of host copies, for finding bugs: taken once a copy has arrived, looked at again before
// it is used. Costs a wait for each copy while it is on, and nothing else.
//
// Guarded by the device's lock; checksums are taken without it.
#pragma once

#include <deque>

#include "core/ledger.hpp"

namespace stagehand::core {

struct Device;

class Sealer {
 public:
  explicit Sealer(Device& device) : d_(device) {}

  // A copy out was queued.
  void note(const Record& record);
  // At the end of a call: waits, without the lock, for what was queued and takes its checksum.
  void seal(Entry& entry);
  // Whether the host's copy is still what was written there; true where nobody asked to know.
  bool intact(Record& record);

 private:
  Device& d_;
  std::deque<RecordId> unsealed_;
};

}  // namespace stagehand::core
