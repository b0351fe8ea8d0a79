// The plan: what earlier steps taught about this one. Pure and deterministic: it is told what
// happens, in order, and asked what to expect.
//
// A step's records are known by their place in the order of saving and the size of their block. As
// long as a step repeats the sizes of one that is remembered (its trace, and the budget it ran
// under), it is expected to repeat the rest too: which records leave the GPU, in which order
// backward asks for them, and how much live memory there is on the way. Several traces are kept, so
// that shapes may alternate, and a step's own records may outlive the start of the next one
// (micro-batches in a pipeline). From the first size that no trace has, the step follows the trace
// nearest to it as its kin (kin.hpp); where too little fits, the rest is reactive.
#pragma once

#include <array>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/kin.hpp"

namespace stagehand::core {

enum class PlanState : std::uint8_t {
  none,       // nothing remembered, and nothing needed yet
  learning,   // records leave, and no step like this one is remembered
  following,  // the step repeats one that is remembered, or is like one in all but its sizes
  diverged,   // it did, up to where too little fits
  declined,   // it does, but live memory alone is above `high`: moving records cannot hold it there
};

class Plan {
 public:
  struct Place {
    std::uint32_t step = 0;
    std::uint32_t index = 0;
  };
  // When a record is asked for next, as a position in the order in which records are asked for:
  // greater is later. Without a trace the newest saved is expected first.
  using Use = std::uint64_t;

  // A pool was entered, with so much live. A step whose records nobody asked for (no backward)
  // teaches nothing.
  void begin_step(Bytes high, Bytes live);
  // A record was opened over a block of this size. It can be made again by a recipe, or by the
  // call.
  Place saved(Bytes block_bytes, RecordId record = {}, const Made& made = {}, Origin from = {});
  // That recipe's n-th input is this record.
  void made_of(Place place, std::size_t n, Place input);
  // Only a record needs its block from now on; it left the GPU, it came back; backward asked for
  // it, or a recipe did; its last handle is gone.
  void retained(Place place);
  void evicted(Place place);
  void dropped(Place place);
  void returned(Place place);
  void unpacked(Place place, bool by_recipe = false);
  void closed(Place place);
  // Somebody holds a weight group that nobody held; nobody does any more.
  void weights_held(std::uint32_t group, Bytes bytes);
  void weights_left(std::uint32_t group);
  // The function of a call begins to run again, with so much occupied; it ended, whatever came of
  // it; it had made all that it was to, the last of it this record.
  void rerun_begins(Bytes occupied);
  void rerun_ends() { rerun_.on = false; }
  void rerun_made(Place last);
  // So much is live now: torch's and backward's blocks.
  void live(Bytes bytes);
  // So much is occupied, at the most since it was said last, and mapped.
  void occupied(Bytes bytes, Bytes mapped = 0);

  // The moment that the newest step is in: one begins with each save and each first use.
  std::size_t moment() const { return now_ != nullptr ? now_->seen.full.size() - 1 : 0; }
  // Whether the newest step is to be measured, while others are whose times are not known yet.
  std::optional<StepToTime> wants_times(bool others = false);
  // False once it has gone another way than the trace that it followed: its times say nothing.
  bool measures() const { return timed_step_ != 0; }
  void timed(const StepToTime& step, const StepTimes& times);
  // The next one began before it was over.
  void cut_off(const StepToTime& step);

  // The largest request since the last record was saved, or asked for by backward.
  void requested(Bytes largest);
  // What that will be when the next one is, by the last two such steps. Where they asked for
  // nothing then, what they asked for around it. 0 where nobody knows.
  Bytes expected_request() const;
  // A request of the program's at that place has made a record leave that had come back ahead.
  void crowded(std::size_t place, Bytes request, driver::Stream stream);
  // The largest of such requests in so many places from here on, in steps before.
  Bytes crowding_ahead(std::size_t places, driver::Stream stream) const;
  // Whether one as large was seen at this place.
  bool request_came() const;
  // The largest of those of so many places from here on; 0 where that is a guess.
  Bytes largest_ahead(std::size_t places) const;
  // The trace that the newest step repeats, 0 where none does; and how many records were saved, or
  // asked for by backward, in the step so far.
  std::uint32_t repeats() const { return follows() && !now_->kin ? now_->trace->id : 0; }
  bool of_newest(Place place) const { return now_ != nullptr && place.step == now_->serial; }
  // The plan that it runs, among all of all traces; 0 without.
  std::uint64_t in_use() const;
  // The same once no other is tried, inside such a budget.
  std::uint64_t kept() const;
  std::size_t place() const {
    return now_ != nullptr ? now_->seen.entries.size() + now_->needed : 0;
  }
  // The largest so far in this step.
  Bytes largest_request() const { return now_ != nullptr ? now_->seen.largest_request : 0; }

