// Who is known to come before whom: vector clocks over streams.
//
// An operation's clock is known when it is queued: it follows everything earlier on its stream,
// every record its stream was told to wait for, and everything the host knew to be complete. So
// hazards are found from the program alone, whatever order the scheduler takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace stagehand::sim {

class VectorClock {
 public:
  std::uint64_t at(std::uint32_t slot) const { return slot < times_.size() ? times_[slot] : 0; }
  std::uint64_t tick(std::uint32_t slot) {
    if (slot >= times_.size()) {
      times_.resize(slot + 1, 0);
    }
    return ++times_[slot];
  }
  void join(const VectorClock& other) {
    if (times_.size() < other.times_.size()) {
      times_.resize(other.times_.size(), 0);
    }
    for (std::size_t i = 0; i < other.times_.size(); ++i) {
      times_[i] = std::max(times_[i], other.times_[i]);
    }
  }

 private:
  std::vector<std::uint64_t> times_;
};

enum class OpKind : std::uint8_t {
  kD2H,
  kH2D,
  kD2D,
  kMemset,
  kKernel,
  kFill,
  kCheck,
  kRecord,
  kWait,
  kWaitValue
};

const char* op_name(OpKind kind);

// One operation's place in time, and enough to name it in a hazard. time 0: no operation.
struct Access {
  std::uint64_t time = 0;
  std::uint64_t op = 0;
  std::uint32_t slot = 0;
  OpKind kind = OpKind::kKernel;
  int device = 0;  // of its stream
  bool before(const VectorClock& now) const { return time <= now.at(slot); }
};

}  // namespace stagehand::sim
