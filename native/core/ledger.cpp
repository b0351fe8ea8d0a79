#include "core/ledger.hpp"

#include "core/arena.hpp"
#include "core/check.hpp"

namespace stagehand::core {

Record* Ledger::open(Block* block, Bytes begin, Bytes end) {
  if (spare_.empty()) {
    const auto index = static_cast<std::uint32_t>(slots_.size());
    slots_.emplace_back().index = index;
    spare_.push_back(index);
  }
  Record& record = slots_[spare_.back()];
  spare_.pop_back();
  SH_CHECK(!record.alive && record.copy.slabs.empty());
  record.alive = true;
  record.handles = 0;
  record.order = ++order_;
  record.evictions = record.restores = 0;
  record.outdated = false;
  record.copying = record.prefetched = record.asked = record.watched = false;
  record.block = block;
  record.begin = begin;
  record.end = end;
  record.block_begin = 0;
  record.arrived = Tick{};
  record.stall_pair = ~0u;
  record.copy.written = Tick{};
  record.copy.sealed = false;
  record.copy.checksum = record.copy.checksum_found = 0;
  record.stream = block->arena->key.stream;
  record.newer = nullptr;
  record.older = newest_;
  (newest_ != nullptr ? newest_->newer : oldest_) = &record;
  newest_ = &record;
  ++size_;
  return &record;
}

void Ledger::close(Record* record) {
  SH_CHECK(record->alive && record->handles == 0);
  (record->older != nullptr ? record->older->newer : oldest_) = record->newer;
  (record->newer != nullptr ? record->newer->older : newest_) = record->older;
  record->older = record->newer = nullptr;
  record->alive = false;
  record->block = nullptr;
  ++record->generation;
  spare_.push_back(record->index);
  --size_;
}

Record* Ledger::find(RecordId id) {
  if (id.index >= slots_.size()) {
    return nullptr;
  }
  Record& record = slots_[id.index];
  return record.alive && record.generation == id.generation ? &record : nullptr;
}

}  // namespace stagehand::core
