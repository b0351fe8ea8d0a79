#include "core/step_clock.hpp"

#include <algorithm>
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

bool StepClock::tell(Plan& plan) {
  measuring_ = false;
  if (marks_.size() > 1) {
    StepTimes times;
    if (!read(&times)) {
      return false;
    }
    plan.timed(of_, times);
  }
  marks_.clear();
  return true;
}

void StepClock::step_began(Plan& plan) {
  if (!tell(plan)) {
    return;
  }
  std::size_t moments = 0;
  if (plan.wants_times(&of_, &moments)) {
    measuring_ = true;
    due_ = 1;
    copies_[0] = copies_[1] = again_ = 0;
    making_ = false;
    last_ = moments;
    every_ = std::max<std::size_t>(1, moments / kPoints);
  }
}

void StepClock::note_moment(std::size_t number, driver::Stream stream) {
  if (marks_.empty()) {
    stream_ = stream;
  }
  if (stream != stream_) {
    return;
  }
  if (note(Kind::moment, stream)) {
    marks_.back().moment = number;
  }
  due_ = number + every_;
  if (number < last_) {
    due_ = std::min(due_, last_);
  } else {
    measuring_ = false;
  }
}

void StepClock::making(driver::Stream stream) {
  making_ = watches(stream) && !marks_.empty() && again_ < kAgain && note(Kind::again, stream);
}

void StepClock::made(driver::Stream stream, std::uint32_t index, bool rerun) {
  if (std::exchange(making_, false) && watches(stream) &&
      note(rerun ? Kind::rerun : Kind::made, stream)) {
    marks_.back().moment = index;
    ++again_;
  }
}

bool StepClock::note(Kind kind, driver::Stream stream, Bytes bytes) {
  const std::size_t slot = marks_.size();
  if (slot == kMarks) {
    marks_.clear();  // what is left out would pass for computing
    measuring_ = false;
    return false;
  }
  if (slot == events_.size()) {
    const driver::Event event = spare_.take(SpareEvents::Kind::time);
    if (event == nullptr) {
      return false;
    }
    events_.push_back(event);
  }
  if (gate_->event_record(events_[slot], stream) != driver::kSuccess) {
    return false;
  }
  marks_.push_back({kind, 0, bytes});
  return true;
}

bool StepClock::read(StepTimes* times) {
  for (std::size_t i = marks_.size(); i-- > 0;) {
    if (gate_->event_query(events_[i]) != driver::kSuccess) {
      return false;
    }
  }
  const auto ns_between = [&](std::size_t a, std::size_t b) {
    float milliseconds = 0;
    if (gate_->event_elapsed_time(&milliseconds, events_[a], events_[b]) != driver::kSuccess) {
      return std::uint64_t{0};
    }
    return static_cast<std::uint64_t>(std::max(0.0f, milliseconds) * 1e6f);
  };
  std::uint64_t idle = 0;
  std::size_t began = 0;
  std::size_t making = marks_.size();                       // where it began; none
  std::uint64_t waited = 0;                                 // meanwhile
  std::vector<std::pair<std::uint64_t, std::uint64_t>> in;  // copies, on either of two lanes
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    const Mark& mark = marks_[i];
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
        making = marks_.size();
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
