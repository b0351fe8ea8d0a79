// Hazards: what a program did that a real GPU would punish only sometimes.
//
// History keeps, for every byte that matters, the last operation that wrote it and those that read
// it since, and finds conflicts that nothing orders. HazardLog keeps what was found.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sim/clocks.hpp"
#include "sim/common.hpp"
#include "sim/control.hpp"

namespace stagehand::sim {

class HazardLog {
 public:
  void add(int kind, std::string text);
  std::uint64_t count(int kind) const { return counts_[static_cast<std::size_t>(kind)]; }
  const std::string* text(std::uint64_t index) const;
  int kind(std::uint64_t index) const;
  void clear();

 private:
  struct Entry {
    int kind;
    std::string text;
  };
  std::vector<Entry> entries_;
  std::array<std::uint64_t, STAGEHAND_SIM_KINDS> counts_{};
};

// "d2h copy #12 on stream 3"
std::string describe(const Access& access);
// "0x7f0012000000+4096"
std::string range_text(const Range& range);

class History {
 public:
  explicit History(HazardLog& log) : log_(log) {}

  // `access`, whose clock is `now`, touches the piece. Unordered conflicts go to the log. An access
  // with time 0 is the host's own: checked but not kept, since all later work follows the host.
  void touch(const Piece& piece, bool write, const Access& access, const VectorClock& now);
  // The first operation on the piece that is not before `now`; null when there is none.
  const Access* unordered(const Piece& piece, const VectorClock& now) const;
  // The bytes were given up: what happened to them no longer matters.
  void forget(const Piece& piece);
  // Drops what came before everything that may still be queued (all of it follows the host).
  void sweep_if_large(const VectorClock& host);

 private:
  struct Cell {
    std::uint64_t end = 0;
    Access write;
    std::vector<Access> reads;
  };
  using Cells = std::map<std::uint64_t, Cell>;

  void report(const Piece& piece, const Access& earlier, bool earlier_wrote, const Access& later,
              bool later_writes);
  void check(const Cells& cells, const Piece& piece, bool write, const Access& access,
             const VectorClock& now);
  static void split(Cells& cells, std::uint64_t at);
  static void keep_write(Cells& cells, const Piece& piece, const Access& access);
  static void keep_read(Cells& cells, const Piece& piece, const Access& access,
                        const VectorClock& now);

  HazardLog& log_;
  std::map<int, Cells> spaces_;
  std::size_t sweep_at_ = 4096;
  std::uint64_t reporting_ = 0;  // the operation whose conflicts are being found
  std::vector<std::pair<int, std::uint64_t>> reported_;  // space and earlier operation
};

}  // namespace stagehand::sim