  // Whether this record is expected to leave.
  bool leaves(Place place) const;
  // Whether backward has asked for any of its step's records, in a step with weights: these leave
  // before copies are waited for, and what has stayed till then has no reason to leave any more.
  bool has_stayed(Place place) const {
    const Step* step = step_of(place.step);
    return step != nullptr && step->with_weights() && !step->seen.by_use.empty();
  }
  // Whether it is expected to be dropped then; whether it is to leave by a copy, though it could
  // be dropped.
  bool drops(Place place) const;
  // Whether that waits until a request needs its place.
  bool drops_late(Place place) const;
  bool copies(Place place) const;
  // Which of the newest step's planned copies out the record's is to be, so that requests find the
  // copies done that they wait for; kNever: it may be made at once.
  std::uint32_t copy_turn(Place place) const;
  // Whether that step goes on without the copy of this turn: there is none, its record does not
  // leave by one, or should have been retained by now.
  bool copy_passed(std::uint32_t turn) const;
  // Whether the newest step is known to save more: forwards of a pipeline follow each other's
  // backwards.
  bool expects_saves() const {
    return follows() && !now_->kin && now_->seen.entries.size() < now_->trace->entries.size();
  }
  // Goes up when other turns than before may hold from here on.
  std::uint64_t turns_version() const { return turns_; }
  // Whether it was seen to come back bit by bit, in an earlier step at this place.
  bool proven(Place place) const;
  // Whether the recipe that the record was saved with first, which a proof is of, is of this kind.
  bool made_by(Place place, std::uint32_t kind) const;
  // Where it is to be seen in this one, for `proved`: of what leaves; where sizes vary of some of
  // what stays, too, since other records leave in the next step. Once, until the answer came or is
  // overdue: it takes some steps, and a proof takes memory.
  struct ToProve {
    std::uint32_t trace = 0;  // 0: it is not; else Trace::SeenAs
    std::uint32_t index = 0;
    std::uint32_t rests_on = 0;
    bool again = false;       // it was before
    bool other_size = false;  // than at that place in the step's kin
  };
  ToProve to_prove(Place place);
  // What its recipe needs; of generation 0 where it needs less.
  using Inputs = std::array<RecordId, Made::kInputs>;
  Inputs inputs(Place place) const;
  // It is moved in such steps for a while, whatever was planned: they would go over `high` else.
  void no_room_to_prove(Place place);
  // Where its bytes are looked at when it is saved and when it is back, whatever was proven: what a
  // program does behind autograd's back may change, and nothing tells of it. Those that a settled
  // plan drops take turns, one in each step. In steps of other sizes it is each drop at first, and
  // one in eight later.
  ToProve looks_at(Place place) const;
  void proved(ToProve what, bool same);
  // Whether the step has followed a trace so far.
  bool follows() const { return now_ != nullptr && now_->trace != nullptr; }
  // Whether weights were held in the newest step.
  bool with_weights() const { return now_ != nullptr && now_->with_weights(); }
  // Whether an earlier step inside such a budget says what becomes of the record.
  bool guides(Place place) const;
  // Whether the step that begins is the first with another plan that drops: said once.
  bool takes_other_plan();
  // Whether such steps take so much longer than what they compute that memory of its own is worth
  // what that takes.
  bool far_from_free() const;
  // Whether any step is remembered.
  bool learned() const { return !traces_.empty(); }
  // Whether it is worth to know how what is saved was made: not where nothing left in such a step.
  bool wants_recipes() const {
    return !follows() || now_->trace->pressed || !alike(now_->trace.get(), high_);
  }
  // Whether regions are worth their marks in the step that begins: a run of a checkpoint takes the
  // host half a millisecond. Not where steps like it are known, and for long none of any kind has
  // had something leave inside such a budget or a larger one.
  bool wants_regions() const {
    return wants_recipes() || (high_ <= pressed_ && serial_ - pressed_in_ < kPressed);
  }
  // Whether nothing is known of what leaves in a step like this one inside such a budget.
  bool is_new() const;
  // Whether that is a guess: the trace is not of its sizes.
  bool guesses() const { return follows() && now_->kin; }
  // Whether the record's step has gone another way than each that is remembered, as steps of other
  // sizes do: what is known of its records is a guess, or nothing.
  bool strays(Place place) const {
    const Step* step = step_of(place.step);
    return step != nullptr && (step->kin || step->diverged);
  }
  // Whether most of the last steps, more than there are traces of, were of sizes not seen before.
  bool varies() const { return varied_ > kTraces; }
  PlanState state() const;
  const LaneRates& lane_rates() const { return rates_; }
  // What the newest kind of step plans for its records, by the regions that they were saved in and
  // what made them; for people.
  struct ByOp {
    const char* region = nullptr;
    const char* op = nullptr;
    std::size_t records = 0;
    Bytes stays = 0;
    Bytes leaves = 0;  // by a copy
    Bytes drops = 0;
    std::uint64_t again_ns = 0;  // to make those again
  };
  struct Shown {
    std::vector<ByOp> ops;
    std::uint64_t step_ns =
        0;  // of computing, from the first save to the last use; 0: not measured
    std::uint64_t best_ns = 0;  // the quickest such step, with all waits; 0: likewise
    Forecast forecast;
    bool settled = false;  // no other plan will be tried, as long as steps cost what they do
  };
  Shown shown() const;
  // What made the record, and the region that it was saved in; null where nobody knows.
  void name(Place place, const char** op, const char** region) const;
  // The other records that its call made, but for those that stand far from all others.
  void of_call(Place place, std::vector<RecordId>* others) const;
  // Half of what the step learned last saved lies in blocks of no less; 0 before the first.
  Bytes typical_block() const;
  // Its trace; null before the first.
  std::shared_ptr<const Trace> newest() const {
    return traces_.empty() ? nullptr : traces_.front();
  }
  // As if no step had been. Steps whose records are alive go on, and follow nothing.
  void forget_all();
  void set_ranks(bool ranks) { ranks_ = ranks; }
  bool ranks() const { return ranks_; }
  // Goes up when what is expected of records that were saved already has changed.
  std::uint64_t version() const { return version_; }
  Use next_use(Place place, std::uint64_t order) const;
  // How many records were asked for so far: next_use counts on from there.
  Use uses() const { return uses_; }
  // Whether the order of use is known for the record's step.
  bool knows(Place place) const;
  // The record of the same step that is asked for next after this one; false where there is none.
  bool next_after(Place place, Place* next, RecordId* record) const;
  // The most that was live from the use of this record to the next one's: room that the step needs
  // for itself then. 0 where nobody knows.
  Bytes live_after(Place place) const;
  // The least that can be occupied at once from the use of this record to the next one's, when
  // what is planned to leave has; 0 where nobody knows.
  Bytes least_after(Place place) const;
  // Live memory that the last two steps of this kind inside this very budget needed at once, where
  // it is above `high`; 0 where it is not. No eviction can hold less.
  Bytes unavoidable() const;
  // Of all steps that are remembered: the most that was live, and the largest request. 0 without.
  struct Peaks {
    Bytes live = 0;
    Bytes request = 0;
  };
  Peaks peaks() const;

