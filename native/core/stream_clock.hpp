// Time as a stream sees it. A clock numbers the events recorded on one stream; a Tick names "all
// work queued on that stream before event number seq". Every ordering rule S1 to S6 is one call of
// `ClockBank::order_after`, which queues a device-side wait and never waits on the host.
//
// What the driver answered is remembered: that an event has passed for good, that one has not, and
// whether a stream is being captured, for the rest of the public call (Gate::turn).
//
// Protected by the device's lock. Not protected: a stream destroyed by its owner and its handle
// given to a new stream while blocks of the old one are alive (torch's own streams never die).
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <vector>

#include "core/gate.hpp"
#include "core/spare_events.hpp"
#include "core/step_clock.hpp"
#include "core/timeline.hpp"
#include "core/types.hpp"

namespace stagehand::core {

struct Block;

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
  // Whether nothing will ever be known to be behind it.
  bool never() const {
    return std::any_of(begin(), end(), [](const Tick& tick) { return tick.seq == kNever; });
  }
  const Tick* begin() const { return ticks_.data(); }
  const Tick* end() const { return ticks_.data() + count_; }

 private:
  std::array<Tick, kCapacity> ticks_{};
  std::uint8_t count_ = 0;
};

struct StreamPlace {
  driver::Stream stream = nullptr;
  driver::Context context = nullptr;  // null where it is the device's own
};
// The host waits until all that is queued there is done. Without any lock; false where the driver
// refuses.
bool synchronize(const driver::Table& driver, const StreamPlace& place);

class StreamClock {
 public:
  // `context`: of the stream, where it is not the device's own.
  StreamClock(Gate& gate, SpareEvents& events, const int& captures, driver::Stream stream,
              std::uint32_t index, driver::Context context = nullptr)
      : gate_(gate),
        events_(events),
        captures_(captures),
        stream_(stream),
        context_(context),
        index_(index) {}

  driver::Stream stream() const { return stream_; }
  // Where it is now: a lane's goes from stream to stream.
  StreamPlace place() const { return {stream_, context_}; }
  std::uint32_t index() const { return index_; }
  // The number the next recorded event will get: names all work queued up to now.
  Seq upcoming() const { return next_; }
  // The same for a fence that may outlive whoever relies on this clock.
  Tick now() {
    named_ = true;
    return {index_, next_};
  }
  // All work queued before event number `seq`, for the same.
  Tick tick(Seq seq) {
    named_ |= seq >= next_;
    return {index_, seq};
  }
  // Records an event behind everything queued so far; returns its tick. Fails on a stream that is
  // being captured into a CUDA graph: the event would be the graph's, and tell nothing.
  Status record(Tick* tick);
  // An event now and then, so that copies can start at a point of the stream instead of behind all
  // that the host has queued since: one for each kFine bytes of work noted here.
  void note_work(Bytes bytes);
  bool captured();
  // For a stream of our own: nothing is queued on it but behind `captured` of others, so no capture
  // reaches it, and it is not asked.
  void never_captured() { own_ = true; }
  // Goes on, in order, on `spare`, and leaves the stream it was on there. What is queued on one
  // stream reaches the copy engine in one go and holds up everybody else's copies until it is done;
  // a copy that waits for another stream's lets others through between the two.
  Status hop(driver::Stream* spare);
  // The earliest recorded event at or after `seq`, recording one if there is none yet.
  Status event_for(Seq seq, driver::Event* event, Seq* actual);
  // Whether the work up to `seq` is done; asks the driver at most once a call of ours for what is
  // not, never waits, never records.
  bool passed(Seq seq);
  // The same, from what is known already.
  bool known_passed(Seq seq) const { return seq <= passed_; }
  // Names all work queued so far without an event, for who waits for the whole GPU: nothing is
  // asked of the stream, which may be gone. `gpu_passed` says that the wait is over.
  Seq mark();
  void gpu_passed(Seq marked) { passed_ = std::max(passed_, marked); }

