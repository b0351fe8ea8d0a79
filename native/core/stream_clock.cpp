#include "core/stream_clock.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"

namespace stagehand::core {

bool Fence::add(Tick tick) {
  for (std::size_t i = 0; i < count_; ++i) {
    if (ticks_[i].clock == tick.clock) {
      ticks_[i].seq = std::max(ticks_[i].seq, tick.seq);
      return true;
    }
  }
  if (count_ == kCapacity) {
    return false;
  }
  ticks_[count_++] = tick;
  return true;
}

bool Fence::add(const Fence& other) {
  bool all = true;
  for (const Tick& tick : other) {
    all &= add(tick);
  }
  return all;
}

bool StreamClock::captured() const {
  int status = driver::kCaptureNone;
  return captures_ > 0 && (table_.stream_is_capturing(stream_, &status) != driver::kSuccess ||
                           status != driver::kCaptureNone);
}

Status StreamClock::record(Tick* tick) {
  if (captured()) {
    return Status::driver_failed;
  }
  const std::size_t slot = next_ % kRing;
  if (ring_.size() <= slot) {
    ring_.resize(slot + 1, nullptr);
  }
  if (ring_[slot] == nullptr &&
      table_.event_create(&ring_[slot], driver::kEventDisableTiming) != driver::kSuccess) {
    ring_[slot] = nullptr;
    return Status::driver_failed;
  }
  if (table_.event_record(ring_[slot], stream_) != driver::kSuccess) {
    return Status::driver_failed;
  }
  *tick = {index_, next_++};
  return Status::ok;
}

Status StreamClock::hop(driver::Stream* spare) {
  Tick tick;
  if (const Status status = record(&tick); status != Status::ok) {
    return status;
  }
  if (table_.stream_wait_event(*spare, ring_[tick.seq % kRing], 0) != driver::kSuccess) {
    return Status::driver_failed;
  }
  std::swap(stream_, *spare);
  return Status::ok;
}

Status StreamClock::event_for(Seq seq, driver::Event* event, Seq* actual) {
  if (seq >= next_) {
    Tick tick;
    if (const Status status = record(&tick); status != Status::ok) {
      return status;
    }
    SH_CHECK(tick.seq >= seq);
  }
  const Seq oldest = next_ > kRing ? next_ - kRing : 1;
  *actual = std::max(seq, oldest);
  *event = ring_[*actual % kRing];
  return Status::ok;
}

bool StreamClock::passed(Seq seq) {
  if (seq <= passed_) {
    return true;
  }
  if (seq >= next_) {
    return false;
  }
  const Seq oldest = next_ > kRing ? next_ - kRing : 1;
  const Seq asked = std::max(seq, oldest);
  if (table_.event_query(ring_[asked % kRing]) != driver::kSuccess) {
    return false;
  }
  passed_ = asked;
  return true;
}

void StreamClock::set_waited(std::uint32_t clock, Seq seq) {
  if (waited_.size() <= clock) {
    waited_.resize(clock + 1, 0);
  }
  waited_[clock] = std::max(waited_[clock], seq);
}

StreamClock& ClockBank::of(driver::Stream stream) {
  for (StreamClock& clock : clocks_) {
    if (clock.stream() == stream) {
      return clock;
    }
  }
  return clocks_.emplace_back(table_, captures_, stream,
                              static_cast<std::uint32_t>(clocks_.size()));
}

Status ClockBank::order_after(StreamClock& waiter, Tick tick) {
  if (tick.clock == waiter.index() || waiter.waited(tick.clock) >= tick.seq) {
    return Status::ok;
  }
  if (tick.seq == kNever || waiter.captured()) {
    return Status::driver_failed;
  }
  driver::Event event = nullptr;
  Seq actual = 0;
  if (const Status status = at(tick.clock).event_for(tick.seq, &event, &actual);
      status != Status::ok) {
    return status;
  }
  if (table_.stream_wait_event(waiter.stream(), event, 0) != driver::kSuccess) {
    return Status::driver_failed;
  }
  waiter.set_waited(tick.clock, actual);
  return Status::ok;
}

Status ClockBank::order_after(StreamClock& waiter, const Fence& fence) {
  for (const Tick& tick : fence) {
    if (const Status status = order_after(waiter, tick); status != Status::ok) {
      return status;
    }
  }
  return Status::ok;
}

bool ClockBank::settled(const StreamClock& waiter, const Fence& fence) {
  return std::all_of(fence.begin(), fence.end(), [&](const Tick& tick) {
    return tick.clock == waiter.index() || waiter.waited(tick.clock) >= tick.seq ||
           at(tick.clock).passed(tick.seq);
  });
}

}  // namespace stagehand::core
