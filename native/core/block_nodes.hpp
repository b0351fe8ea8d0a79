// Blocks come from here and go back here; addresses of nodes are stable and reused.
#pragma once

#include <deque>
#include <vector>

#include "core/block.hpp"

namespace stagehand::core {

class BlockNodes {
 public:
  Block* take() {
    if (spare_.empty()) {
      if (spare_.capacity() <= nodes_.size()) {
        spare_.reserve(2 * nodes_.size() + 16);  // so that giving back needs no memory
      }
      return &nodes_.emplace_back();
    }
    Block* block = spare_.back();
    spare_.pop_back();
    *block = Block{};
    return block;
  }
  void give(Block* block) { spare_.push_back(block); }

 private:
  std::deque<Block> nodes_;
  std::vector<Block*> spare_;
};

}  // namespace stagehand::core
