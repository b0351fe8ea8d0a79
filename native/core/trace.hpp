// What the plan remembers of one kind of step. Data, and pure questions about it.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "core/planner.hpp"
#include "core/trials.hpp"
#include "core/types.hpp"
#include "core/watch.hpp"
#include "driver/driver.hpp"

namespace stagehand::core {

struct Trace {
  static constexpr Bytes kAlike =
      64;  // live memory, and `high`, are alike where they differ by 1/64

  enum class Proof : std::uint8_t { none, proven, refused };
  // The trace in which a place was seen first, and where in it: steps of other sizes have it from
  // their kin. A proof is of a place.
  struct SeenAs {
    std::uint32_t trace = 0;
    std::uint32_t index = 0;
    bool operator==(const SeenAs&) const = default;
  };

  struct Entry {
    Bytes block_bytes = 0;
    RecordId record;
    const char* op = nullptr;  // Origin's
    const char* region = nullptr;
    bool evicted = false;
    bool dropped = false;        // without a copy
    std::uint32_t kind = 0;      // Made::kind
    std::uint32_t rests_on = 0;  // Made::rests_on
    bool by_node = false;        // can be made again by a recipe, unless that is refused
    bool sought = true;          // else nobody looked for one
    std::uint32_t made_of[Made::kInputs] = {KnownRecord::kNever, KnownRecord::kNever,
                                            KnownRecord::kNever};  // its inputs' entries
    bool by_call = false;       // can be by the call that it was saved in
    std::uint64_t call = 0;     // that one's number; 0: none
    Proof proof = Proof::none;  // that the recipe makes the same bytes
    bool cramped = false;       // proving that would have gone over `high`: it is moved
    bool any_size = false;      // Made::any_size
    std::uint8_t agreed = 0;    // proofs, and looks since, that came back the same
    std::uint32_t asked = 0;    // the step that asked for a proof last, by its number; 0: none did
    SeenAs seen_as;
    std::uint64_t again_ns = 0;  // by the recipe, as last measured; 0: never was
    std::uint64_t rerun_ns = 0;  // by the call, from its beginning on, likewise
    Bytes rerun_bytes = 0;       // by its newest run, beside what that made; on the last of it
    bool comes = false;          // if dropped too: its call runs past it in any case
    bool leaves = false;         // is to leave in the next step
    bool away = false;
    // Which it was of those that left, in the last such step in which it did; its turn in `copies`.
    std::uint32_t left_as = KnownRecord::kNever;
    std::uint32_t turn = KnownRecord::kNever;
    std::uint32_t saved = 0;  // moments
    std::uint32_t retained = KnownRecord::kNever;
    std::uint32_t used_moment = KnownRecord::kNever;
    std::uint32_t used = 0;     // the how-maniest of its step that was asked for; 0: never
    std::uint64_t used_at = 0;  // of all that were asked for since the step began
    // The how-maniest that backward itself asked for, and not a recipe for it; 0: it never did.
    std::uint32_t needed = 0;

    bool again() const { return by_node || by_call; }
    bool unproven() const { return may_by_node() && proof == Proof::none; }
    bool may_by_node() const { return by_node && !cramped && proof != Proof::refused; }
    // Nobody looked for a recipe this time: the one before is likely to be there still. What is
    // dropped rests on the recipe that is there then.
    void keep_recipe(const Entry& before) {
      by_node = before.by_node;
      any_size = before.any_size;
      kind = before.kind;
      rests_on = before.rests_on;
      proof = before.proof;
      std::copy(std::begin(before.made_of), std::end(before.made_of), made_of);
    }
    bool same_recipe(const Entry& other) const {
      return by_node == other.by_node && kind == other.kind && rests_on == other.rests_on;
    }
    bool proven_by_node() const { return by_node && proof == Proof::proven; }
    // Also for steps of other sizes: each of so many was of another size than the one before.
    bool proven_for_all_sizes() const {
      return any_size && proven_by_node() && agreed >= kForAllSizes;
    }
    static constexpr std::uint8_t kForAllSizes = 4;
  };
  std::uint32_t id = 0;
  std::uint32_t depth = 0;     // steps that waited for their backward when it began
  std::uint32_t follower = 0;  // the trace of the step that came next
  std::uint32_t repeated = 0;  // the last step that repeated it; 0: none has
  Bytes high = 0;              // the budget it ran under
  Bytes live_before = 0;       // when it began
  Bytes live_peak = 0;
  Bytes unavoidable = 0;  // the lesser live peak of the last two such steps
  std::vector<Entry> entries;
  std::vector<std::uint32_t> by_use;  // the entry asked for first, second, ...
  std::vector<Bytes> live{0};         // the most live after the n-th use, before the next
  // Of each moment: the most that would have been occupied if none of its records had left.
  std::vector<Bytes> full{0};
  // Of each moment: the most that was held in it, of this step as it went. For people.
  struct Held {
    Bytes occupied = 0;
    Bytes mapped = 0;
  };
  std::vector<Held> held{{}};
  // Both, or neither where host memory has run out.
  void begin_moment() {
    full.push_back(0);
    try {
      held.emplace_back();
    } catch (...) {
      full.pop_back();
      throw;
    }
  }
  // Weight groups that were held in it, from one moment to another, in order; and what they were
  // not held in, once it is over.
  struct WeightUse {
    std::uint32_t group = 0;
    Bytes bytes = 0;
    std::uint32_t from = 0;
    std::uint32_t until = KnownRecord::kNever;  // the last
  };
  std::vector<WeightUse> weight_uses;
  std::vector<IdleWeights> idle;
  void weights_held(std::uint32_t group, Bytes bytes);
  void weights_left(std::uint32_t group);
  WeightUse* newest_use(std::uint32_t group);  // null without any
  void find_idle();
  // When each begins, once that was measured, and what the lanes carry.
  std::vector<std::uint64_t> at_ns{};
  LaneRates rates;
  bool of_kin = false;  // its places were seen in others first
  int timed = 0;        // steps; kTimed: no more of them need be
  int cut_off = 0;      // that began to be measured, and the next one began before they were over;
                        // once settled, since the last look
  StepTotals totals;    // of the newest that was
  Trials trials;
  Watch watch;
  bool begins_plan = false;   // another one than the steps before had, and what they made of it
  std::uint32_t plans = 0;    // that were tried, and begun to be tried anew
  bool planned = false;       // the planner chose what leaves
  bool drops_late = false;    // RunPlan's
  std::uint32_t leavers = 0;  // records that left in it
  // The entries that leave by a copy, in the order in which their copies are to be made
  // (core/copy_order.hpp). Empty before the step was measured: they are made as it goes.
  std::vector<std::uint32_t> copies{};
  bool pressed = false;        // something left in it
  std::vector<Bytes> least{};  // the most of Plan::least_after, of each use
  Bytes largest_request = 0;
  // The largest before the n-th record saved or needed; in the step, and in the one before. What
  // recipes ask for does not count, so that it is the same whatever is made again.
  std::vector<Bytes> requests;
  std::vector<Bytes> requests_before;
  // Requests that made records leave again that had come back ahead, by the plan that did so
  // (Trials::id) and their places: the largest of each. There may be more of them than holes are
  // set aside for.
  struct Crowding {
    Bytes bytes = 0;
    driver::Stream stream = nullptr;
  };
  std::map<std::pair<std::uint32_t, std::size_t>, Crowding> crowding;

