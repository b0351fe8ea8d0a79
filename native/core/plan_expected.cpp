// What the step's trace says of its records: questions only, but for `proved`.
#include <algorithm>
#include <functional>
#include <utility>

#include "core/plan.hpp"
#include "core/step_grid.hpp"

namespace stagehand::core {

// What the step's trace says of the record; null without one.
const Trace::Entry* Plan::expected(Place place, const Step** step) const {
  *step = step_of(place.step);
  if (*step == nullptr || (*step)->trace == nullptr) {
    return nullptr;
  }
  const std::uint32_t at = place_in_trace(**step, place.index);
  return at < (*step)->trace->entries.size() ? &(*step)->trace->entries[at] : nullptr;
}

void Plan::name(Place place, const char** op, const char** region) const {
  if (const Step* step = step_of(place.step); step != nullptr) {
    *op = step->seen.entries[place.index].op;
    *region = step->seen.entries[place.index].region;
  }
}

// They stand side by side, but for those that it was given.
void Plan::of_call(Place place, std::vector<RecordId>* others) const {
  constexpr std::uint32_t kApart = 32;
  const Step* step = step_of(place.step);
  if (step == nullptr || step->seen.entries[place.index].call == 0) {
    return;
  }
  const std::vector<Trace::Entry>& all = step->seen.entries;
  const std::uint64_t call = all[place.index].call;
  const auto look = [&](std::uint32_t side) {  // unsigned: past either end is past the last
    std::uint32_t apart = 0;
    for (std::uint32_t i = place.index + side; i < all.size() && apart < kApart; i += side) {
      const bool its = all[i].call == call && all[i].by_call;
      apart = its ? 0 : apart + 1;
      if (its) {
        others->push_back(all[i].record);
      }
    }
  };
  look(~std::uint32_t{0});
  look(1);
}

bool Plan::leaves(Place place) const {
  const Step* step = nullptr;
  const Trace::Entry* entry = expected(place, &step);
  if (entry == nullptr) {
    return false;
  }
  return step->kin ? step->kin.leaves(place.index)
                   : entry->leaves && step->trace->predicts(step->seen.high);
}

bool Plan::drops_late(Place place) const {
  const Step* step = step_of(place.step);
  return drops(place) && !step->kin && step->trace->drops_late;
}

bool Plan::drops(Place place) const {
  const Step* step = nullptr;
  const Trace::Entry* entry = expected(place, &step);
  return entry != nullptr && (step->kin ? step->kin.drops(place.index) : entry->dropped);
}

bool Plan::copies(Place place) const {
  const Step* step = nullptr;
  const Trace::Entry* entry = expected(place, &step);
  if (entry == nullptr) {
    return false;
  }
  if (step->kin) {  // nothing is dropped on a proof that is not looked at (looks_at)
    const Trace::Entry& mine = step->seen.entries[place.index];
    return mine.any_size && !mine.by_call && !step->kin.drops(place.index);
  }
  if (!entry->again() || entry->dropped) {
    return false;
  }
  // Where more has to leave than was planned: a recipe takes little, and a call that runs anyway
  // nothing. To run another one for it would take longer than the copy.
  const bool cheap = entry->comes || entry->proven_by_node();
  return leaves(place) || (guides(place) && !cheap);
}

std::uint32_t Plan::copy_turn(Place place) const {
  const Step* step = nullptr;
  const Trace::Entry* entry = expected(place, &step);
  return entry != nullptr && step == now_ && !step->kin ? entry->turn : KnownRecord::kNever;
}

bool Plan::copy_passed(std::uint32_t turn) const {
  if (!follows() || now_->kin || turn >= now_->trace->copies.size()) {
    return true;
  }
  const Trace::Entry& entry = now_->trace->entries[now_->trace->copies[turn]];
  return !entry.leaves || entry.dropped || entry.retained < moment();
}

bool Plan::proven(Place place) const {
  const Step* step = nullptr;
  const Trace::Entry* entry = expected(place, &step);
  if (entry == nullptr || entry->proof != Trace::Proof::proven ||
      !entry->same_recipe(step->seen.entries[place.index])) {
    return false;
  }
  return !step->kin ||
         (for_all_sizes_ && entry->proven_for_all_sizes() && step->kin.anchored(place.index));
}

bool Plan::made_by(Place place, std::uint32_t kind) const {
  const Step* step = step_of(place.step);
  return step != nullptr && step->seen.entries[place.index].kind == kind;
}

Plan::ToProve Plan::looks_at(Place place) const {
  const Step* step = nullptr;
  const Trace::Entry* entry = expected(place, &step);
  if (entry == nullptr) {
    return {};
  }
  const bool turn = step->kin ? drops(place) && (entry->agreed < kSeenOften ||
                                                 (serial_ + place.index) % kLook == 0)
                              : step->look_at == place.index;
  if (!turn || !proven(place)) {
    return {};
  }
  return {entry->seen_as.trace, entry->seen_as.index, entry->rests_on, true,
          of_other_size(*step, place.index, *entry)};
}

// What leaves by a copy is proven too: then dropping it is known to be right, and how long making
// it again takes, before a plan has to guess either.
Plan::ToProve Plan::to_prove(Place place) {
  constexpr std::uint32_t kOverdue = 16;  // steps
  const Step* of = nullptr;
  const Trace::Entry* entry = expected(place, &of);
  if (entry == nullptr || !is_sure_of_place(*of, place.index) ||
      !entry->same_recipe(of->seen.entries[place.index]) ||
      (entry->asked != 0 && serial_ - entry->asked < kOverdue)) {
    return {};
  }
  const bool other_size = of_other_size(*of, place.index, *entry);
  const bool for_all = other_size && for_all_sizes_ && entry->any_size &&
                       entry->block_bytes >= Kin::kCheap && !entry->proven_for_all_sizes();
  if (of->kin ? !for_all || !entry->may_by_node() : !entry->unproven()) {
    return {};
  }
  const bool gone = of->kin ? of->kin.leaves(place.index) : entry->dropped || entry->leaves;
  if (!gone) {
    Step& step = *step_of(place.step);
    if (!step.kin || step.asked == kStay) {
      return {};
    }
    ++step.asked;
  }
  if (const auto trace = trace_of(of->trace->id); trace != nullptr) {
    trace->entries[place_in_trace(*of, place.index)].asked = serial_;
  }
  return {entry->seen_as.trace, entry->seen_as.index, entry->rests_on, false, other_size};
}

Plan::Inputs Plan::inputs(Place place) const {
  Inputs found{};
  if (const Step* step = step_of(place.step); step != nullptr) {
    const std::vector<Trace::Entry>& all = step->seen.entries;
    for (std::size_t n = 0; n < found.size(); ++n) {
      const std::uint32_t input = all[place.index].made_of[n];
      found[n] = input < all.size() ? all[input].record : RecordId{};
    }
  }
  return found;
}

// Steps of other sizes say nothing of this one.
void Plan::no_room_to_prove(Place place) {
  const Step* step = step_of(place.step);
  const auto trace =
      step != nullptr && step->trace != nullptr && !step->kin ? trace_of(step->trace->id) : nullptr;
  if (trace != nullptr) {
    Trace::Entry& entry = trace->entries[place_in_trace(*step, place.index)];
    entry.cramped = true;
    version_ += std::exchange(entry.dropped, false) ? 1 : 0;
  }
}

// What differs leaves by a copy from here on, and the rest is planned anew.
void Plan::proved(ToProve what, bool same) {
  const Trace::SeenAs place{what.trace, what.index};
  if (!same && what.again) {
    for_all_sizes_ = false;  // it may do so for some sizes only
    forget_proofs();
    ++version_;
  }
  for (const auto& trace : traces_) {
    Trace::Entry* const entry = trace->at_place(place);
    if (entry == nullptr || entry->rests_on != what.rests_on) {
      continue;
    }
    if (entry->proof == Trace::Proof::refused) {
      continue;  // it differed once: another one that came late proves nothing
    }
    entry->proof = same ? Trace::Proof::proven : Trace::Proof::refused;
    entry->cramped = false;
    const bool counts = what.other_size && entry->agreed < kSeenOften;
    entry->agreed = same ? entry->agreed + (counts ? 1 : 0) : 0;
    entry->asked = 0;
    if (!same && std::exchange(entry->dropped, false)) {
      trace->forget_trials();
    }
    ++version_;
  }
}

// What changed for one may have changed for all.
void Plan::forget_proofs() {
  for (const auto& trace : traces_) {
    for (Trace::Entry& entry : trace->entries) {
      entry.proof = entry.proof == Trace::Proof::proven ? Trace::Proof::none : entry.proof;
      entry.agreed = 0;
      entry.asked = 0;
    }
  }
}

bool Plan::is_new() const {
  if (now_ == nullptr || now_->diverged) {
    return now_ == nullptr;
  }
  return !alike(now_->trace.get(), high_);
}

bool Plan::guides(Place place) const {
  const Step* step = step_of(place.step);
  return step != nullptr && alike(step->trace.get(), step->seen.high);
}

bool Plan::alike(const Trace* trace, Bytes high) {
  const Bytes other = trace != nullptr ? trace->high : 0;
  return std::max(other, high) - std::min(other, high) <= high / Trace::kAlike;
}

Plan::Use Plan::next_use(Place place, std::uint64_t order) const {
  const Step* step = nullptr;
  const Trace::Entry* entry = expected(place, &step);
  if (entry == nullptr) {
    return 2 * kUnplanned - order;
  }
  return entry->used != 0 ? step->began + entry->used_at : 2 * kUnplanned;
}

bool Plan::knows(Place place) const {
  const Step* step = nullptr;
  return expected(place, &step) != nullptr;
}

bool Plan::next_after(Place place, Place* next, RecordId* record) const {
  const Step* step = nullptr;
  const Trace::Entry* entry = expected(place, &step);
  if (entry == nullptr) {
    return false;
  }
  std::uint32_t index = Kin::kNone;
  if (step->kin) {
    index = step->kin.next_after(place.index);
  } else if (entry->used != 0 && entry->used < step->trace->by_use.size()) {
    index = step->trace->by_use[entry->used];
  }
  if (index >= step->seen.entries.size()) {
    return false;
  }
  *next = {place.step, index};
  *record = step->seen.entries[index].record;
  return true;
}

Bytes Plan::live_after(Place place) const {
  const Step* step = nullptr;
  const Trace::Entry* entry = expected(place, &step);
  if (entry == nullptr || entry->used == 0) {
    return 0;
  }
  return step->kin ? step->kin.live(entry->used, step->seen.live_before)
                   : step->trace->live[entry->used];
}

Bytes Plan::least_after(Place place) const {
  const Step* step = nullptr;
  const Trace::Entry* entry = expected(place, &step);
  return entry != nullptr && !step->kin && entry->used != 0 &&
                 entry->used < step->trace->least.size()
             ? step->trace->least[entry->used]
             : 0;
}

Bytes Plan::unavoidable() const {
  if (!follows()) {
    return 0;
  }
  const Trace& trace = *now_->trace;
  if (trace.high != high_) {
    return 0;  // what was needed inside another budget says nothing sure of this one
  }
  const Bytes live_before = now_->seen.live_before;
  Bytes least = trace.repeated != 0 ? trace.unavoidable : 0;
  if (now_->kin) {
    least = now_->kin.unavoidable(live_before);
  } else {  // whatever was live before such a step may be gone
    least -= std::min(least, trace.live_before - std::min(trace.live_before, live_before));
  }
  return least > high_ ? least : 0;
}

Bytes Plan::typical_block() const {
  const std::shared_ptr<const Trace> trace = newest();
  if (trace == nullptr) {
    return 0;
  }
  std::vector<Bytes> blocks;
  Bytes all = 0;
  for (const Trace::Entry& entry : trace->entries) {
    blocks.push_back(entry.block_bytes);
    all += entry.block_bytes;
  }
  std::sort(blocks.begin(), blocks.end(), std::greater<>());
  Bytes sum = 0;
  for (const Bytes block : blocks) {
    sum += block;
    if (2 * sum >= all) {
      return block;
    }
  }
  return 0;
}

Plan::Peaks Plan::peaks() const {
  Peaks most;
  for (const auto& trace : traces_) {
    most = {std::max(most.live, trace->live_peak), std::max(most.request, trace->largest_request)};
  }
  return most;
}

Plan::Shown Plan::shown() const {
  Shown all;
  if (traces_.empty()) {
    return all;
  }
  const Trace& trace = *traces_.front();
  std::vector<KnownRecord> records;
  const KnownStep step = trace.known(&records);
  const std::vector<Fate> fates = trace.fates();
  all.settled = trace.settled();
  const bool timed = !trace.at_ns.empty();
  std::vector<MadeAgain> again(fates.size());
  if (timed) {
    again = made_again(Grid(step), fates);
    all.step_ns = trace.at_ns.back();
    all.best_ns = trace.trials.best_ns();
    all.forecast = forecast(step, fates);
  }
  for (std::size_t i = 0; i < trace.entries.size(); ++i) {
    const Trace::Entry& entry = trace.entries[i];
    auto one = std::find_if(all.ops.begin(), all.ops.end(), [&](const ByOp& of) {
      return of.op == entry.op && of.region == entry.region;
    });
    if (one == all.ops.end()) {
      one = all.ops.insert(one, ByOp{entry.region, entry.op});
    }
    ++one->records;
    (fates[i] == Fate::stay    ? one->stays
     : fates[i] == Fate::leave ? one->leaves
                               : one->drops) += entry.block_bytes;
    one->again_ns += fates[i] == Fate::drop ? static_cast<std::uint64_t>(again[i].ns) : 0;
  }
  return all;
}

}  // namespace stagehand::core
