// Tells once that more is in use than a mark: what a quiet step waits for
// (stagehand_alloc/_step/quiet.py). Whoever has one guards it.
#pragma once

#include "core/types.hpp"

namespace stagehand::core {

class Alarm {
 public:
  // Called under the owner's lock, by whichever thread asks for memory: it must call nothing of the
  // engine. False: it could not be told, and is told again at the next request.
  using Tell = bool (*)(int device) noexcept;

  Alarm() = default;
  // `tell` is null where it is enough to know afterwards.
  Alarm(Bytes mark, Tell tell, int device) : mark_(mark), tell_(tell), device_(device) {}
  bool tells() const { return tell_ != nullptr; }
  // Whether there was more in use than the mark.
  bool rang() const { return rang_; }
  void look(Bytes in_use) {
    if (in_use > mark_) {
      rang_ = true;
      mark_ = tell_ == nullptr || tell_(device_) ? kUnlimited : mark_;
    }
  }

 private:
  Bytes mark_ = kUnlimited;
  Tell tell_ = nullptr;
  int device_ = 0;
  bool rang_ = false;
};

}  // namespace stagehand::core
