// How long a thread has been waiting.
#pragma once

#include <chrono>

#include "core/types.hpp"

namespace stagehand::core {

class WaitTimer {
 public:
  Bytes ns() const {
    return static_cast<Bytes>(std::chrono::nanoseconds(Clock::now() - began_).count());
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point began_ = Clock::now();
};

}  // namespace stagehand::core
