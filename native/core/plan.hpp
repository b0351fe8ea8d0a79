// The plan: what earlier steps taught about this one. Pure and deterministic: it is told what
// happens, in order, and asked what to expect.
//
// A step's records are known by their place in the order of saving and the size of their block. As
// long as a step repeats the sizes of one that is remembered (its trace, and the budget it ran
// under), it is expected to repeat the rest too: which records leave the GPU, in which order
// backward asks for them, and how much live memory there is on the way. Several traces are kept, so
// that shapes may alternate, and a step's own records may outlive the start of the next one
// (micro-batches in a pipeline). On the first size that no trace has, the rest is reactive.
#pragma once

#include <list>
#include <memory>
#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

enum class PlanState : std::uint8_t {
  none,       // nothing remembered, and nothing needed yet
  learning,   // records leave, and no step like this one is remembered
  following,  // the step repeats one that is remembered
  diverged,   // it did, up to a size that none has
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
  // A record was opened over a block of this size.
  Place saved(Bytes block_bytes, RecordId record = {});
  // A record left the GPU; backward asked for one; its last handle is gone.
  void evicted(Place place);
  void unpacked(Place place);
  void closed(Place place);
  // So much is live now: torch's and backward's blocks.
  void live(Bytes bytes);

  // The largest request since the last record was saved or asked for.
  void requested(Bytes largest);
  // What that will be when the next one is, by the last two such steps. Where they asked for
  // nothing then, what they asked for around it. 0 where nobody knows.
  Bytes expected_request() const;
  // The largest so far in this step.
  Bytes largest_request() const { return now_ != nullptr ? now_->seen.largest_request : 0; }

  // Whether this record is expected to leave.
  bool leaves(Place place) const;
  // Whether the step has followed a trace so far.
  bool follows() const { return now_ != nullptr && now_->trace != nullptr; }
  // Whether nothing is known of what leaves in a step like this one inside such a budget.
  bool is_new() const;
  PlanState state() const;
  // Goes up when what is expected of records that were saved already has changed.
  std::uint64_t version() const { return version_; }
  Use next_use(Place place, std::uint64_t order) const;
  // Whether the order of use is known for the record's step.
  bool knows(Place place) const;
  // The record of the same step that is asked for next after this one; false where there is none.
  bool next_after(Place place, Place* next, RecordId* record) const;
  // The most that was live from the use of this record to the next one's: room that the step needs
  // for itself then. 0 where nobody knows.
  Bytes live_after(Place place) const;
  // Live memory that the last two steps of this kind needed at once, where it is above `high`;
  // 0 where it is not. No eviction can hold less.
  Bytes unavoidable() const;

 private:
  static constexpr std::size_t kTraces = 8;
  static constexpr Bytes kAlike = 64;  // live memory is alike where it differs by 1/64 of `high`
  static constexpr std::size_t kUnasked = 64;  // records that went before any was asked for
  static constexpr std::size_t kLongestStep = std::size_t{1} << 20;  // records
  static constexpr Bytes kTraceBytes = 16_MiB;                       // of all traces but the newest
  static constexpr Use kUnplanned = Use{1} << 62;  // later than all that is planned

  struct Entry {
    Bytes block_bytes = 0;
    RecordId record;
    bool evicted = false;
    bool leaves = false;     // is to leave in the next step
    std::uint32_t used = 0;  // the how-maniest of its step that was asked for; 0: never
    Use used_at = 0;         // of all that were asked for since the step began
  };
  struct Trace {
    std::uint32_t id = 0;
    std::uint32_t depth = 0;     // steps that waited for their backward when it began
    std::uint32_t follower = 0;  // the trace of the step that came next
    Bytes high = 0;              // the budget it ran under
    Bytes live_before = 0;       // when it began
    Bytes live_peak = 0;
    Bytes unavoidable = 0;  // the lesser live peak of the last two such steps
    std::vector<Entry> entries;
    std::vector<std::uint32_t> by_use;  // the entry asked for first, second, ...
    std::vector<Bytes> live{0};         // the most live after the n-th use, before the next
    Bytes largest_request = 0;
    // The largest before the n-th record saved or asked for; in the step, and in the one before.
    std::vector<Bytes> requests;
    std::vector<Bytes> requests_before;

    Bytes requested(std::size_t place) const;
    Bytes evicted_bytes() const;
    Bytes memory() const;  // of the host, that it takes

    bool repeats(const Trace& other) const;
    // Whether as much was live when both began: else as much more or less has to leave, as where
    // the first of several micro-batches has no gradients yet.
    bool begins_like(const Trace& other) const;
    // What left under its budget leaves under this one too.
    bool predicts(Bytes other_high) const { return other_high <= high; }
  };
  struct Step {
    std::uint32_t serial = 0;
    std::uint32_t before = 0;  // the trace learned last when it began
    std::size_t alive = 0;     // records
    bool diverged = false;
    Use began = 0;
    std::shared_ptr<const Trace> trace;  // what it follows
    Trace seen;                          // what it teaches
  };

  Step* step_of(std::uint32_t serial);
  const Step* step_of(std::uint32_t serial) const;
  const Entry* expected(Place place, const Step** step) const;
  // The likeliest trace among those that `may`, null without any.
  std::shared_ptr<Trace> likeliest(const Trace& seen, auto may) const;
  bool over(const Step& step) const;
  void follow(Step& step);
  void end(Step* step);
  void learn(Step& step);

  std::list<std::shared_ptr<Trace>> traces_;  // newest first
  std::list<Step> steps_;                     // those whose records are alive, and the newest
  Step* now_ = nullptr;                       // the newest; null before the first
  Step* using_ = nullptr;                     // whose record was asked for last
  std::uint32_t serial_ = 0;
  std::uint32_t ids_ = 0;
  std::uint64_t version_ = 0;
  std::uint32_t learned_ = 0;  // the trace learned last
  Use uses_ = 0;
  Bytes high_ = kUnlimited;
  Bytes live_ = 0;  // when last told
};

}  // namespace stagehand::core
