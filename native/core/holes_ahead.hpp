// Requests that found no hole in torch's cache, though there were bytes enough: blocks that stay
// lay in every stretch. In the next steps their holes are made some places earlier. Pure.
#pragma once

#include <map>
#include <utility>

#include "core/cache_map.hpp"

namespace stagehand::core {

class HolesAhead {
 public:
  struct Hole {
    std::size_t place = 0;  // of the request: so many records were saved or asked for before it
    Bytes bytes = 0;
    CacheMap::Owner owner;
    bool first = false;  // before requests that come earlier
  };
  // No hole could be made for this one, in a step with that plan (Plan::in_use): in another's steps
  // blocks lie elsewhere. Each time it is wanted earlier: nobody knows when the last stretch that
  // would do is broken up.
  void lacked(std::uint64_t plan, const Hole& hole, std::uint32_t step);
  // The next one that is wanted by now, of those from place `from` on; null without any. `soon`:
  // it is worth making others leave for it.
  const Hole* wanted(std::uint64_t plan, std::size_t now, std::size_t from, bool* soon) const;
  // In this step it is not made yet, for a request that comes earlier. Where it is lacking in the
  // same step, it comes first from then on.
  void postponed(std::uint64_t plan, const Hole& hole, std::uint32_t step);
  // It is made after all.
  void made(std::uint64_t plan, const Hole& hole) { postponed(plan, hole, 0); }
  bool empty() const { return known_.empty(); }

 private:
  static constexpr std::size_t kEarliest = 64;   // places ahead; what lacked even so is given up
  static constexpr std::size_t kEarlier = 2;     // places, each time
  static constexpr std::size_t kForNothing = 4;  // places before that, where the hole is there
  static constexpr std::size_t kMost = 64;       // holes; those of the oldest plans go

  struct Known {
    Hole hole;
    std::size_t ahead = 1;
    std::uint32_t postponed_in = 0;  // a step
  };
  std::map<std::pair<std::uint64_t, std::size_t>, Known> known_;  // by plan and place
};

}  // namespace stagehand::core
