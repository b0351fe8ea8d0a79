// Which requests of a backward are for gradients that stay: with gradient accumulation, until an
// optimizer has stepped.
//
// They lie between what all backwards but the first leave free, each cycle elsewhere. A block that
// a backward asked for, and that is still there when the next one begins, is one. It is known by
// its size, and by how many of that size that backward had asked for before it. In the first
// backward of the next cycle that request is served from the blocks of another stream
// (core/survivors.hpp). In the later ones the same request is for what is added to it, and gone at
// once: so none is wanted while most of those of the cycle are there.
//
// Only what is decided; guarded by the cache map's lock.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <map>
#include <memory_resource>
#include <utility>
#include <vector>

#include "core/torch_side.hpp"

namespace stagehand::core {

class KeptGradients {
 public:
  struct Request {
    driver::Stream stream = nullptr;  // that the program asks on
    Bytes bytes = 0;                  // of whole units
    std::uint32_t nth = 0;            // of those since the backward began

    auto operator<=>(const Request&) const = default;
  };
  using Left = std::pair<Address, Request>;

  explicit KeptGradients(std::pmr::memory_resource* nodes)
      : known_(nodes), there_(nodes), pending_(nodes), left_(nodes), served_(nodes) {}

  // A step begins: what the backward before asked for, and is there. Until its own backward begins
  // nothing is counted.
  void begin_step(const std::vector<Left>& left);
  // None is wanted where they take more than `most`: the room that is kept for them would cost the
  // first step of a cycle more than the others gain.
  void begin_backward(Bytes most);
  // What is asked for from here on is no gradient: an optimizer steps.
  void end_backward() { counts_ = wanted_ = false; }
  // The program was served a block there. Returns the request's number; 0 where none is counted.
  std::uint32_t served(Address address, Bytes bytes, driver::Stream stream);
  // The program has let go of the block there, whether or not the GPU is done with it; then it is.
  void let_go(Address address);
  void freed(Address address);
  // Whether the next request of that size is for one.
  bool wants(Bytes bytes, driver::Stream stream) const;
  // Bits (size_bit) of all that may be wanted.
  std::uint64_t sizes() const { return wanted_ ? sizes_ : 0; }
  // Whether `let_go` has to be told.
  bool follows() const { return wanted_ || !there_.empty() || !left_.empty(); }
  bool knows_any() const { return !known_.empty(); }
  // Bytes of those that are known, and not there: the next cycle's. Not of those that the GPU is
  // not done with.
  Bytes missing() const { return few_ ? known_bytes_ - std::min(known_bytes_, held()) : 0; }
  // Bytes of those that are there, and of those that the GPU is not done with.
  Bytes held() const { return there_bytes_ + pending_bytes_; }
  const std::vector<driver::Stream>& streams() const { return streams_; }

 private:
  static constexpr std::size_t kSizes = 4096;  // so many are counted, of all streams
  static constexpr int kMissing = 3;           // in so many cycles: it is one no more
  struct One {
    Address at = 0;   // 0: not there
    int missing = 0;  // cycles in a row that it did not outlive a forward in
  };
  using Known = std::pmr::map<Request, One>;
  void keep(Address address, Known::iterator known);
  Bytes forget(Address address);  // how much was there
  void drop(Known::iterator known);
  void begin_cycle();

  Known known_;
  std::pmr::map<Address, Request> there_;  // of those known
  std::pmr::map<Address, Bytes> pending_;  // of those let go of
  std::pmr::map<Address, Request> left_;   // by backwards before
  std::pmr::map<std::pair<driver::Stream, Bytes>, std::uint32_t> served_;
  std::vector<driver::Stream> streams_;  // that any known one is asked for on
  Bytes known_bytes_ = 0;
  Bytes there_bytes_ = 0;
  Bytes pending_bytes_ = 0;
  std::uint64_t sizes_ = 0;
  bool few_ = false;     // they take no more than they may
  bool counts_ = false;  // a backward runs
  bool wanted_ = false;  // the first one of a cycle
};

}  // namespace stagehand::core
