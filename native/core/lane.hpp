// A lane: one direction of the link, with its caps. Copies run in the order they are queued.
// Guarded by the device's lock.
//
// What is queued on one stream can reach the copy engine in one go and hold up the copies of others
// until all of it is done. So copies go in pieces on two streams in turn, each behind the last:
// that lets others through in between. On an H200 a foreign copy of 64 KiB took 0.22 ms (p99)
// beside pieces of 16 MiB, which cost the lane 2 % of the link; beside whole copies it waited for
// all that was queued (decision 9). Where steps wait for the link, pieces are four times as large
// (decision 74).
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <span>

#include "core/lane_limits.hpp"
#include "core/pacer.hpp"
#include "core/stream_clock.hpp"

namespace stagehand::core {

// Between `device` and `host`, whichever way the lane goes.
struct Copy {
  Address device = 0;
  std::byte* host = nullptr;
  Bytes bytes = 0;
};

inline constexpr std::size_t kSmallTogether = 64;  // small copies in one call
inline constexpr Bytes kSmallCopy = 64_KiB;        // below this a copy costs the same however small

class Lane {
 public:
  enum class Way { out, in };  // device to host; host to device

  // `clock` is on one stream of the lane's own, `spare` is another.
  Lane(Gate& gate, Way way, StreamClock& clock, driver::Stream spare)
      : gate_(gate), way_(way), clock_(clock), spare_(spare), pacer_(gate.table()) {}

  StreamClock& clock() { return clock_; }
  Pacer& pacer() { return pacer_; }

  // Queues the copies behind all that the lane's clock was made to wait for. Small ones go together
  // where the driver can. When this fails half-way, what was queued still runs.
  Status queue(std::span<const Copy> copies);
  // One copy that the caller waits for, without the device's lock, on the stream that was the
  // lane's when its order was queued. True: it has moved.
  bool copy_now(driver::Stream stream, const Copy& copy);
  // What its copies were of so far: queued ones too.
  Bytes moved_bytes() const { return moved_.load(std::memory_order_relaxed); }

  // 0 copies are no cap, and a piece of 0 bytes is the lane's own: a large one on request.
  void limit(std::uint32_t inflight, Bytes piece, bool large) {
    inflight_ = inflight;
    piece_ = piece != 0 ? piece : large ? kLargePiece : kPiece;
  }
  // A copy that ends at `tick` was queued.
  void note(Tick tick);
  // Whether copies made ahead of need should hold back.
  bool full();
  // Whether there is a cap on copies in flight: then each goes on its own.
  bool capped() const { return inflight_ > 0; }

 private:
  static constexpr Bytes kPiece = 16_MiB;
  static constexpr Bytes kLargePiece = 64_MiB;

  Status queue_pieces(const Copy& copy);
  Status queue_together(std::span<const Copy> copies);
  Status admit(Bytes bytes);
  void moved(Bytes bytes);
  driver::Result copy_async(const driver::Table& driver, const Copy& copy,
                            driver::Stream stream) const;

  Gate& gate_;
  const Way way_;
  StreamClock& clock_;
  driver::Stream spare_;
  Pacer pacer_;
  std::uint32_t inflight_ = 0;
  Bytes piece_ = kPiece;
  Bytes since_hop_ = 0;
  std::atomic<Bytes> moved_{0};  // `copy_now` adds without the lock
  std::deque<Seq> under_way_;    // ends of the newest copies, as many as may be under way
};

}  // namespace stagehand::core
