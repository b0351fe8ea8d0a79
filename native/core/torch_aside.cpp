// Holes that are made before their request comes, and memory that torch maps at once: so that a
// step of fixed shapes finds all that it asks for in what is mapped.
#include <algorithm>
#include <utility>

#include "core/device.hpp"
#include "core/torch_store.hpp"

namespace stagehand::core {

// The request finds no hole, and pages go back for it. With segments of their own sizes nothing is
// known to be gained by setting one aside.
void TorchStore::lacked(Bytes request, const CacheMap::Owner& owner) {
  cache_.lacks_hole(owner);
  const std::uint64_t plan = d_.plan.in_use();
  if (sight_.runs == 1 && request > kSmallLimit && plan != 0) {
    ahead_.lacked(plan, {d_.plan.place(), request, owner}, d_.books.step());
  }
}

// At a save or unpack. What blocks of torch's own would break up until the request comes is taken
// from torch until then; what is in the way leaves. Not where live memory needs the bytes, nor
// while a request comes before that would have to make others leave for want of them.
void TorchStore::set_aside(Entry& entry) {
  if (ahead_.empty()) {
    return;
  }
  if (d_.counters.overshoot_bytes > over_at_entry_) {
    end_aside();  // bytes are short, and not only side by side
    return;
  }
  const std::size_t place = d_.plan.place();
  const bool same_step = hole_step_ == d_.books.step();
  if (aside_.storage != nullptr && same_step && place <= hole_.place) {
    return;
  }
  end_aside();
  const std::size_t from = same_step && place >= hole_.place ? hole_.place + 1 : place;
  bool soon = false;
  const HolesAhead::Hole* wanted =
      d_.budget.armed ? ahead_.wanted(d_.plan.in_use(), place, from, &soon) : nullptr;
  if (wanted == nullptr || held_.side().blocked() ||
      !fits_under(d_.live(), wanted->bytes, d_.ceiling())) {
    return;
  }
  const HolesAhead::Hole hole = *wanted;
  const Bytes before = d_.plan.largest_ahead(hole.place - std::min(hole.place, place));
  if (!hole.first && before > kSmallLimit && !cache_.both_fit(hole.owner, hole.bytes, before)) {
    ahead_.postponed(d_.plan.in_use(), hole, d_.books.step());
    return;
  }
  if (cache_.largest_hole(hole.owner) < hole.bytes) {
    look_at_cache(hole.owner);
    const Window window = choose_window(sight_.candidates, hole.bytes, d_.plan.with_weights());
    Attempt attempt;
    const bool leave = window.victims > 0;
    if (!window.found || (leave && !soon) ||
        (leave &&
         evict_window(window, attempt, hole.place, hole.bytes, hole.owner) != Evicted::yes)) {
      return;
    }
  }
  HeldStorage held;
  bool made = false;
  const Bytes peak = cache_.usage().allocated_peak;
  const std::uint32_t step = d_.books.step();
  {
    const Unlocked unlocked(entry);
    made = cache_.largest_hole(hole.owner) >= hole.bytes && serves_here(hole.owner) &&
           held_.side().make(d_.number, hole.bytes, hole.owner.stream, true, &held);
  }
  if (made && (!d_.budget.armed || step != d_.books.step())) {
    d_.gate.due().storages.push_back({held.storage, held.address});  // the step ended meanwhile
    return;
  }
  if (made) {
    end_aside();  // of another thread that was here meanwhile
    ahead_.made(d_.plan.in_use(), hole);
    aside_ = held;
    hole_ = hole;
    hole_step_ = d_.books.step();
    cache_.set_aside(held.address, peak);
  }
}

// Whether torch serves this thread's requests on that stream from that pool. Where a MemPool of the
// user's is active around ours, or a graph is captured, it would grow for them. Without the lock.
bool TorchStore::serves_here(const CacheMap::Owner& owner) {
  constexpr Bytes kLittle = 512;
  HeldStorage held;
  if (!held_.side().make(d_.number, kLittle, owner.stream, true, &held)) {
    return false;
  }
  const std::optional<CacheMap::Owner> found = cache_.owner_of(held.address);
  held_.side().drop(held.storage);
  return found == owner;
}

// Whether what is set aside is for a request at this place.
bool TorchStore::has_hole_here() const {
  return aside_.storage != nullptr && d_.plan.place() >= hole_.place;
}

// A miss that is for what was set aside, and not for less that comes at the same place.
bool TorchStore::take_aside(Bytes request, Bytes told, const CacheMap::Owner& owner) {
  const Bytes least = told != 0 ? aside_.bytes - aside_.bytes / 8 : kSmallLimit + 1;
  return has_hole_here() && request >= least && request <= aside_.bytes && owner == hole_.owner &&
         end_aside();
}

bool TorchStore::end_aside() {
  if (aside_.storage == nullptr) {
    return false;
  }
  d_.gate.due().storages.push_back({aside_.storage, aside_.address});
  aside_ = {};
  return true;
}

// Before a step: after one that had to give pages back or give memory up, or before the first with
// another plan (TorchStore::begin_step). Free memory of expandable segments lies in pieces between
// gaps. It goes back, and as much is mapped in one piece for each stream: for the one that had
// most, whose records leave, what the others have left of the budget; for those as much as they had
// at most in that step, since they would have to take it from the first one again. Without
// expandable segments that piece is one segment, in which neighbours that leave make a hole
// wherever they are (TorchStore::maps_whole). Where the program has emptied the cache since,
// something else may have run, and had more there: then the lesser of two steps. Here the GPU has
// been waited for, so that no copy out is under way, beside which it takes the driver thirty times
// as long to open access to a page.
Bytes TorchStore::map_whole(Entry& entry, Bytes target) {
  Bytes released = 0;
  Bytes mapped = 0;
  bool over = false;
  {
    const Unlocked unlocked(entry);
    const Bytes peak = cache_.usage().allocated_peak;
    released = release_cached().value_or(0);
    // With those of steps before, whether they went back just now or when the program emptied the
    // cache: a page more or less, and what a plan took in its trials is not what it takes.
    const Bytes besides = room_for_small() + cache_.growth_apart(nullptr);
    std::size_t driver_free = 0;
    std::size_t total = 0;
    if (d_.gate.table().mem_get_info(&driver_free, &total) ==
        driver::kSuccess) {  // others use it too
      target = std::min<Bytes>(target, cache_.usage().reserved + driver_free);
    }
    mapped = map_for_owners(target - std::min(target, besides));
    over = mapped > 0 && cache_.usage().reserved > target;
    cache_.forget_request(peak);
  }
  if (!cache_.by_pages()) {
    ++times_whole_;
    whole_ = mapped > 0;
    tight_ = over ? kUnlimited : tight_;  // torch was told to round what is asked for, meanwhile
  }
  return released - std::min(released, mapped);
}

// In all so much at most is reserved then. Returns how much was mapped. Without the lock.
Bytes TorchStore::map_for_owners(Bytes most) {
  std::vector<CacheMap::Large> owners = cache_.large();
  std::sort(owners.begin(), owners.end(),
            [](const auto& one, const auto& other) { return one.peak < other.peak; });
  Bytes mapped = 0;
  for (const CacheMap::Large& one : owners) {
    const Bytes room = most - std::min(most, cache_.usage().reserved);
    const bool last = &one == &owners.back();
    const Bytes peak_of_step = emptied_ ? one.lesser_peak : one.peak;
    const Bytes lost = last ? kUnlimited : peak_of_step - std::min(peak_of_step, one.mapped);
    const Bytes whole = CacheMap::whole_pages(0, std::min(lost, room));
    if (whole > 0 && map_free(whole, one.owner)) {
      mapped += whole;
    }
  }
  return mapped;
}

// So much free memory for one owner. Without the lock.
bool TorchStore::map_free(Bytes bytes, const CacheMap::Owner& owner) {
  HeldStorage held;
  const bool made =
      serves_here(owner) && held_.side().make(d_.number, bytes, owner.stream, true, &held);
  if (made) {
    held_.side().drop(held.storage);
  }
  return made;
}

// torch maps the pages of an expandable segment one at a time. Without such segments each request
// gets one of its own, and nothing is to be gained.
void TorchStore::map_ahead(Entry& entry, RecordId id, Bytes target) {
  const Record* record = d_.ledger.find(id);
  if (held_.side().triggers == 0 || record == nullptr || record->block == nullptr ||
      !cache_.by_pages()) {
    return;
  }
  const std::optional<CacheMap::Owner> owner = cache_.owner_of(record->block->address);
  if (!owner.has_value()) {
    return;
  }
  refresh();
  const Bytes there = d_.counters.mapped + room_for_small() + cache_.growth_apart(owner->stream);
  const Bytes whole = CacheMap::whole_pages(0, target - std::min(target, there));
  if (whole == 0) {
    return;
  }
  const Bytes peak = cache_.usage().allocated_peak;
  const Unlocked unlocked(entry);
  if (map_free(whole, *owner)) {
    cache_.forget_request(peak);
  }
}

}  // namespace stagehand::core