 private:
  static constexpr std::size_t kTraces = 8;
  // Of those, of shapes seen once, before what was repeated is given up for them; and for how many
  // steps that is kept.
  static constexpr std::size_t kSeenOnce = 3;
  static constexpr std::uint32_t kRemembered = 64;
  static constexpr std::uint32_t kCramped = 64;    // steps, then it may have room
  static constexpr std::uint32_t kPressed = 1024;  // steps, for which one that was short counts
  static constexpr std::size_t kUnasked = 64;      // records that went before any was asked for
  static constexpr std::uint32_t kStay = 32;       // proofs of what stays, in a step
  static constexpr std::uint8_t kSeenOften = 16;   // then not each drop is looked at
  static constexpr std::uint32_t kLook = 8;        // steps, in which each is at least once
  static constexpr std::size_t kLongestStep = std::size_t{1} << 20;  // records
  static constexpr Bytes kTraceBytes = 16_MiB;                       // of all traces but the newest
  static constexpr Use kUnplanned = Use{1} << 62;  // later than all that is planned

  struct Step {
    std::uint32_t serial = 0;
    std::uint32_t before = 0;  // the trace learned last when it began
    std::size_t alive = 0;     // records
    Bytes away = 0;            // of them
    bool diverged = false;
    std::uint32_t look_at = KnownRecord::kNever;        // of the trace's places
    std::uint32_t asked = 0;                            // for proofs of what stays
    std::uint32_t needed = 0;                           // records that backward itself asked for,
    std::uint32_t newest_needed = KnownRecord::kNever;  // and the newest of them
    Use began = 0;
    std::shared_ptr<const Trace> trace;  // what it follows
    Kin kin;                             // where the trace is not of its sizes
    Trace seen;                          // what it teaches

