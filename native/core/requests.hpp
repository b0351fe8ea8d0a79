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

}  // namespace stagehand::core
