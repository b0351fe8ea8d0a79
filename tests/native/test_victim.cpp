// Which blocks to evict: core/victim, on recorded snapshots.
#include <random>
#include <vector>

#include "core/victim.hpp"
#include "native/test.hpp"

namespace stagehand::core {
namespace {

constexpr Candidate wall(Bytes size = 8) { return {Candidate::Kind::wall, size, 0}; }
constexpr Candidate idle(Bytes size, std::uint64_t copy = 0) {
  return {Candidate::Kind::idle, size, 0, copy};
}
constexpr Candidate victim(Bytes size, std::uint64_t age, std::uint64_t copy = 0) {
  return {Candidate::Kind::victim, size, age, copy};
}

void expect(const std::vector<Candidate>& blocks, Bytes bytes, std::size_t begin, std::size_t end) {
  const Window window = choose_window(blocks, bytes);
  CHECK(window.found);
  CHECK_EQ(window.begin, begin);
  CHECK_EQ(window.end, end);
}

TEST("nothing to choose from, nothing chosen") {
  CHECK(!choose_window({}, 8).found);
  CHECK(!choose_window(std::vector<Candidate>{wall(), wall()}, 8).found);
}

TEST("of single victims that fit the oldest goes") {
  expect({victim(8, 30), wall(), victim(8, 10), wall(), victim(8, 20)}, 8, 2, 3);
}

TEST("a run without victims goes before any victim, however old") {
  expect({victim(8, 1), wall(), idle(4), idle(4)}, 8, 2, 4);
}

TEST("free neighbours count: a small victim between free blocks makes the hole") {
  expect({victim(16, 50), wall(), idle(6), victim(2, 9), idle(8)}, 16, 2, 5);
}

TEST("where all leave in any case, and copies count first, nobody waits for a late one") {
  const std::vector<Candidate> blocks{idle(6), victim(2, 0, 9), wall(), victim(8, 0, 3)};
  expect(blocks, 8, 0, 2);
  const Window window = choose_window(blocks, 8, true);
  CHECK_EQ(window.begin, 3);
  CHECK_EQ(choose_window(std::vector<Candidate>{idle(6), victim(2, 1, 9), wall(), victim(8, 1, 3)},
                         8, true)
               .begin,
           0);  // these would stay: each byte counts
}

TEST("where all leave in any case, those that would have to come back at once leave last") {
  const auto away = [](Bytes size, std::uint64_t uses) {
    Candidate one = victim(size, 0);
    one.near = nearness(uses);
    return one;
  };
  expect({away(8, 3), wall(), away(16, 40)}, 8, 2, 3);
  expect({away(8, 3), wall(), away(16, 4)}, 8, 2, 3);
  expect({away(16, 6), wall(), away(8, 5)}, 8, 2, 3);     // about as soon: the fewer bytes
  expect({away(16, 400), wall(), away(8, 33)}, 8, 2, 3);  // none soon
  expect({away(4, 90), away(4, 2), wall(), away(16, 9)}, 8, 3, 4);
  Candidate stays = away(8, 50);
  stays.age = 1;
  expect({stays, wall(), away(8, 1)}, 8, 2, 3);  // what would stay stays
  Candidate large = away(9, 50);
  large.age = 1;
  stays.size = 4;
  // Both with what would stay, in the middle: then each byte counts, whatever leaves beside it.
  expect({large, stays, away(4, 1)}, 8, 1, 3);
}

TEST("a run never crosses a wall") {
  CHECK(!choose_window(std::vector<Candidate>{idle(7), wall(1), idle(7)}, 8).found);
}

TEST("a run's age is that of its youngest victim") {
  // The pair 1, 40 holds one that is needed soon; 20, 21 do not.
  expect({victim(4, 1), victim(4, 40), wall(), victim(4, 20), victim(4, 21)}, 8, 3, 5);
}

TEST("with equal ages fewer victim bytes go") {
  expect({victim(16, 5), wall(), idle(4), victim(4, 5)}, 8, 2, 4);
}

TEST("of what leaves in any case fewer bytes go, and then what was copied out first") {
  expect({victim(8, 0, 1), victim(16, 0, 2), wall(), victim(16, 0, 9), wall(), victim(16, 0, 5)},
         16, 1, 2);
  expect({victim(8, 0, 1), victim(8, 0, 2), wall(), victim(8, 0, 3), victim(10, 0, 4)}, 18, 3, 5);
  expect({victim(16, 0, 9), wall(), victim(8, 0, 6), victim(8, 0, 4)}, 16, 2, 4);
}

TEST("what leaves in any case goes before what would have stayed, however much more it is") {
  expect({victim(16, 1), wall(), victim(12, 0, 3), victim(12, 0, 4)}, 16, 2, 4);
}

TEST("of runs without victims the one whose copy out was queued first goes") {
  expect({idle(8, 7), wall(), idle(8, 3), wall(), idle(8, 5)}, 8, 2, 3);
  expect({idle(8, 7), wall(), idle(16, 0)}, 8, 2, 3);
}

TEST("no more blocks are taken than the request needs") {
  expect({victim(8, 1), victim(8, 2), victim(8, 3)}, 16, 0, 2);
}

TEST("a request larger than every run finds nothing") {
  CHECK(!choose_window(std::vector<Candidate>{victim(8, 1), idle(8)}, 17).found);
}

TEST("the number of victims in the run is told") {
  const std::vector<Candidate> blocks{idle(4), victim(4, 1), victim(4, 2)};
  CHECK_EQ(choose_window(blocks, 12).victims, 2);
  CHECK_EQ(choose_window(blocks, 4).victims, 0);
}

// A forward of a transformer under pressure: weights are walls, activations were saved in order,
// some short-lived tensors between them are free again.
const std::vector<Candidate> kForward{wall(64),      victim(16, 1), victim(16, 2), idle(8),
                                      victim(16, 3), wall(32),      victim(32, 4), idle(16),
                                      victim(16, 5), victim(16, 6), wall(16)};

TEST("recorded snapshot, forward: small requests take the first layers' activations") {
  expect(kForward, 16, 7, 8);
  expect(kForward, 24, 2, 4);
  expect(kForward, 32, 1, 3);
  expect(kForward, 40, 1, 4);
}

TEST("recorded snapshot, forward: a large request takes the run whose last need is latest") {
  expect(kForward, 56, 1, 5);
  expect(kForward, 64, 6, 9);
}

TEST("on random snapshots the run is the best there is by the rule of the header") {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    std::vector<Candidate> blocks;
    for (int i = 0; i < 12; ++i) {
      blocks.push_back(
          {static_cast<Candidate::Kind>(random() % 3), 1 + random() % 8, random() % 20});
    }
    const Bytes bytes = 1 + random() % 24;
    const Window window = choose_window(blocks, bytes);
    bool any_run = false;
    std::uint64_t oldest = ~std::uint64_t{0};  // the least youngest victim of any run
    for (std::size_t begin = 0; begin < blocks.size(); ++begin) {
      Bytes size = 0;
      std::uint64_t youngest = 0;
      for (std::size_t i = begin; i < blocks.size() && size < bytes; ++i) {
        if (blocks[i].kind == Candidate::Kind::wall) {
          break;
        }
        size += blocks[i].size;
        if (blocks[i].kind == Candidate::Kind::victim) {
          youngest = std::max(youngest, blocks[i].age + 1);
        }
      }
      if (size >= bytes) {
        any_run = true;
        oldest = std::min(oldest, youngest);
      }
    }
    CHECK_EQ(window.found, any_run);
    if (!window.found) {
      continue;
    }
    Bytes size = 0;
    std::uint64_t youngest = 0;
    for (std::size_t i = window.begin; i < window.end; ++i) {
      CHECK(blocks[i].kind != Candidate::Kind::wall);
      size += blocks[i].size;
      if (blocks[i].kind == Candidate::Kind::victim) {
        youngest = std::max(youngest, blocks[i].age + 1);
      }
    }
    CHECK(size >= bytes);
    CHECK_EQ(youngest, oldest);
  }
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
