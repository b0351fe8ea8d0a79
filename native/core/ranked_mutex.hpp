// A mutex with a rank: a thread may only take locks of rising rank (rule T2).
// The GIL counts as the outermost lock: rank 0, never taken by the core (rule T1).
#pragma once

#include <mutex>

#include "core/check.hpp"

namespace stagehand::core {

enum class Rank : int { registry = 1, device = 2, host = 3, pacer = 4, cache = 5 };

class RankedMutex {
 public:
  explicit RankedMutex(Rank rank) : rank_(static_cast<int>(rank)) {}
  RankedMutex(const RankedMutex&) = delete;
  RankedMutex& operator=(const RankedMutex&) = delete;

  void lock() {
    SH_CHECK(held() < rank_);
    mutex_.lock();
    if constexpr (kRanked) {
      previous_ = held();
      held() = rank_;
    }
  }
  // False: another thread has it.
  bool try_lock() {
    SH_CHECK(held() < rank_);
    if (!mutex_.try_lock()) {
      return false;
    }
    if constexpr (kRanked) {
      previous_ = held();
      held() = rank_;
    }
    return true;
  }
  void unlock() {
    if constexpr (kRanked) {
      held() = previous_;
    }
    mutex_.unlock();
  }
  // To be said before a driver call that can wait: this thread holds no lock of the core (rule T2).
  static void expect_none_held() { SH_CHECK(held() == 0); }

 private:
  // What a thread holds is a look-up in its own storage, three for a lock: only where it is
  // checked.
  static constexpr bool kRanked = STAGEHAND_CHECKS != 0;

  static int& held() {
    static thread_local int rank = 0;
    return rank;
  }
  std::mutex mutex_;
  [[maybe_unused]] const int rank_;
  [[maybe_unused]] int previous_ = 0;  // guarded by mutex_
};

using Lock = std::unique_lock<RankedMutex>;

}  // namespace stagehand::core
