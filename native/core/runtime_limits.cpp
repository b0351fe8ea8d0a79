// Limits that may change while running, and what is told of a budget or a copy that went wrong.
#include <cstdio>

#include "core/runtime.hpp"

namespace stagehand::core {

void Runtime::set_lane_limits(const LaneLimits& limits) {
  Lock lock(mutex_);
  lane_limits_ = limits;
}

LaneLimits Runtime::lane_limits() {
  Lock lock(mutex_);
  return lane_limits_;
}

void Runtime::set_checksums(bool on) {
  Lock lock(mutex_);
  debug_.checksums = on;
}

PlanState Runtime::plan_state() {
  Lock lock(mutex_);
  return plan_.state();
}

// Of what is live: the saved activations that torch or backward still uses. Walks the ledger.
Bytes Runtime::saved_in_use() const {
  Bytes bytes = 0;
  for (const Record* r = ledger_.oldest(); r != nullptr; r = r->newer) {
    if (r->block != nullptr && r->block->state != BlockState::retained) {
      bytes += r->block->size;
    }
  }
  return bytes;
}

std::string Runtime::history(RecordId id) {
  Lock lock(mutex_);
  const Record* record = ledger_.find(id);
  if (record == nullptr) {
    return "its record is gone";
  }
  char text[256];
  std::snprintf(text, sizeof(text),
                "%llu bytes, saved as number %llu, evicted %u times and restored %u times since, "
                "in %zu slab(s); CRC %08x was written, %08x was found",
                static_cast<unsigned long long>(record->bytes()),
                static_cast<unsigned long long>(record->order), record->evictions, record->restores,
                record->copy.slabs.size(), record->copy.checksum, record->copy.checksum_found);
  return text;
}

}  // namespace stagehand::core
