// Which requests are served apart.
//
// A survivor is a large block that the program asks for while a step saves, and still has when the
// next one begins: a loss, say, whose memory is as large as what it is the mean of, until the next
// loss is there. It lies among what the next step saves, each time elsewhere, so that steps of one
// plan find other holes. Where steps before left one, the same request (of that size, and as many
// of it before it) is served from the blocks of another stream, on which nothing ever runs: torch
// keeps those in segments of their own. A wrong guess costs nothing but its place.
//
// What an optimizer keeps is made in its first step, and stays: all of that is served apart.
//
// Only what is decided; guarded by the cache map's lock.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "core/torch_side.hpp"

namespace stagehand::core {

class Survivors {
 public:
  // More of them are gradients, or states that are made once.
  static constexpr std::size_t kFew = 4;
  struct One {
    Bytes bytes = 0;                  // of whole units
    std::uint32_t nth = 0;            // of its size since the step began; 0: it was not counted
    driver::Stream stream = nullptr;  // whose block it is
  };

  // A request of the program's was served. Which one of its size since the step began: 0 where that
  // size is not counted.
  std::uint32_t served(Bytes bytes);
  // On whose blocks the next request of that size should be served.
  driver::Stream place(Bytes bytes, driver::Stream stream) const;
  // All that the stream asks for is served apart, until `serve_few` or the next step, as long as
  // torch reserves no more than `roof` for it.
  void serve_all(driver::Stream stream, Bytes roof) { all_of_ = {stream, roof}; }
  void serve_few() { all_of_.reset(); }
  struct AllOf {
    driver::Stream stream = nullptr;
    Bytes roof = 0;
  };
  const std::optional<AllOf>& all_of() const { return all_of_; }
  // A step begins, and has these of the last one; others that had survived before may do so again,
  // as after steps of an evaluation. None is served apart where they are many, or take more than
  // `most`.
  void begin_step(const std::vector<One>& there, Bytes most);
  // Bits (size_bit) of all that are counted: `place` has nothing to say of others.
  std::uint64_t sizes() const { return all_of_.has_value() ? ~std::uint64_t{0} : sizes_; }
  // A stream whose requests would be served apart, if there was another one for that.
  std::optional<driver::Stream> lacks() const;
  void give(driver::Stream stream, driver::Stream apart) { apart_.push_back({stream, apart}); }
  std::optional<driver::Stream> apart_of(driver::Stream stream) const;
  bool is_apart(driver::Stream stream) const;
  // The one whose requests were served from these blocks; itself if none was.
  driver::Stream asked_on(driver::Stream stream) const;

 private:
  static constexpr int kMissing = 3;  // in so many steps: it is one no more
  struct Counted {
    One last;
    std::uint32_t served = 0;
    int missing = 0;  // steps in a row that did not leave it
  };
  void note(One one);

  std::vector<Counted> counted_;
  std::uint64_t sizes_ = 0;
  // Each stream beside the one that its survivors' blocks are of.
  std::vector<std::pair<driver::Stream, driver::Stream>> apart_;
  std::optional<AllOf> all_of_;
};

}  // namespace stagehand::core
