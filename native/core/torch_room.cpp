// Making room in torch's cache: what is evicted at a miss, and which of torch's segments go back to
// the driver. Under torch's mutex, without the GIL.
#include <algorithm>
#include <array>
#include <utility>

#include "core/device.hpp"
#include "core/expandable.hpp"
#include "core/free_runs.hpp"
#include "core/requests.hpp"
#include "core/torch_store.hpp"
#include "core/window_search.hpp"

namespace stagehand::core {

namespace {

// Owners asked at a miss: the newest, and as many of the others in turn. Where nothing is left to
// evict, all are.
constexpr std::size_t kPolled = 256;
// Room for segments of small requests beyond those of earlier steps: two of torch's 2 MiB and one
// of its 20 MiB segments.
constexpr Bytes kSmallSegments = 24_MiB;
// Less than so many times the request left, of free room and of what can still be evicted: the edge
// of what a step can be held to.
constexpr Bytes kEdge = 2;
constexpr Bytes kTogether = 16_MiB;  // of small blocks that leave at a miss
// So many small ones leave at once whose copies may not be done: the first one's is waited for, and
// the others' are done no later.
constexpr std::size_t kWaitedFor = 4;
constexpr Bytes kUnknownRequest = 20_MiB;  // at least: torch's next larger kind of segment

}  // namespace

// Segments of small blocks are asked for between the large ones; nothing of a block that stays is
// moved out of their way.
Bytes TorchStore::room_for_small() { return kSmallSegments + cache_.small_growth(); }

// What the cache may grow by for a request and the small ones around it.
Bytes TorchStore::growth_for(Bytes request) {
  return cache_.growth_for(request) + (request > kSmallLimit ? room_for_small() : 0);
}

// Nothing goes back while a MemPool serves: what one stream's memory grows by, no other stream has.
// Else room is kept for what is served apart.
Bytes TorchStore::room_for_others(driver::Stream stream) {
  return route_.here() ? cache_.growth_of_others(stream) : cache_.growth_apart(stream);
}

// Others use the device too, and torch asks only once: what growth may reach at most.
Bytes TorchStore::roof_of_driver(Bytes growth, Bytes roof) {
  std::size_t driver_free = 0;
  std::size_t total = 0;
  if (!fits_under(d_.counters.mapped, growth, roof) ||
      d_.gate->mem_get_info(&driver_free, &total) != driver::kSuccess) {
    return roof;
  }
  return std::min<Bytes>(roof, d_.counters.mapped + driver_free);
}

// What the miss is for; 0 where nobody knows. Where torch tells it, a step that repeats an exact
// trace also makes room for the largest request that came at this place before: it comes next, if
// it has not come yet; not for a small one, which may come anywhere, also before memory is free
// that the large one is to have. Where torch does not tell, that may be this one. Nothing goes back
// while a MemPool serves: there room that is made for too much serves what comes later.
Bytes TorchStore::request_of(Bytes told) const {
  if (OwnRequest::here() != 0) {
    return OwnRequest::here();
  }
  const bool came = !route_.here() && d_.plan.request_came();
  const bool alone = told <= kSmallLimit || d_.plan.guesses() || has_hole_here() || came;
  return told != 0 && alone ? told : std::max(told, d_.plan.expected_request());
}

// Nothing is let go of while a stream that we rely on is captured, or the one that asks.
bool TorchStore::in_capture(driver::Stream stream) {
  if (d_.clocks.of(stream).captured()) {
    return true;
  }
  for (std::uint32_t i = 0; i < d_.clocks.size(); ++i) {
    StreamClock& clock = d_.clocks.at(i);
    if (d_.clocks.relied_on(clock) && clock.captured()) {
      return true;
    }
  }
  return false;
}

bool TorchStore::missed(Entry& entry, driver::Stream stream, Bytes told) {
  if (in_capture(stream)) {
    return false;
  }
  Due& due = d_.gate.due();
  take_stuck();
  if (!d_.budget.armed) {
    end_aside();
    if (!d_.weights.standing().empty()) {
      weights_stay_below_high(std::max(OwnRequest::here(), told));
    }
    return !due.storages.empty();
  }
  d_.books.forgive();
  ++d_.counters.misses;
  refresh();
  poll_newest(kPolled);
  poll_others(kPolled);
  // What is served apart has found room for just this.
  const Bytes known = cache_.is_apart(stream) && told != 0 ? told : request_of(told);
  // Once over `high` in a step that is not known, not again for what it asked for already.
  const bool over = d_.counters.overshoot_bytes > over_at_entry_;
  const Bytes request = known == 0 && over ? d_.plan.largest_request() : known;
  const Bytes between = std::max(d_.budget.high - d_.budget.low, kUnknownRequest);
  const Bytes growth = std::max(known == 0 ? between : 0, request != 0 ? growth_for(request) : 0);
  const CacheMap::Owner owner = owner_here(stream);
  if (take_aside(request, told, owner)) {
    return true;
  }
  const Bytes all = roof_of_driver(growth, d_.ceiling());
  const Bytes roof = all - std::min(all, room_for_others(stream));
  if (fits_under(d_.counters.mapped, growth, roof)) {
    return !due.storages.empty();
  }
  if (known == 0) {
    weights_make_way(growth);
    end_aside();
    evict_down(entry);
  }
  if (request != 0) {
    make_hole(entry, request, OwnRequest::here() == 0 ? told : 0, owner, roof);
  }
  // What the first step has cut, as it asked for one thing after the other, holds no other's
  // blocks. One that saves nothing has no plan, and is served by the same holes again.
  const bool saves = d_.plan.place() > 0;
  start_anew_ |= told != 0 && saves && !d_.plan.learned() && !std::exchange(cut_, true);
  d_.sealer.seal(entry);
  return !due.storages.empty() || due.release_segments;
}

// Between two steps too.
void TorchStore::weights_stay_below_high(Bytes known) {
  refresh();
  const Bytes request = std::max(known, kUnknownRequest);
  const Bytes growth = cache_.growth_for(request);
  const Bytes roof = roof_of_driver(growth, d_.ceiling());
  if (!fits_under(d_.counters.mapped, growth, roof)) {
    weights_make_way(std::min(request, d_.counters.mapped + growth - roof));
  }
}

// Groups leave until so much of them has.
void TorchStore::weights_make_way(Bytes bytes) {
  for (Bytes freed = 0; freed < bytes;) {
    const Bytes left = d_.weights.make_way(true);
    if (left == 0) {
      return;
    }
    freed += left;
  }
}

// Walks the cache's segments, once a miss or so. Where torch would map pages for the request behind
// the last one, as many as it may grow by count as idle there.
void TorchStore::look_at_cache(const CacheMap::Owner& owner, Bytes request, Bytes growing) {
  cache_.walk(owner, &sight_.stretches);
  sight_.candidates.clear();
  sight_.blocks.clear();
  sight_.of_stretch.clear();
  departing_.clear();
  for (const Due::Storage& one : d_.gate.due().storages) {
    departing_.push_back(one.address);
  }
  std::sort(departing_.begin(), departing_.end());
  VictimIndex& victims = d_.books.victims();
  victims.last_needed(false);  // files what waits
  sight_.end = 0;
  Address last = 0;  // where the owner's last page ends, if torch would map more there
  if (growing >= CacheMap::kPage && growth_of(sight_.stretches, departing_, request).at_end) {
    for (const CacheMap::Stretch& one : sight_.stretches) {
      last = one.of_owner && one.by_pages ? one.address + one.bytes : last;
    }
  }
  const std::uint32_t out = d_.transfers.out().clock().index();
  for (const CacheMap::Stretch& stretch : sight_.stretches) {
    if (stretch.begins_segment) {
      sight_.candidates.push_back({Candidate::Kind::wall});
      sight_.blocks.push_back(nullptr);
    }
    Block* block = stretch.hole || !stretch.of_owner ? nullptr : held_.at(stretch.address);
    const bool idle =
        stretch.hole || std::binary_search(departing_.begin(), departing_.end(), stretch.address);
    Candidate candidate{Candidate::Kind::wall};
    if (stretch.of_owner && idle) {
      candidate.kind = Candidate::Kind::idle;
    } else if (stretch.of_owner && block != nullptr && block->record != nullptr &&
               block->record->filed.at_all) {
      candidate = candidate_of(*block, out);
      const Plan::Use use = block->record->filed.use;
      candidate.near = nearness(use - std::min(use, d_.plan.uses()));
    }
    candidate.size = stretch.bytes;
    candidate.idle = idle;
    sight_.of_stretch.push_back(sight_.candidates.size());
    sight_.candidates.push_back(candidate);
    sight_.blocks.push_back(block);
    if (stretch.address + stretch.bytes == last) {
      sight_.end = sight_.candidates.size();
      sight_.candidates.push_back(
          {Candidate::Kind::idle, growing / CacheMap::kPage * CacheMap::kPage});
      sight_.blocks.push_back(nullptr);
    }
  }
  sight_.by_pages = false;
  sight_.runs = 0;
  for (const CacheMap::Stretch& one : sight_.stretches) {
    sight_.by_pages |= one.by_pages;
    sight_.runs += one.of_owner && one.by_pages && one.begins_segment ? 1 : 0;
  }
  sight_.releasable = 0;
  for (std::size_t i = 0; i < sight_.stretches.size(); ++i) {
    const bool begins = sight_.stretches[i].begins_segment || i == 0 ||
                        !sight_.candidates[sight_.of_stretch[i - 1]].idle;
    if (begins && sight_.candidates[sight_.of_stretch[i]].idle) {
      sight_.releasable += free_run(i, true);
    }
  }
}

// What torch can give back of the idle run around a stretch: the whole segment, or whole pages of
// an expandable one. Without the stretch itself: of the runs that it parts.
Bytes TorchStore::free_run(std::size_t at, bool with) const {
  const auto& all = sight_.stretches;
  const auto idle = [&](std::size_t i) { return sight_.candidates[sight_.of_stretch[i]].idle; };
  if (!all[at].releasable) {
    return 0;
  }
  std::size_t first = at;
  while (!all[first].begins_segment && idle(first - 1)) {
    --first;
  }
  std::size_t end = at + 1;
  while (end < all.size() && !all[end].begins_segment && idle(end)) {
    ++end;
  }
  const bool whole = all[first].begins_segment && (end == all.size() || all[end].begins_segment);
  if (!all[at].by_pages) {
    return with && whole ? all[end - 1].address + all[end - 1].bytes - all[first].address : 0;
  }
  const Address base = all[at].segment;
  const auto pages = [&](Address begin, Address stop) {
    return CacheMap::whole_pages(begin - base, stop - base);
  };
  const Address stop = all[end - 1].address + all[end - 1].bytes;
  return with ? pages(all[first].address, stop)
              : pages(all[first].address, all[at].address) +
                    pages(all[at].address + all[at].bytes, stop);
}

// Looks at the cache only where there is little room: else as whoever asks next, it finds some.
bool TorchStore::fits(std::span<const Bytes> sizes, driver::Stream stream) {
  constexpr Bytes kAmple = 8;  // times what it takes
  Bytes most = 0;
  for (const Bytes bytes : sizes) {
    most += cache_.growth_for(bytes);
  }
  const Bytes ceiling = d_.ceiling() - std::min(d_.ceiling(), room_for_others(stream));
  const Bytes taken = d_.counters.mapped + CacheMap::kSmallBuffer;
  const Bytes may_leave = std::min(d_.counters.mapped, d_.counters.occupied - d_.live());
  if (fits_under(taken, most, ceiling) || fits_under(taken - may_leave, kAmple * most, ceiling)) {
    return true;
  }
  look_at_cache(owner_here(stream));
  find_runs();
  const Bytes small = can_release() ? cache_.small_releasable() : 0;
  const std::int64_t growth = growth_of(runs_, sizes, sight_.by_pages);
  return static_cast<std::int64_t>(taken) + growth <= static_cast<std::int64_t>(ceiling + small);
}

// With all victims of the owner gone.
void TorchStore::find_runs() {
  const auto& all = sight_.stretches;
  const auto free = [&](std::size_t i) {
    const Candidate& one = sight_.candidates[sight_.of_stretch[i]];
    return one.idle || one.kind == Candidate::Kind::victim;
  };
  runs_.clear();
  for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    const bool usable = free(begin);
    for (end = begin + 1; end < all.size() && !all[end].begins_segment && free(end) == usable;) {
      ++end;
    }
    if (!usable) {
      continue;
    }
    const CacheMap::Stretch& first = all[begin];
    const Address stop = all[end - 1].address + all[end - 1].bytes;
    const bool to_end = end == all.size() || all[end].begins_segment;
    const Bytes whole =
        first.by_pages ? CacheMap::whole_pages(first.address - first.segment, stop - first.segment)
        : first.begins_segment && to_end ? stop - first.address
                                         : 0;
    runs_.push_back({first.of_owner ? stop - first.address : 0,
                     first.releasable && can_release() ? whole : 0,
                     first.of_owner && first.by_pages && to_end});
  }
}

