// What a choice of fates comes to, time by time, with both lanes as the engine uses them. Pure.
#pragma once

#include <span>
#include <vector>

#include "core/step_grid.hpp"

namespace stagehand::core {

// Those that leave, in the order they are retained. Their copies may be made in another one
// (core/copy_order.hpp): what leaves by a time is as much, whichever it is.
std::vector<std::uint32_t> leaving(const Grid& grid, std::span<const Fate> fates);
// Sets when the copies out end if nothing ever waits: at the latest then.
void place_copies(Grid& grid, std::span<const std::uint32_t> order);

class Simulation {
 public:
  Simulation(Grid& grid, std::span<const Fate> fates);

  // Of each record that leaves: when its copy out ended.
  const std::vector<std::size_t>& ends() const { return ends_; }

  Forecast run();

 private:
  double arrive(std::size_t t);
  void come(std::uint32_t i, std::size_t t);
  double depart(std::size_t t);
  bool weights_leave(std::size_t t);
  void go(std::uint32_t i);
  void leave(std::uint32_t i);
  void copy_out(std::size_t t, double room);
  void copy_in(std::size_t t, double room);

  Grid& grid_;
  std::vector<std::uint32_t> outs_;
  std::vector<std::uint32_t> ins_;
  std::vector<std::uint32_t> idle_;  // weights, the one used last first
  Row over_;                         // what must be away beside what was dropped
  Row more_ns_;                      // of computing: what was dropped is made again
  Row spare_;                        // that could come back at once
  std::vector<bool> back_;
  std::vector<bool> gone_;
  std::size_t out_ = 0;
  std::size_t in_ = 0;
  std::size_t use_ = 0;
  double done_ = 0;           // of the copy out under way
  double begun_ = 0;          // of the copy in under way,
  std::uint32_t coming_ = 0;  // of this one
  double away_ = 0;
  double bytes_ = 0;
  double dropped_ = 0;
  double again_ns_ = 0;
  double weights_ = 0;
  std::size_t now_ = 0;
  std::vector<std::size_t> ends_;
};

}  // namespace stagehand::core
