#include "core/standing.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"

namespace stagehand::core {

namespace {
bool before(Plan::Place a, Plan::Place b) {
  return a.step != b.step ? a.step < b.step : a.index < b.index;
}
}  // namespace

GroupId Standing::add(Bytes bytes, std::byte* host) {
  GroupId id = static_cast<GroupId>(groups_.size());
  if (spare_.empty()) {
    groups_.emplace_back();
    spare_.reserve(groups_.size());  // so that removing needs no memory
  } else {
    id = spare_.back();
    spare_.pop_back();
  }
  const std::uint32_t generation = groups_[id].generation + 1;
  groups_[id] = {};
  groups_[id].generation = generation;
  groups_[id].bytes = bytes;
  groups_[id].host = host;
  groups_[id].alive = true;
  ++count_;
  bytes_ += bytes;
  return id;
}

void Standing::retire(GroupId id) {
  SH_CHECK(groups_[id].alive && !groups_[id].home() && groups_[id].holds == 0);
  bytes_ -= groups_[id].bytes;
  groups_[id] = {.generation = groups_[id].generation};
  order_.forget(id);
  --count_;
}

void Standing::remove(GroupId id) {
  SH_CHECK(!groups_[id].alive);
  spare_.push_back(id);
}

bool Standing::used(Use use, Plan::Place saves, Bytes saved) {
  const Use before_it = order_.current();
  if (!order_.used(use)) {
    return false;
  }
  if (alive(before_it.group)) {
    groups_[before_it.group].beside[static_cast<std::size_t>(before_it.kind)] = beside_;
  }
  beside_ = 0;
  groups_[use.group].trains |= use.kind != UseKind::sampling;
  groups_[use.group].saved[static_cast<std::size_t>(use.kind)] = saved;
  if (!marks_.empty() && before(saves, marks_.back().from)) {
    saves = marks_.back().from;  // the newest record is gone: places only grow
  }
  marks_.push_back({saves, use.group});
  if (marks_.size() > kMarks) {
    marks_.pop_front();
  }
  return true;
}

// An optimizer's step needs all of its state, so which of it leaves before costs nothing.
std::uint32_t Standing::counted_distance(GroupId id) const {
  const std::uint32_t away = order_.distance(id);
  const bool in_step = order_.current().kind == UseKind::sampling;
  return !in_step && away != UseOrder::kNever && is_state(id) ? UseOrder::kNever - 1 : away;
}

// Forward fills the memory up, and copies out end in the order in which they were queued. An
// optimizer's step queues them as it goes, so what it used first leaves first for nothing.
bool Standing::leaves_later(GroupId id, GroupId other) const {
  const WeightGroup& one = groups_[id];
  const WeightGroup& two = groups_[other];
  const std::uint32_t a = counted_distance(id);
  const std::uint32_t b = counted_distance(other);
  if (a != b) {
    return a < b;
  }
  if ((one.dirty > 0) != (two.dirty > 0)) {
    return one.dirty > 0;
  }
  if (one.dirty == 0 && one.turn != two.turn && order_.current().kind == UseKind::forward) {
    return one.turn > two.turn;
  }
  const std::uint32_t in = order_.distance(id);
  const std::uint32_t other_in = order_.distance(other);
  return in != other_in ? in < other_in : one.bytes <= two.bytes;
}

GroupId Standing::farthest() const {
  GroupId found = kNoGroup;
  for (GroupId id = 0; id < groups_.size(); ++id) {
    if (may_go(id) && (found == kNoGroup || !leaves_later(id, found))) {
      found = id;
    }
  }
  return found;
}

GroupId Standing::farthest_as_large(Bytes bytes) const {
  GroupId found = kNoGroup;
  for (GroupId id = 0; id < groups_.size(); ++id) {
    if (may_go(id) && groups_[id].bytes >= bytes &&
        (found == kNoGroup || order_.distance(id) > order_.distance(found))) {
      found = id;
    }
  }
  return found;
}

GroupId Standing::written_next(Bytes leaving) const {
  GroupId found = kNoGroup;
  if (leaving == 0) {
    return found;
  }
  for (GroupId id = 0; id < groups_.size(); ++id) {
    if (may_go(id) && groups_[id].dirty > 0 && order_.distance(id) > kAhead &&
        (found == kNoGroup || !leaves_later(id, found))) {
      found = id;
    }
  }
  Bytes before_it = 0;
  for (GroupId id = 0; found != kNoGroup && id < groups_.size(); ++id) {
    const WeightGroup& group = groups_[id];
    const bool clean = group.may_leave() && group.dirty == 0;
    before_it += clean && !leaves_later(id, found) ? group.bytes : 0;
  }
  return before_it < leaving ? found : kNoGroup;
}

bool Standing::stepped(GroupId id) const {
  const Use next = order_.next_use(id);
  return next.group == id && next.kind == UseKind::sampling &&
         order_.distance(id) > order_.rest_of_pass();
}

GroupId Standing::stepped_next(Bytes leaving) const {
  GroupId found = kNoGroup;
  if (leaving == 0) {
    return found;
  }
  Bytes clean = 0;
  for (GroupId id = 0; id < groups_.size(); ++id) {
    if (!may_go(id) || !stepped(id)) {
      continue;
    }
    if (groups_[id].dirty == 0) {
      clean += groups_[id].bytes;
    } else if (found == kNoGroup || order_.distance(id) < order_.distance(found)) {
      found = id;
    }
  }
  return clean < leaving ? found : kNoGroup;
}

void Standing::forgive() {
  if (std::exchange(refused_, false)) {
    for (WeightGroup& group : groups_) {
      group.refused = false;
    }
  }
}

GroupId Standing::next_ahead(std::uint32_t record, bool* far) const {
  GroupId seen[kAhead];
  std::size_t count = 0;
  std::uint32_t away = 0;
  bool forwards = true;  // so far
  const bool in_forward = order_.current().kind != UseKind::backward;
  for (const Use& use : order_.upcoming()) {
    forwards = forwards && use.kind != UseKind::backward;
    *far = count == kAhead;
    if (*far && !forwards && (in_forward || away >= record)) {
      break;
    }
    ++away;
    if (!alive(use.group)) {
      continue;
    }
    if (!groups_[use.group].home()) {
      return use.group;
    }
    if (!*far && std::find(seen, seen + count, use.group) == seen + count) {
      seen[count++] = use.group;
    }
  }
  return kNoGroup;
}

Bytes Standing::live_until(GroupId id, Bytes saved) const {
  const auto in = [&](Use use) -> Bytes {
    if (!alive(use.group)) {
      return 0;
    }
    const WeightGroup& group = groups_[use.group];
    const auto kind = static_cast<std::size_t>(use.kind);
    return group.beside[kind] + std::min(saved, group.saved[kind]);
  };
  Bytes most = in(order_.current());
  for (const Use& use : order_.upcoming()) {
    if (use.group == id) {
      break;
    }
    most = std::max(most, in(use));
  }
  return most;
}

Bytes Standing::needed_until(GroupId id) const {
  Bytes weights = groups_[id].bytes;
  for (const WeightGroup& group : groups_) {
    weights += group.holds > 0 ? group.bytes : 0;
  }
  for (const Use& use : order_.upcoming()) {
    if (use.group == id) {
      break;
    }
    weights += alive(use.group) && groups_[use.group].may_leave() ? groups_[use.group].bytes : 0;
  }
  return weights + live_until(id, 0);
}

std::uint32_t Standing::needed_in(Plan::Place place) const {
  const auto after = std::lower_bound(
      marks_.begin(), marks_.end(), place,
      [](const Mark& mark, Plan::Place wanted) { return before(mark.from, wanted); });
  return after == marks_.begin() ? UseOrder::kNever : order_.backward_distance((after - 1)->group);
}

const char* Standing::broken() const {
  std::size_t count = 0;
  for (const WeightGroup& group : groups_) {
    count += group.alive ? 1 : 0;
    if (group.alive && (group.host == nullptr || group.bytes == 0)) {
      return "W4: a weight group has no host copy";
    }
    if (group.dirty > (group.home() ? group.bytes : 0)) {
      return "W4: what was written to a weight group is neither at home nor on the host";
    }
    if (!group.alive && (group.home() || group.holds > 0)) {
      return "W5: a weight group that is gone has memory or is held";
    }
  }
  return count == count_ ? nullptr : "W5: weight groups are miscounted";
}

}  // namespace stagehand::core
