// Whether steps wait for what comes back over the link, and a good part of that is weights: then a
// lane's pieces may be large. Pure.
#pragma once

#include <cstdint>

#include "core/types.hpp"

namespace stagehand::core {

class LinkBound {
 public:
  // Looked at for so many bytes at once: a single late copy says little.
  static constexpr Bytes kLooked = 256_MiB;
  // Of the quickest link that is known (PCIe 5, docs/decisions/0009): a slower one is waited for
  // sooner.
  static constexpr Bytes kBytesPerNs = 55;

  bool is() const { return bound_; }
  // Since the start: bytes that came back, so many of them of weights, and ns that compute waited
  // for such. Steps are bound by the link from an eighth of the time on that it takes for those
  // bytes, and down to a 16th.
  void note(Bytes back, Bytes weights, std::uint64_t stalled_ns) {
    if (back - back_ < kLooked) {
      return;
    }
    const std::uint64_t link_ns = (back - back_) / kBytesPerNs;
    const std::uint64_t waited_ns = stalled_ns - stalled_ns_;
    const bool streams = (weights - weights_) * kPart >= back - back_;
    back_ = back;
    weights_ = weights;
    stalled_ns_ = stalled_ns;
    bound_ = streams && waited_ns >= link_ns / (bound_ ? 16 : 8);
  }

 private:
  static constexpr Bytes kPart = 4;  // of what comes back is weights

  Bytes back_ = 0;
  Bytes weights_ = 0;
  std::uint64_t stalled_ns_ = 0;
  bool bound_ = false;
};

}  // namespace stagehand::core
