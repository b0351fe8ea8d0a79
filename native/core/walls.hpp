// Which requests of a forward are for walls.
//
// A wall is a large block that the program asks for while a step saves, still has when its backward
// begins, and that cannot leave: what a checkpoint was given, mostly. Walls lie between what
// leaves, so that no hole is larger than what is saved from one to the next. A step's requests are
// told apart by their numbers, which are the same where sizes differ. What was one in two steps in
// a row is served from the blocks of another stream in the next, as survivors are
// (core/survivors.hpp). A wrong guess costs its place, and that torch hands its block out again
// only once the GPU is done with it.
//
// Only what is decided; guarded by the cache map's lock.
#pragma once

#include <array>
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

  // None is wanted in a step in which they would take more than `most`.
  void begin_step(Bytes most);
  // A large request of the program's was served. Returns its number; 0 once backward has begun, or
  // where the stream is not counted.
  std::uint32_t served(driver::Stream stream);
  // Whether the next one is for a wall.
  bool wants(driver::Stream stream) const;
  // Backward begins: what was there, in any order. None is wanted where they are few, which leave
  // large holes between them, or take more than `most`.
  void end_saving(std::vector<One> there, Bytes most);
  // What all of them take that are wanted, at the most in the last steps: room to keep for them.
  Bytes room() const { return fits_ ? bytes_ : 0; }
  // Whether any request may be for one.
  bool looks() const { return saving_ && room() > 0; }
  // Those that have some of what is wanted.
  const std::vector<driver::Stream>& streams() const { return streams_; }

 private:
  static constexpr std::size_t kFew = 4;
  static constexpr std::size_t kStreams = 8;  // so many are counted: nothing is allocated for it
  static constexpr int kUnanswered = 8;       // steps in a row without a backward: as evaluations

  // Its place among those that are counted; their number where it is none.
  std::size_t place_of(driver::Stream stream) const;

  std::vector<One> last_;    // of the step before, by stream and number
  std::vector<One> wanted_;  // likewise, of this one
  bool saving_ = false;
  bool fits_ = false;
  int unanswered_ = 0;
  Bytes bytes_ = 0;
  std::array<std::pair<driver::Stream, std::uint32_t>, kStreams> counts_{};
  std::size_t counted_ = 0;  // streams
  std::vector<driver::Stream> streams_;
};

}  // namespace stagehand::core
