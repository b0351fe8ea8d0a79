// How long compute waited for restores and for weights, from device timestamps: an event on the
// consumer's stream where it begins to wait, one on the lane where the copy ends; of weights one on
// the consumer's stream where it goes on: the room for a late one was waited for before. Read
// later, when both have passed, so that nothing waits for them. Bounded: past kPairs unread pairs
// new ones are not measured.
#pragma once

#include <deque>
#include <vector>

#include "core/counters.hpp"
#include "core/gate.hpp"
#include "core/spare_events.hpp"
#include "core/types.hpp"

namespace stagehand::core {

class StallMeter {
 public:
  StallMeter(Gate& gate, SpareEvents& spare_events, Counters& counters)
      : gate_(gate), spare_events_(spare_events), counters_(counters) {}

  static constexpr std::uint32_t kNone = ~0u;
  // Notes the end of `count` copies queued on `lane`; returns what `asked` needs.
  std::uint32_t copied(driver::Stream lane, std::uint32_t count);
  // The consumer is about to wait for that copy.
  void asked(std::uint32_t pair, driver::Stream consumer, bool prefetched);
  // The consumer has come to a block whose weights may be away: between the two it waits for them.
  std::uint32_t weights_asked(driver::Stream consumer);
  void weights_there(std::uint32_t pair, driver::Stream consumer);
  // The copy was never asked for.
  void forget(std::uint32_t pair);
  // Adds up the pairs that have passed, up to the first that has not: later ones nearly always come
  // behind it.
  void collect();

 private:
  static constexpr std::size_t kPairs = 512;
  struct Pair {
    driver::Event copied = nullptr;
    driver::Event asked = nullptr;
    bool prefetched = false;
    bool weights = false;
    std::uint32_t count = 1;
  };
  std::uint32_t spare();
  std::uint32_t begin(driver::Event Pair::* first, driver::Stream stream);

  Gate& gate_;
  SpareEvents& spare_events_;
  Counters& counters_;
  std::vector<Pair> pairs_;
  std::vector<std::uint32_t> spare_;
  std::deque<std::uint32_t> open_;  // asked, not yet read
};

}  // namespace stagehand::core
