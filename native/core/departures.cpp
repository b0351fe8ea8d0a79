#include "core/departures.hpp"

#include <algorithm>
#include <functional>
#include <span>
#include <utility>

#include "core/device.hpp"

namespace stagehand::core {

namespace {
constexpr Bytes kFreeAhead = 16_MiB;  // what a plan keeps free for the next requests
// In a new step, one part in so many of what was saved is copied out before memory is short, and
// host memory is made for it: about what the link carries while a transformer saves it. With a
// quarter, models that save faster waited behind copies that they did not need.
constexpr Bytes kNewShare = 5;
constexpr Bytes kTightShare = 8;  // mapped so near to `high`: in parts of the step's room
}  // namespace

void Departures::retained(Record& record) {
  if (!d_.budget.armed || !d_.saving) {
    return;
  }
  const bool other_step = step_ != d_.books.step();
  if (other_step) {
    step_ = d_.books.step();
    to_leave_.clear();
    held_back_ = 0;
  }
  if (std::exchange(version_, d_.plan.turns_version()) != d_.plan.turns_version() || other_step) {
    copy_those_due(true);  // of other turns
    next_turn_ = 0;
  }
  const bool leaves = d_.plan.leaves(record.place);
  const bool drops = leaves && d_.plan.drops(record.place) && record.droppable() &&
                     (record.by_node || !d_.plan.guesses());  // no call runs for a guess
  if (drops && !d_.plan.drops_late(record.place)) {
    d_.room.drop(record);
    copy_those_due(false);
    return;
  }
  if (leaves && !drops) {
    copy_in_turn(record);
  }
  copy_those_due(false);
  write_back_ahead(record);
  let_leave();
}

Departures::Staged Departures::stage(Record& record, bool squeeze, Bytes* missing) {
  if (!d_.host.take(record.bytes(), squeeze, &record.copy.slabs, missing)) {
    return Staged::no_slab;
  }
  d_.books.stage(record);
  staged_.push_back(Ledger::id_of(record));
  staged_bytes_ += record.bytes();
  return Staged::yes;
}

// False: the lane's cap holds it back. Never after backward has asked for it.
bool Departures::write_back(Record& record) {
  Bytes missing = 0;
  if (d_.books.victims().leaves_free(record) || !record.evictable() || record.asked) {
    return true;
  }
  if (d_.transfers.out().full()) {
    return false;
  }
  if (stage(record, false, &missing) == Staged::yes) {
    ++d_.counters.write_backs;
    if (staged_bytes_ >= kBatch || staged_.size() >= kBatchCopies || d_.transfers.out().capped()) {
      flush();
    }
  }
  return true;
}

void Departures::copy_planned(Record& record) {
  held_back_ += write_back(record) ? 0 : 1;
  to_leave_.push_back(Ledger::id_of(record));
}

// Requests take planned victims as memory lies, so that what was saved last may be what leaves
// first. Where the lane is behind, its copy would come behind all others'.
void Departures::copy_in_turn(Record& record) {
  const std::uint32_t turn = d_.plan.copy_turn(record.place);
  if (turn == KnownRecord::kNever || turn < next_turn_) {
    copy_planned(record);
    return;
  }
  turns_.push_back({turn, Ledger::id_of(record)});
  std::push_heap(turns_.begin(), turns_.end(), std::greater<>{});
}

// Those whose turn has come, as far as the lane's cap lets them; or all, the others of which are
// made up for like any that a cap holds back.
void Departures::copy_those_due(bool all) {
  while (!turns_.empty()) {
    const Turn first = turns_.front();
    if (!all && first.turn > next_turn_) {
      if (!d_.plan.copy_passed(next_turn_)) {
        return;
      }
      ++next_turn_;
      continue;
    }
    if (!all && d_.transfers.out().full()) {
      return;
    }
    next_turn_ = std::max(next_turn_, first.turn + 1);
    std::pop_heap(turns_.begin(), turns_.end(), std::greater<>{});
    turns_.pop_back();
    if (Record* record = d_.ledger.find(first.id); record != nullptr) {
      copy_planned(*record);
    }
  }
}

void Departures::no_more_saves(bool for_now) {
  if (!for_now || !d_.plan.expects_saves()) {
    copy_those_due(true);
  }
  flush();
}

// What would bring memory down to `low`.
Bytes Departures::over_low() {
  const Bytes over = d_.counters.occupied - std::min(d_.counters.occupied, d_.budget.low);
  return over == 0 ? 0 : over - std::min(over, d_.books.victims().clean_bytes());
}

// Nobody knows what will leave in a new step. Once memory is full the link and the pinning thread
// alone set the pace, so both begin before that: with a part of what was saved. Copies only where
// `high` was near before, so that hardly anything is left to be mapped beside them: with a copy out
// under way that takes the driver 30 times as long. In the first step inside a budget nothing was
// near: what it lacks is mapped at once when half of its room is in use. A model that stays below
// that pays for neither, and one that never comes near `high` for that one step's copies. Not where
// weights come and go: the link has work from the start, and replays gained nothing.
Bytes Departures::ahead_of_need(const Record& record) {
  if (!d_.plan.is_new() || d_.budget.high <= occupied_before_) {
    return 0;
  }
  const Bytes room = d_.budget.high - occupied_before_;
  const Bytes saved = d_.counters.occupied - std::min(d_.counters.occupied, occupied_before_);
  const bool half = saved > room / 2;
  const bool tight = fits_under(d_.budget.high, 0, d_.counters.mapped + room / kTightShare);
  if (half && !tight && ahead_for_ != d_.budget.high && d_.weights.standing().bytes() == 0) {
    ahead_for_ = d_.budget.high;
    map_ahead_ = occupied_before_ + but_for_others(room);
  }
  if (tight || half) {
    d_.host.expect(record.bytes(), kNewShare);
  }
  if (!tight) {
    return 0;
  }
  const Bytes away = d_.counters.evicted;
  const Bytes wanted = (saved + away) / kNewShare;
  const Bytes copied = d_.books.victims().clean_bytes() + away;
  return std::min(wanted - std::min(wanted, copied), record.block->size + kBatch);
}

void Departures::write_back_ahead(const Record& newest) {
  const bool planned = d_.plan.follows() && !d_.plan.guesses();
  // Under a plan what a cap held back before.
  Bytes wanted = planned ? (held_back_ > 0 ? kUnlimited : 0) : over_low();
  const Bytes ahead = ahead_of_need(newest);
  held_back_ = 0;
  VictimIndex& victims = d_.books.victims();
  for (wanted = std::max(wanted, ahead); wanted > 0;) {
    Record* record = victims.first_dirty();
    if (record == nullptr || (planned && ahead == 0 && !d_.plan.leaves(record->place))) {
      return;
    }
    const Bytes bytes = record->block->size;
    if (!write_back(*record)) {
      ++held_back_;
      return;
    }
    if (!record->clean()) {
      return;  // no slab is there, or the driver refuses
    }
    wanted -= std::min(wanted, bytes);
  }
}

void Departures::copy_ahead(Bytes bytes) {
  Bytes missing = 0;
  const Bytes most = std::min(bytes, kBatch);
  VictimIndex& victims = d_.books.victims();
  while (staged_bytes_ < most && staged_.size() < kBatchCopies) {
    Record* record = victims.first_dirty();
    if (record == nullptr || stage(*record, false, &missing) != Staged::yes) {
      break;
    }
    ++d_.counters.write_backs;
  }
  flush();
}

Departures::Staged Departures::copy_out(Record& record, bool squeeze, Bytes* missing) {
  const bool small = record.bytes() < kSmallCopy;
  if (!record.clean()) {
    Record* like_it = small ? d_.books.victims().next_small_dirty(record) : nullptr;
    if (const Staged staged = stage(record, squeeze, missing); staged != Staged::yes) {
      return staged;
    }
    Bytes ignored = 0;
    for (; like_it != nullptr && staged_.size() < kSmallTogether;) {
      Record* one = like_it;
      like_it = d_.books.victims().next_small_dirty(*one);
      if (stage(*one, false, &ignored) != Staged::yes) {
        break;
      }
      ++d_.counters.write_backs;
    }
  }
  flush();
  return Staged::yes;
}

bool Departures::queue(std::span<Record* const> records) {
  if (d_.transfers.copy_out(records) != Status::ok) {
    return false;
  }
  for (Record* record : records) {
    d_.books.queued(*record);
  }
  return true;
}

// Slabs and blocks of a copy that was refused half-way carry its tick; the blocks stay as they are.
void Departures::flush() {
  if (staged_.empty()) {
    return;
  }
  batch_.clear();
  for (const RecordId id : staged_) {
    Record* record = d_.ledger.find(id);
    if (record != nullptr && record->copy.state == CopyState::staged) {
      batch_.push_back(record);
    }
  }
  staged_.clear();
  staged_bytes_ = 0;
  // In use again meanwhile, and staged again, it is there twice.
  std::sort(batch_.begin(), batch_.end(),
            [](const Record* a, const Record* b) { return a->order < b->order; });
  batch_.erase(std::unique(batch_.begin(), batch_.end()), batch_.end());
  if (batch_.empty() || queue(batch_)) {
    return;
  }
  for (Record* record : batch_) {  // one of them may be what cannot go
    Record* const alone[] = {record};
    if (!queue(alone)) {
      d_.books.drop_copy(*record);
    }
  }
}

Record* Departures::next_to_leave() {
  for (; !to_leave_.empty(); to_leave_.pop_front()) {
    Record* record = d_.ledger.find(to_leave_.front());
    if (record != nullptr && record->evictable() && record->clean() && !record->asked) {
      return record;
    }
  }
  return nullptr;
}

// Planned victims leave as soon as their copies are known to be done, so that requests find free
// blocks instead of making room one victim at a time; not before memory is about to run short, or
// more would leave than must. Where the host is far ahead of the GPU none is, and requests take
// them behind their copies, in the order of these.
void Departures::let_leave() {
  const Bytes room = std::min(kFreeAhead, (d_.budget.high - d_.budget.low) / 2);
  while (!fits_under(d_.counters.occupied, room, d_.ceiling())) {
    Record* record = next_to_leave();
    if (record == nullptr || !record->copy.holds_bytes() ||
        !d_.clocks.at(record->copy.written.clock).passed(record->copy.written.seq)) {
      return;
    }
    d_.room.leave(*record);
    left();
  }
}

}  // namespace stagehand::core
