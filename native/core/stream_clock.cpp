#include "core/stream_clock.hpp"

#include <algorithm>
#include <utility>

#include "core/block.hpp"
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

bool synchronize(const driver::Table& driver, const StreamPlace& place) {
  if (place.context != nullptr && driver.ctx_push_current(place.context) != driver::kSuccess) {
    return false;
  }
  const bool done = driver.stream_synchronize(place.stream) == driver::kSuccess;
  if (place.context != nullptr) {
    driver::Context popped = nullptr;
    driver.ctx_pop_current(&popped);
  }
  return done;
}

// A stream that the driver does not know is a stream no more: nothing of it is captured. Where the
// driver does not say, it may be.
bool StreamClock::captured() {
  if (own_ || captures_ == 0) {
    return false;
  }
  if (captured_turn_ != gate_.turn()) {
    int status = driver::kCaptureNone;
    const driver::Result result = gate_->stream_is_capturing(stream_, &status);
    captured_ = result == driver::kSuccess
                    ? status != driver::kCaptureNone
                    : result != driver::kInvalidHandle && result != driver::kContextIsDestroyed;
    captured_turn_ = gate_.turn();
  }
  return captured_;
}

bool StreamClock::asked_again() {
  captured_turn_ = gate_.turn() - 1;
  return captured();
}

Status StreamClock::record(Tick* tick) {
  if (captured()) {
    return Status::driver_failed;
  }
  const std::size_t slot = next_ % kRing;
  if (ring_.size() <= slot) {
    ring_.resize(slot + 1, nullptr);
  }
  const driver::Table& driver = *gate_.operator->();
  // An event belongs to the context of its stream; who waits for it may be of any.
  const bool foreign = context_ != nullptr;
  if (foreign && driver.ctx_push_current(context_) != driver::kSuccess) {
    return Status::driver_failed;
  }
  if (ring_[slot] == nullptr) {
    ring_[slot] = spare();
  }
  bool recorded = ring_[slot] != nullptr;
  if (recorded && driver.event_record(ring_[slot], stream_) != driver::kSuccess) {
    const driver::Event event = std::exchange(ring_[slot], nullptr);
    if (foreign) {
      driver.event_destroy(event);  // it may be of another context: the next try makes another
    } else {
      spare_.push_back(event);  // somebody may still wait for what it stood for
    }
    recorded = false;
  }
  // Its own thread begins a capture without a lock of ours: one that began since it was asked has
  // the event, and whoever asked of that would end the capture.
  if (recorded && asked_again()) {
    driver.event_destroy(std::exchange(ring_[slot], nullptr));
    recorded = false;
  }
  if (foreign) {
    driver::Context popped = nullptr;
    driver.ctx_pop_current(&popped);
  }
  if (!recorded) {
    return Status::driver_failed;
  }
  *tick = {index_, next_++};
  named_ = false;
  work_ = 0;
  return Status::ok;
}

// One to record. Of what this stream has passed nobody needs an event any more: it serves any
// stream, since who still waits for it then waits too long at most.
driver::Event StreamClock::spare() {
  give_up_passed();
  if (!spare_.empty()) {
    const driver::Event event = spare_.back();
    spare_.pop_back();
    return event;
  }
  if (context_ != nullptr) {
    return events_.make(SpareEvents::Kind::order);
  }
  if (events_.empty(SpareEvents::Kind::order)) {
    look_back();
    give_up_passed();
  }
  return events_.take(SpareEvents::Kind::order);
}

// Whether the older part of what is kept has passed. `passed` is not asked: what it finds not to
// have passed it takes for so in all of this call.
void StreamClock::look_back() {
  for (const Seq part : {2, 16}) {
    const Seq seq = with_event(kept_ + (next_ - kept_) / part);
    if (seq < next_ && gate_->event_query(ring_[seq % kRing]) == driver::kSuccess) {
      passed_ = std::max(passed_, seq);
      return;
    }
  }
}

void StreamClock::give_up(Seq seq) {
  const driver::Event event = std::exchange(ring_[seq % kRing], nullptr);
  if (event == nullptr) {
    return;
  }
  if (context_ == nullptr && seq <= passed_) {
    events_.give(SpareEvents::Kind::order, event);
  } else {
    spare_.push_back(event);
  }
}

void StreamClock::give_up_passed() {
  for (kept_ = std::max(kept_, oldest()); kept_ <= passed_ && kept_ < next_; ++kept_) {
    give_up(kept_);
  }
}

// All that was recorded is past.
void StreamClock::move_to(driver::Stream stream, driver::Context context) {
  give_up_passed();
  for (driver::Event event : spare_) {
    if (context_ == nullptr) {
      events_.give(SpareEvents::Kind::order, event);
    } else {
      gate_->event_destroy(event);  // nobody says of which context the next ones are
    }
  }
  spare_.clear();
  ring_.clear();
  stream_ = stream;
  context_ = context;
  captured_turn_ = 0;
  waited_.clear();  // what the old stream waited for, the new one has not
}

