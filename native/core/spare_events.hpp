// Events that nobody uses now. The driver takes the host up to half a millisecond to make one while
// memory is pinned or mapped beside it: a cold first step on an H200 spent 480 ms there. So what a
// step needs is made before that.
//
// Guarded by the device's lock. What is kept is of the device's own context.
#pragma once

#include <array>
#include <vector>

#include "core/gate.hpp"

namespace stagehand::core {

class SpareEvents {
 public:
  enum class Kind : std::uint8_t { order, time };  // the latter can be asked how long

  explicit SpareEvents(Gate& gate) : gate_(gate) {}

  // Once. What the driver refuses is made when it is needed.
  void fill() {
    if (filled_) {
      return;
    }
    filled_ = true;
    for (const Kind kind : {Kind::order, Kind::time}) {
      std::vector<driver::Event>& spare = of(kind);
      spare.reserve(count(kind));
      while (spare.size() < count(kind)) {
        const driver::Event event = make(kind);
        if (event == nullptr) {
          return;
        }
        spare.push_back(event);
      }
    }
  }
  // Null where the driver refuses.
  driver::Event take(Kind kind) {
    std::vector<driver::Event>& spare = of(kind);
    if (spare.empty()) {
      late_ += filled_ ? 1 : 0;
      return make(kind);
    }
    const driver::Event event = spare.back();
    spare.pop_back();
    return event;
  }
  // One of the context that is current. Null where the driver refuses.
  driver::Event make(Kind kind) {
    driver::Event event = nullptr;
    const unsigned flags = kind == Kind::order ? driver::kEventDisableTiming : 0;
    return gate_->event_create(&event, flags) == driver::kSuccess ? event : nullptr;
  }
  void give(Kind kind, driver::Event event) { of(kind).push_back(event); }
  bool empty(Kind kind) { return of(kind).empty(); }
  // How many were made in the middle of a step: each may have held the host.
  std::uint64_t late() const { return late_; }

 private:
  // What 500 records and their copies name before the GPU has come to the first of them: all that
  // the recorded steps of tests/native/traces need at half of their activations.
  static constexpr std::size_t count(Kind kind) { return kind == Kind::order ? 3072 : 1280; }

  std::vector<driver::Event>& of(Kind kind) { return spare_[static_cast<std::size_t>(kind)]; }

  Gate& gate_;
  std::array<std::vector<driver::Event>, 2> spare_;
  bool filled_ = false;
  std::uint64_t late_ = 0;
};

}  // namespace stagehand::core
