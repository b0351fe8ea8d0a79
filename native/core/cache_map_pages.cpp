// What the engine itself has torch hand out, and how much each stream has of segments for large
// blocks.
#include <algorithm>
#include <utility>

#include "core/cache_map.hpp"

namespace stagehand::core {

void CacheMap::forget_request(Bytes allocated_peak_before) {
  const Lock lock(mutex_);
  largest_request_ = 0;
  peak_since_ = usage_.allocated;
  usage_.allocated_peak = std::max(allocated_peak_before, usage_.allocated);
}

void CacheMap::set_aside(Address address, Bytes allocated_peak_before) {
  {
    const Lock lock(mutex_);
    if (const auto live = lives_.find(address); live != lives_.end()) {
      aside_.insert(address);
      usage_.allocated -= std::min(usage_.allocated, live->second);
      usage_.aside += live->second;
    }
  }
  forget_request(allocated_peak_before);
}

void CacheMap::add_large(const Segment& segment, Bytes bytes) {
  if (segment.counts_as_large()) {
    by_pages_ = segment.expandable;
    LargeCount& count = large_[segment.owner];
    count.mapped += bytes;
    count.peak = std::max({count.peak, count.mapped, std::exchange(count.lacking, 0) + bytes});
  }
}

void CacheMap::remove_large(const Segment& segment, Bytes bytes) {
  if (segment.counts_as_large()) {
    Bytes& mapped = large_[segment.owner].mapped;
    mapped -= std::min(mapped, bytes);
  }
}

void CacheMap::begin_large() {
  for (auto one = large_.begin(); one != large_.end();) {
    LargeCount& count = one->second;
    const Bytes before = count.before.front() != 0 ? count.before.front() : kUnlimited;
    count.before = {std::exchange(count.peak, count.mapped), before};
    count.lacking = 0;
    one =
        count.before.front() == 0 ? large_.erase(one) : std::next(one);  // it may never come again
  }
}

std::vector<CacheMap::Large> CacheMap::large() {
  const Lock lock(mutex_);
  std::vector<Large> all;
  for (const auto& [owner, count] : large_) {
    const auto& [before, earlier] = count.before;
    if (!survivors_.is_apart(owner.stream)) {
      all.push_back({owner, count.mapped, before, std::min(before, earlier)});
    }
  }
  return all;
}

bool CacheMap::by_pages() {
  const Lock lock(mutex_);
  return by_pages_;
}

void CacheMap::lacks_hole(const Owner& owner) {
  const Lock lock(mutex_);
  if (const auto found = large_.find(owner); found != large_.end()) {
    found->second.lacking = found->second.mapped;
  }
}

void CacheMap::add_to_stream(const Segment& segment, Bytes bytes) {
  if (!segment.small) {
    StreamCount& count = streams_[segment.owner.stream];
    count.mapped += bytes;
    count.peak = std::max(count.peak, count.mapped);
  }
}

void CacheMap::remove_from_stream(const Segment& segment, Bytes bytes) {
  if (!segment.small) {
    Bytes& mapped = streams_[segment.owner.stream].mapped;
    mapped -= std::min(mapped, bytes);
  }
}

void CacheMap::begin_streams() {
  for (auto& [stream, count] : streams_) {
    count.before = {std::exchange(count.peak, count.mapped), count.before.front()};
  }
  std::erase_if(streams_, [](const auto& one) {  // it may never come again
    return one.second.before == std::array<Bytes, 2>{};
  });
}

Bytes CacheMap::growth_of_others(driver::Stream stream) {
  const Lock lock(mutex_);
  Bytes growth = 0;
  for (const auto& [other, count] : streams_) {
    const Bytes most = std::max({count.peak, count.before.front(), count.before.back()});
    growth += other != stream && !survivors_.is_apart(other) ? most - count.mapped : 0;
  }
  return growth;
}

}  // namespace stagehand::core
