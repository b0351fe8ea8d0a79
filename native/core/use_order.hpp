// The order in which weight groups are used, learned from their uses so far: what follows is what
// followed the last time. Pure: no driver, no lock.
//
// Nothing says where a step begins or ends. So sampling between steps, several backwards for one
// optimizer step, two models in turn and blocks that are used twice need no words of their own.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

using GroupId = std::uint32_t;
inline constexpr GroupId kNoGroup = ~GroupId{0};

enum class UseKind : std::uint8_t {
  forward,
  sampling,  // a forward without gradients, or an optimizer's step
  backward,  // also what a checkpoint runs again
};

struct Use {
  GroupId group = kNoGroup;
  UseKind kind = UseKind::forward;
  bool operator==(const Use&) const = default;
};

class UseOrder {
 public:
  static constexpr std::uint32_t kNever = ~std::uint32_t{0};

  // Before anything is known of them: forward in this order, then backward in the reverse of it.
  void presume(std::span<const GroupId> groups);
  // False: it is the use that was told last, which goes on.
  bool used(Use use);
  void forget(GroupId group);

  // The uses that are expected next, nearest first, until what is expected repeats.
  const std::vector<Use>& upcoming() const { return upcoming_; }
  // How many uses away the group's next is, 1 the nearest; kNever where none is expected.
  std::uint32_t distance(GroupId group) const { return at(next_, group); }
  // Its next use; of no group where none is expected.
  Use next_use(GroupId group) const {
    const std::uint32_t away = distance(group);
    return away == kNever ? Use{} : upcoming_[away - 1];
  }
  // Whether forward turns into backward, or back, before it is used again.
  bool turns_before(GroupId group) const {
    return distance(group) == kNever || past_.empty() || next_use(group).kind != past_.back().kind;
  }
  // How many of the next uses are of the kind of what is used now, up to the first of another: what
  // is left of this forward, backward or optimizer's step.
  std::uint32_t rest_of_pass() const { return rest_; }
  // What is used now; of no group before the first.
  Use current() const { return past_.empty() ? Use{} : past_.back(); }
  // The same of its next backward, which is when what it saved is needed.
  std::uint32_t backward_distance(GroupId group) const { return at(backward_, group); }

 private:
  static constexpr std::size_t kRemembered = 2048;  // uses
  static constexpr std::size_t kContext = 32;       // of them, that tell places apart
  static constexpr std::size_t kPlaces = 8;         // of one use, that are looked at

  static std::uint32_t at(const std::vector<std::uint32_t>& distances, GroupId group) {
    return group < distances.size() ? distances[group] : kNever;
  }
  std::size_t likeliest(bool any_kind) const;
  void expect();

  std::deque<Use> past_;
  std::vector<Use> upcoming_;
  std::vector<std::uint32_t> next_;  // by group
  std::vector<std::uint32_t> backward_;
  std::uint32_t rest_ = 0;
};

}  // namespace stagehand::core
