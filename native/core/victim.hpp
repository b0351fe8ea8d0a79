// Which blocks to evict for a request: pure decisions over a snapshot of one arena.
#pragma once

#include <bit>
#include <compare>
#include <cstddef>
#include <span>

#include "core/types.hpp"

namespace stagehand::core {

// How soon what is asked for so many uses from now is wanted: 0 for later than it could matter,
// more the sooner, by powers of two.
inline std::uint64_t nearness(std::uint64_t uses_away) {
  constexpr int kSoon = 5;  // 32 uses: some layers' backward
  const int bits = std::bit_width(uses_away);
  return bits > kSoon ? 0 : static_cast<std::uint64_t>(kSoon + 1 - bits);
}

// One block of an arena, in address order, as the choice sees it.
struct Candidate {
  enum class Kind : std::uint8_t {
    wall,    // cannot be had: live, unmapped, or its record may not be evicted
    idle,    // free, or evicting: costs no new copy
    victim,  // retained: costs an eviction
  };
  Kind kind = Kind::wall;
  Bytes size = 0;
  // Of a victim: place in the order of next use; 0 = needed last, or it leaves in any case.
  std::uint64_t age = 0;
  std::uint64_t copy = 0;  // the number of the copy out that still reads it, 0 = none
  std::uint64_t near = 0;  // of a victim: nearness
  bool idle = false;       // free for whoever may have it, which is not always who asks
};

// Less is better: in this order.
struct WindowCost {
  bool any_victim = false;
  std::uint64_t soonest = 0;  // the greatest age
  std::uint64_t wait = 0;     // the last copy, where that counts before bytes
  std::uint64_t near = 0;     // the greatest
  Bytes victim_bytes = 0;
  std::uint64_t last_copy = 0;  // the greatest
  Bytes bytes = 0;

  auto operator<=>(const WindowCost&) const = default;
};

struct Window {
  std::size_t begin = 0;
  std::size_t end = 0;  // one past the last
  bool found = false;
  std::size_t victims = 0;
  WindowCost cost;
};

// The run of neighbours that makes a hole of `bytes` at the least cost: a run without victims if
// there is one, else the one whose soonest-needed victim is needed latest; then, where that counts
// before bytes, the one whose last copy out was queued first; then, of victims that leave in any
// case, not the one with some that would have to come back at once; then the one with fewer victim
// bytes; then the one whose last copy out was queued first. Oldest first with free neighbours
// counted (Coop, and IBM's LMS, reclaim contiguous runs for the same reason: freed bytes that do
// not join are unusable). `copies_first`: where all of its victims leave in any case, the last copy
// counts before bytes.
Window choose_window(std::span<const Candidate> blocks, Bytes bytes, bool copies_first = false);

}  // namespace stagehand::core
