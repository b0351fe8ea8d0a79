// A step beside a trace that is not of its sizes: which of its records is which of the trace's, how
// much larger it all is, and so what is likely to leave. Pure. A guess: it costs time where it is
// wrong. But which place a record has, a proof rests on (Plan::proven): `anchored` says where that
// is more than a guess.
//
// Place by place in the order of saving. Where that stops to fit (one of the two has records that
// the other lacks), the places around it are tried. A record costs a constant.
#pragma once

#include <memory>
#include <vector>

#include "core/trace.hpp"

namespace stagehand::core {

class Kin {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  explicit operator bool() const { return trace_ != nullptr; }

  // The step's records so far are beside this trace's, the newest for the first time.
  void follow(std::shared_ptr<const Trace> trace, const Trace& step);
  // A record was saved. True: what leaves has changed, of records saved before too.
  bool saved(const Trace& step);
  // Most of what is saved is not like the trace.
  bool lost() const { return unlike_ > kUnlike && 2 * unlike_ > compared_; }

  // Of the step's record the place in the trace: that of the one before where it has none.
  std::uint32_t place_of(std::uint32_t index) const { return places_[index]; }
  // Whether that is sure: all records so far, or the last kAnchored, are alike what is at their
  // places, made by the same ops, and in the same order without a gap.
  bool anchored(std::uint32_t index) const { return anchored_[index]; }
  bool leaves(std::uint32_t index) const { return leaves_[places_[index]]; }
  // Whether it is to be dropped then, where it can be.
  bool drops(std::uint32_t index) const {
    return leaves(index) && anchored(index) && cheap(trace_->entries[places_[index]]);
  }
  // The step's record that is asked for next after this one; kNone where nobody knows.
  std::uint32_t next_after(std::uint32_t index) const;
  // What was live after the n-th use, and what was requested before a place, at this size.
  Bytes live(std::size_t use, Bytes live_before) const;
  Bytes request_at(std::size_t place) const;
  Bytes unavoidable(Bytes live_before) const;
  Bytes live_peak(Bytes live_before) const { return scaled(trace_->live_peak, live_before); }
  // The place in the trace of the record that is saved next.
  std::size_t next_place() const { return next_; }

  static constexpr Bytes kCheap = 2_MiB;  // less is moved sooner than it is made again

 private:
  static constexpr std::size_t kAnchored = 8;
  static constexpr std::size_t kTail = 4;      // records that must fit better where places change
  static constexpr std::size_t kReach = 32;    // places looked at, each way
  static constexpr std::size_t kSkipped = 64;  // of the trace, in the order of use
  static constexpr std::size_t kUnlike = 32;

  static bool cheap(const Trace::Entry& entry);
  bool alike(Bytes mine, Bytes its) const;
  int fit(const Trace& step, std::size_t place) const;
  void place(const Trace& step);
  void put(const Trace& step, std::size_t index, std::size_t place);
  double scale() const;
  Bytes scaled(Bytes live, Bytes live_before) const;
  void choose(const Trace& step);

  std::shared_ptr<const Trace> trace_;
  std::vector<std::uint32_t> places_;  // of the step's records
  std::vector<std::uint32_t> older_;   // the step's record that was at the same place before
  std::vector<std::uint32_t> newest_;  // of the trace's places: the step's record there
  std::vector<bool> anchored_;
  std::size_t in_order_ = 0;  // the newest records that are alike their places without a gap
  std::vector<bool> leaves_;  // of the trace's places
  std::size_t next_ = 0;
  std::size_t compared_ = 0;
  std::size_t unlike_ = 0;
  double ratio_ = 1;       // of the sizes compared last that differ
  double mine_ = 0;        // bytes of what is alike, in the step
  double its_ = 0;         // and in the trace
  double chosen_for_ = 1;  // the scale
  double chosen_at_ = 0;   // mine_
};

}  // namespace stagehand::core
