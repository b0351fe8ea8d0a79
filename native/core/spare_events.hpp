// Events that nobody uses now. The driver takes the host up to half a millisecond to make one while
// memory is pinned or mapped beside it: a cold first step on an H200 spent 480 ms there. So what a
// step needs is made before that.
//
// Guarded by the device's lock. What is kept is of the device's own context.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "core/gate.hpp"

namespace stagehand::core {

class SpareEvents {
 public:
  enum class Kind : std::uint8_t { order, time };  // the latter can be asked how long

  explicit SpareEvents(Gate& gate) : gate_(gate) {}

  // Before a step: what most need, once. Then where a quarter of that is not to spare, since the
  // host is ahead of the GPU by whole steps, as much as is lacking; and where something had to be
  // made since the last call, twice that, at most half of what most need. Eight times that in all.
  // What the driver refuses is made when it is needed.
  void fill() {
    for (const Kind kind : {Kind::order, Kind::time}) {
      Spare& spare = of(kind);
      const std::size_t most = kMostTimes * count(kind);
      const std::size_t lacked = std::min(2 * (spare.late - spare.known), count(kind) / 2);
      const std::size_t to_spare = std::min(count(kind) / 4, spare.events.size());
      const std::size_t more = filled_ ? std::max(lacked, count(kind) / 4 - to_spare) : count(kind);
      spare.known = spare.late;
      spare.events.reserve(spare.events.size() + more);
      for (std::size_t i = 0; i < more && spare.made < most; ++i) {
        const driver::Event event = make(kind);
        if (event == nullptr) {
          break;
        }
        ++spare.made;
        spare.events.push_back(event);
      }
    }
    filled_ = true;
  }
  // Null where the driver refuses.
  driver::Event take(Kind kind) {
    Spare& spare = of(kind);
    if (spare.events.empty()) {
      spare.late += filled_ ? 1 : 0;
      return make(kind);
    }
    const driver::Event event = spare.events.back();
    spare.events.pop_back();
    return event;
  }
  // One of the context that is current. Null where the driver refuses.
  driver::Event make(Kind kind) {
    driver::Event event = nullptr;
    const unsigned flags = kind == Kind::order ? driver::kEventDisableTiming : 0;
    return gate_->event_create(&event, flags) == driver::kSuccess ? event : nullptr;
  }
  void give(Kind kind, driver::Event event) { of(kind).events.push_back(event); }
  bool empty(Kind kind) { return of(kind).events.empty(); }
  // How many were made in the middle of a step: each may have held the host.
  std::uint64_t late() const { return spare_[0].late + spare_[1].late; }

 private:
  // What 500 records and their copies name before the GPU has come to the first of them: all that
  // the recorded steps of tests/native/traces need at half of their activations.
  static constexpr std::size_t count(Kind kind) { return kind == Kind::order ? 3072 : 1280; }

  static constexpr std::size_t kMostTimes = 8;

  struct Spare {
    std::vector<driver::Event> events;
    std::size_t made = 0;     // by `fill`
    std::uint64_t late = 0;   // that a step had to make,
    std::uint64_t known = 0;  // of those, as `fill` saw it last
  };
  Spare& of(Kind kind) { return spare_[static_cast<std::size_t>(kind)]; }

  Gate& gate_;
  std::array<Spare, 2> spare_;
  bool filled_ = false;
};

}  // namespace stagehand::core
