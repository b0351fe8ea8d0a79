#include "core/stall_meter.hpp"

namespace stagehand::core {

namespace {
constexpr float kLateMilliseconds = 0.02f;  // below this a wait is the event's own cost
}

// A pair that is nobody's; kNone where there are too many. It stays spare until it is taken.
std::uint32_t StallMeter::spare() {
  if (spare_.empty()) {
    collect();
  }
  if (spare_.empty()) {
    if (pairs_.size() == kPairs) {
      return kNone;
    }
    Pair pair;
    pair.copied = spare_events_.take(SpareEvents::Kind::time);
    if (pair.copied == nullptr) {
      return kNone;
    }
    pair.asked = spare_events_.take(SpareEvents::Kind::time);
    if (pair.asked == nullptr) {
      spare_events_.give(SpareEvents::Kind::time, pair.copied);
      return kNone;
    }
    pairs_.push_back(pair);
    spare_.push_back(static_cast<std::uint32_t>(pairs_.size() - 1));
  }
  return spare_.back();
}

// A pair whose first event is recorded; kNone where there is none.
std::uint32_t StallMeter::begin(driver::Event Pair::* first, driver::Stream stream) {
  const std::uint32_t index = spare();
  if (index == kNone || gate_->event_record(pairs_[index].*first, stream) != driver::kSuccess) {
    return kNone;
  }
  spare_.pop_back();
  return index;
}

std::uint32_t StallMeter::copied(driver::Stream lane, std::uint32_t count) {
  const std::uint32_t index = begin(&Pair::copied, lane);
  if (index != kNone) {
    pairs_[index].weights = false;
    pairs_[index].count = count;
  }
  return index;
}

std::uint32_t StallMeter::weights_asked(driver::Stream consumer) {
  const std::uint32_t index = begin(&Pair::asked, consumer);
  if (index != kNone) {
    pairs_[index].weights = true;
    pairs_[index].prefetched = false;
  }
  return index;
}

void StallMeter::weights_there(std::uint32_t pair, driver::Stream consumer) {
  if (pair == kNone) {
    return;
  }
  if (gate_->event_record(pairs_[pair].copied, consumer) != driver::kSuccess) {
    forget(pair);
    return;
  }
  open_.push_back(pair);
}

void StallMeter::asked(std::uint32_t pair, driver::Stream consumer, bool prefetched) {
  if (pair == kNone) {
    return;
  }
  if (gate_->event_record(pairs_[pair].asked, consumer) != driver::kSuccess) {
    forget(pair);
    return;
  }
  pairs_[pair].prefetched = prefetched;
  open_.push_back(pair);
}

void StallMeter::forget(std::uint32_t pair) {
  if (pair != kNone) {
    spare_.push_back(pair);
  }
}

void StallMeter::collect() {
  while (!open_.empty()) {
    const Pair& pair = pairs_[open_.front()];
    if (gate_->event_query(pair.copied) != driver::kSuccess ||
        gate_->event_query(pair.asked) != driver::kSuccess) {
      return;
    }
    float milliseconds = 0;
    if (gate_->event_elapsed_time(&milliseconds, pair.asked, pair.copied) == driver::kSuccess) {
      const bool late = milliseconds > kLateMilliseconds;
      if (late) {
        const auto ns = static_cast<Bytes>(milliseconds * 1e6f);
        counters_.stall_ns += ns;
        counters_.weights_wait_ns += pair.weights ? ns : 0;
        ++counters_.stall_count;
      }
      if (pair.prefetched) {
        (late ? counters_.prefetch_lates : counters_.prefetch_hits) += pair.count;
      }
    }
    spare_.push_back(open_.front());
    open_.pop_front();
  }
}

}  // namespace stagehand::core