// A victim has left: its place is idle once it is dropped.
void TorchStore::now_idle(Address address) {
  const auto found = std::lower_bound(
      sight_.stretches.begin(), sight_.stretches.end(), address,
      [](const CacheMap::Stretch& one, Address wanted) { return one.address < wanted; });
  if (found == sight_.stretches.end() || found->address != address) {
    return;
  }
  const auto at = static_cast<std::size_t>(found - sight_.stretches.begin());
  Candidate& candidate = sight_.candidates[sight_.of_stretch[at]];
  sight_.releasable -= free_run(at, false);
  candidate.idle = true;
  candidate.kind = found->of_owner ? Candidate::Kind::idle : Candidate::Kind::wall;
  sight_.releasable += free_run(at, true);
}

// The record needed last leaves. Where none is known to be free, all owners are asked.
Evicted TorchStore::evict_last(bool of_mem_pools, Attempt& attempt) {
  VictimIndex& victims = d_.books.victims();
  Record* last = victims.last_needed(false, of_mem_pools);
  if (last == nullptr) {
    poll_newest(watched_.size());
    last = victims.last_needed(false, of_mem_pools);
  }
  if (last == nullptr) {
    return Evicted::nobody;
  }
  const Address address = last->block->address;
  const std::vector<Due::Storage>& due = d_.gate.due().storages;
  const std::size_t before = due.size();
  const Evicted result = d_.room.evict(*last, attempt);
  if (result == Evicted::yes) {
    now_idle(address);
    for (std::size_t i = before; i < due.size(); ++i) {  // others of its call, too
      if (due[i].address != address) {
        now_idle(due[i].address);
      }
    }
  }
  return result;
}

