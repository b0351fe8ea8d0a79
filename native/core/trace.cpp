#include "core/trace.hpp"

#include <algorithm>

namespace stagehand::core {

namespace {
constexpr std::size_t kAround = 4;
}  // namespace

bool Trace::repeats(const Trace& other) const {
  return depth == other.depth && high == other.high && begins_like(other) &&
         std::equal(entries.begin(), entries.end(), other.entries.begin(), other.entries.end(),
                    [](const auto& a, const auto& b) { return a.block_bytes == b.block_bytes; });
}

bool Trace::begins_like(const Trace& other) const {
  const auto [less, more] = std::minmax(live_before, other.live_before);
  return more - less <= std::min(high, other.high) / kAlike;
}

Bytes Trace::evicted_bytes() const {
  Bytes bytes = 0;
  for (const Entry& entry : entries) {
    bytes += entry.evicted ? entry.block_bytes : 0;
  }
  return bytes;
}

Bytes Trace::memory() const {
  return entries.capacity() * sizeof(Entry) + by_use.capacity() * sizeof(std::uint32_t) +
         (live.capacity() + requests.capacity() + requests_before.capacity()) * sizeof(Bytes);
}

Bytes Trace::request_at(std::size_t place) const {
  const auto here = [&](std::size_t i) {
    const auto at = [&](const std::vector<Bytes>& all) { return i < all.size() ? all[i] : 0; };
    return std::max(at(requests), at(requests_before));
  };
  Bytes request = here(place);
  if (request == 0) {
    for (std::size_t i = place - std::min(place, kAround); i <= place + kAround; ++i) {
      request = std::max(request, here(i));
    }
  }
  return request;
}

}  // namespace stagehand::core
