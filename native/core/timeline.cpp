#include "core/timeline.hpp"

#include <chrono>
#include <new>
#include <utility>

namespace stagehand::core {

namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

bool Timeline::start(driver::Stream stream) {
  on_ = false;
  taken_ = {};
  try {
    taken_.notes.reserve(kNotes);  // pages that nobody writes to cost nothing
    taken_.copies.reserve(kCopies);
    events_.reserve(1 + 2 * kCopies);
  } catch (const std::bad_alloc&) {
    taken_ = {};
    return false;
  }
  on_ = mark(0, stream);
  began_ns_ = now_ns();
  return on_;
}

Timeline::Taken Timeline::stop() {
  on_ = false;
  Taken taken = std::exchange(taken_, {});
  std::vector<Copy> passed;
  for (std::size_t i = 0; i < taken.copies.size(); ++i) {
    Copy copy = taken.copies[i];
    const auto at = [&](std::size_t slot, std::int64_t* ns) {
      float ms = 0;
      const bool read =
          gate_->event_query(events_[slot]) == driver::kSuccess &&
          gate_->event_elapsed_time(&ms, events_[0], events_[slot]) == driver::kSuccess;
      *ns = began_ns_ + static_cast<std::int64_t>(static_cast<double>(ms) * 1e6);
      return read;
    };
    if (at(1 + 2 * i, &copy.begin_ns) && at(2 + 2 * i, &copy.end_ns)) {
      passed.push_back(copy);
    } else {
      ++taken.missed;
    }
  }
  taken.copies = std::move(passed);
  return taken;
}

void Timeline::add(What what, Bytes bytes, std::uint64_t record,
                   const Counters& counters) noexcept {
  if (taken_.notes.size() == kNotes) {
    ++taken_.missed;
    return;
  }
  taken_.notes.push_back(
      {what, now_ns(), bytes, record, counters.occupied, counters.mapped, counters.evicted});
}

bool Timeline::copy_begins(driver::Stream stream) noexcept {
  if (taken_.copies.size() == kCopies || !mark(1 + 2 * taken_.copies.size(), stream)) {
    ++taken_.missed;
    return false;
  }
  return true;
}

void Timeline::copy_ends(driver::Stream stream, std::uint8_t lane, Bytes bytes) noexcept {
  if (mark(2 + 2 * taken_.copies.size(), stream)) {
    taken_.copies.push_back({lane, bytes, now_ns(), 0, 0});
  }
}

bool Timeline::mark(std::size_t slot, driver::Stream stream) noexcept {
  while (slot >= events_.size()) {
    driver::Event event = nullptr;
    if (gate_->event_create(&event, 0) != driver::kSuccess) {
      return false;
    }
    events_.push_back(event);
  }
  return gate_->event_record(events_[slot], stream) == driver::kSuccess;
}

}  // namespace stagehand::core