// For a request of the program's at that place; 0 where it is none, or nobody knows.
Evicted TorchStore::evict_window(const Window& window, Attempt& attempt, std::size_t place,
                                 Bytes request, const CacheMap::Owner& owner) {
  victims_.clear();
  for (std::size_t i = window.begin; i < window.end; ++i) {
    if (sight_.candidates[i].kind == Candidate::Kind::victim) {
      victims_.push_back(sight_.blocks[i]->record);
      if (victims_.back()->prefetched && request != 0) {
        d_.plan.crowded(place, request, owner.stream);
      }
    }
  }
  return d_.room.evict_together(victims_, attempt);
}

// The small victims of a request: those that leave in any case and have been copied out, else the
// first that leaves and a few whose copies are done no later, else one.
void TorchStore::choose_small(Bytes request, const CacheMap::Owner& owner) {
  VictimIndex& victims = d_.books.victims();
  // Until `take` says that it is enough.
  const auto look = [&](bool leaves, auto take) {
    std::size_t looked = 0;
    for (Record* one = victims.in_small_block(request, leaves); one != nullptr && looked < kPolled;
         one = VictimIndex::next_larger(*one), ++looked) {
      if (cache_.owner_of(one->block->address) == owner && take(*one)) {
        return;
      }
    }
  };
  const auto goes_at_once = [&](const Record& one) {
    const Tick written = one.copy.written;
    return victims.drops(one)
               ? d_.plan.guides(one.place)
               : one.clean() && d_.clocks.at(written.clock).known_passed(written.seq);
  };
  const auto done_no_later = [](const Record& one, const Record& than) {
    return one.copy.holds_bytes() && than.copy.holds_bytes() &&
           one.copy.written.clock == than.copy.written.clock &&
           one.copy.written.seq <= than.copy.written.seq;
  };
  victims_.clear();
  std::array<Record*, kWaitedFor> first{};
  std::size_t count = 0;
  Bytes bytes = 0;
  look(true, [&](Record& one) {
    if (count == 0 || (count < first.size() && done_no_later(one, *first[0]))) {
      first[count++] = &one;
    }
    if (goes_at_once(one)) {
      victims_.push_back(&one);
      bytes += one.block->size;
    }
    return bytes >= kTogether;
  });
  // Where few are small, whole pages of large ones are sooner had than small ones by the hundred.
  if (count == 0 && victims.mostly_small()) {
    look(false, [&](Record& one) { return (first[count++] = &one) != nullptr; });
  }
  if (victims_.empty()) {
    victims_.assign(first.begin(), first.begin() + static_cast<std::ptrdiff_t>(count));
  }
}

