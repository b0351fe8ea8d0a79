#include "core/step_clock.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/plan.hpp"

namespace stagehand::core {

namespace {
// How long at least one of them lasted.
std::uint64_t together(std::vector<std::pair<std::uint64_t, std::uint64_t>> intervals) {
  std::sort(intervals.begin(), intervals.end());
  std::uint64_t sum = 0;
  std::uint64_t until = 0;
  for (const auto& [begin, end] : intervals) {
    sum += end - std::min(end, std::max(begin, until));
    until = std::max(until, end);
  }
  return sum;
}
}  // namespace

void StepClock::forget() {
  count_ -= open_ ? 1 : 0;
  open_ = measuring_ = full_ = false;
}

void StepClock::tell(Plan& plan) {
  if (measuring_ || full_) {
    plan.cut_off(newest().step);
    forget();
  }
  open_ = false;
  for (StepTimes times; count_ > 0 && read(measured_[oldest_], &times); times = {}) {
    plan.timed(measured_[oldest_].step, times);
    --count_;
    oldest_ = count_ > 0 ? (oldest_ + 1) % kSteps : 0;  // the first one's events are there
  }
}

void StepClock::step_began(Plan& plan) {
  tell(plan);
  if (count_ == kSteps) {
    return;
  }
  if (std::optional<StepToTime> step = plan.wants_times(count_ > 0)) {
    every_ = std::max<std::size_t>(1, step->moments / kPoints);
    due_ = 1;
    copies_[0] = copies_[1] = again_ = 0;
    making_ = false;
    open_ = measuring_ = true;
    ++count_;
    newest().step = std::move(*step);
    newest().marks.clear();
  }
}

void StepClock::note_moment(std::size_t number, driver::Stream stream) {
  Measured& now = newest();
  if (now.marks.empty()) {
    now.stream = stream;
  }
  if (stream != now.stream) {
    return;
  }
  if (note(Kind::moment, stream)) {
    now.marks.back().moment = number;
  }
  due_ = number + every_;
  if (number < now.step.moments) {
    due_ = std::min(due_, now.step.moments);
  } else {
    measuring_ = false;
  }
}

void StepClock::making(driver::Stream stream) {
  making_ =
      watches(stream) && !newest().marks.empty() && again_ < kAgain && note(Kind::again, stream);
}

void StepClock::made(driver::Stream stream, std::uint32_t index, bool rerun) {
  if (std::exchange(making_, false) && watches(stream) &&
      note(rerun ? Kind::rerun : Kind::made, stream)) {
    newest().marks.back().moment = index;
    ++again_;
  }
}

bool StepClock::note(Kind kind, driver::Stream stream, Bytes bytes) {
  if (!measuring_) {
    return false;
  }
  Measured& now = newest();
  const std::size_t slot = now.marks.size();
  if (slot == kMarks) {
    full_ = true;  // what is left out would pass for computing
    measuring_ = false;
    return false;
  }
  if (slot == now.events.size()) {
    if (count_ > 1 && spare_.empty(SpareEvents::Kind::time)) {
      forget();  // one of several: not worth to make events in the middle of a step
      return false;
    }
    const driver::Event event = spare_.take(SpareEvents::Kind::time);
    if (event == nullptr) {
      return false;
    }
    now.events.push_back(event);
  }
  if (gate_->event_record(now.events[slot], stream) != driver::kSuccess) {
    return false;
  }
  now.marks.push_back({kind, 0, bytes});
  return true;
}

bool StepClock::read(const Measured& of, StepTimes* times) {
  const auto& [step, stream, marks, events] = of;
  for (std::size_t i = marks.size(); i-- > 0;) {
    if (gate_->event_query(events[i]) != driver::kSuccess) {
      return false;
    }
  }
  const auto ns_between = [&](std::size_t a, std::size_t b) {
    float milliseconds = 0;
    if (gate_->event_elapsed_time(&milliseconds, events[a], events[b]) != driver::kSuccess) {
      return std::uint64_t{0};
    }
    return static_cast<std::uint64_t>(std::max(0.0f, milliseconds) * 1e6f);
  };
  std::uint64_t idle = 0;
  std::size_t began = 0;
  std::size_t making = marks.size();                        // where it began; none
  std::uint64_t waited = 0;                                 // meanwhile
  std::vector<std::pair<std::uint64_t, std::uint64_t>> in;  // copies, on either of two lanes
  for (std::size_t i = 0; i < marks.size(); ++i) {
    const Mark& mark = marks[i];
    switch (mark.kind) {
      case Kind::moment: {
        const std::uint64_t ns = ns_between(0, i);
        times->points.push_back({mark.moment, ns - std::min(ns, idle)});
        times->all_ns = ns;
        break;
      }
      case Kind::waited:
        (making < i ? waited : idle) += ns_between(began, i);
        times->waited_ns += ns_between(began, i);
        break;
      case Kind::again:
        making = i;
        waited = 0;
        break;
      case Kind::made:
      case Kind::rerun: {
        const std::uint64_t ns = ns_between(making, i);
        times->again.push_back({static_cast<std::uint32_t>(mark.moment), ns - std::min(ns, waited),
                                mark.kind == Kind::rerun});
        idle += ns;
        making = marks.size();
        break;
      }
      case Kind::out_ends:
        times->out_bytes += mark.bytes;
        times->out_ns += ns_between(began, i);
        break;
      case Kind::in_ends:
        times->in_bytes += mark.bytes;
        in.emplace_back(ns_between(0, began), ns_between(0, i));
        break;
      case Kind::waits:
      case Kind::out:
      case Kind::in:
        began = i;  // both ends are noted in one go
        break;
    }
  }
  times->in_ns = together(std::move(in));
  return true;
}

}  // namespace stagehand::core
