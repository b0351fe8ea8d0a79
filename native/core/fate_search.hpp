// Who leaves and who is dropped, by one pass through a step. Pure.
#pragma once

#include <cstdint>
#include <queue>
#include <vector>

#include "core/step_grid.hpp"

namespace stagehand::core {

// What is dropped together: a record that a recipe makes again, or some of what one call does. All
// that is to be dropped of a call goes in order, what makes the most room for its time first.
struct Droppable {
  std::vector<std::uint32_t> records;
  double ns = 0;  // beside what is dropped of the call before it
  double bytes = 0;
  std::size_t retained = 0;  // buckets: nearly all of it from then on
  std::size_t used = 0;      // it is back from then on
  std::size_t call = 0;      // that runs for it; 0: a recipe
};

std::vector<Droppable> droppable(const Grid& grid);

// From the first moment that lacks room to the last: what leaves for it is the record asked for
// last among those whose copies fit into idle time of both lanes. Where none does, that is late by
// the least, or the one is dropped that takes the least to make again for its bytes, whichever
// costs the GPU less. Idle weights are chosen among too, since they need the H2D lane; what becomes
// of them is not said: it follows.
class Search {
 public:
  // `idle`: the share of the lanes' time that is planned with. What takes at most `cheap` ns a byte
  // to make again leaves the lanes to others: it never leaves by copy.
  Search(const Grid& grid, const std::vector<Droppable>& items, double idle, double cheap);

  std::vector<Fate> run();

 private:
  // The best of those that may leave by copy, and of idle weights: which list it heads.
  struct Leaving {
    std::size_t list = 0;  // past the last: none
    double late_ns = 0;    // for a byte
  };
  using ByCost = std::pair<double, std::uint32_t>;

  bool take_one(std::size_t t);
  Leaving best_leaving(std::size_t t);
  void leave(std::size_t of_list, std::size_t t);
  void take(std::uint32_t i, std::size_t t);
  bool drop_one(std::size_t t, const Leaving& instead);
  void drop(std::uint32_t i, std::size_t used);
  void run_again(const Droppable& item);

  const Grid& grid_;
  const std::vector<Droppable>& items_;
  Row out_;  // idle time of the lanes, in bytes
  Row in_;
  Row away_;
  Row in_until_;  // idle time of the H2D lane from the moment looked at to before this one
  // By the bucket in which they are retained: records, and behind them idle weights.
  std::vector<std::vector<std::uint32_t>> lists_;
  std::vector<std::size_t> next_;
  std::vector<std::vector<std::uint32_t>> again_;                               // items, likewise
  std::priority_queue<ByCost, std::vector<ByCost>, std::greater<>> droppable_;  // retained so far
  std::vector<bool> runs_again_;                                                // by the call
  std::vector<Fate> fates_;
};

}  // namespace stagehand::core