// torch keeps small blocks in segments of their own, of many each: where one leaves that is as
// large as the request there is a hole for it. Others go with it, since the next request is as
// likely for one: a miss takes longer than they do.
bool TorchStore::make_small_hole(Entry& entry, Bytes request, const CacheMap::Owner& owner,
                                 Attempt& attempt) {
  Evicted result = Evicted::nobody;
  do {
    choose_small(request, owner);
    result = d_.room.evict_together(victims_, attempt);
  } while (result != Evicted::yes && d_.room.helped(entry, result, attempt));
  return result == Evicted::yes;
}

// Victims side by side, so that torch finds a hole for the request; where no segment can hold it,
// enough wholly free segments for a new one of its own, which go back to the driver.
//
// Blocks that stay where they are break up large segments, by now and then more than evicting can
// make good. After a planned step that came near that, the next pool entry gives all free segments
// back: what it asks for then lies in segments of its own size. Not after every step that had to
// give segments back: each would be made again in every step. Nor where sizes differ in each step:
// the next one breaks them up elsewhere.
void TorchStore::make_hole(Entry& entry, Bytes request, Bytes told, const CacheMap::Owner& owner,
                           Bytes roof) {
  const Bytes growth = growth_for(request);
  Due& due = d_.gate.due();
  Attempt attempt;
  bool asked = false;  // all owners
  const bool repeats = d_.plan.repeats() != 0;
  bool look = true;
  Bytes spared = 0;  // groups that left rather than that segments go back
  const auto weights_leave = [&](bool last) {
    look = d_.weights.make_way(true, last) != 0;
    return look;
  };
  // Before torch grows above the ceiling, or runs out of memory.
  const auto aside_leaves = [&] { return look = end_aside(); };
  // What torch has mapped if it gives back all that it can.
  const auto kept = [&] {
    const Bytes releasable = can_release() ? sight_.releasable : 0;
    return d_.counters.mapped - std::min(d_.counters.mapped, releasable);
  };
  for (;;) {
    if (std::exchange(look, false)) {
      const Bytes small = request > kSmallLimit ? room_for_small() : 0;
      look_at_cache(owner, request, roof - std::min(roof, d_.counters.mapped + small));
      Window window;
      if (request > kSmallLimit) {
        window = choose_window(sight_.candidates, request, d_.plan.with_weights());
      }
      if (is_there(window, roof)) {
        return;
      }
      // They leave for free: before records, unless no hole would come of it, nor is needed.
      const bool fits = fits_under(kept(), growth, roof);
      if ((!fits || d_.weights.would_give(true) >= request) && weights_leave(false)) {
        continue;
      }
      if (window.found && window.victims > 0) {
        const std::uint64_t turn = d_.gate.turn();
        const std::size_t before = due.storages.size();
        const Evicted result = evict_window(window, attempt, d_.plan.place(), told, owner);
        // All have left, and nothing can have come: torch has the hole once the lock is given up.
        // Where others of their calls have left with them, another look tells.
        if (due.storages.size() == before + window.victims && d_.gate.turn() == turn) {
          return;
        }
        look = d_.room.helped(entry, result, attempt);
        if (look || weights_leave(true) || aside_leaves()) {
          continue;
        }
        break;
      }
      look = end_aside();
      if (look) {
        continue;
      }
    }
    if (fits_under(kept(), growth, roof)) {
      const bool releases = !fits_under(d_.counters.mapped, growth, roof);
      if (releases && request > kSmallLimit && spared < request) {
        const Bytes left = d_.weights.spares_a_wait();
        if (left > 0) {
          spared += left;
          look = true;
          continue;
        }
      }
      const Bytes left = roof - kept() - growth + d_.counters.retained;
      due.release_segments = releases;
      if (releases) {
        note_walls(request);
        lacked(request, owner);
        start_anew_ |= repeats && (sight_.by_pages || left < kEdge * request);
      }
      return;
    }
    if (request <= kSmallLimit && make_small_hole(entry, request, owner, attempt)) {
      return;
    }
    if (!can_release()) {
      // What no run of victims makes room for, no victim does: once all owners were asked.
      if (std::exchange(asked, true)) {
        if (weights_leave(true) || aside_leaves()) {
          continue;
        }
        break;
      }
      poll_newest(watched_.size());
      look = true;
      continue;
    }
    const Evicted result = evict_last(owner.pool != CacheMap::Owner{}.pool, attempt);
    const std::uint64_t turn = d_.gate.turn();
    if (!d_.room.helped(entry, result, attempt)) {
      if (weights_leave(true) || aside_leaves()) {
        continue;
      }
      break;
    }
    look = d_.gate.turn() != turn;  // the lock was given up: all may be elsewhere
  }
  // Torch grows above the ceiling, then: by the least.
  note_walls(request);
  cache_.lacks_hole(owner);
  look_at_cache(owner);
  const bool kept_for_walls = cache_.wants_walls() && cache_.releasable() > 0;
  due.release_segments = can_release() && (sight_.releasable > 0 || kept_for_walls);
  start_anew_ |= due.release_segments && repeats;
  // Segments of small blocks would be mapped again: they go only where the request then fits.
  const Bytes grown = cache_.growth_for(request);
  const Bytes back = sight_.releasable + cache_.small_releasable();
  due.release_segments |= can_release() && !fits_under(d_.counters.mapped, grown, roof) &&
                          fits_under(d_.counters.mapped - back, grown, roof);
}

