#include "core/cache_map.hpp"

#include <algorithm>
#include <utility>

#include "core/giving_back.hpp"

namespace stagehand::core {

namespace {
constexpr Bytes kLargeBuffer = CacheMap::kPage;
constexpr Bytes kMinLargeAlloc = 10_MiB;
constexpr Bytes kRoundLarge = 2_MiB;
}  // namespace

Bytes CacheMap::growth_for(Bytes request) {
  if (request <= kSmallLimit) {
    return kSmallBuffer;
  }
  const Lock lock(mutex_);
  return growth_of(request);
}

// For a large one.
Bytes CacheMap::growth_of(Bytes request) const { return mapped_for(request, expandable_); }

Bytes CacheMap::mapped_for(Bytes large, bool by_pages) {
  if (by_pages) {
    return round_up(large, kLargeBuffer);
  }
  return large < kMinLargeAlloc ? kLargeBuffer : round_up(large, kRoundLarge);
}

Bytes CacheMap::whole_pages(Bytes begin, Bytes end) {
  const Bytes first = round_up(begin, kLargeBuffer);
  const Bytes last = end / kLargeBuffer * kLargeBuffer;
  return last - std::min(first, last);
}

Bytes CacheMap::small_growth() {
  const Lock lock(mutex_);
  const Bytes peak = std::max(small_peaks_.front(), small_peaks_.back());
  return peak - std::min(peak, small_);
}

void CacheMap::apply(const CacheEvent& event) {
  if (event.kind == CacheEvent::segment_gone) {
    GivingBack::segment_goes(event.device);
  }
  const Lock lock(mutex_);
  if (waiting_) {
    queue_.push_back(event);
  } else {
    do_apply(event);
  }
}

void CacheMap::snapshot() {
  const Lock lock(mutex_);
  waiting_ = true;
  queue_.clear();
  segments_.clear();
  lives_.clear();
  holes_.clear();
  large_.clear();
  streams_.clear();
  aside_.clear();
  releasable_ = 0;
  usage_.reserved = usage_.allocated = usage_.aside = small_ = 0;
}

void CacheMap::known(const CacheEvent& event) {
  const Lock lock(mutex_);
  do_apply(event);
}

void CacheMap::told() {
  const Lock lock(mutex_);
  waiting_ = false;
  for (const CacheEvent& event : queue_) {
    do_apply(event);
  }
  queue_.clear();
  largest_request_ = 0;
}

void CacheMap::do_apply(const CacheEvent& event) {
  switch (event.kind) {
    case CacheEvent::alloc:
      return allocate(event);
    case CacheEvent::let_go:
      young_.erase(event.address);
      return gradients_.let_go(event.address);
    case CacheEvent::freed:
      gradients_.freed(event.address);
      return free(event);
    case CacheEvent::segment:
    case CacheEvent::mapped:
      return add_segment(event);
    case CacheEvent::segment_gone:
    case CacheEvent::unmapped:
      return remove_range(event);
  }
}

void CacheMap::add_hole(const Segment& segment, Bytes bytes) {
  if (bytes > 0 && !segment.small) {
    holes_[segment.owner].insert(bytes);
  }
}

void CacheMap::remove_hole(const Segment& segment, Bytes bytes) {
  if (bytes > 0 && !segment.small) {
    const auto of_owner = holes_.find(segment.owner);
    if (of_owner == holes_.end()) {
      return;
    }
    auto& sizes = of_owner->second;
    if (const auto found = sizes.find(bytes); found != sizes.end()) {
      sizes.erase(found);
    }
    if (sizes.empty()) {
      holes_.erase(of_owner);  // its stream or pool may never come again
    }
  }
}

void CacheMap::hole_around(const Segment& segment, Lives::iterator after, Address* begin,
                           Address* end) {
  *begin = segment.base;
  *end = segment.base + segment.bytes;
  if (after != lives_.end() && after->first < *end) {
    *end = after->first;
  }
  if (after != lives_.begin()) {
    const auto before = std::prev(after);
    *begin = std::max(*begin, before->first + before->second);
  }
}

void CacheMap::note_reserved(Bytes before) {
  usage_.reserved_peak = std::max(usage_.reserved_peak, usage_.reserved);
  if (usage_.reserved > mark_) {
    usage_.over_mark += usage_.reserved - std::max(mark_, before);
  }
}

void CacheMap::add_releasable(const Segment& segment, Bytes bytes) {
  releasable_ += segment.releasable() ? bytes : 0;
}

void CacheMap::remove_releasable(const Segment& segment, Bytes bytes) {
  releasable_ -= segment.releasable() ? std::min(releasable_, bytes) : 0;
}

void CacheMap::add_segment(const CacheEvent& event) {
  const Bytes before = usage_.reserved;
  usage_.reserved += event.bytes;
  note_reserved(before);
  Segment segment;
  segment.base = event.address;
  segment.bytes = event.bytes;
  segment.owner = {event.stream, {event.pool[0], event.pool[1]}};
  segment.expandable = event.kind == CacheEvent::mapped;
  segment.small = event.bytes <= kSmallBuffer;  // an expandable one of small blocks grows by that
  if (segment.small) {
    small_ += event.bytes;
    small_peak_ = std::max(small_peak_, small_);
  }
  expandable_ |= segment.expandable;
  add_large(segment, event.bytes);
  add_to_stream(segment, event.bytes);
  add_releasable(segment, segment.bytes);
  Address hole_begin = event.address;
  Address hole_end = event.address + event.bytes;
  const auto join = [&](const Segment* one) {
    if (one == nullptr || !segment.expandable || !one->expandable || one->small != segment.small ||
        !(one->owner == segment.owner)) {
      return;
    }
    Address begin = 0;
    Address end = 0;
    hole_around(*one, lives_.lower_bound(event.address), &begin, &end);
    remove_hole(*one, end - std::min(begin, end));
    hole_begin = std::min(hole_begin, begin);
    hole_end = std::max(hole_end, end);
    segment.base = std::min(segment.base, one->base);
    segment.bytes += one->bytes;
    segment.live += one->live;
    segments_.erase(one);
  };
  join(segments_.at(event.address + event.bytes));
  join(event.address > 0 ? segments_.around(event.address - 1) : nullptr);
  segments_.put(segment);
  add_hole(segment, hole_end - hole_begin);
}

// Only free memory goes back, but of an expandable segment it may be a part.
void CacheMap::remove_range(const CacheEvent& event) {
  const Segment* const found = segments_.around(event.address);
  if (found == nullptr) {
    return;
  }
  const Segment segment = *found;
  usage_.reserved -= std::min(usage_.reserved, event.bytes);
  small_ -= segment.small ? std::min(small_, event.bytes) : 0;
  remove_releasable(segment, event.bytes);
  remove_large(segment, event.bytes);
  remove_from_stream(segment, event.bytes);
  Address begin = 0;
  Address end = 0;
  hole_around(segment, lives_.lower_bound(event.address), &begin, &end);
  remove_hole(segment, end - std::min(begin, end));
  segments_.erase(found);
  const Address gone_end = event.address + event.bytes;
  const Address segment_end = segment.base + segment.bytes;
  Segment left = segment;
  left.bytes = event.address - segment.base;
  Segment right = segment;
  right.base = gone_end;
  right.bytes = segment_end - std::min(gone_end, segment_end);
  left.live = right.live = 0;
  for (auto live = lives_.lower_bound(segment.base);
       live != lives_.end() && live->first < segment_end; ++live) {
    (live->first < event.address ? left : right).live += live->second;
  }
  if (left.bytes > 0) {
    segments_.put(left);
    add_hole(left, event.address - std::min(begin, event.address));
  }
  if (right.bytes > 0) {
    segments_.put(right);
    add_hole(right, end - std::min(gone_end, end));
  }
}

void CacheMap::allocate(const CacheEvent& event) {
  Bytes bytes = round_up(event.bytes, kBlockUnit);
  if (marks_young_) {
    const bool of_default = event.pool[0] == 0 && event.pool[1] == 0;
    const bool counts = bytes > kSmallLimit && !event.ours && of_default;
    young_.put(event.address, {++serial_, bytes, number(event, bytes),
                               counts ? walls_.served(survivors_.asked_on(event.stream)) : 0});
  }
  if (!event.ours) {
    largest_request_ = std::max(largest_request_, bytes);
  }
  Segment* const found = segments_.around(event.address);
  Address begin = 0;
  Address end = 0;
  auto after = lives_.end();
  if (found != nullptr && !found->small) {
    after = lives_.lower_bound(event.address);
    hole_around(*found, after, &begin, &end);
    // torch cuts off only what is worth a block of its own; where it makes expandable segments,
    // all.
    const Bytes left = end - std::min(event.address + bytes, end);
    bytes += left <= kSmallLimit && !expandable_ ? left : 0;
  }
  usage_.allocated += bytes;
  usage_.allocated_peak = std::max(usage_.allocated_peak, usage_.allocated);
  peak_since_ = std::max(peak_since_, usage_.allocated);
  alarm_.look(usage_.allocated);
  if (found == nullptr) {
    return;
  }
  Segment& segment = *found;
  if (segment.expandable) {
    remove_releasable(segment, bytes);
  } else if (segment.live == 0) {
    remove_releasable(segment, segment.bytes);
  }
  segment.live += bytes;
  if (segment.small) {
    return;
  }
  streams_[segment.owner.stream].live += bytes;
  remove_hole(segment, end - std::min(begin, end));
  lives_.emplace_hint(after, event.address, bytes);
  add_hole(segment, event.address - std::min(begin, event.address));
  add_hole(segment, end - std::min(event.address + bytes, end));
}

void CacheMap::free(const CacheEvent& event) {
  Bytes bytes = round_up(event.bytes, kBlockUnit);
  if (!kept_.empty()) {
    kept_.erase(event.address);
  }
  if (marks_young_) {
    young_.erase(event.address);
  }
  Segment* const found = segments_.around(event.address);
  if (found != nullptr && !found->small) {
    const auto live = lives_.find(event.address);
    if (live == lives_.end()) {
      return;  // allocated before anything was known
    }
    bytes = live->second;
    Bytes& of_stream = streams_[found->owner.stream].live;
    of_stream -= std::min(of_stream, bytes);
    Address begin = 0;
    Address end = 0;
    const auto after = lives_.erase(live);
    hole_around(*found, after, &begin, &end);
    remove_hole(*found, event.address - std::min(begin, event.address));
    remove_hole(*found, end - std::min(event.address + bytes, end));
    add_hole(*found, end - std::min(begin, end));
  }
  Bytes& counted = aside_.erase(event.address) != 0 ? usage_.aside : usage_.allocated;
  counted -= std::min(counted, bytes);
  if (found == nullptr) {
    return;
  }
  Segment& segment = *found;
  segment.live -= std::min(segment.live, bytes);
  if (segment.expandable) {
    add_releasable(segment, bytes);
  } else if (segment.live == 0) {
    add_releasable(segment, segment.bytes);
  }
}

CacheMap::Since CacheMap::since() {
  const Lock lock(mutex_);
  return {usage_, std::exchange(largest_request_, 0), std::exchange(peak_since_, usage_.allocated)};
}

CacheMap::Known CacheMap::known_of(Address address) {
  const Lock lock(mutex_);
  Known known;
  if (const Segment* found = segments_.around(address); found != nullptr) {
    known.owner = found->owner;
  }
  const Order* young = young_.find(address);
  known.serial = young != nullptr ? young->serial : 0;
  known.kept = !kept_.empty() && kept_.contains(address);
  return known;
}

bool CacheMap::has_pool(const std::array<std::uint64_t, 2>& pool) {
  const Lock lock(mutex_);
  return std::any_of(segments_.begin(), segments_.end(),
                     [&](const Segment& one) { return one.owner.pool == pool; });
}

CacheMap::PoolUsage CacheMap::usage_of(const std::array<std::uint64_t, 2>& pool) {
  const Lock lock(mutex_);
  PoolUsage usage;
  for (const Segment& segment : segments_) {
    if (segment.owner.pool == pool) {
      usage.reserved += segment.bytes;
      usage.free += segment.live == 0 ? segment.bytes : 0;
    }
  }
  return usage;
}

CacheMap::Usage CacheMap::usage() {
  const Lock lock(mutex_);
  return usage_;
}

void CacheMap::set_usage(Bytes reserved, Bytes allocated) {
  const Lock lock(mutex_);
  const Bytes before = usage_.reserved;
  usage_.reserved = reserved;
  usage_.allocated = allocated;
  usage_.allocated_peak = std::max(usage_.allocated_peak, allocated);
  peak_since_ = std::max(peak_since_, allocated);
  if (reserved > before) {
    note_reserved(before);
  }
}

void CacheMap::forget_allocated(Bytes bytes) {
  const Lock lock(mutex_);
  usage_.allocated -= std::min(usage_.allocated, bytes);
}

void CacheMap::reset_peaks() {
  const Lock lock(mutex_);
  usage_.reserved_peak = usage_.reserved;
  usage_.allocated_peak = usage_.allocated;
}

void CacheMap::set_mark(Bytes bytes) {
  const Lock lock(mutex_);
  mark_ = bytes;
}

void CacheMap::set_alarm(const Alarm& alarm) {
  const Lock lock(mutex_);
  alarm_ = alarm;
}

bool CacheMap::rang() {
  const Lock lock(mutex_);
  return alarm_.rang();
}

Bytes CacheMap::take_largest_request() {
  const Lock lock(mutex_);
  return std::exchange(largest_request_, 0);
}

void CacheMap::forget_kept() {
  const Lock lock(mutex_);
  kept_.clear();
}

void CacheMap::begin_step() {
  const Lock lock(mutex_);
  saving_until_ = kSaving;
  young_.clear();
  marks_young_ = true;
  small_peaks_ = {std::exchange(small_peak_, small_), small_peaks_.front()};
  begin_large();
  begin_streams();
}

std::uint64_t CacheMap::serial() {
  const Lock lock(mutex_);
  return serial_;
}

bool CacheMap::live(Address address) {
  const Lock lock(mutex_);
  return lives_.contains(address);
}

void CacheMap::keep(Address address) {
  const Lock lock(mutex_);
  kept_.insert(address);
}

std::optional<CacheMap::Owner> CacheMap::owner_of(Address address) {
  const Lock lock(mutex_);
  const Segment* const found = segments_.around(address);
  return found != nullptr ? std::optional(found->owner) : std::nullopt;
}

CacheMap::Hole CacheMap::largest_hole() {
  const Lock lock(mutex_);
  Hole found;
  for (const auto& [owner, holes] : holes_) {
    if (owner.pool == Owner{}.pool && !holes.empty() && *holes.rbegin() > found.bytes) {
      found = {owner, *holes.rbegin()};
    }
  }
  return found;
}

Bytes CacheMap::largest_hole(const Owner& owner) {
  const Lock lock(mutex_);
  return largest_hole_of(owner);
}

Bytes CacheMap::largest_hole_of(const Owner& owner) const {
  const auto found = holes_.find(owner);
  return found != holes_.end() && !found->second.empty() ? *found->second.rbegin() : 0;
}

// What torch takes for so many bytes: the smallest hole that has them. But one that ends where an
// expandable segment is not mapped counts as all that it could grow to, as long as the next larger
// one counts as less (get_free_block of CUDACachingAllocator.cpp, torch 2.11).
CacheMap::Holes::const_iterator CacheMap::fit(const Owner& owner, const Holes& holes, Bytes bytes) {
  auto fit = holes.lower_bound(bytes);
  if (!expandable_ || fit == holes.end() || std::next(fit) == holes.end()) {
    return fit;
  }
  growing_.clear();
  Address next = ~Address{0};  // where the segment is mapped again
  for (auto one = segments_.rbegin(); one != segments_.rend(); ++one) {
    const Segment& segment = *one;
    if (!segment.expandable || segment.small || !(segment.owner == owner)) {
      continue;
    }
    const Address end = segment.base + segment.bytes;
    Address begin = 0;
    Address stop = 0;
    hole_around(segment, lives_.lower_bound(end), &begin, &stop);
    if (begin < end) {
      growing_.push_back({end - begin, next - begin});
    }
    next = segment.base;
  }
  const auto grown = [&](Bytes hole) {
    Bytes most = 0;
    std::size_t alike = 0;
    for (const auto& [bytes, with] : growing_) {
      most = bytes == hole ? std::max(most, with) : most;
      alike += bytes == hole ? 1 : 0;
    }
    return alike > 0 && alike == holes.count(hole) ? most : hole;
  };
  for (auto after = std::next(fit); after != holes.end() && grown(*after) < grown(*fit); ++after) {
    fit = after;
  }
  return fit;
}

bool CacheMap::has_beside(const Holes& holes, Holes::const_iterator taken, Bytes bytes,
                          Bytes other) {
  if (*taken >= bytes && *taken - bytes >= other) {
    return true;
  }
  auto beside = holes.lower_bound(other);
  beside = beside == taken ? std::next(beside) : beside;
  return beside != holes.end();
}

bool CacheMap::fits_beside(const Owner& owner, Bytes bytes, Bytes kept) {
  const Lock lock(mutex_);
  const auto found = holes_.find(owner);
  if (found == holes_.end()) {
    return true;
  }
  const Holes& holes = found->second;
  const auto taken = fit(owner, holes, bytes);
  return taken == holes.end() || *taken < kept || has_beside(holes, taken, bytes, kept);
}

bool CacheMap::both_fit(const Owner& owner, Bytes bytes, Bytes other) {
  const Lock lock(mutex_);
  const auto found = holes_.find(owner);
  if (found == holes_.end()) {
    return false;
  }
  const Holes& holes = found->second;
  const auto taken = fit(owner, holes, bytes);
  return has_beside(holes, taken == holes.end() ? std::prev(taken) : taken, bytes, other);
}

Bytes CacheMap::releasable() {
  const Lock lock(mutex_);
  return releasable_;
}

Bytes CacheMap::small_releasable() {
  const Lock lock(mutex_);
  Bytes bytes = 0;
  for (const Segment& segment : segments_) {
    const bool whole = !segment.expandable && segment.live == 0;
    bytes += segment.small && segment.releasable() && whole ? segment.bytes : 0;
  }
  return bytes;
}

void CacheMap::walk(const Owner& owner, std::vector<Stretch>* stretches) {
  const Lock lock(mutex_);
  stretches->clear();
  for (const Segment& segment : segments_) {
    if (segment.small) {
      continue;
    }
    const Address base = segment.base;
    Address at = base;
    const Address end = base + segment.bytes;
    // What is free for gradients or walls to come would have to be mapped again.
    const bool kept =
        (gradients_.missing() > 0 || walls_.looks()) && survivors_.is_apart(segment.owner.stream);
    const auto add = [&](Bytes bytes, bool hole) {
      stretches->push_back({at, bytes, hole, at == base, segment.owner == owner,
                            segment.releasable() && !kept, segment.expandable, base});
      at += bytes;
    };
    for (auto live = lives_.lower_bound(base); live != lives_.end() && live->first < end; ++live) {
      if (live->first > at) {
        add(live->first - at, true);
      }
      add(live->second, false);
    }
    if (at < end) {
      add(end - at, true);
    }
  }
}

}  // namespace stagehand::core
