// Free blocks by size: core/free_index.
#include <algorithm>
#include <deque>
#include <random>
#include <vector>

#include "core/free_index.hpp"
#include "core/types.hpp"
#include "native/test.hpp"

namespace stagehand::core {
namespace {

// Blocks of these sizes (in units of 512 bytes) at rising addresses, all in one index.
struct Filled {
  explicit Filled(const std::vector<Bytes>& units) {
    Address at = 0;
    for (const Bytes count : units) {
      Block& block = blocks.emplace_back();
      block.address = at;
      block.size = count * kBlockUnit;
      at = block.end();
      index.insert(&block);
    }
  }
  Block* fit(Bytes units) const { return index.best_fit(units * kBlockUnit); }

  std::deque<Block> blocks;
  FreeIndex index;
};

TEST("an empty index has nothing to offer") { CHECK(Filled({}).fit(1) == nullptr); }

TEST("the block of exactly the size wins over larger ones") {
  const Filled filled({9, 5, 64, 7});
  CHECK(filled.fit(7) == &filled.blocks[3]);
}

TEST("the smallest block that holds the request is taken, in the request's bin and beyond") {
  // Over 16 KiB one bin spans several sizes: 1000 and 1010 units share one.
  const Filled filled({4000, 1010, 1000, 90000});
  CHECK(filled.fit(1001) == &filled.blocks[1]);
  CHECK(filled.fit(1011) == &filled.blocks[0]);
  CHECK(filled.fit(4001) == &filled.blocks[3]);
}

TEST("a block in the request's bin that is too small is not taken") {
  const Filled filled({1000});
  CHECK(filled.fit(1001) == nullptr);
  CHECK(filled.fit(1000) == &filled.blocks[0]);
}

TEST("of blocks of one size the lowest address wins, whatever the order of freeing") {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Filled filled(std::vector<Bytes>(10, 40));
    std::vector<std::size_t> order{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    std::mt19937 random(seed);
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      filled.index.remove(&filled.blocks[i]);
      filled.index.insert(&filled.blocks[i]);
    }
    CHECK(filled.fit(33) == &filled.blocks[0]);
  }
}

TEST("a removed block is not offered again") {
  Filled filled({8, 8, 12});
  filled.index.remove(&filled.blocks[0]);
  CHECK(filled.fit(8) == &filled.blocks[1]);
  filled.index.remove(&filled.blocks[1]);
  CHECK(filled.fit(8) == &filled.blocks[2]);
  filled.index.remove(&filled.blocks[2]);
  CHECK(filled.fit(1) == nullptr);
}

TEST("a search looks at no more than 64 blocks of a bin, and still finds a larger one") {
  // 1009 and 1020 share a bin: 65 blocks that are too small stand before the one of the same bin
  // that fits.
  std::vector<Bytes> units{1020};
  units.insert(units.end(), 65, 1009);
  units.push_back(5000);
  Filled filled(units);
  CHECK(filled.fit(1012) == &filled.blocks.back());
  filled.index.remove(&filled.blocks[1]);
  filled.index.remove(&filled.blocks[2]);
  CHECK(filled.fit(1012) == &filled.blocks[0]);
}

TEST("sizes from one unit to the largest there can be find their way") {
  std::vector<Bytes> units;
  for (unsigned shift = 0; shift <= 40; ++shift) {
    units.push_back(Bytes{1} << shift);
  }
  const Filled filled(units);
  for (unsigned shift = 0; shift <= 40; ++shift) {
    CHECK(filled.fit(Bytes{1} << shift) == &filled.blocks[shift]);
    CHECK(filled.fit((Bytes{1} << shift) + 1) ==
          (shift == 40 ? nullptr : &filled.blocks[shift + 1]));
  }
}

TEST("random inserts, removals and searches agree with a plain search over all blocks") {
  for (unsigned seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    std::vector<Bytes> units;
    for (int i = 0; i < 60; ++i) {  // below 64 a bin: the search is exact
      units.push_back(1 + (random() >> (random() % 26)) % 100000);
    }
    Filled filled(units);
    std::vector<bool> inside(units.size(), true);
    for (int turn = 0; turn < 300; ++turn) {
      const std::size_t i = random() % units.size();
      inside[i] ? filled.index.remove(&filled.blocks[i]) : filled.index.insert(&filled.blocks[i]);
      inside[i] = !inside[i];
      const Bytes wanted = 1 + random() % 100000;
      const Block* found = filled.fit(wanted);
      if (found == nullptr) {
        for (std::size_t k = 0; k < units.size(); ++k) {
          CHECK(!inside[k] || units[k] < wanted);
        }
        continue;
      }
      for (std::size_t k = 0; k < units.size(); ++k) {
        const Block& other = filled.blocks[k];
        if (!inside[k] || other.size < wanted * kBlockUnit) {
          CHECK(found != &other);
        } else {
          CHECK(found->size <= other.size);
          CHECK(found->size < other.size || found->address <= other.address);
        }
      }
    }
  }
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