// Where no two walls have room for the request between them, no hole can be made: memory has to go
// back, or to grow. With one that has, walls cost nothing, and a place of their own would.
void TorchStore::note_walls(Bytes request) {
  Bytes run = 0;
  Bytes longest = 0;
  for (const Candidate& one : sight_.candidates) {
    run = one.kind == Candidate::Kind::wall ? 0 : run + one.size;
    longest = std::max(longest, run);
  }
  walled_in_ |= longest < request;
}

// Whether torch finds the hole without anything more leaving, or maps pages that it may for it.
// Where it was there before, what torch lacks is a small segment.
bool TorchStore::is_there(const Window& window, Bytes roof) {
  if (!window.found || window.victims > 0) {
    return false;
  }
  const bool grows = sight_.end != 0 && window.end == sight_.end + 1;
  const bool small =
      cache_.small_growth() > 0 && fits_under(d_.counters.mapped, CacheMap::kSmallBuffer, roof);
  return grows || !d_.gate.due().storages.empty() || small;
}

// torch keeps its free segments while a MemPool serves anybody or a graph is captured, and gives
// nothing back then: victims serve instead, until the next pool entry.
bool TorchStore::can_release() const { return !release_failed_ && !route_.on(); }

// Nobody knows what is asked for: as much as there is between the two watermarks, and what the
// requests before took too much.
void TorchStore::evict_down(Entry& entry) {
  // Free memory that no whole segment is part of stays mapped, whatever is evicted.
  const Bytes between = d_.budget.high - d_.budget.low;
  const Bytes over = std::min(d_.counters.mapped - std::min(d_.counters.mapped, d_.ceiling()),
                              (can_release() ? cache_.releasable() : 0) + between);
  const Bytes lowest =
      std::min(d_.budget.low, d_.ceiling() - std::min(d_.ceiling(), kUnknownRequest));
  const Bytes target = lowest - std::min(lowest, over);
  sight_.stretches.clear();
  Attempt attempt;
  while (d_.counters.occupied > target) {
    Record* first = d_.books.victims().last_needed(false);
    if (first != nullptr && !d_.books.victims().leaves_free(*first)) {
      d_.departures.copy_ahead(d_.counters.occupied - target);
    }
    if (!d_.room.helped(entry, evict_last(true, attempt), attempt)) {
      break;
    }
  }
  if (over > 0 || pool_waits_) {  // what a MemPool cannot use must not be in its way
    look_at_cache({});
    d_.gate.due().release_segments = can_release() && sight_.releasable > 0;
  }
}