  Entry* at_place(SeenAs place);  // null without any
  // That one; where nothing was asked for there, the largest around it.
  Bytes request_at(std::size_t place) const;
  Bytes largest_request_in(std::size_t begin, std::size_t end) const;  // places
  Bytes largest_crowding_in(std::size_t begin, std::size_t end, driver::Stream stream) const;
  void keep_crowding(const Trace& before);
  Bytes evicted_bytes() const;
  // What its step had to do without at once, at least.
  Bytes short_by() const;
  Bytes memory() const;  // of the host, that it takes

  static constexpr int kTimed = 64;
  static constexpr std::uint32_t kPays = 3;           // steps from here on pay for a change of plan
  static constexpr std::uint32_t kOthersSettle = 64;  // steps; other ranks may take so many
  static constexpr int kCutOff = 16;                  // then none will be measured whole
  // No more plans are tried; nor is any where steps cannot be measured.
  bool tried_all() const { return timed >= kTimed; }
  bool settled() const { return tried_all() || cut_off >= kCutOff; }
  // One such step was measured: chooses by all that were; once that is settled only where what it
  // costs has moved. False: nothing changed, as where its plan has been left meanwhile. `ranks`:
  // other processes take part in the step, who try plans too (tries_first_of_all).
  bool measured(const StepToTime& of, const StepTimes& times, LaneRates& known_rates,
                std::uint32_t step, bool ranks = false);
  StepToTime to_time() const;  // the step that begins
  void drop_what_is_cheap();
  // All is to be measured and planned anew.
  void forget_times();
  // What steps took so far rests on what is no more.
  void forget_trials();
  // What leaves, by the planner; where something can be dropped, by what took the least of all that
  // was tried.
  void choose();
  void try_another();
  bool tries_first_of_all();  // false: there is nothing to try
  bool kept_first_of_all();   // no more plans are tried
  double little() const;      // of a step, in ns
  bool drops() const;
  bool moves_least(const KnownStep& step, const Forecast& before, RunPlan* best);
  // Whether the best of its plans that drop takes a good part longer than what it computes.
  bool far_from_free() const;
  // In turn, each that a settled plan drops for a recipe to make again.
  std::uint32_t nth_by_recipe(std::uint32_t n) const;
  void use(const RunPlan& plan);
  // What that leaves room for.
  void expect();
  // Sets `copies`, and each one's turn.
  void order_copies();
  // Whether what is to be dropped has to be proven first.
  bool proving() const;
  KnownStep known(std::vector<KnownRecord>* records) const;
  std::vector<Fate> fates() const;
  RunPlan plan() const { return RunPlan(fates(), drops_late); }
  // Whether it was in torch's cache: only there requests are told.
  bool is_not_moved() const { return largest_request > 0; }
  std::uint64_t time_to_make(const Entry& entry) const;
  // Sets what it takes to run each record's call again, up to where that is saved.
  void time_reruns(std::vector<KnownRecord>* records) const;

  bool repeats(const Trace& other) const;
  // Whether as much was live when both began: else as much more or less has to leave, as where
  // the first of several micro-batches has no gradients yet.
  bool begins_like(const Trace& other) const;
  // What left under its budget leaves under this one too.
  bool predicts(Bytes other_high) const { return other_high <= high; }
};

}  // namespace stagehand::core
