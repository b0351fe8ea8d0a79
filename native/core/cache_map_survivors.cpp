// What of a step is there when the next one begins, and where its requests are served then.
#include <algorithm>

#include "core/budget.hpp"
#include "core/cache_map.hpp"
#include "core/requests.hpp"

namespace stagehand::core {

// Large blocks of the default pool.
std::vector<CacheMap::Young> CacheMap::young() {
  const Lock lock(mutex_);
  std::vector<Young> all;
  young_.for_each([&](Address address, const Order& order) {
    if (order.bytes <= kSmallLimit || !lives_.contains(address) || aside_.contains(address)) {
      return;
    }
    const Segment* const segment = segments_.around(address);
    if (segment != nullptr && segment->releasable()) {
      const driver::Stream stream = survivors_.asked_on(segment->owner.stream);
      all.push_back(
          {address, {order.bytes, order.nth, stream}, order.serial > saving_until_, order.request});
    }
  });
  return all;
}

void CacheMap::serve_apart(const std::vector<Survivors::One>& survivors, Bytes most,
                           const std::vector<KeptGradients::Left>& gradients, Bytes walls_most,
                           Bytes walls_roof) {
  const Lock lock(mutex_);
  walls_.begin_step(walls_most);
  walls_roof_ = walls_roof;
  survivors_.begin_step(survivors, most);
  gradients_.begin_step(gradients);
}

void CacheMap::end_saving(Bytes gradients, Bytes roof, std::vector<Walls::One> walls,
                          Bytes walls_most) {
  const Lock lock(mutex_);
  saving_until_ = std::min(saving_until_, serial_);
  walls_.end_saving(std::move(walls), walls_most);
  if (gradients > 0) {
    gradients_.begin_backward(gradients);
    gradients_roof_ = roof;
  }
}

void CacheMap::end_backward() {
  const Lock lock(mutex_);
  gradients_.end_backward();
}

// What was freed is no wall, though the GPU may not be done with it.
bool CacheMap::follows() {
  const Lock lock(mutex_);
  return gradients_.follows() || walls_.looks();
}

bool CacheMap::wants_walls() {
  const Lock lock(mutex_);
  return walls_.room() > 0;
}

// What the engine asks for, or has made again, is not asked for in every backward.
std::uint32_t CacheMap::number(const CacheEvent& event, Bytes bytes) {
  const std::uint32_t nth = survivors_.served(bytes);
  if (serial_ <= saving_until_) {
    return nth;
  }
  const bool counts = bytes > kSmallLimit && !event.ours && !MakesAgain::here();
  return counts ? gradients_.served(event.address, bytes, survivors_.asked_on(event.stream)) : 0;
}

bool CacheMap::has_room_apart(driver::Stream apart, Bytes bytes, Bytes roof) const {
  return largest_hole_of(Owner{apart}) >= bytes ||
         fits_under(usage_.reserved, growth_of(bytes), roof);
}

// A survivor has no room of its own: it is served apart though that may make others leave.
driver::Stream CacheMap::place(Bytes bytes, driver::Stream stream) {
  const Lock lock(mutex_);
  bytes = round_up(bytes, kBlockUnit);
  const std::optional<driver::Stream> apart = survivors_.apart_of(stream);
  if (!apart.has_value()) {
    return stream;
  }
  if (const auto& all_of = survivors_.all_of(); all_of.has_value() && all_of->stream == stream &&
                                                has_room_apart(*apart, bytes, all_of->roof)) {
    return *apart;
  }
  if (gradients_.wants(bytes, stream) && !MakesAgain::here() &&
      has_room_apart(*apart, bytes, gradients_roof_)) {
    return *apart;
  }
  if (walls_.wants(stream) && has_room_apart(*apart, bytes, walls_roof_)) {
    return *apart;
  }
  return survivors_.place(bytes, stream);
}

bool CacheMap::knows_gradients() {
  const Lock lock(mutex_);
  return gradients_.knows_any();
}

Bytes CacheMap::missing_apart() {
  const Lock lock(mutex_);
  return gradients_.missing() + walls_.room();
}

bool CacheMap::is_apart(driver::Stream stream) {
  const Lock lock(mutex_);
  return survivors_.is_apart(stream);
}

Bytes CacheMap::growth_apart(driver::Stream stream) {
  const Lock lock(mutex_);
  const Bytes missing = gradients_.missing();
  const Bytes walls = walls_.room();
  if (missing + walls == 0 || survivors_.is_apart(stream)) {
    return 0;
  }
  Bytes mapped = 0;
  Bytes free = 0;
  for (const auto& [other, count] : streams_) {
    if (survivors_.is_apart(other)) {
      mapped += count.mapped;
      free += count.mapped - std::min(count.mapped, count.live);
    }
  }
  const Bytes all = walls > 0 ? gradients_.held() + missing + walls : 0;
  return std::max(missing - std::min(missing, free), all - std::min(all, mapped));
}

std::uint64_t CacheMap::survivor_sizes() {
  const Lock lock(mutex_);
  return walls_.looks() ? ~std::uint64_t{0} : survivors_.sizes() | gradients_.sizes();
}

std::optional<driver::Stream> CacheMap::lacks_apart() {
  const Lock lock(mutex_);
  for (const auto* asked : {&gradients_.streams(), &walls_.streams()}) {
    const auto lacking = std::find_if(asked->begin(), asked->end(), [&](driver::Stream stream) {
      return !survivors_.apart_of(stream).has_value();
    });
    if (lacking != asked->end()) {
      return *lacking;
    }
  }
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
