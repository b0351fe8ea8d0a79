// Where the requests of one plan's steps are served: where they were in such a step before.
//
// The best free block for a request hangs on when copies end and on what has come back by then,
// and no two steps agree on that. In memory that is nearly full, one block elsewhere leaves a later
// request without a hole, and pieces must be mapped for it; the next step's holes are elsewhere
// again. So where steps of a plan that is kept still map, each large request, and each record that
// comes back, is served at the address that it had the last time. What comes ahead waits for that,
// but hardly longer than it did then.
//
// The usual address is a guess: what is not free cannot be taken, and the request is served as any.
//
// Only what is decided; guarded by the device's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>

#include "core/flat_map.hpp"
#include "core/types.hpp"

namespace stagehand::core {

class UsualAddresses {
 public:
  struct Usual {
    Address at = 0;        // 0: nobody knows
    Bytes bytes = 0;       // of the block
    std::size_t when = 0;  // the place of the step (Plan::place) that it was taken at first
  };
  using Key = FlatMap<Usual>::Key;  // of a request, in each step of a plan; 0: of none

  // How much was done so far, of all steps.
  struct Done {
    std::uint64_t gathers = 0;     // holes
    std::uint64_t over_bytes = 0;  // mapped above `high`
  };
  // A step begins that runs this plan (Plan::in_use), 0 where none is kept.
  void begin_step(std::uint64_t plan, const Done& done);
  // Whether there are any for the newest step, as long as it runs the plan that it began with.
  bool kept() const { return now_ != nullptr && now_->kept; }
  std::uint64_t plan() const { return now_ != nullptr ? now_->plan : 0; }
  // The program's next request at this place of its step. The number starts anew at each place: so
  // what a step asks for once more, or not at all, changes no key of another place.
  Key request(std::size_t place);
  // The record that was saved as the step's n-th comes back.
  static Key comes_back(std::uint32_t n) { return kComesBack | n; }
  // Of a block of this size. Nothing for the key 0.
  Usual of(Key key, Bytes bytes) const;
  // Where it was served now; with no address, that it has none.
  void note(Key key, const Usual& usual);
  // Whether it is worth to wait for at this place of the step.
  static bool may_come(const Usual& usual, std::size_t place) {
    return place <= usual.when + kLater;
  }

 private:
  static constexpr Key kComesBack = Key{1} << 63;
  // Requests; others have no key, as most of an evaluation between two steps.
  static constexpr std::uint64_t kAtOnePlace = 1024;
  static constexpr std::size_t kPlans = 8;  // kinds of steps that take turns
  static constexpr std::size_t kLater = 8;  // places: copies end a little later

  struct One {
    std::uint64_t plan = 0;
    bool kept = false;  // a step of it has gathered, and none since went over `high`
    FlatMap<Usual> usual{};
  };

  std::list<One> all_;        // the one used last first
  One* now_ = nullptr;        // the newest step's
  Done done_;                 // when that began
  std::size_t place_ = 0;     // of its newest request,
  std::uint64_t number_ = 0;  // and its number there
};

}  // namespace stagehand::core
