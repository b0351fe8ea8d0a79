// Calls counted and made to fail, by symbol.
#pragma once

#include <array>
#include <cstdint>

#include "sim/api.hpp"

namespace stagehand::sim {

class Faults {
 public:
  // Counts the call. A result other than kSuccess: the call returns it and does nothing.
  Result enter(Function function) {
    Site& site = sites_[static_cast<std::size_t>(function)];
    ++site.calls;
    if (site.times == 0 || site.calls < site.first) {
      return kSuccess;
    }
    --site.times;
    return site.result;
  }
  // From the nth call after now (1 is the next) `times` calls fail with `result`.
  void plan(Function function, std::uint64_t nth, std::uint64_t times, Result result) {
    Site& site = sites_[static_cast<std::size_t>(function)];
    site.first = site.calls + nth;
    site.times = times;
    site.result = result;
  }
  std::uint64_t calls(Function function) const {
    return sites_[static_cast<std::size_t>(function)].calls;
  }

 private:
  struct Site {
    std::uint64_t calls = 0;
    std::uint64_t first = 0;
    std::uint64_t times = 0;
    Result result = kSuccess;
  };
  std::array<Site, kFunctions> sites_{};
};

}  // namespace stagehand::sim
