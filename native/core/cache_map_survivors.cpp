// What of a step is there when the next one begins, and where its requests are served then.
#include <algorithm>

#include "core/budget.hpp"
#include "core/cache_map.hpp"

namespace stagehand::core {

// Large blocks of the default pool that were asked for while the step saved.
std::vector<CacheMap::Young> CacheMap::survivors() {
  const Lock lock(mutex_);
  std::vector<Young> all;
  for (const auto& [address, order] : young_) {
    if (order.serial > saving_until_ || !lives_.contains(address) || aside_.contains(address)) {
      continue;
    }
    const auto segment = segment_of(address);
    if (segment != segments_.end() && segment->second.releasable()) {
      all.push_back({address, {order.bytes, order.nth, segment->second.owner.stream}});
    }
  }
  return all;
}

void CacheMap::serve_apart(const std::vector<Survivors::One>& survivors, Bytes most) {
  const Lock lock(mutex_);
  survivors_.begin_step(survivors, most);
}

void CacheMap::end_saving() {
  const Lock lock(mutex_);
  saving_until_ = std::min(saving_until_, serial_);
}

driver::Stream CacheMap::place(Bytes bytes, driver::Stream stream) {
  const Lock lock(mutex_);
  bytes = round_up(bytes, kBlockUnit);
  if (const auto& all_of = survivors_.all_of(); all_of.has_value() && all_of->stream == stream) {
    const std::optional<driver::Stream> apart = survivors_.apart_of(stream);
    if (apart.has_value() && (largest_hole_of(Owner{*apart}) >= bytes ||
                              fits_under(usage_.reserved, growth_of(bytes), all_of->roof))) {
      return *apart;
    }
  }
  return survivors_.place(bytes, stream);
}

std::uint64_t CacheMap::survivor_sizes() {
  const Lock lock(mutex_);
  return survivors_.sizes();
}

std::optional<driver::Stream> CacheMap::lacks_apart() {
  const Lock lock(mutex_);
  return survivors_.lacks();
}

void CacheMap::give_apart(driver::Stream stream, driver::Stream apart) {
  const Lock lock(mutex_);
  survivors_.give(stream, apart);
}

void CacheMap::serve_all_apart(driver::Stream stream, Bytes roof) {
  const Lock lock(mutex_);
  survivors_.serve_all(stream, roof);
}

void CacheMap::serve_few_apart() {
  const Lock lock(mutex_);
  survivors_.serve_few();
}

}  // namespace stagehand::core