  // How far this stream has been made to wait on each other clock.
  Seq waited(std::uint32_t clock) const { return clock < waited_.size() ? waited_[clock] : 0; }
  void set_waited(std::uint32_t clock, Seq seq);

 private:
  friend class ClockBank;
  // Older ticks are answered by the oldest event kept: later than need be, and safe.
  static constexpr Seq kRing = 2048;
  static constexpr Bytes kFine = 16_MiB;

  bool asked_again();  // whether it is captured now
  Seq oldest() const { return next_ > kRing ? next_ - kRing : 1; }
  // The first number from `seq` on that an event stands for; next_ where none does.
  Seq with_event(Seq seq) const;

  driver::Event spare();
  void give_up(Seq seq);
  void give_up_passed();
  void look_back();
  void move_to(driver::Stream stream, driver::Context context);

  Gate& gate_;
  SpareEvents& events_;
  const int& captures_;  // the bank's count of captures under way
  driver::Stream stream_;
  driver::Context context_;
  const std::uint32_t index_;
  Seq next_ = 1;
  Seq passed_ = 0;
  Seq not_passed_ = kNever;            // the least that had not passed,
  std::uint64_t not_passed_turn_ = 0;  // asked in this turn
  std::uint64_t captured_turn_ = 0;    // when last asked
  bool captured_ = false;
  bool own_ = false;                 // no capture reaches it
  bool named_ = false;               // a tick that no event stands for yet was handed out
  Bytes work_ = 0;                   // noted since the last event
  std::uint32_t holders_ = 0;        // arenas, lanes, held blocks and users that rely on this clock
  std::vector<driver::Event> ring_;  // null where a mark took the number, or it has passed
  Seq kept_ = 1;                     // before it all that have passed were given up
  std::vector<driver::Event> spare_;  // of another context, or given up before they had passed
  std::vector<Seq> waited_;
};

// All clocks of one device. A clock that nothing relies on any more serves the next new stream: its
// numbers go on, so that old ticks stay in the past.
class ClockBank {
 public:
  explicit ClockBank(Gate& gate) : events(gate), steps(gate, events), timeline(gate), gate_(gate) {}

  SpareEvents events;
  StepClock steps;  // measures waits for lanes too
  Timeline timeline;
  // A step has come to this moment, on `stream`.
  void moment(std::size_t number, driver::Stream stream);

  StreamClock& of(driver::Stream stream) { return of(stream, nullptr); }
  // The default stream of another device, by its context.
  StreamClock& of(driver::Stream stream, driver::Context context);
  void capture(int change) { captures_ += change; }
  int captures() const { return captures_; }
  StreamClock& at(std::uint32_t index) { return clocks_[index]; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(clocks_.size()); }
  Gate& gate() { return gate_; }

  // Whoever relies on a clock for longer than a call says so: it is not reused meanwhile.
  void hold(StreamClock& clock) { ++clock.holders_; }
  void let_go(StreamClock& clock) { --clock.holders_; }
  bool relied_on(const StreamClock& clock) const { return clock.holders_ > 0; }
  // The clock's stream works on the block too, until `forget_users`.
  void add_user(Block* block, const StreamClock& clock);
  void forget_users(Block* block);

  // Work queued on `waiter` from now on runs after `tick`. Nothing to do on the tick's own stream
  // (rule S7), when an earlier wait already covers it, or when it is known to be past.
  Status order_after(StreamClock& waiter, Tick tick);
  Status order_after(StreamClock& waiter, const Fence& fence);
  // Whether `waiter` needs no wait for `fence`: already ordered, or already done.
  bool settled(const StreamClock& waiter, const Fence& fence);

 private:
  static constexpr std::size_t kMany = 16;  // clocks, before one is looked for that can be reused

  StreamClock* reusable();
  driver::Context foreign_context(driver::Stream stream);

  Gate& gate_;
  int captures_ = 0;
  std::deque<StreamClock> clocks_;
};

}  // namespace stagehand::core