// Without the trigger, or while it is blocked, at a pack or unpack: what has been copied out leaves
// down to `low`. Above `high` the host waits for copies, since torch has grown already. Which
// stream torch hands a block out on is not known here, so only the host can tell that nothing reads
// it any more.
void TorchStore::leave_later(Entry& entry) {
  take_stuck();
  if (!d_.budget.armed || d_.counters.occupied <= d_.budget.low ||
      (held_.side().triggers != 0 && !held_.side().blocked())) {  // last: torch takes long to say
    return;
  }
  d_.books.forgive();
  Attempt attempt;
  while (d_.counters.occupied > d_.budget.low) {
    Record* record = d_.books.victims().last_needed(false);
    if (record == nullptr) {
      return;
    }
    if (d_.books.victims().drops(*record)) {
      d_.room.drop(*record);
      continue;
    }
    if (!record->copy.holds_bytes()) {
      if (d_.departures.copy_out(*record, attempt.squeeze, &attempt.missing) ==
          Departures::Staged::no_slab) {
        attempt.lacking = Ledger::id_of(*record);
        if (d_.counters.occupied > d_.budget.high &&
            d_.room.helped(entry, Evicted::no_slab, attempt)) {
          continue;
        }
        return;
      }
      if (!record->copy.holds_bytes()) {
        d_.books.refuse(*record);
        continue;
      }
    }
    const Tick written = record->copy.written;
    if (!d_.clocks.at(written.clock).passed(written.seq)) {
      if (d_.counters.occupied <= d_.budget.high || !wait_for_copy(entry, *record)) {
        return;
      }
      continue;  // it may be in use again
    }
    d_.room.leave(*record);
  }
}

// Waits, without the lock, until the record's copy out is done. False where that cannot be told.
bool TorchStore::wait_for_copy(Entry& entry, Record& record) {
  const Tick written = record.copy.written;
  driver::Event event = nullptr;
  Seq actual = 0;
  if (d_.clocks.at(written.clock).event_for(written.seq, &event, &actual) != Status::ok) {
    return false;
  }
  bool done = false;
  d_.books.wait(
      entry, record,
      [&] {
        return done =
                   event == nullptr || d_.gate.table().event_synchronize(event) == driver::kSuccess;
      },
      [](bool) {});
  return done;
}

}  // namespace stagehand::core
