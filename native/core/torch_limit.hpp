// torch's own limit on its cache, a share of the device: ours from a pool's entry until its last
// record is gone, and the user's before and after. What is wanted is decided under the device's
// lock, and said to torch without it, by one thread at a time, again until nothing newer is wanted.
#pragma once

#include <atomic>
#include <mutex>

#include "core/torch_side.hpp"

namespace stagehand::core {

class TorchLimit {
 public:
  // A limit of the device's size, or more, is none of ours. True: torch has to be told.
  bool want(Bytes limit, Bytes device_bytes);
  // Takes torch's mutex; no lock of ours is held.
  void apply(const TorchSide& side, int device);

 private:
  static constexpr double kNone = -1;

  std::atomic<bool> applying_{false};
  std::mutex mutex_;        // of what follows; nothing is called under it
  std::uint64_t turn_ = 0;  // goes up with what is wanted
  std::uint64_t applied_ = 0;
  double wanted_ = kNone;
  double told_ = kNone;  // what torch said after it was told last: it rounds to bytes
  double before_ = 1;    // the user's
};

}  // namespace stagehand::core
