#include "core/ledger.hpp"

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
  const std::uint32_t index = record.index;
  const std::uint32_t generation = record.generation;
  std::vector<Slab*> slabs = std::move(record.copy.slabs);  // for its room
  record = Record{};
  record.copy.slabs = std::move(slabs);
  record.index = index;
  record.generation = generation;
  record.alive = true;
  record.order = ++order_;
  record.block = block;
  record.begin = begin;
  record.end = end;
  record.stream = block->clock->stream();
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
