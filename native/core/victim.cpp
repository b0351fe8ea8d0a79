#include "core/victim.hpp"

#include <algorithm>
#include <tuple>

namespace stagehand::core {

namespace {

struct Cost {
  std::size_t any_victim;
  std::uint64_t soonest;  // the greatest age among the victims
  std::uint64_t last_copy;
  Bytes victim_bytes;
  Bytes bytes;

  auto key() const { return std::tie(any_victim, soonest, last_copy, victim_bytes, bytes); }
};

// The shortest run from `begin` that holds `bytes`; its end, or `begin` when a wall comes first.
std::size_t extend(std::span<const Candidate> blocks, std::size_t begin, Bytes bytes, Cost* cost,
                   std::size_t* victims) {
  *cost = {};
  *victims = 0;
  for (std::size_t i = begin; i < blocks.size(); ++i) {
    const Candidate& block = blocks[i];
    if (block.kind == Candidate::Kind::wall) {
      return begin;
    }
    if (block.kind == Candidate::Kind::victim) {
      cost->any_victim = 1;
      cost->soonest = std::max(cost->soonest, block.age);
      cost->victim_bytes += block.size;
      ++*victims;
    } else {
      cost->last_copy = std::max(cost->last_copy, block.age);
    }
    cost->bytes += block.size;
    if (cost->bytes >= bytes) {
      return i + 1;
    }
  }
  return begin;
}

}  // namespace

Window choose_window(std::span<const Candidate> blocks, Bytes bytes) {
  Window best;
  Cost best_cost{};
  for (std::size_t begin = 0; begin < blocks.size(); ++begin) {
    Cost cost{};
    std::size_t victims = 0;
    const std::size_t end = extend(blocks, begin, bytes, &cost, &victims);
    if (end != begin && (!best.found || cost.key() < best_cost.key())) {
      best = {begin, end, true, victims};
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace stagehand::core
