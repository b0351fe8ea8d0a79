#include "core/free_index.hpp"

#include "core/check.hpp"

namespace stagehand::core {

void FreeIndex::insert(Block* block) {
  const Bin bin = bin_of(block->size);
  Block*& head = heads_[bin.octave][bin.step];
  block->bin_previous = nullptr;
  block->bin_next = head;
  if (head != nullptr) {
    head->bin_previous = block;
  }
  head = block;
  steps_[bin.octave] |= 1u << bin.step;
  octaves_ |= std::uint64_t{1} << bin.octave;
}

void FreeIndex::remove(Block* block) {
  const Bin bin = bin_of(block->size);
  Block*& head = heads_[bin.octave][bin.step];
  if (block->bin_previous != nullptr) {
    block->bin_previous->bin_next = block->bin_next;
  } else {
    SH_CHECK(head == block);
    head = block->bin_next;
  }
  if (block->bin_next != nullptr) {
    block->bin_next->bin_previous = block->bin_previous;
  }
  block->bin_previous = block->bin_next = nullptr;
  if (head == nullptr) {
    steps_[bin.octave] &= ~(1u << bin.step);
    if (steps_[bin.octave] == 0) {
      octaves_ &= ~(std::uint64_t{1} << bin.octave);
    }
  }
}

Block* FreeIndex::smallest_in(Bin bin, Bytes bytes) const {
  Block* best = nullptr;
  unsigned looked = 0;
  for (Block* b = heads_[bin.octave][bin.step]; b != nullptr && looked < kScan;
       b = b->bin_next, ++looked) {
    if (b->size < bytes) {
      continue;
    }
    if (best == nullptr || b->size < best->size ||
        (b->size == best->size && b->address < best->address)) {
      best = b;
    }
  }
  return best;
}

Block* FreeIndex::best_fit(Bytes bytes) const {
  const Bin own = bin_of(bytes);
  if (Block* found = smallest_in(own, bytes); found != nullptr) {
    return found;
  }
  // Every block of a later bin fits: take the next bin that has any.
  const std::uint32_t later = own.step + 1 < kSteps ? steps_[own.octave] >> (own.step + 1) : 0;
  if (later != 0) {
    const unsigned step = own.step + 1 + static_cast<unsigned>(std::countr_zero(later));
    return smallest_in({own.octave, step}, bytes);
  }
  const std::uint64_t above = own.octave + 1 < 64 ? octaves_ >> (own.octave + 1) : 0;
  if (above == 0) {
    return nullptr;
  }
  const unsigned octave = own.octave + 1 + static_cast<unsigned>(std::countr_zero(above));
  return smallest_in({octave, static_cast<unsigned>(std::countr_zero(steps_[octave]))}, bytes);
}

}  // namespace stagehand::core
