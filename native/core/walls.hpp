// Which requests of a forward are for walls.
//
// A wall is a large block that the program asks for while a step saves, still has when its backward
// begins, and that cannot leave: what a checkpoint was given, mostly. Walls lie between what
// leaves, so that no hole is larger than what is saved from one to the next. A step's requests are
// told apart by their numbers, which are the same where sizes differ. What was one in two steps in
// a row is served from the blocks of another stream in the next, as survivors are
// (core/survivors.hpp). A wrong guess costs nothing but its place.
//
// Only what is decided; guarded by the cache map's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/torch_side.hpp"

namespace stagehand::core {

class Walls {
 public:
  struct One {
    driver::Stream stream = nullptr;  // that the program asks on
    std::uint32_t nth = 0;            // of the large requests there since the step began
    Bytes bytes = 0;
  };

  void begin_step();
  // A large request of the program's was served, while the step saves. Returns its number.
  std::uint32_t served(driver::Stream stream);
  // Whether the next one is for a wall.
  bool wants(driver::Stream stream) const { return wants(stream, count(stream) + 1); }
  bool wants(driver::Stream stream, std::uint32_t nth) const;
  // Backward begins: what was there, in any order. None is wanted where they are few, which leave
  // large holes between them, or take more than `most`.
  void end_saving(std::vector<One> there, Bytes most);
  // One was served apart; it was freed.
  void came(Bytes bytes) { there_ += bytes; }
  void went(Bytes bytes) { there_ -= std::min(there_, bytes); }
  // What those take that are not there, at the most of the last steps.
  Bytes missing() const { return bytes_ - std::min(bytes_, there_); }
  // Whether any request may be for one.
  bool looks() const { return !wanted_.empty() && saving_; }
  bool counts() const { return saving_; }
  // Those that have some of what is wanted.
  const std::vector<driver::Stream>& streams() const { return streams_; }

 private:
  static constexpr std::size_t kFew = 4;
  std::uint32_t count(driver::Stream stream) const;

  std::vector<One> last_;    // of the step before, by stream and number
  std::vector<One> wanted_;  // likewise, of this one
  bool saving_ = false;
  Bytes bytes_ = 0;
  Bytes there_ = 0;
  std::vector<std::pair<driver::Stream, std::uint32_t>> counts_;
  std::vector<driver::Stream> streams_;
};

}  // namespace stagehand::core
