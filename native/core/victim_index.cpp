#include "core/victim_index.hpp"

#include <initializer_list>

#include "core/lane.hpp"

namespace stagehand::core {

void VictimIndex::wait(Record& record) {
  record.filed.waiting = true;
  record.filed.previous = nullptr;
  record.filed.next = waiting_;
  if (waiting_ != nullptr) {
    waiting_->filed.previous = &record;
  }
  waiting_ = &record;
}

void VictimIndex::stop_waiting(Record& record) {
  Record::Filed& filed = record.filed;
  (filed.previous != nullptr ? filed.previous->filed.next : waiting_) = filed.next;
  if (filed.next != nullptr) {
    filed.next->filed.previous = filed.previous;
  }
  filed.waiting = false;
}

void VictimIndex::put(Record& record) {
  if (record.filed.at_all) {
    unfile(record);
  }
  if (!record.filed.waiting) {
    wait(record);
  }
}

void VictimIndex::remove(Record& record) {
  if (record.filed.at_all) {
    unfile(record);
  } else if (record.filed.waiting) {
    stop_waiting(record);
  }
}

bool VictimIndex::planned_to_leave(const Record& record) const {
  if (record.restores != 0 || record.was_dropped || record.asked ||
      plan_.has_stayed(record.place)) {
    return false;
  }
  // Where nobody knows, what can be made again goes first: the lanes have enough to do.
  return plan_.leaves(record.place) || (!plan_.guides(record.place) && record.droppable());
}

Plan::Use VictimIndex::need(const Record& record) const {
  return planned_to_leave(record) ? kLeaves : plan_.next_use(record.place, record.order);
}

void VictimIndex::file(Record& record) {
  Record::Filed& filed = record.filed;
  const Block& block = *record.block;
  filed.at_all = true;
  filed.clean = leaves_free(record);
  filed.small = block.small;
  filed.pool = block.in_mem_pool;
  filed.leaves = planned_to_leave(record);
  filed.need = need(record);
  filed.use = plan_.next_use(record.place, record.order);
  filed.bytes = block.size;
  by_use_[filed.small][filed.pool].insert(record);
  if (filed.leaves) {
    leaving_[filed.small].insert(record);
  }
  if (in_small(record)) {
    small_[filed.leaves].insert(record);
  } else if (filed.leaves) {
    planned_[filed.clean].insert(record);
  }
  (in_small(record) ? small_bytes_ : large_bytes_) += filed.bytes;
  filed.counted = filed.clean && !record.asked;
  clean_bytes_ += filed.counted ? filed.bytes : 0;
  if (record.asked || filed.clean) {
    return;
  }
  dirty_.insert(record);
  if (record.bytes() < kSmallCopy) {
    small_dirty_.insert(record);
  }
}

void VictimIndex::unfile(Record& record) {
  Record::Filed& filed = record.filed;
  filed.at_all = false;
  by_use_[filed.small][filed.pool].remove(record);
  if (filed.leaves) {
    leaving_[filed.small].remove(record);
  }
  if (in_small(record)) {
    small_[filed.leaves].remove(record);
  } else if (filed.leaves) {
    planned_[filed.clean].remove(record);
  }
  (in_small(record) ? small_bytes_ : large_bytes_) -= filed.bytes;
  if (record.dirty_hook.linked) {
    dirty_.remove(record);
  }
  clean_bytes_ -= filed.counted ? filed.bytes : 0;
  if (record.small_hook.linked) {
    small_dirty_.remove(record);
  }
}

// What the plan expects of a step may change with a record that it did not expect: then all are
// filed anew, a few times a step.
void VictimIndex::file() {
  if (plan_version_ != plan_.version()) {
    plan_version_ = plan_.version();
    for (auto& of_size : by_use_) {
      for (ByUse& tree : of_size) {
        while (Record* record = tree.first()) {
          unfile(*record);
          wait(*record);
        }
      }
    }
  }
  while (Record* record = waiting_) {
    stop_waiting(*record);
    file(*record);
  }
}

Record* VictimIndex::last_needed(bool small_too, bool of_mem_pools) {
  file();
  const auto best = [&](std::initializer_list<bool> sizes) {
    Record* found = nullptr;
    for (const bool small : sizes) {
      for (const bool pool : {false, true}) {
        Record* first = pool && !of_mem_pools ? nullptr : by_use_[small][pool].first();
        if (first != nullptr && (found == nullptr || LaterUse{}(*first, *found))) {
          found = first;
        }
      }
    }
    return found;
  };
  if (small_too) {
    return best({false, true});
  }
  Record* large = best({false});
  return large != nullptr ? large : best({true});
}

Record* VictimIndex::first(bool small) {
  file();
  if (Record* leaving = leaving_[small].first(); leaving != nullptr) {
    return leaving;
  }
  return by_use_[small][false].first();
}

Record* VictimIndex::next(Record& record) {
  const bool small = record.filed.small;
  Record* one = nullptr;
  if (record.filed.leaves) {
    if (one = Leaving::next(record); one != nullptr) {
      return one;
    }
    one = by_use_[small][false].first();
  } else {
    one = ByUse::next(record);
  }
  while (one != nullptr && one->filed.leaves) {
    one = ByUse::next(*one);
  }
  return one;
}

Record* VictimIndex::planned(Bytes bytes) {
  file();
  for (const bool clean : {true, false}) {
    Record* found =
        planned_[clean].first_that([&](const Record& one) { return one.filed.bytes >= bytes; });
    if (found != nullptr) {
      return found;
    }
    if (Record* largest = planned_[clean].last(); largest != nullptr) {
      return largest;
    }
  }
  return nullptr;
}

bool VictimIndex::mostly_small() {
  file();
  return small_bytes_ > large_bytes_;
}

Record* VictimIndex::in_small_block(Bytes bytes, bool leaves) {
  file();
  return small_[leaves].first_that([&](const Record& one) { return one.filed.bytes >= bytes; });
}

Record* VictimIndex::first_dirty() {
  file();
  return dirty_.first();
}

Record* VictimIndex::next_small_dirty(Record& record) {
  file();
  return small_dirty_.first_that([&](const Record& one) { return one.order > record.order; });
}

Bytes VictimIndex::clean_bytes() {
  file();
  return clean_bytes_;
}

const char* VictimIndex::broken(const Ledger& ledger) {
  file();
  Bytes clean = 0;
  Bytes all = 0;
  for (const Record* r = ledger.oldest(); r != nullptr; r = r->newer) {
    if (r->filed.at_all != r->evictable()) {
      return "an evictable record is not in the index of victims, or another is";
    }
    if (!r->filed.at_all) {
      continue;
    }
    if (r->filed.clean != leaves_free(*r) || r->filed.need != need(*r) ||
        r->filed.bytes != r->block->size) {
      return "a record is in the index of victims under what it was";
    }
    clean += leaves_free(*r) && !r->asked ? r->block->size : 0;
    all += r->block->size;
  }
  if (all != small_bytes_ + large_bytes_) {
    return "bytes in small and large blocks differ from the index of victims";
  }
  return clean == clean_bytes_ ? nullptr : "clean bytes differ from the index of victims";
}

}  // namespace stagehand::core
