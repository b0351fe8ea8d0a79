// What this thread asks torch for, where the engine does so itself: a miss inside that call is then
// for just this. In a header of its own, since a call through torch lies between the two.
#pragma once

#include "core/types.hpp"

namespace stagehand::core {

class OwnRequest {
 public:
  explicit OwnRequest(Bytes bytes) { here() = bytes; }
  ~OwnRequest() { here() = 0; }
  OwnRequest(const OwnRequest&) = delete;
  OwnRequest& operator=(const OwnRequest&) = delete;

  // 0 where the engine asks for nothing.
  static Bytes& here() {
    static thread_local Bytes bytes = 0;
    return bytes;
  }
};

// A saved tensor comes back on this thread, and may have to be made again: what torch is asked for
// meanwhile is not asked for in every step.
class MakesAgain {
 public:
  MakesAgain() : before_(here()) { here() = true; }
  ~MakesAgain() { here() = before_; }
  MakesAgain(const MakesAgain&) = delete;
  MakesAgain& operator=(const MakesAgain&) = delete;

  static bool& here() {
    static thread_local bool makes = false;
    return makes;
  }

 private:
  const bool before_;
};

}  // namespace stagehand::core
