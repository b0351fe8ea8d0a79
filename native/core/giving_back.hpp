// torch's free segments go back to the driver, on this thread, as long as it lives.
//
// cuMemFree waits for the device that the memory is of, but takes it away from the others before
// that: what another device has queued on it then faults, whatever waits for it. torch's copy from
// device to device is such work. Its result may be dropped at once, in the order of the stream of
// either side, and torch gives it back with no look at the other one. So the others are waited for
// here: for each device that gives anything back once, when torch tells of the first segment, under
// its mutex. What is free by then stays free.
//
// The pages of an expandable segment go before torch tells, behind the segment's stream; behind the
// wrong one where that is the default stream of a device that is not the current one. So all but
// the current one are waited for at the beginning too.
//
// Work of another device may wait for this thread, as for the peer of a collective: so that wait is
// on a thread of its own, for two seconds at most, and where it is not over nothing goes back. At a
// segment of another device than the current one nobody can be told to stop: there the wait only
// makes it likely.
//
// In a header of its own, since a call through torch lies between the two.
#pragma once

#include <cstdint>

#include "driver/driver.hpp"

namespace stagehand::core {

class GivingBack {
 public:
  // `device` is the current one. Waits, so: without any lock of ours.
  GivingBack(const driver::Table& table, int device);
  ~GivingBack() { here() = nullptr; }
  GivingBack(const GivingBack&) = delete;
  GivingBack& operator=(const GivingBack&) = delete;

  // False where another device could not be waited for: a graph is captured there, or its work
  // takes longer than that. Then nothing may go back.
  bool safe() const { return safe_; }
  // A segment of that device goes back next.
  static void segment_goes(int device);

 private:
  static GivingBack*& here();
  bool wait_for_others(int device) const;

  const driver::Table& table_;
  const bool safe_;
  std::uint64_t waited_ = 0;  // a bit for each device whose segments go
};

}  // namespace stagehand::core
