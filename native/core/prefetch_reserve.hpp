// How much room prefetch leaves below `low`, beside what it knows to be needed: learned from what
// came too early and had to leave again, and forgotten by an eighth at a time. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

class PrefetchReserve {
 public:
  Bytes bytes() const { return bytes_; }
  unsigned patience() const { return patience_; }

  // A pool is entered. Inside another budget nothing is known of how fast to forget.
  void enter(Bytes high, Bytes low) {
    if (high_ != high) {
      patience_ = 1;
      since_ = kept_ = 0;
      forgot_ = false;
      high_ = high;
    }
    bytes_ = std::min(bytes_, low);
  }

  // A step begins. `link_bounds`: the GPU waits for the lanes most of all; there an idle moment of
  // a lane costs more than what is copied twice.
  void begin_step(bool link_bounds) {
    if (++since_ >= kLong * patience_) {
      since_ = 0;
      patience_ = std::max(patience_ / 2, 1U);
    }
    if ((++kept_ >= patience_ || link_bounds) && bytes_ > 0) {
      bytes_ -= bytes_ / 8;
      forgot_ = true;
      kept_ = 0;
    }
  }

  // So many bytes came too early. Where an eighth was forgotten since the last ones did, that was
  // too soon: a step in which it happens takes up to a fifth longer. Where nothing was, and it is
  // not one step after the other until there is enough, room is not what they lacked.
  void came_early(Bytes bytes, Bytes low) {
    bytes_ = std::max(bytes_, std::min(bytes_ + bytes, low / kMostShare));
    if (!forgot_ && since_ > kApart) {
      patience_ = std::max(patience_ / 2, 1U);
    } else {
      patience_ = forgot_ ? std::min(2 * patience_, kMostPatience) : patience_;
      kept_ = 0;
    }
    forgot_ = false;
    since_ = 0;
  }

 private:
  static constexpr unsigned kMostPatience = 64;
  static constexpr Bytes kMostShare = 2;  // of `low`
  static constexpr unsigned kApart = 3;   // steps: what comes early after more is another reason
  static constexpr unsigned kLong = 8;    // times as many without any: it is forgotten faster again

  Bytes bytes_ = 0;
  Bytes high_ = 0;
  unsigned patience_ = 1;  // an eighth takes so many steps
  unsigned kept_ = 0;      // steps since the last one,
  unsigned since_ = 0;     // and since some came early
  bool forgot_ = false;    // an eighth, since those
};

// One of each plan (Plan::in_use; 0: none is followed). What one needed that was tried for two
// steps is not left to the one that is gone back to: it kept most of what backward asks for away
// there, for as many steps as forgetting takes.
class PlanReserves {
 public:
  const PrefetchReserve& now() const { return now_.reserve; }
  void begin_step(std::uint64_t plan, Bytes high, Bytes low, bool link_bounds) {
    if (plan != now_.plan) {
      follow(plan);
    }
    now_.reserve.enter(high, low);
    now_.reserve.begin_step(link_bounds);
  }
  void came_early(Bytes bytes, Bytes low) { now_.reserve.came_early(bytes, low); }

 private:
  static constexpr std::size_t kPlans = 32;

  struct One {
    std::uint64_t plan = 0;
    PrefetchReserve reserve{};
  };

  // One that is new begins with what the one before it has learned: what weights need, no plan
  // changes.
  void follow(std::uint64_t plan) {
    const auto found = std::find_if(others_.begin(), others_.end(),
                                    [&](const One& one) { return one.plan == plan; });
    One next{plan, now_.reserve};
    if (found != others_.end()) {
      next = *found;
      others_.erase(found);
    }
    if (others_.size() == kPlans) {
      others_.erase(others_.begin());  // the one that was left first
    }
    others_.push_back(now_);
    now_ = next;
  }

  One now_;
  std::vector<One> others_;  // the one that was left last comes last
};

}  // namespace stagehand::core
