// Blocks in address order, their page table and their lists: core/arena.
#include <random>
#include <set>
#include <string>

#include "core/arena.hpp"
#include "native/test.hpp"

namespace stagehand::core {
namespace {

constexpr Address kBase = Address{1} << 40;

// An arena over addresses nobody maps: it never touches them.
struct Range {
  explicit Range(Bytes bytes, bool small = false)
      : clock(gate, events, captures, nullptr, 0),
        arena({nullptr, small, 0}, clock, nodes, kBase, bytes) {}

  // The first `bytes` of the arena's hole at its end, in this state.
  Block* open(Bytes bytes, BlockState state) {
    Block* hole = arena.first;
    while (hole->next != nullptr) {
      hole = hole->next;
    }
    Block* block = arena.split_front(hole, bytes);
    if (state == BlockState::live) {
      arena.set_state(block, BlockState::free);
    }
    arena.set_state(block, state);
    return block;
  }

  driver::Table table;
  Gate gate{table};
  SpareEvents events{gate};
  const int captures = 0;
  StreamClock clock;
  BlockNodes nodes;
  Arena arena;
};

// Tiling, lists and page table, the slow way. Empty when all hold.
std::string broken(const Arena& arena) {
  std::set<const Block*> evicting;
  for (const Block* b = arena.evicting.first(); b != nullptr; b = b->bin_next) {
    evicting.insert(b);
  }
  Address at = arena.base;
  const Block* previous = nullptr;
  for (const Block* b = arena.first; b != nullptr; previous = b, b = b->next) {
    if (b->address != at || b->previous != previous || b->size == 0) {
      return "blocks do not tile the arena";
    }
    at = b->end();
    if ((b->state == BlockState::evicting) != (evicting.count(b) == 1)) {
      return "the evicting list and the states differ";
    }
    for (Address probe = b->address; probe < b->end(); probe += kBlockUnit) {
      const Block* expected = is_mapped(b->state) ? b : nullptr;
      if (arena.find(probe) != expected || arena.find(probe + kBlockUnit - 1) != expected) {
        return "the page table finds another block";
      }
      if (arena.at(probe) != (b->state != BlockState::hole ? b : nullptr)) {
        return "the page table knows no former address";
      }
    }
  }
  return at == arena.base + arena.reserved ? "" : "blocks do not tile the arena";
}

TEST("a new arena is one hole in which nothing is found") {
  Range range(64_MiB);
  CHECK_EQ(broken(range.arena), "");
  CHECK(range.arena.first->state == BlockState::hole);
  CHECK(range.arena.find(kBase) == nullptr);
  CHECK(range.arena.free.best_fit(512) == nullptr);
}

TEST("an arena contains its addresses and no others") {
  const Range range(64_MiB);
  CHECK(range.arena.contains(kBase));
  CHECK(range.arena.contains(kBase + 64_MiB - 1));
  CHECK(!range.arena.contains(kBase + 64_MiB));
  CHECK(!range.arena.contains(kBase - 1));
}

TEST("splitting a block leaves two that tile it, found by every address in them") {
  Range range(8_MiB, true);
  Block* rest = range.open(4_MiB, BlockState::free);
  Block* front = range.arena.split_front(rest, 1536);
  CHECK_EQ(front->address, kBase);
  CHECK_EQ(front->size, 1536);
  CHECK_EQ(rest->address, kBase + 1536);
  CHECK_EQ(rest->size, 4_MiB - 1536);
  CHECK_EQ(broken(range.arena), "");
  CHECK(range.arena.free.best_fit(512) == front);
  CHECK(range.arena.free.best_fit(2048) == rest);
}

TEST("a split block's parts carry the ticks of the whole") {
  Range range(8_MiB, true);
  Block* rest = range.open(4_MiB, BlockState::free);
  rest->idle_from = 17;
  rest->fence.add({3, 9});
  const Block* front = range.arena.split_front(rest, 1_MiB);
  CHECK_EQ(front->idle_from, 17);
  CHECK_EQ(front->fence.begin()->clock, 3);
  CHECK_EQ(front->fence.begin()->seq, 9);
}

TEST("freed neighbours join on both sides, and live ones do not") {
  Range range(64_MiB);
  Block* a = range.open(4_MiB, BlockState::live);
  Block* b = range.open(4_MiB, BlockState::live);
  Block* c = range.open(4_MiB, BlockState::live);
  Block* d = range.open(4_MiB, BlockState::live);
  range.arena.set_state(a, BlockState::free);
  CHECK_EQ(range.arena.coalesce(a)->size, 4_MiB);
  range.arena.set_state(c, BlockState::free);
  CHECK_EQ(range.arena.coalesce(c)->size, 4_MiB);
  range.arena.set_state(b, BlockState::free);
  const Block* joined = range.arena.coalesce(b);
  CHECK_EQ(joined->address, kBase);
  CHECK_EQ(joined->size, 12_MiB);
  CHECK(joined->next == d);
  CHECK_EQ(broken(range.arena), "");
}

TEST("joined blocks keep the later ticks of both") {
  Range range(64_MiB);
  Block* a = range.open(4_MiB, BlockState::free);
  Block* b = range.open(4_MiB, BlockState::free);
  a->idle_from = 5;
  a->fence.add({1, 7});
  b->idle_from = 3;
  b->fence.add({1, 9});
  b->fence.add({2, 4});
  const Block* joined = range.arena.coalesce(b);
  CHECK_EQ(joined->idle_from, 5);
  Seq of[3] = {};
  for (const Tick& tick : joined->fence) {
    of[tick.clock] = tick.seq;
  }
  CHECK_EQ(of[1], 9);
  CHECK_EQ(of[2], 4);
}

TEST("joining more clocks than a fence holds falls back to the stream's own upcoming tick") {
  Range range(64_MiB);
  Block* a = range.open(4_MiB, BlockState::free);
  Block* b = range.open(4_MiB, BlockState::free);
  for (std::uint32_t clock = 1; clock <= 4; ++clock) {
    a->fence.add({clock, 1});
    b->fence.add({clock + 4, 1});
  }
  CHECK_EQ(range.arena.coalesce(a)->idle_from, range.clock.upcoming());
}

TEST("a run of free and evicting blocks joins into one live block") {
  Range range(64_MiB);
  Block* a = range.open(4_MiB, BlockState::free);
  range.open(2_MiB, BlockState::evicting);
  Block* c = range.open(8_MiB, BlockState::free);
  const Block* joined = range.arena.join(a, c);
  CHECK_EQ(joined->address, kBase);
  CHECK_EQ(joined->size, 14_MiB);
  CHECK(joined->state == BlockState::live);
  CHECK(range.arena.evicting.first() == nullptr);
  CHECK(range.arena.free.best_fit(512) == nullptr);
  CHECK_EQ(broken(range.arena), "");
}

TEST("unmapped blocks are not found, and holes join") {
  Range range(64_MiB);
  Block* a = range.open(4_MiB, BlockState::free);
  Block* b = range.open(4_MiB, BlockState::live);
  range.arena.set_state(a, BlockState::former);
  CHECK(range.arena.find(kBase) == nullptr);
  CHECK(range.arena.find(kBase + 4_MiB) == b);
  range.arena.set_state(a, BlockState::hole);
  range.arena.coalesce(a);
  range.arena.set_state(b, BlockState::free);
  range.arena.set_state(b, BlockState::hole);
  range.arena.coalesce(b);
  CHECK(range.arena.first->next == nullptr);
  CHECK_EQ(range.arena.first->size, 64_MiB);
  CHECK_EQ(broken(range.arena), "");
}

// Any change that keeps the arena's own rules, on a block drawn at random.
void change(Range& range, std::mt19937& random) {
  std::vector<Block*> blocks;
  for (Block* b = range.arena.first; b != nullptr; b = b->next) {
    blocks.push_back(b);
  }
  Block* block = blocks[random() % blocks.size()];
  const auto go = [&](Block* one, BlockState state) {
    if (may_follow(one->state, state)) {
      range.arena.set_state(one, state);
    }
  };
  const Bytes unit = is_mapped(block->state) ? kBlockUnit : 2_MiB;  // mapping has its own grain
  switch (random() % 4) {
    case 0:
      if (block->size > unit) {
        range.arena.split_front(block, unit * (1 + random() % (block->size / unit - 1)));
      }
      break;
    case 1:
      if (block->address % 2_MiB == 0 && block->size % 2_MiB == 0) {
        go(block, static_cast<BlockState>(random() % 6));
      } else {
        go(block, static_cast<BlockState>(2 + random() % 4));
      }
      break;
    case 2:
      if (block->state == BlockState::free || block->state == BlockState::hole) {
        range.arena.coalesce(block);
      }
      break;
    default: {
      const auto idle = [](const Block* b) {
        return b->state == BlockState::free || b->state == BlockState::evicting;
      };
      if (idle(block) && block->next != nullptr && idle(block->next)) {
        range.arena.join(block, block->next);
      }
    }
  }
}

TEST("tiling, lists and page table hold after every random change, small blocks and large") {
  for (unsigned seed = 0; seed < 8; ++seed) {
    std::mt19937 random(seed);
    Range range(8_MiB, seed % 2 == 0);
    for (int turn = 0; turn < 60; ++turn) {
      change(range, random);
      const std::string what = broken(range.arena);
      CHECK_EQ(what, "");
      if (!what.empty()) {
        return;
      }
    }
  }
}

TEST("a node given back is taken clean") {
  BlockNodes nodes;
  Block* block = nodes.take();
  block->keep = true;
  block->users = 3;
  block->fence.add({1, 1});
  nodes.give(block);
  CHECK(nodes.take() == block);
  CHECK(!block->keep);
  CHECK_EQ(block->users, 0);
  CHECK(block->fence.empty());
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
