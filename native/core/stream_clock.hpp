// Time as a stream sees it. A clock numbers the events recorded on one stream; a Tick names "all
// work queued on that stream before event number seq". Every ordering rule S1 to S6 is one call of
// `ClockBank::order_after`, which queues a device-side wait and never waits on the host.
//
// Protected by the device's lock. Not protected: a stream destroyed by its owner and its handle
// given to a new stream while blocks of the old one are alive (torch's own streams never die).
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "core/types.hpp"
#include "driver/driver.hpp"

namespace stagehand::core {

inline constexpr Seq kNever = ~Seq{0};  // a tick no event will ever stand for

struct Tick {
  std::uint32_t clock = 0;
  Seq seq = 0;
};

// The ticks a block or slab must be behind before it is used again: at most one a clock.
class Fence {
 public:
  static constexpr std::size_t kCapacity = 4;

  // False when full of other clocks: the caller then orders its stream behind `tick` at once.
  bool add(Tick tick);
  bool add(const Fence& other);
  void clear() { count_ = 0; }
  bool empty() const { return count_ == 0; }
  const Tick* begin() const { return ticks_.data(); }
  const Tick* end() const { return ticks_.data() + count_; }

 private:
  std::array<Tick, kCapacity> ticks_{};
  std::uint8_t count_ = 0;
};

class StreamClock {
 public:
  StreamClock(const driver::Table& table, const int& captures, driver::Stream stream,
              std::uint32_t index)
      : table_(table), captures_(captures), stream_(stream), index_(index) {}

  driver::Stream stream() const { return stream_; }
  std::uint32_t index() const { return index_; }
  // The number the next recorded event will get: names all work queued up to now.
  Seq upcoming() const { return next_; }
  Tick now() const { return {index_, next_}; }
  // Records an event behind everything queued so far; returns its tick. Fails on a stream that is
  // being captured into a CUDA graph: the event would be the graph's, and tell nothing.
  Status record(Tick* tick);
  bool captured() const;
  // Goes on, in order, on `spare`, and leaves the stream it was on there. What is queued on one
  // stream reaches the copy engine in one go and holds up everybody else's copies until it is done;
  // a copy that waits for another stream's lets others through between the two.
  Status hop(driver::Stream* spare);
  // The earliest recorded event at or after `seq`, recording one if there is none yet.
  Status event_for(Seq seq, driver::Event* event, Seq* actual);
  // Whether the work up to `seq` is done; asks the driver once, never waits, never records.
  bool passed(Seq seq);

  // How far this stream has been made to wait on each other clock.
  Seq waited(std::uint32_t clock) const { return clock < waited_.size() ? waited_[clock] : 0; }
  void set_waited(std::uint32_t clock, Seq seq);

 private:
  // Older ticks are answered by the oldest event kept: later than need be, and safe.
  static constexpr Seq kRing = 2048;

  const driver::Table& table_;
  const int& captures_;  // the bank's count of captures under way
  driver::Stream stream_;
  const std::uint32_t index_;
  Seq next_ = 1;
  Seq passed_ = 0;
  std::vector<driver::Event> ring_;
  std::vector<Seq> waited_;
};

// All clocks of one device.
class ClockBank {
 public:
  explicit ClockBank(const driver::Table& table) : table_(table) {}

  StreamClock& of(driver::Stream stream);
  void capture(int change) { captures_ += change; }
  int captures() const { return captures_; }
  StreamClock& at(std::uint32_t index) { return clocks_[index]; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(clocks_.size()); }
  // Work queued on `waiter` from now on runs after `tick`. Nothing to do on the tick's own stream
  // (rule S7) or when an earlier wait already covers it.
  Status order_after(StreamClock& waiter, Tick tick);
  Status order_after(StreamClock& waiter, const Fence& fence);
  // Whether `waiter` needs no wait for `fence`: already ordered, or already done.
  bool settled(const StreamClock& waiter, const Fence& fence);

 private:
  const driver::Table& table_;
  int captures_ = 0;
  std::deque<StreamClock> clocks_;
};

}  // namespace stagehand::core
