#include "core/prefetcher.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "core/device.hpp"
#include "core/wait_timer.hpp"

namespace stagehand::core {

namespace {
// Records looked at beyond the one unpacked: what is wanted first may be far ahead, but looking
// costs the host.
constexpr int kReach = 64;
constexpr int kFarReach = 512;  // at every kFarTurn-th unpack, as long as the bound below lasts
constexpr unsigned kFarTurn = 8;
// Of a step of thousands of small records that would be most of what an unpack takes: so many are
// looked at that far ahead in a step, and so many more for each unpack.
constexpr int kFarRecords = 4096;
constexpr int kFarForEach = 4;
constexpr int kMostSkipped = 16;
constexpr std::uint64_t kLinkBounds = 4;  // a part of the step that the GPU waits for the lanes
// Copies that go together: an event and a wait for all of them. More wait where nothing is short.
constexpr Bytes kBatch = 16_MiB;
constexpr Bytes kMostInBatch = 32_MiB;

bool can_come(const Record& record) {
  return record.state == RecordState::away && !record.waited_for && record.copy.holds_bytes();
}

}  // namespace

void Prefetcher::awaited(Tick arrived) {
  if (arrived.clock == d_.transfers.in().clock().index()) {
    awaited_ = std::max(awaited_, arrived.seq);
  }
}

void Prefetcher::leave_more(Bytes bytes) { reserves_.came_early(bytes, d_.budget.low); }

bool Prefetcher::link_bounds() const {
  const std::shared_ptr<const Trace> newest = d_.plan.newest();
  return newest != nullptr && newest->totals.waited_ns > newest->totals.all_ns / kLinkBounds;
}

bool Prefetcher::restore(Entry& entry, Record& record, Status* status) {
  for (;;) {
    d_.counters.host_waits += record.waited_for ? 1 : 0;
    const WaitTimer timer;
    while (record.waited_for) {  // another thread waits for its copy: rare, and it ends on its own
      const Unlocked unlocked(entry);
      std::this_thread::yield();
    }
    d_.counters.copy_wait_ns += timer.ns();
    if (record.state == RecordState::device) {
      return true;
    }
    SH_CHECK(record.state != RecordState::dropped);  // nothing drops yet
    if (!d_.sealer.intact(record)) {
      *status = Status::corrupted;
      return false;
    }
    Block* block = d_.store->make(entry, record, status);
    if (block == nullptr) {
      return record.state == RecordState::device;
    }
    if (record.state == RecordState::device || record.waited_for) {
      d_.books.give_back(block);
      continue;
    }
    record.block_begin = record.returning_begin();
    if (record.copy.slabs.front()->pageable) {
      *status = restore_pageable(entry, record, block);
    } else {
      const Arrival arrival{&record, block};
      *status = bring_back({&arrival, 1}, Wants::now);
    }
    return *status == Status::ok;
  }
}

// Queues the copies back and puts them on the books; on failure the blocks are given back.
Status Prefetcher::bring_back(std::span<const Arrival> arrivals, Wants wants) {
  Lane& lane = d_.transfers.in(wants != Wants::in_turn);
  Status status = d_.transfers.keep_order(lane, awaited_);
  if (status == Status::ok) {
    status = d_.transfers.copy_in(arrivals, lane);
    d_.counters.overtakes += &lane != &d_.transfers.in() && wants != Wants::now ? 1 : 0;
  }
  // One measurement stands for the batch: whoever asks for its first record asks first.
  const std::uint32_t pair =
      status == Status::ok
          ? d_.stalls.copied(lane.clock().stream(), static_cast<std::uint32_t>(arrivals.size()))
          : StallMeter::kNone;
  for (const auto& [record, block] : arrivals) {
    if (status != Status::ok) {
      d_.books.give_back(block);
      continue;
    }
    if (&lane == &d_.transfers.in()) {
      newest_ = record->arrived.seq;
    }
    record->stall_pair = record == arrivals.front().record ? pair : StallMeter::kNone;
    d_.books.arrive(*record, block, wants != Wants::now);
  }
  return status;
}

// From pageable memory the driver copies while the caller waits. An alias stands for this thread
// meanwhile: the block is nobody else's.
Status Prefetcher::restore_pageable(Entry& entry, Record& record, Block* block) {
  Lane& lane = d_.transfers.in(true);
  Status status = d_.transfers.keep_order(lane, awaited_);
  if (status == Status::ok) {
    status = d_.transfers.order_copy_in(record, block, lane);
  }
  if (status != Status::ok) {
    d_.books.give_back(block);
    return status;
  }
  const Copy copy{block->address + record.begin - record.block_begin,
                  record.copy.slabs.front()->host, record.bytes()};
  const driver::Stream stream = lane.clock().stream();
  ++block->aliases;
  status = Status::driver_failed;
  d_.books.wait(
      entry, record, [&] { return lane.copy_now(stream, copy); },
      [&](bool good) {
        --block->aliases;
        if (good) {
          status = Status::ok;
          d_.books.arrive(record, block, false);
        } else {
          d_.books.give_back(block);
        }
      });
  return status;
}

// The record that backward is expected to ask for next: by the plan, else the one saved before.
Record* Prefetcher::next_wanted(const Record& record) {
  if (!d_.plan.knows(record.place)) {
    return record.older;
  }
  Plan::Place place = record.place;
  RecordId id;
  while (d_.plan.next_after(place, &place, &id)) {
    if (Record* next = d_.ledger.find(id); next != nullptr) {
      return next;
    }
  }
  return nullptr;
}

// What is wanted before some of what is on its way on the lane does not wait for that. Where the
// host is ahead of the GPU all that is on its way may be awaited already: that comes first.
void Prefetcher::overtake(std::vector<Wanted>& wanted) {
  StreamClock& lane = d_.transfers.in().clock();
  if (newest_ <= awaited_ || lane.passed(newest_)) {
    return;
  }
  const auto first = std::find_if(coming_.begin(), coming_.end(),
                                  [&](const Coming& one) { return !lane.passed(one.arrived); });
  const std::size_t count = first != coming_.end() ? first->after : wanted.size();
  for (std::size_t i = 0; i < count; ++i) {
    wanted[i].overtakes = true;
  }
}

// Weights that nobody holds are in nobody's way, up to `high`: there one leaves that is needed
// later.
bool Prefetcher::room_for(const Record& record, Bytes bytes, Bytes room, Bytes* occupied) {
  if (!fits_under(d_.without_idle(*occupied), bytes, room)) {
    return false;
  }
  while (!fits_under(*occupied, bytes, std::max(room, d_.budget.high))) {
    const Bytes left = d_.weights.make_way_for(record.place);
    if (left == 0) {
      return false;
    }
    *occupied -= std::min(*occupied, left);
  }
  return true;
}

// What is occupied may come to so much: what is free below `low`, less what earlier steps turned
// out to need of it. Where the planner chose, it knows what forwards in between will save too, and
// what will have left for that: then half of what is between `low` and `high` is room as well; the
// rest stays for holes.
Bytes Prefetcher::room(bool measured) const {
  const Bytes most = d_.budget.low + (measured ? (d_.budget.high - d_.budget.low) / 2 : 0);
  return most - std::min(most, reserves_.now().bytes());
}

// Whether what a look would bring is less than a batch, while more than one is there: then it would
// bring nothing.
bool Prefetcher::lasts(const Record& from) {
  const Bytes asked = from.block != nullptr ? from.block->size : from.bytes();
  lasts_ -= std::min(lasts_, asked);
  if (lasts_ == 0) {
    return false;
  }
  const bool measured = d_.plan.least_after(from.place) > 0;
  if (fits_under(d_.without_idle(d_.counters.occupied), kBatch, room(measured))) {
    lasts_ = 0;
    return false;
  }
  return true;
}

// A plan also knows what the step needs for itself until the record is asked for: what was live
// then the last time, and what is retained by then, must fit below the ceiling too.
void Prefetcher::choose(Record& from, bool far, std::vector<Wanted>* wanted, Bytes* ahead) {
  const bool measured = d_.plan.least_after(from.place) > 0;
  const auto needed_after = [&](const Record& one) {
    return measured ? d_.plan.least_after(one.place) : d_.plan.live_after(one.place);
  };
  const Bytes from_needed = needed_after(from);
  const bool planned = from_needed > 0;
  Bytes occupied = d_.counters.occupied;
  // Beside that, when the record looked at is asked for: from here on what is there until then.
  Bytes there = measured ? d_.ahead : d_.counters.retained;
  Bytes fullest = std::max(d_.without_idle(occupied), there + from_needed);
  const Bytes room = this->room(measured);
  const int reach = far ? kFarReach : kReach;
  int resident = 0;
  int i = 0;
  Lane& lane = d_.transfers.in();
  coming_.clear();
  Record* record = next_wanted(from);
  for (; record != nullptr && i < reach; ++i, record = next_wanted(*record)) {
    const Record& one = *record;
    if (one.state == RecordState::device) {
      const bool counts = measured ? one.prefetched : one.retained();
      there -= std::min(there, counts ? one.block->size : 0);
      if (resident == i) {
        ++resident;
        *ahead += one.block->size;
      }
      if (one.prefetched && lane.clock().index() == one.arrived.clock &&
          !lane.clock().known_passed(one.arrived.seq)) {
        coming_.push_back({one.arrived.seq, wanted->size()});
      }
    } else if (can_come(one) && !one.copy.slabs.front()->pageable) {
      const Bytes bytes = d_.store->bytes_for(one);
      if (!room_for(one, bytes, room, &occupied) ||
          (planned && !fits_under(fullest, bytes, d_.ceiling()))) {
        break;
      }
      wanted->push_back({Ledger::id_of(one), bytes, i >= kReach});
      occupied += bytes;
      fullest += bytes;
    }
    if (planned) {
      fullest = std::max(fullest, there + needed_after(one));
    }
  }
  far_records_ -= far ? std::min(far_records_, i) : 0;
  looked_ += static_cast<std::uint64_t>(i);
  lacks_ = record != nullptr ? std::optional(record->place) : std::nullopt;
  if (!wanted->empty()) {
    overtake(*wanted);
  }
  const bool all = record == nullptr;  // nothing further will be wanted
  Bytes bytes = 0;
  for (const Wanted& one : *wanted) {
    bytes += one.bytes;
  }
  if (!all && !wanted->empty() && !wanted->front().overtakes && bytes < kBatch &&
      *ahead >= kBatch) {
    wanted->clear();  // what is there lasts until a whole batch fits
  }
  skip_ = wanted->empty() ? std::min(resident / 2, kMostSkipped) : 0;
  // Of others so many would last too long; and looking lets weights go.
  const bool small = resident >= kReach / 2 && d_.weights.standing().empty();
  lasts_ = wanted->empty() && !all && small ? *ahead - std::min(*ahead, kBatch) : 0;
}

void Prefetcher::run(Entry& entry, RecordId from_id) {
  if (step_ != d_.books.step()) {
    step_ = d_.books.step();
    reserves_.begin_step(d_.plan.in_use(), d_.budget.high, d_.budget.low, link_bounds());
    look_again();
    far_records_ = kFarRecords;
  }
  if (!d_.budget.armed || d_.counters.evicted == 0) {
    return;
  }
  far_records_ = std::min(far_records_ + kFarForEach, kFarRecords);
  const bool all = !d_.weights.standing().empty();  // groups come as far ahead as records
  const bool far = ++turn_ % kFarTurn == 0 && (all || far_records_ >= kFarReach);
  Record* from = d_.ledger.find(from_id);
  if (from == nullptr || lasts(*from)) {
    return;
  }
  if (skip_ > 0 && !far) {
    --skip_;
    return;
  }
  if (d_.transfers.in().full()) {
    return;
  }
  std::vector<Wanted> wanted = std::exchange(spare_, {});
  wanted.clear();
  Bytes ahead = 0;
  choose(*from, far, &wanted, &ahead);
  if (!wanted.empty() && d_.gate.due().any() && !d_.weights.standing().empty()) {
    const Unlocked unlocked(entry);  // torch has what weights left from here on
  }
  bring(entry, wanted, ahead == 0);
  spare_ = std::move(wanted);
}

// In batches. Where the first is wanted soon it goes alone, then two, then four: it does not wait
// for the others.
void Prefetcher::bring(Entry& entry, std::vector<Wanted>& wanted, bool soon) {
  const bool capped = d_.transfers.in().capped();
  std::size_t most = soon || capped ? 1 : wanted.size();
  for (std::size_t begin = 0; begin < wanted.size();) {
    std::size_t end = begin;
    Bytes bytes = 0;
    bool room = true;
    while (end < wanted.size() && end - begin < most && bytes < kMostInBatch && room &&
           wanted[end].overtakes == wanted[begin].overtakes) {
      Wanted& one = wanted[end];
      Record* record = d_.ledger.find(one.record);
      room = record != nullptr && can_come(*record) && d_.sealer.intact(*record);
      if (room) {
        one.block = d_.store->make_ahead(entry, one.record, one.bytes, one.far);
        room = one.block != nullptr;
      }
      if (room) {
        ++one.block->aliases;  // this thread's, until a record has it: the lock is given up between
        bytes += one.bytes;
        ++end;
      }
    }
    if (!queue({wanted.data() + begin, end - begin}) || !room ||
        (capped && d_.transfers.in().full())) {
      return;
    }
    begin = end;
    most = capped ? 1 : std::min(2 * most, wanted.size());
  }
}

bool Prefetcher::queue(std::span<const Wanted> batch) {
  arrivals_.clear();
  for (const Wanted& one : batch) {
    --one.block->aliases;
    Record* record = d_.ledger.find(one.record);
    const bool twice = std::any_of(arrivals_.begin(), arrivals_.end(),
                                   [&](const Arrival& other) { return other.record == record; });
    if (record == nullptr || !can_come(*record) || twice) {
      d_.books.give_back(one.block);  // it came back or ended while the lock was given up
      continue;
    }
    record->block_begin = record->returning_begin();
    arrivals_.push_back({record, one.block});
  }
  const Wants wants =
      !batch.empty() && batch.front().overtakes ? Wants::before_others : Wants::in_turn;
  return arrivals_.empty() || bring_back(arrivals_, wants) == Status::ok;
}

}  // namespace stagehand::core
