// A recorded step as plain torch plays it: what is saved stays, and backward uses it where it is.
#pragma once

#include <cstdint>
#include <map>
#include <set>

#include "native/trace.hpp"

namespace stagehand::core::test {

class PlainSaves {
 public:
  // `play` makes and drops blocks: lines of the kinds a and f.
  void play(const Event& event, auto play) {
    if (event.kind == 's') {
      blocks_[event.a] = event.b;
      saved_.insert(event.b);
    } else if (event.kind == 'f' && saved_.contains(event.a)) {
      freed_.insert(event.a);
    } else if (event.kind == 'h') {
      const std::uint64_t block = blocks_.at(event.a);
      saved_.erase(saved_.find(block));
      if (!saved_.contains(block) && freed_.erase(block) > 0) {
        play({'f', block});
      }
    } else if (event.kind == 'a' || event.kind == 'f') {
      play(event);
    }
  }

 private:
  std::map<std::uint64_t, std::uint64_t> blocks_;  // of records
  std::multiset<std::uint64_t> saved_;
  std::set<std::uint64_t> freed_;
};

}  // namespace stagehand::core::test
