// How long compute waited for restores, from device timestamps: an event on the consumer's stream
// where it begins to wait, one on the lane where the copy ends. Read later, when both have passed,
// so that nothing waits for them. Bounded: past kPairs unread pairs new ones are not measured.
#pragma once

#include <array>
#include <vector>

#include "core/counters.hpp"
#include "core/types.hpp"
#include "driver/driver.hpp"

namespace stagehand::core {

class StallMeter {
 public:
  StallMeter(const driver::Table& table, Counters& counters) : table_(table), counters_(counters) {}

  static constexpr std::uint32_t kNone = ~0u;
  // Notes the end of a copy queued on `lane`; returns what `asked` needs.
  std::uint32_t copied(driver::Stream lane);
  // The consumer is about to wait for that copy.
  void asked(std::uint32_t pair, driver::Stream consumer, bool prefetched);
  // The copy was never asked for.
  void forget(std::uint32_t pair);
  // Adds up the pairs that have passed.
  void collect();

 private:
  static constexpr std::size_t kPairs = 512;
  struct Pair {
    driver::Event copied = nullptr;
    driver::Event asked = nullptr;
    bool prefetched = false;
  };

  const driver::Table& table_;
  Counters& counters_;
  std::vector<Pair> pairs_;
  std::vector<std::uint32_t> spare_;
  std::vector<std::uint32_t> open_;  // asked, not yet read
};

}  // namespace stagehand::core
