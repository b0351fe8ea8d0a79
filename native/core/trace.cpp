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
         (full.capacity() + at_ns.capacity() + least.capacity() + live.capacity() +
          requests.capacity() + requests_before.capacity()) *
             sizeof(Bytes);
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

KnownStep Trace::known(std::vector<KnownRecord>* records) const {
  for (const Entry& entry : entries) {
    records->push_back({entry.block_bytes, entry.retained, entry.used_moment});
  }
  return {*records, full, at_ns, high, out_bytes_per_ns, in_bytes_per_ns};
}

std::vector<Fate> Trace::fates() const {
  std::vector<Fate> all;
  for (const Entry& entry : entries) {
    all.push_back(entry.leaves ? Fate::leave : Fate::stay);
  }
  return all;
}

void Trace::choose() {
  std::vector<KnownRecord> records;
  const std::vector<Fate> was = fates();
  const std::vector<Fate> chosen = choose_fates(known(&records), was);
  planned = planned || chosen != was;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    entries[i].leaves = chosen[i] == Fate::leave;
  }
}

void Trace::expect() {
  std::vector<KnownRecord> records;
  const std::vector<Bytes> of_moments = least_occupied(known(&records), fates());
  least.assign(by_use.size() + 1, 0);
  std::size_t use = 0;
  for (std::size_t m = 0; m < of_moments.size(); ++m) {
    while (use < by_use.size() && entries[by_use[use]].used_moment <= m) {
      ++use;
    }
    least[use] = std::max(least[use], of_moments[m]);
  }
}

}  // namespace stagehand::core
