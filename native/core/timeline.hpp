// What the engine does and when, for people: off until somebody asks, and then one look at a flag.
// Nothing waits for it.
//
// Guarded by the device's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "core/counters.hpp"
#include "core/gate.hpp"
#include "core/types.hpp"

namespace stagehand::core {

class Timeline {
 public:
  explicit Timeline(Gate& gate) : gate_(gate) {}

  // In the order of stagehand_alloc/_pictures/timeline.py's names.
  enum class What : std::uint8_t {
    entered,     // a pool
    left,        // a pool
    evicted,     // a record's block was given up, and its copy is made or queued
    dropped,     // the same without a copy
    made_again,  // what was dropped
    restored,    // somebody waits for it
    prefetched,  // nobody does yet
  };
  struct Note {
    What what;
    std::int64_t ns;       // since the epoch, when the host did it
    Bytes bytes = 0;       // of the record
    std::uint64_t record;  // its order of saving
    Bytes occupied = 0;    // after it
    Bytes mapped = 0;
    Bytes evicted = 0;
  };
  struct Copy {
    std::uint8_t lane;  // 0 to the host, 1 back, 2 back on the express lane
    Bytes bytes;
    std::int64_t queued_ns;  // by the host, since the epoch
    std::int64_t begin_ns;   // by the GPU, likewise
    std::int64_t end_ns;
  };
  struct Taken {
    std::vector<Note> notes;
    std::vector<Copy> copies;
    std::uint64_t missed = 0;  // beyond what is kept
  };

  bool on() const { return on_; }
  // From here on. The caller has made the GPU idle: its clock and the host's are put side by side
  // by an event on that stream. False: the driver refuses it, or there is no host memory for notes.
  bool start(driver::Stream stream);
  // The caller has made the GPU idle again: copies whose events have not passed are left out.
  Taken stop();

  void note(What what, Bytes bytes, std::uint64_t record, const Counters& counters) {
    if (on_) {
      add(what, bytes, record, counters);
    }
  }
  // A copy is about to be queued on that stream; it was. With `on()` only.
  bool copy_begins(driver::Stream stream) noexcept;
  void copy_ends(driver::Stream stream, std::uint8_t lane, Bytes bytes) noexcept;

 private:
  static constexpr std::size_t kNotes = std::size_t{1} << 20;
  static constexpr std::size_t kCopies = std::size_t{1} << 16;

  // In room that `start` took: who notes something is in the middle of it.
  void add(What what, Bytes bytes, std::uint64_t record, const Counters& counters) noexcept;
  bool mark(std::size_t slot, driver::Stream stream) noexcept;

  Gate& gate_;
  bool on_ = false;
  std::int64_t began_ns_ = 0;
  Taken taken_;
  std::vector<driver::Event> events_;  // the beginning, then two for each copy; kept
};

}  // namespace stagehand::core
