#include "core/weights.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "core/device.hpp"

namespace stagehand::core {

namespace {
// Taken back also where host memory has run out.
class Arriving {
 public:
  Arriving(Bytes& sum, Bytes bytes) : sum_(sum), bytes_(bytes) { sum_ += bytes_; }
  ~Arriving() { sum_ -= bytes_; }
  Arriving(const Arriving&) = delete;
  Arriving& operator=(const Arriving&) = delete;

 private:
  Bytes& sum_;
  const Bytes bytes_;
};
}  // namespace

Weights::Holding::Holding(Weights& weights, GroupId id)
    : weights_(weights), id_(id), generation_(weights.standing_.at(id).generation) {
  WeightGroup& group = weights_.standing_.at(id_);
  weights_.idle_bytes_ -= group.may_leave() ? group.bytes : 0;
  ++group.holds;
}

Weights::Holding::~Holding() {
  if (!kept_ && still()) {
    weights_.leave(id_);
  }
}

bool Weights::Holding::still() const {
  const WeightGroup& group = weights_.standing_.at(id_);
  return group.alive && group.generation == generation_;
}

void Weights::leave(GroupId id) {
  WeightGroup& group = standing_.at(id);
  idle_bytes_ += --group.holds == 0 && group.home() ? group.bytes : 0;
  if (group.holds == 0) {
    d_.plan.weights_left(id);
  }
}

Status Weights::enter(Entry& entry, GroupId id, UseKind kind, driver::Stream consumer,
                      Address* address) {
  if (!standing_.alive(id)) {
    return Status::stale;
  }
  WeightGroup& group = standing_.at(id);
  if (d_.clocks.of(consumer).captured()) {
    return Status::captured;
  }
  if (group.holds == 0 && kind != UseKind::sampling) {
    d_.plan.weights_held(id, group.bytes);
  }
  Holding holding(*this, id);  // rule W3: from here on it stays
  const Record* newest = d_.ledger.newest();
  standing_.forgive();
  const bool was_home = group.home();
  if (kind == UseKind::forward && std::exchange(went_back_, false)) {
    left_before_ = std::exchange(left_, 0);
    gone_before_ = d_.counters.gone_bytes();
  }
  went_back_ |= kind == UseKind::backward;
  came_for_nothing_ = standing_.order().current().kind == kind ? came_for_nothing_ : 0;
  const bool begins =
      standing_.used({id, kind}, newest != nullptr ? newest->place : Plan::Place{}, saved());
  left_instead_ = begins ? 0 : left_instead_;
  if (begins && ++uses_ >= standing_.count()) {
    uses_ = 0;
    leaves_free_.begin_step(false);
  }
  group.far = false;
  while (!group.home()) {
    const Status status = bring(entry, id, consumer, false);
    if (!holding.still()) {
      return Status::stale;  // the lock was given up; the holds are another group's by now
    }
    if (status != Status::ok) {
      return status;
    }
  }
  StreamClock& clock = d_.clocks.of(consumer);
  if (holds(Rule::W7) && wait_for(group, clock) != Status::ok) {
    return Status::driver_failed;
  }
  if (was_home && wait_for_copy_out(group, clock) != Status::ok) {  // it may write
    return Status::driver_failed;
  }
  if (&clock != group.block->clock) {
    d_.clocks.add_user(group.block, clock);
  }
  *address = group.block->address;
  if (begins && home_bytes_ < standing_.bytes()) {
    clock.note_work(group.bytes);  // a fine clock: copies into what leaves can then start early
    bring_ahead(entry, consumer);
    write_ahead();
  } else if (begins && kind != UseKind::backward) {
    write_ahead();
  }
  holding.keep();
  return Status::ok;
}

// Bytes that backward is to use, wherever they are.
Bytes Weights::saved() const {
  return d_.counters.retained + d_.counters.evicted + d_.counters.dropped;
}

// The consumer waits for the group's copy in; where that may be under way still it is measured.
Status Weights::wait_for(const WeightGroup& group, StreamClock& clock) {
  const Tick arrived{group.clock, group.arrived};
  const bool may_wait = clock.waited(arrived.clock) < arrived.seq &&
                        !d_.clocks.at(arrived.clock).known_passed(arrived.seq);
  const driver::Stream consumer = clock.stream();
  const std::uint32_t pair = may_wait ? d_.stalls.weights_asked(consumer) : StallMeter::kNone;
  const Status status = d_.clocks.order_after(clock, arrived);
  if (status == Status::ok) {
    d_.stalls.weights_there(pair, consumer);
  } else {
    d_.stalls.forget(pair);
  }
  return status;
}

// Rule W4: what reads or writes again what a copy out reads or writes comes behind that.
Status Weights::wait_for_copy_out(const WeightGroup& group, StreamClock& clock) {
  return holds(Rule::S4) ? d_.clocks.order_after(clock, {group.out_clock, group.written})
                         : Status::ok;
}

// Into memory of the store's. On the lane of what is wanted now, ahead of need too: behind records
// that came far ahead a block would wait for all of those. Another thread may have been quicker by
// then: then that one's stays. On failure the group is away, and the books are as before (rule W5).
Status Weights::bring(Entry& entry, GroupId id, driver::Stream stream, bool ahead) {
  WeightGroup& group = standing_.at(id);
  const std::uint32_t generation = group.generation;
  Status status = Status::ok;
  Block* block = nullptr;
  {
    const Arriving arriving(ahead ? arriving_idle_ : arriving_held_, group.bytes);
    block = d_.store->make_weights(entry, group.bytes, stream, ahead, &status);
  }
  if (block == nullptr) {
    return status == Status::ok ? Status::out_of_memory : status;
  }
  if (!group.alive || group.generation != generation || group.home()) {
    d_.books.give_back(block);
    return Status::ok;
  }
  Tick arrived;
  try {
    Lane& lane = d_.transfers.in(true);
    status = wait_for_copy_out(group, lane.clock());
    if (status == Status::ok) {
      status = d_.transfers.copy_in(block, group.host, group.bytes, lane, &arrived);
    }
  } catch (...) {
    d_.books.give_back(block);
    throw;
  }
  if (status != Status::ok) {
    d_.books.give_back(block);
    return status;
  }
  block->owned_by_torch = true;  // though torch knows nothing of it: somebody uses it
  block->keep = true;            // nobody's saved tensor has it
  group.block = block;
  group.clock = arrived.clock;
  group.arrived = arrived.seq;
  home_bytes_ += group.bytes;
  idle_bytes_ += group.holds == 0 ? group.bytes : 0;
  d_.counters.weights_are(home_bytes_);
  ++counts_.loads;
  counts_.late += ahead ? 0 : 1;
  counts_.loaded_bytes += group.bytes;
  return Status::ok;
}

void Weights::bring_ahead(Entry& entry, driver::Stream stream) {
  bool far = false;
  const auto next = [&] {
    const std::optional<Plan::Place> record = d_.prefetcher.lacks();
    return standing_.next_ahead(record ? standing_.needed_in(*record) : UseOrder::kNever, &far);
  };
  GroupId id = next();
  while (id != kNoGroup && bring_next(entry, id, far, stream)) {
    id = next();
  }
  lacks_room_.store(id != kNoGroup && !far, std::memory_order_relaxed);
}

// For what is far no record leaves.
bool Weights::bring_next(Entry& entry, GroupId id, bool far, driver::Stream stream) {
  const bool sampling = standing_.order().current().kind == UseKind::sampling;
  const bool for_nothing = came_for_nothing_ >= kForNothing && !sampling && !d_.plan.follows();
  if (d_.transfers.in().full() || (far && for_nothing)) {
    return false;
  }
  d_.store->look();
  const Bytes high = std::min(d_.budget.high, d_.budget.limit);
  const Bytes bytes = standing_.at(id).bytes;
  const bool beside = far && standing_.order().current().kind == UseKind::backward;
  const bool fits = !beside || fits_beside(id, high);
  if (!fits && !fits_instead(id, high)) {
    return false;
  }
  const bool early = comes_early(id, far);
  leaves_free_.enter(high, high);
  if (standing_.needed_until(id) > high - (early ? leaves_free_.bytes() : 0)) {
    return false;  // it would have to leave again before it is used
  }
  Bytes occupied = d_.counters.occupied;
  const Bytes before = occupied;
  while (!fits_under(occupied, bytes, high)) {
    const GroupId last = standing_.farthest();
    const UseOrder& order = standing_.order();
    if ((!beside || !fits) && last != kNoGroup && order.distance(last) > order.distance(id)) {
      occupied -= give_way(standing_.at(last)) ? std::min(occupied, standing_.at(last).bytes) : 0;
    } else if (far || !record_leaves(id, &occupied)) {
      return false;
    }
  }
  if (occupied != before && d_.gate.due().any()) {
    const Unlocked unlocked(entry);  // torch has it from here on
  }
  if (!standing_.alive(id)) {
    return false;
  }
  const Status status = bring(entry, id, stream, true);
  const bool there =
      status == Status::ok || (status == Status::out_of_memory && bring_instead(entry, id, stream));
  WeightGroup& group = standing_.at(id);
  group.far |= there && (far || early) && group.may_leave();
  return there;
}

// Whether it comes only beside what others that did so have had to leave for: a request may need
// more than its bytes, where what is free lies in pieces or torch has cut a group's hole for it.
// While sampling, all but the next. Not what an optimizer steps, whose gradients come at their own
// times.
bool Weights::comes_early(GroupId id, bool far) const {
  const UseOrder& order = standing_.order();
  const bool sampling = order.current().kind == UseKind::sampling;
  return !standing_.at(id).written_to && (sampling ? order.distance(id) > 1 : far);
}

// There is room, but in no one place: it is where another group lies, which leaves. Where it has to
// be copied out for what is far ahead, that begins, and it leaves in a later use: whose work would
// wait for the copy else. A few in each use: where no hole comes of it, the others stay.
bool Weights::bring_instead(Entry& entry, GroupId id, driver::Stream stream) {
  if (left_instead_ == kLeftInstead) {
    return false;
  }
  const GroupId last = in_its_place(id);
  if (last == kNoGroup) {
    return false;
  }
  ++left_instead_;
  WeightGroup& group = standing_.at(last);
  const UseOrder& order = standing_.order();
  const bool far = order.current().kind == UseKind::backward && order.distance(id) > 1;
  if (group.dirty > 0 && far) {
    if (!d_.transfers.out().full()) {
      write_back(group);  // refused: it stays dirty
    }
    return false;
  }
  if (!give_way(group)) {
    return false;
  }
  if (d_.gate.due().any()) {
    const Unlocked unlocked(entry);
  }
  return standing_.alive(id) && bring(entry, id, stream, true) == Status::ok;
}

// Which group it takes the place of. kNoGroup: none.
// * What is used next: of one that is used later. That one would leave all the same once its block
//   is reached, and the copy begin only then.
// * What an optimizer's step uses yet: of what that has used, so that copies go both ways at once.
// * What it will use first, in backward: of what it will use later. By then the first ones have
// been
//   used, and what left for them comes back in their places.
// * What is used further ahead: of one that is used later, as large, and leaves for nothing.
// The last two only while nothing but weights comes and goes.
GroupId Weights::in_its_place(GroupId id) const {
  const UseOrder& order = standing_.order();
  const std::uint32_t away = order.distance(id);
  const UseKind now = order.current().kind;
  const Bytes bytes = standing_.at(id).bytes;
  const bool for_a_step = order.next_use(id).kind == UseKind::sampling;
  GroupId last = standing_.farthest_as_large(bytes);
  if (last != kNoGroup && now == UseKind::sampling && away <= order.rest_of_pass() &&
      standing_.stepped(last)) {
    return last;
  }
  if (last != kNoGroup && now == UseKind::backward && for_a_step && alone() &&
      order.next_use(last).kind == UseKind::sampling &&
      order.distance(last) > away + 2 * Standing::kAhead) {
    return last;
  }
  last = standing_.farthest();
  if (last == kNoGroup || order.distance(last) <= away) {
    return kNoGroup;
  }
  const WeightGroup& group = standing_.at(last);
  return away == 1 || (alone() && group.dirty == 0 && group.bytes >= bytes) ? last : kNoGroup;
}

// Far ahead in backward: beside all weights at home, the most that will be live until then, and
// what is saved. Backward uses that one by one; where some of it has yet to come back, what it
// gives up goes to that, and for the next step all of that is counted too.
bool Weights::fits_beside(GroupId id, Bytes high) const {
  const Counters& now = d_.counters;
  const Bytes away = now.evicted + now.dropped;
  const UseOrder& order = standing_.order();
  const Bytes later = order.turns_before(id) ? away : 0;
  const bool saves_nothing = order.next_use(id).kind == UseKind::sampling;  // mostly an optimizer's
  const Bytes beside = saves_nothing && away == 0
                           ? standing_.live_until(id, now.retained)
                           : standing_.live_until(id, 0) + now.retained + later;
  return fits_under(home_bytes_ + beside, standing_.at(id).bytes, high);
}

// Whether only weights come and go in this round: else what leaves far ahead makes room for what
// was saved and comes back.
bool Weights::alone() const {
  return d_.counters.gone_bytes() == gone_before_ && d_.counters.evicted + d_.counters.dropped == 0;
}

// The same in the place of the group that leaves first: where this backward needs that no more, and
// it leaves for nothing.
bool Weights::fits_instead(GroupId id, Bytes high) const {
  const GroupId last = standing_.farthest();
  const UseOrder& order = standing_.order();
  if (!alone() || last == kNoGroup || order.turns_before(id) || !order.turns_before(last)) {
    return false;
  }
  const WeightGroup& group = standing_.at(last);
  const Bytes occupied = d_.counters.occupied - std::min(d_.counters.occupied, group.bytes);
  return group.dirty == 0 && fits_under(occupied, standing_.at(id).bytes, high) &&
         fits_beside(id, high + group.bytes);
}

// A record that is needed later than the group leaves.
bool Weights::record_leaves(GroupId id, Bytes* occupied) {
  VictimIndex& victims = d_.books.victims();
  Record* record = victims.last_needed(false);
  if (record == nullptr || standing_.needed_in(record->place) <= standing_.order().distance(id)) {
    return false;
  }
  if (!victims.leaves_free(*record)) {
    d_.departures.copy_ahead(standing_.at(id).bytes);
    return false;
  }
  const Bytes before = d_.counters.occupied;
  Attempt attempt;
  if (d_.room.evict(*record, attempt) != Evicted::yes) {
    return false;
  }
  *occupied -= std::min(*occupied, before - d_.counters.occupied);
  return true;
}

// Rule W2: its memory goes back like any other, behind what names it. False, and nothing has
// changed: the driver refused its copy out (rule W4).
bool Weights::put_away(WeightGroup& group) {
  SH_CHECK(group.may_leave());
  if (holds(Rule::W4) && group.dirty > 0 && write_back(group) != Status::ok) {
    return false;
  }
  Block* block = std::exchange(group.block, nullptr);
  block->owned_by_torch = false;
  block->keep = false;
  group.far = false;
  home_bytes_ -= group.bytes;
  idle_bytes_ -= group.bytes;
  d_.counters.weights_are(home_bytes_);
  ++counts_.dropped;
  left_ += standing_.order().current().kind != UseKind::sampling ? group.bytes : 0;
  if (holds(Rule::W2)) {
    d_.transfers.fence_users(block);
  } else {
    block->fence.clear();
  }
  d_.books.give_back(block);
  return true;
}

// For a request, a record or a group that is needed sooner.
bool Weights::give_way(WeightGroup& group) {
  const bool unused = group.far;
  const bool left = put_away(group);
  if (left && unused) {
    ++came_for_nothing_;
    if (!group.written_to) {
      leaves_free_.came_early(group.bytes, std::min(d_.budget.high, d_.budget.limit));
    }
  }
  return left;
}

// The host copy gets what changed at home. Nothing waits for it here: the memory has the copy's
// tick (S2), and so has the group, for its next copy in. Refused half-way the group stays dirty.
Status Weights::write_back(WeightGroup& group) {
  Block* block = group.block;
  block->idle_from = block->clock->upcoming();
  Tick written;
  const Status status = d_.transfers.copy_out(block, group.host, group.dirty, &written);
  if (written.seq != 0) {
    group.out_clock = written.clock;
    group.written = written.seq;
    standing_.wrote_back(group);
  }
  if (status != Status::ok) {
    standing_.refuse(group);
    return status;
  }
  counts_.written_bytes += std::exchange(group.dirty, 0);
  return status;
}

// So that groups leave for nothing. Forward fills the memory up: with each block one more is copied
// out of what left in the last round, without a look at the lane, since the host is ahead of the
// GPU. An optimizer's step begins with that: what it has used will not be written to until the next
// one. Else one more where not all are at home, while the lane out has nothing to do.
void Weights::write_ahead() {
  Lane& out = d_.transfers.out();
  const Bytes away = standing_.bytes() - home_bytes_;
  const UseKind kind = standing_.order().current().kind;
  const Bytes left = kind != UseKind::backward ? std::max(left_before_, left_) : 0;
  const Bytes leaving = left - std::min(left, away);
  const bool steps = kind == UseKind::sampling;
  GroupId id = steps ? standing_.stepped_next(leaving) : standing_.written_next(leaving);
  if (id == kNoGroup && away > 0) {
    id = steps ? standing_.stepped_next(~Bytes{0}) : kNoGroup;
    id = id == kNoGroup ? standing_.written_next(~Bytes{0}) : id;
    id = id != kNoGroup && out.clock().passed(out.clock().upcoming() - 1) ? id : kNoGroup;
  }
  if (id != kNoGroup && !out.full()) {
    write_back(standing_.at(id));  // refused: it stays dirty
  }
}

Status Weights::wrote(GroupId id, Bytes bytes, driver::Stream writer) {
  if (!standing_.alive(id) || !standing_.at(id).home()) {
    return Status::stale;
  }
  WeightGroup& group = standing_.at(id);
  StreamClock& clock = d_.clocks.of(writer);
  if (&clock != group.block->clock) {
    d_.clocks.add_user(group.block, clock);
  }
  group.dirty = std::max(group.dirty, std::min(bytes, group.bytes));
  group.written_to = true;
  return Status::ok;
}

Status Weights::to_host(Entry& entry, GroupId id) {
  if (!standing_.alive(id)) {
    return Status::stale;
  }
  WeightGroup& group = standing_.at(id);
  standing_.forgive();
  if (group.dirty > 0) {
    if (const Status status = write_back(group); status != Status::ok) {
      return status;
    }
  }
  StreamClock& clock = d_.clocks.at(group.out_clock);
  if (group.written == 0 || clock.known_passed(group.written)) {
    return Status::ok;
  }
  driver::Event event = nullptr;
  Seq actual = 0;
  if (const Status status = clock.event_for(group.written, &event, &actual); status != Status::ok) {
    return status;
  }
  const Unlocked unlocked(entry);
  return event == nullptr || d_.gate.table().event_synchronize(event) == driver::kSuccess
             ? Status::ok
             : Status::driver_failed;
}

GroupId Weights::leaver(bool small_too) {
  const GroupId farthest = standing_.farthest();
  if (farthest == kNoGroup) {
    return farthest;
  }
  const Record* record = d_.books.victims().last_needed(small_too);
  if (record == nullptr) {
    return farthest;
  }
  const UseOrder& order = standing_.order();
  const std::uint32_t away = order.distance(farthest);
  // A copy that is not known to have ended is one to wait for, or still to be made.
  const bool waits =
      !d_.books.victims().leaves_free(*record) ||
      (record->copy.holds_bytes() &&
       !d_.clocks.at(record->copy.written.clock).known_passed(record->copy.written.seq));
  const bool clean = standing_.at(farthest).dirty == 0;
  if (waits && clean && order.turns_before(farthest) && away > 2 * Standing::kAhead) {
    return farthest;
  }
  const std::uint32_t needed = standing_.needed_in(record->place);
  const bool sooner = needed > away || (needed == away && !clean && !waits);
  return sooner ? kNoGroup : farthest;
}

Bytes Weights::would_give(bool small_too) {
  const GroupId id = standing_.empty() ? kNoGroup : leaver(small_too);
  return id == kNoGroup ? 0 : standing_.at(id).bytes;
}

Bytes Weights::make_way(bool small_too, bool last) {
  const auto next = [&] { return last ? standing_.farthest() : leaver(small_too); };
  for (GroupId id = standing_.empty() ? kNoGroup : next(); id != kNoGroup; id = next()) {
    WeightGroup& group = standing_.at(id);
    StreamClock& clock = *group.block->clock;
    if (give_way(group)) {
      // As for a record that leaves for a request: then its memory can join its neighbours.
      d_.clocks.order_after(clock, {group.out_clock, group.written});  // or later: it is fenced
      return group.bytes;
    }
  }
  return 0;
}

Bytes Weights::spares_a_wait() {
  if (standing_.empty() || !d_.plan.follows() || !alone()) {
    return 0;
  }
  const GroupId farthest = standing_.farthest();
  if (farthest == kNoGroup || standing_.order().distance(farthest) <= Standing::kAhead) {
    return 0;
  }
  WeightGroup& group = standing_.at(farthest);
  return !group.written_to && give_way(group) ? group.bytes : 0;
}

Bytes Weights::make_way_for(Plan::Place record) {
  const GroupId farthest = standing_.empty() ? kNoGroup : standing_.farthest();
  if (farthest == kNoGroup) {
    return 0;
  }
  const std::uint32_t needed = standing_.needed_in(record);
  if (needed > Standing::kAhead || standing_.order().distance(farthest) <= needed) {
    return 0;
  }
  return give_way(standing_.at(farthest)) ? standing_.at(farthest).bytes : 0;
}

void Weights::fit(Entry& entry, Bytes most) {
  if (standing_.empty()) {
    return;
  }
  standing_.forgive();
  d_.store->look();
  Bytes occupied = d_.counters.occupied;
  while (occupied > most) {
    const GroupId last = standing_.farthest();
    if (last == kNoGroup) {
      break;
    }
    occupied -= put_away(standing_.at(last)) ? std::min(occupied, standing_.at(last).bytes) : 0;
  }
  if (d_.gate.due().any()) {
    const Unlocked unlocked(entry);
  }
}

void Weights::leave_all() {
  standing_.forgive();
  for (GroupId id = standing_.farthest(); id != kNoGroup; id = standing_.farthest()) {
    put_away(standing_.at(id));
  }
}

void Weights::forget_early() {
  leaves_free_ = {};
  uses_ = 0;
}

void Weights::drop(GroupId id) {
  WeightGroup& group = standing_.at(id);
  group.dirty = 0;
  if (group.home()) {
    put_away(group);
  }
}

const char* Weights::broken() const {
  Bytes home = 0;
  Bytes idle = 0;
  for (GroupId id = 0; id < standing_.size(); ++id) {
    const WeightGroup& group = standing_.at(id);
    home += group.home() ? group.bytes : 0;
    idle += group.may_leave() ? group.bytes : 0;
    if (group.home() && (group.block->state != BlockState::live || !group.block->owned() ||
                         !group.block->keep || group.block->record != nullptr)) {
      return "W8: the memory of a weight group is not live, or has a record";
    }
    if (group.holds > 0 && !group.home()) {
      return "W3: a weight group is held and away";
    }
  }
  if (arriving_idle_ != 0 || arriving_held_ != 0) {
    return "W10: weights are said to arrive, and nobody brings any";
  }
  return home == home_bytes_ && idle == idle_bytes_ ? standing_.broken()
                                                    : "W10: the weights at home are miscounted";
}

}  // namespace stagehand::core