void StreamClock::note_work(Bytes bytes) {
  work_ += bytes;
  if (work_ >= kFine) {
    Tick tick;
    if (record(&tick) != Status::ok) {
      work_ = 0;
    }
  }
}

Status StreamClock::hop(driver::Stream* spare) {
  Tick tick;
  if (const Status status = record(&tick); status != Status::ok) {
    return status;
  }
  if (gate_->stream_wait_event(*spare, ring_[tick.seq % kRing], 0) != driver::kSuccess) {
    return Status::driver_failed;
  }
  std::swap(stream_, *spare);
  return Status::ok;
}

Status StreamClock::event_for(Seq seq, driver::Event* event, Seq* actual) {
  if (with_event(seq) >= next_) {
    Tick tick;
    if (const Status status = record(&tick); status != Status::ok) {
      return status;
    }
    SH_CHECK(tick.seq >= seq);
  }
  *actual = with_event(seq);
  *event = ring_[*actual % kRing];
  return Status::ok;
}

bool StreamClock::passed(Seq seq) {
  if (seq <= passed_) {
    return true;
  }
  const Seq asked = with_event(seq);
  if (asked >= next_) {
    return false;
  }
  if (not_passed_turn_ == gate_.turn() && asked >= not_passed_) {
    return false;  // the events of one stream pass in order
  }
  if (gate_->event_query(ring_[asked % kRing]) != driver::kSuccess) {
    not_passed_ = asked;
    not_passed_turn_ = gate_.turn();
    return false;
  }
  passed_ = asked;
  return true;
}

Seq StreamClock::mark() {
  const std::size_t slot = next_ % kRing;
  if (ring_.size() <= slot) {
    ring_.resize(slot + 1, nullptr);
  }
  if (next_ > kRing) {
    give_up(next_ - kRing);  // the slot's
  }
  named_ = false;
  return next_++;
}

Seq StreamClock::with_event(Seq seq) const {
  seq = std::max({seq, oldest(), kept_});
  while (seq < next_ && ring_[seq % kRing] == nullptr) {
    ++seq;
  }
  return seq;
}

void StreamClock::set_waited(std::uint32_t clock, Seq seq) {
  if (waited_.size() <= clock) {
    waited_.resize(clock + 1, 0);
  }
  waited_[clock] = std::max(waited_[clock], seq);
}

// Null where the stream is of the device's own context, or nobody says.
driver::Context ClockBank::foreign_context(driver::Stream stream) {
  driver::Context context = nullptr;
  if (stream == nullptr || gate_.context() == nullptr ||
      gate_->stream_get_ctx(stream, &context) != driver::kSuccess) {
    return nullptr;
  }
  return context != gate_.context() ? context : nullptr;
}

StreamClock& ClockBank::of(driver::Stream stream, driver::Context context) {
  for (StreamClock& clock : clocks_) {
    if (clock.stream() == stream && (stream != nullptr || clock.context_ == context)) {
      return clock;
    }
  }
  if (context == nullptr) {
    context = foreign_context(stream);
  }
  if (StreamClock* old = reusable(); old != nullptr) {
    old->move_to(stream, context);
    return *old;
  }
  return clocks_.emplace_back(gate_, events, captures_, stream,
                              static_cast<std::uint32_t>(clocks_.size()), context);
}

// Nothing relies on it, and all that a tick of it can name is past. Nothing is asked of its stream,
// which may be gone.
StreamClock* ClockBank::reusable() {
  if (clocks_.size() < kMany) {
    return nullptr;
  }
  for (StreamClock& clock : clocks_) {
    if (!relied_on(clock) && !clock.named_ && clock.passed(clock.next_ - 1)) {
      return &clock;
    }
  }
  return nullptr;
}

void ClockBank::add_user(Block* block, const StreamClock& clock) {
  if (!block->used_by(clock.index())) {
    block->users |= Block::user_bit(clock.index());
    ++clocks_[std::min(clock.index(), Block::kLastUserBit)].holders_;
  }
}

void ClockBank::forget_users(Block* block) {
  for (std::uint32_t i = 0; i < size() && i <= Block::kLastUserBit; ++i) {
    if (block->used_by(i)) {
      --clocks_[i].holders_;
    }
  }
  block->users = 0;
}

void ClockBank::moment(std::size_t number, driver::Stream stream) {
  if (steps.due(number) && !of(stream).captured() && of(stream).place().context == nullptr) {
    steps.note_moment(number, stream);
  }
}

Status ClockBank::order_after(StreamClock& waiter, Tick tick) {
  if (tick.clock == waiter.index() || waiter.waited(tick.clock) >= tick.seq) {
    return Status::ok;
  }
  if (tick.seq != kNever && at(tick.clock).known_passed(tick.seq)) {
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
  const bool watched = at(tick.clock).own_ && steps.watches(waiter.stream()) &&
                       steps.note(StepClock::Kind::waits, waiter.stream());
  if (gate_->stream_wait_event(waiter.stream(), event, 0) != driver::kSuccess) {
    return Status::driver_failed;
  }
  if (watched) {
    steps.note(StepClock::Kind::waited, waiter.stream());
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
