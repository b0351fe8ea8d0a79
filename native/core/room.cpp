#include "core/room.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/device.hpp"
#include "core/wait_timer.hpp"

namespace stagehand::core {

void Room::leave(Record& record) {
  ++d_.counters.clean_evictions;
  poison(record);
  d_.books.leave(record);
}

void Room::drop(Record& record) {
  poison(record);
  d_.books.drop(record);
}

// Its call runs again in any case, and makes them too. Not where they are less than what has left:
// room for more of that is not made by them, and a run with them takes more at once.
void Room::drop_rest_of_call(Plan::Place place, Bytes left) {
  of_call_.clear();
  d_.plan.of_call(place, &of_call_);
  Bytes rest = 0;
  std::erase_if(of_call_, [&](RecordId id) {
    const Record* record = d_.ledger.find(id);
    const bool may = record != nullptr && record->evictable() && !record->asked &&
                     d_.books.victims().drops(*record);
    rest += may ? record->block->size : 0;
    return !may;
  });
  if (rest >= left) {
    for (const RecordId id : of_call_) {
      drop(*d_.ledger.find(id));
    }
  }
}

void Room::poison(const Record& record) {
  if (d_.debug.poison && d_.store->knows_all_users()) {
    d_.transfers.poison(record.block);
  }
}

Evicted Room::evict(Record& record, Attempt& attempt) {
  const bool all = d_.debug.evict_everything && record.droppable();
  if (all || d_.books.victims().drops(record)) {
    // In backward memory comes free, and the call may be needed next, or be running.
    const bool alone = all || record.by_node || record.asked || !d_.saving;
    const Bytes bytes = record.block->size;
    drop(record);
    if (!alone && d_.plan.strays(record.place)) {
      drop_rest_of_call(record.place, bytes);
    }
    return Evicted::yes;
  }
  const bool clean = record.clean();
  if (!record.copy.holds_bytes()) {
    if (d_.departures.copy_out(record, attempt.squeeze, &attempt.missing) ==
        Departures::Staged::no_slab) {
      attempt.lacking = Ledger::id_of(record);
      return Evicted::no_slab;
    }
    if (!record.copy.holds_bytes()) {
      d_.books.refuse(record);
      return Evicted::refused;
    }
  }
  leave(record);
  d_.counters.clean_evictions -= clean ? 0 : 1;
  d_.counters.dirty_evictions += clean ? 0 : 1;
  return Evicted::yes;
}

Evicted Room::evict_together(std::span<Record* const> records, Attempt& attempt) {
  Bytes missing = 0;
  for (Record* record : records) {
    if (records.size() > 1 && !d_.books.victims().leaves_free(*record)) {
      d_.departures.stage(*record, false, &missing);
    }
  }
  Evicted result = Evicted::nobody;
  for (Record* record : records) {
    if (!record->evictable()) {
      continue;
    }
    const Evicted one = evict(*record, attempt);
    if (one != Evicted::yes) {
      return result == Evicted::yes ? result : one;
    }
    result = one;
  }
  return result;
}

bool Room::helped(Entry& entry, Evicted result, Attempt& attempt) {
  if (result != Evicted::no_slab) {
    return result != Evicted::nobody;
  }
  if (d_.host.wait_for(entry, attempt.missing)) {
    return true;
  }
  return !std::exchange(attempt.squeeze, true) || copy_out_pageable(entry, attempt.lacking);
}

void Room::evict_to_low(Bytes incoming) {
  Attempt attempt;
  while (!fits_under(d_.counters.occupied, incoming, d_.budget.low)) {
    Record* record = d_.books.victims().last_needed(false);
    if (record == nullptr) {
      return;
    }
    if (!d_.books.victims().leaves_free(*record)) {
      d_.departures.copy_ahead(d_.counters.occupied + incoming - d_.budget.low);
    }
    const Evicted result = evict(*record, attempt);
    if (result != Evicted::yes && result != Evicted::refused) {
      return;
    }
  }
}

void Room::evict_all(Entry& entry) {
  d_.books.forgive();
  Attempt attempt{true, {}, 0};
  VictimIndex& victims = d_.books.victims();
  for (Record* record = victims.last_needed(true); record != nullptr;
       record = victims.last_needed(true)) {
    const Evicted result = evict(*record, attempt);
    if (result == Evicted::no_slab && !d_.host.wait_for(entry, attempt.missing)) {
      return;
    }
  }
}

// The last resort for a copy: pageable memory, which the driver fills while the caller waits. The
// block stays where it is meanwhile, so its owners may come and go.
bool Room::copy_out_pageable(Entry& entry, RecordId id) {
  const auto victim = [&] {
    Record* found = d_.ledger.find(id);
    return found != nullptr && found->evictable() && !found->clean() ? found : nullptr;
  };
  const Record* wanted = victim();
  if (wanted == nullptr) {
    return true;  // in use again, or clean by now: look again
  }
  const Bytes bytes = wanted->bytes();
  Slab* slab = nullptr;
  {
    const Unlocked unlocked(entry);
    slab = d_.host.take_pageable(bytes);
  }
  if (slab == nullptr) {
    return false;
  }
  Record* record = victim();
  if (record == nullptr || record->bytes() != bytes) {
    d_.host.give(slab);
    return true;
  }
  const bool ordered = d_.transfers.order_copy_out(*record) == Status::ok;
  const Copy copy{record->block->address + record->begin - record->block_begin, slab->host, bytes};
  const driver::Stream stream = d_.transfers.out().clock().stream();
  ++d_.counters.pageable_copies;
  bool copied = false;
  d_.books.wait(
      entry, *record, [&] { return copied = ordered && d_.transfers.out().copy_now(stream, copy); },
      [&](bool good) {
        if (good) {
          record->copy.slabs.push_back(slab);
          record->copy.written = Tick{};
          d_.books.queued(*record);
        } else {
          d_.host.give(slab);
        }
      });
  if (record = victim(); !copied && record != nullptr) {
    d_.books.refuse(*record);
  }
  return true;
}

// Of torch's captures nobody tells: there only the streams that something relies on are waited for,
// one by one, and not the context, in which another may be captured. Elsewhere the context is, and
// the streams of others beside it.
bool Room::wait_for_gpu(Entry& entry) {
  const bool told = d_.store->tells_of_captures();
  if (!d_.gate.in_context() || (told && d_.clocks.captures() > 0)) {
    return false;
  }
  std::vector<StreamPlace> alone;  // waited for one by one
  std::vector<Tick> marks;
  for (std::uint32_t i = 0; i < d_.clocks.size(); ++i) {
    StreamClock& clock = d_.clocks.at(i);
    const StreamPlace place = clock.place();
    const bool of_context = told && place.context == nullptr;
    const bool there = of_context || (place.context != nullptr && place.stream == nullptr);
    if (!there && !d_.clocks.relied_on(clock)) {
      continue;  // its stream may be gone
    }
    if (clock.captured()) {
      return false;
    }
    marks.push_back({i, clock.mark()});
    if (!of_context) {
      alone.push_back(place);
    }
  }
  ++d_.counters.host_waits;
  bool all = false;
  const WaitTimer timer;
  {
    const Unlocked unlocked(entry);
    RankedMutex::expect_none_held();
    const driver::Table& driver = d_.gate.table();
    all = (!told || driver.ctx_synchronize() == driver::kSuccess) &&
          std::all_of(alone.begin(), alone.end(),
                      [&](const StreamPlace& stream) { return synchronize(driver, stream); });
  }
  d_.counters.gpu_wait_ns += timer.ns();
  for (const Tick& mark : all ? marks : std::vector<Tick>{}) {
    d_.clocks.at(mark.clock).gpu_passed(mark.seq);
  }
  return all;
}

}  // namespace stagehand::core