    bool with_weights() const { return !seen.weight_uses.empty(); }
  };

  Step* step_of(std::uint32_t serial);
  const Step* step_of(std::uint32_t serial) const;
  const Trace::Entry* expected(Place place, const Step** step) const;
  static std::uint32_t place_in_trace(const Step& step, std::uint32_t index) {
    return step.kin ? step.kin.place_of(index) : index;
  }
  static bool of_other_size(const Step& step, std::uint32_t index, const Trace::Entry& its) {
    return step.kin && step.seen.entries[index].block_bytes != its.block_bytes;
  }
  static bool is_sure_of_place(const Step& step, std::uint32_t index) {
    return !step.kin || step.kin.anchored(index);
  }
  // The likeliest trace among those that `may`, null without any.
  std::shared_ptr<Trace> likeliest(const Trace& seen, auto may) const;
  std::shared_ptr<Trace> nearest(const Trace& seen) const;
  bool over(const Step& step) const;
  static bool alike(const Trace* trace, Bytes high);
  std::shared_ptr<Trace> trace_of(std::uint32_t id) const;  // null where that was forgotten
  std::shared_ptr<Trace> repeated() const;                  // by the newest step; null: none is
  void forget_proofs();
  void follow(Step& step);
  void follow_kin(Step& step);
  void forget();
  void end(Step* step);
  void learn(Step& step);
  void see_places(Trace& trace, const Step& step) const;

  std::list<std::shared_ptr<Trace>> traces_;  // newest first
  std::list<Step> steps_;                     // those whose records are alive, and the newest
  std::uint32_t timed_step_ = 0;  // the step that is measured; 0: it has gone another way
  // What a call takes that runs again, beside what is occupied in any case. What is away counts
  // with that, so that what comes or goes meanwhile is not of the call.
  struct Rerun {
    bool on = false;
    Bytes before = 0;  // occupied and away
    Bytes made = 0;    // of what was dropped, since
    Bytes most = 0;    // beside `before`, at once
  };
  Rerun rerun_;
  Bytes away_ = 0;         // of all steps
  Step* now_ = nullptr;    // the newest; null before the first
  Step* using_ = nullptr;  // whose record was asked for last
  std::uint32_t serial_ = 0;
  std::uint32_t ids_ = 0;
  std::uint64_t version_ = 0;
  std::uint64_t turns_ = 0;
  LaneRates rates_;
  std::uint32_t learned_ = 0;  // the trace learned last
  std::size_t varied_ = 0;     // steps of sizes not seen before: more of late than that repeat
  bool ranks_ = false;         // Trace::measured
  bool for_all_sizes_ = true;  // proofs are: until something came back otherwise than when proven
  Use uses_ = 0;
  Bytes high_ = kUnlimited;
  Bytes live_ = 0;                // when last told
  Bytes pressed_ = 0;             // budgets up to this one, or alike, were too small for some step
  std::uint32_t pressed_in_ = 0;  // the last one that was learned in
};

}  // namespace stagehand::core
