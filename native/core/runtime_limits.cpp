// Limits that may change while running, and what is told of a budget or a copy that went wrong.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "core/checksum.hpp"
#include "core/runtime.hpp"

namespace stagehand::core {

// The caps on bytes per second need a pinned word, which takes the driver a moment: without the
// lock.
bool Runtime::set_lane_limits(const LaneLimits& limits) {
  Pacer& out = mover_->out().pacer();
  Pacer& in = mover_->in().pacer();
  {
    const driver::ContextGuard guard(table_, context_);
    if ((limits.rate_d2h != 0 && !out.prepare()) || (limits.rate_h2d != 0 && !in.prepare())) {
      return false;
    }
  }
  Lock lock(mutex_);
  lane_limits_ = limits;
  mover_->out().limit(limits.inflight_d2h, limits.piece);
  mover_->in().limit(limits.inflight_h2d, limits.piece);
  out.set_rate(limits.rate_d2h);
  in.set_rate(limits.rate_h2d);
  return true;
}

LaneLimits Runtime::lane_limits() {
  Lock lock(mutex_);
  return lane_limits_;
}

void Runtime::set_checksums(bool on) {
  Lock lock(mutex_);
  debug_.checksums = on;
}

namespace {

std::uint32_t checksum_of(const Record& record) {
  std::uint32_t crc = 0;
  Bytes left = record.bytes();
  for (const Slab* slab : record.copy.slabs) {
    const Bytes bytes = std::min(slab->size, left);
    crc = crc32c(crc, slab->host, bytes);
    left -= bytes;
  }
  return crc;
}

}  // namespace

// Takes the checksums of what was copied out, once it has arrived: waits for each copy, without the
// lock. Nothing to do, and no cost, unless checksums were asked for.
void Runtime::seal(Lock& lock) {
  for (std::size_t tries = unsealed_.size(); tries > 0 && !unsealed_.empty(); --tries) {
    const driver::ContextGuard guard(table_, context_);
    const RecordId id = unsealed_.front();
    unsealed_.pop_front();
    Record* record = ledger_.find(id);
    if (record == nullptr || !record->clean()) {
      continue;
    }
    if (record->copying) {
      unsealed_.push_back(id);  // its turn comes again
      continue;
    }
    const Tick written = record->copy.written;
    driver::Event event = nullptr;
    Seq actual = 0;
    if (written.seq != 0 &&
        clocks_.at(written.clock).event_for(written.seq, &event, &actual) != Status::ok) {
      unsealed_.push_back(id);
      continue;
    }
    record->copying = true;
    ++counters_.host_waits;
    lock.unlock();
    RankedMutex::expect_none_held();
    const bool arrived = event == nullptr || table_.event_synchronize(event) == driver::kSuccess;
    const std::uint32_t crc = arrived ? checksum_of(*record) : 0;
    lock.lock();
    record->copying = false;
    record->copy.checksum = crc;
    record->copy.sealed = arrived;
    if (std::exchange(record->outdated, false)) {
      release_copy(*record);
    }
    if (record->handles == 0) {
      end_record(*record);
    }
  }
}

// Whether the host's copy is still what was written there; true where nobody asked to know.
bool Runtime::intact(Record& record) {
  if (!debug_.checksums || !record.copy.sealed) {
    return true;
  }
  record.copy.checksum_found = checksum_of(record);
  return record.copy.checksum_found == record.copy.checksum;
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
