// The thread that pins, by hand and in virtual time: a chunk is faulted in while the one before it
// is registered, and both take what an H200's host takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/check.hpp"
#include "core/runtime.hpp"
#include "sim/control.hpp"

namespace stagehand::core::test {

// One at a time: who waits for pinned memory finds it.
class HandPinner {
 public:
  HandPinner() {
    here() = this;
    pin_by_hand = [] { here()->wait(); };
  }
  ~HandPinner() {
    pin_by_hand = nullptr;
    here() = nullptr;
  }
  HandPinner(const HandPinner&) = delete;
  HandPinner& operator=(const HandPinner&) = delete;

  void work_for(Runtime& runtime) { host_ = &runtime.pinned(); }
  // Does what it has done by now.
  void run() {
    for (const std::uint64_t now = stagehand_sim_clock_ns(); step(now);) {
    }
  }
  // All there is to do.
  void finish() {
    while (run(), busy()) {
      wait();
    }
  }

 private:
  static HandPinner*& here() {
    static HandPinner* one = nullptr;
    return one;
  }
  // 4 GiB: 148 ms to fault in by several threads, 106 ms to register. Less than 64 MiB is faulted
  // in where it is registered.
  static std::uint64_t fault_ns(const Chunk& chunk) {
    return chunk.size < 64_MiB ? 0 : chunk.size * 148 / 4295;
  }
  static std::uint64_t register_ns(const Chunk& chunk) {
    return chunk.size < 64_MiB ? chunk.size * 10 / 32 : chunk.size * 106 / 4295;
  }

  bool busy() const { return faulting_.size > 0 || registering_.size > 0; }
  void wait() {
    run();
    if (busy()) {
      const std::uint64_t next = registering_.size > 0 ? registered_at_ : faulted_at_;
      const std::uint64_t now = stagehand_sim_clock_ns();
      stagehand_sim_advance_ns(next - std::min(next, now));
      run();
    }
  }
  void begin(std::uint64_t at) {
    faulting_ = host_->begin_chunk();
    faulted_at_ = at + fault_ns(faulting_);
  }
  bool step(std::uint64_t now) {
    if (registering_.size > 0) {
      if (registered_at_ > now) {
        return false;
      }
      host_->end_chunk(std::exchange(registering_, {}));
      if (faulting_.size == 0) {
        begin(registered_at_);
      }
      return true;
    }
    if (faulting_.size == 0) {
      begin(now);
      return faulting_.size > 0;
    }
    const std::uint64_t at = std::max(faulted_at_, registered_at_);
    if (at > now) {
      return false;
    }
    registering_ = std::exchange(faulting_, {});
    registered_at_ = at + register_ns(registering_);
    begin(at);
    return true;
  }

  PinnedTier* host_ = nullptr;
  Chunk faulting_;
  Chunk registering_;
  std::uint64_t faulted_at_ = 0;
  std::uint64_t registered_at_ = 0;
};

}  // namespace stagehand::core::test
