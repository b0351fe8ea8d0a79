#include "core/window_search.hpp"

#include <algorithm>

namespace stagehand::core {

// The block is to be had in this search: with it its idle neighbours, and the runs that those
// touch.
WindowSearch::Run WindowSearch::add(Block* block) {
  block->seen = turn_;
  Block* first = block;
  Block* last = block;
  for (Block* b = block->previous; b != nullptr; b = b->previous) {
    if (b->seen == turn_) {
      first = b->run_other;
      break;
    }
    if (!usable(*b)) {
      break;
    }
    b->seen = turn_;
    first = b;
  }
  for (Block* b = block->next; b != nullptr; b = b->next) {
    if (b->seen == turn_) {
      last = b->run_other;
      break;
    }
    if (!usable(*b)) {
      break;
    }
    b->seen = turn_;
    last = b;
  }
  first->run_other = last;
  last->run_other = first;
  return {first, last};
}

Candidate candidate_of(const Block& block, std::uint32_t out) {
  Candidate found{Candidate::Kind::idle, block.size};
  if (!is_idle(block.state)) {
    const Record& record = *block.record;
    found.kind = Candidate::Kind::victim;
    found.age = ~record.filed.need;
    found.copy = record.filed.clean ? 0 : kNever;  // its copy would come behind all others
  }
  if (found.copy == 0) {
    for (const Tick& tick : block.fence) {
      if (tick.clock == out && block.clock->waited(tick.clock) < tick.seq) {
        found.copy = tick.seq;
      }
    }
  }
  return found;
}

// The best window of the run that takes the block in; those without it were considered before.
void WindowSearch::consider(const Run& run, Block* around, Bytes bytes, std::uint32_t out) {
  Block* begin = around;
  Bytes held = 0;
  for (int i = 0; i < kSide && begin != run.first && held < bytes; ++i) {
    begin = begin->previous;
    held += begin->size;
  }
  blocks_.clear();
  candidates_.clear();
  held = 0;
  int after = 0;
  bool passed = false;
  for (Block* b = begin;; b = b->next) {
    blocks_.push_back(b);
    candidates_.push_back(candidate_of(*b, out));
    passed |= b == around;
    held += passed ? b->size : 0;
    if (b == run.last || (passed && held >= bytes + around->size) || (passed && ++after > kSide)) {
      break;
    }
  }
  const Window window = choose_window(candidates_, bytes, plan_.with_weights());
  if (!window.found || (best_.found && !(window.cost < best_.cost))) {
    return;
  }
  best_ = window;
  best_blocks_.assign(blocks_.begin() + static_cast<std::ptrdiff_t>(window.begin),
                      blocks_.begin() + static_cast<std::ptrdiff_t>(window.end));
}

FoundWindow WindowSearch::result() {
  FoundWindow found{best_.found, &best_blocks_, 0};
  for (const Block* block : best_.found ? best_blocks_ : std::vector<Block*>{}) {
    if (!is_idle(block->state)) {
      const bool stays = block->record->filed.need != VictimIndex::kLeaves;
      found.leaving += stays && plan_.follows() ? 2 * block->size : block->size;
    }
  }
  return found;
}

FoundWindow WindowSearch::idle(const Arena& arena, Bytes bytes, std::uint32_t out) {
  best_ = {};
  if (arena.idle_bytes < bytes) {
    return {};
  }
  ++turn_;
  int looked = 0;
  for (Block* b = arena.evicting.first(); b != nullptr && looked < kIdle; b = b->bin_next) {
    if (b->seen == turn_ || !usable(*b)) {
      continue;
    }
    ++looked;
    if (const Run run = add(b); run.bytes() >= bytes) {
      consider(run, b, bytes, out);
    }
  }
  return result();
}

// Victims in the order in which they should leave, each joined with what is idle beside it: the
// first run that holds the request has the least that is needed soon.
FoundWindow WindowSearch::with_victims(const Arena& arena, Bytes bytes, std::uint32_t out) {
  best_ = {};
  ++turn_;
  int looked = 0;
  int alike = 0;
  for (Record* r = victims_.first(arena.key.small); r != nullptr && looked < kVictims;
       r = victims_.next(*r)) {
    if (best_.found && (~r->filed.need != best_.cost.soonest || ++alike > kAlike)) {
      break;
    }
    ++looked;
    if (r->block->arena != &arena) {
      continue;
    }
    if (const Run run = add(r->block); run.bytes() >= bytes) {
      consider(run, r->block, bytes, out);
    }
  }
  return result();
}

}  // namespace stagehand::core
