// How much room prefetch leaves, as steps go by in which something came too early, or nothing.
#include "core/prefetch_reserve.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {
namespace {

constexpr Bytes kHigh = 44_GiB;
constexpr Bytes kLow = 40_GiB;

PrefetchReserve entered() {
  PrefetchReserve reserve;
  reserve.enter(kHigh, kLow);
  return reserve;
}

TEST("what came early is room to leave, and an eighth of it is forgotten in each step") {
  PrefetchReserve reserve = entered();
  reserve.begin_step(false);
  CHECK_EQ(reserve.bytes(), 0);
  reserve.came_early(800_MiB, kLow);
  CHECK_EQ(reserve.bytes(), 800_MiB);
  reserve.begin_step(false);
  CHECK_EQ(reserve.bytes(), 700_MiB);
}

// Steps of which each needs so much room, or else so many bytes come early; how many that was.
int learn(PrefetchReserve& reserve, int steps, Bytes needed, Bytes bytes,
          bool link_bounds = false) {
  int early = 0;
  for (int i = 0; i < steps; ++i) {
    reserve.begin_step(link_bounds);
    if (reserve.bytes() < needed) {
      reserve.came_early(bytes, kLow);
      ++early;
    }
  }
  return early;
}

TEST("room that is needed in every step is given up less and less often") {
  PrefetchReserve reserve = entered();
  CHECK(learn(reserve, 400, 600_MiB, 100_MiB) <= 24);
  CHECK(learn(reserve, 640, 600_MiB, 100_MiB) <= 10);
  reserve = entered();  // where the link bounds it, as ever
  CHECK(learn(reserve, 400, 600_MiB, 100_MiB, true) >= 200);
}

TEST("what comes early now and then, whatever the room, does not take all of it") {
  for (const int every : {2, 4, 8, 15}) {
    PrefetchReserve reserve = entered();
    Bytes most = 0;
    for (int i = 0; i < 4000; ++i) {
      reserve.begin_step(false);
      if (i % every == 0) {
        reserve.came_early(256_MiB, kLow);
      }
      most = std::max(most, reserve.bytes());
    }
    CHECK(most <= kLow / 2);
  }
}

TEST("several in one step are one reason") {
  PrefetchReserve reserve = entered();
  for (int i = 0; i < 200; ++i) {
    reserve.begin_step(false);
    if (reserve.bytes() < 1_GiB) {
      for (int k = 0; k < 4; ++k) {
        reserve.came_early(64_MiB, kLow);
      }
    }
  }
  CHECK(reserve.patience() > 2);
}

TEST("inside another budget it is forgotten as fast as at first, and is never more than low") {
  PrefetchReserve reserve = entered();
  learn(reserve, 100, 10_GiB, 1_GiB);
  CHECK(reserve.patience() > 1);
  reserve.enter(12_GiB, 8_GiB);
  CHECK_EQ(reserve.bytes(), 8_GiB);
  for (int i = 0; i < 20; ++i) {
    reserve.begin_step(false);
  }
  CHECK(reserve.bytes() < 1_GiB);
}

TEST("what one plan needs another does not: gone back to, it has what it had") {
  PlanReserves reserves;
  reserves.begin_step(1, kHigh, kLow, false);
  reserves.came_early(100_MiB, kLow);
  reserves.begin_step(2, kHigh, kLow, false);  // is tried, and knows what was known before it
  CHECK_EQ(reserves.now().bytes(), 100_MiB - 100_MiB / 8);
  reserves.came_early(8_GiB, kLow);
  reserves.begin_step(2, kHigh, kLow, false);
  CHECK(reserves.now().bytes() > 7_GiB);
  reserves.begin_step(1, kHigh, kLow, false);
  CHECK(reserves.now().bytes() < 100_MiB);
  reserves.begin_step(2, kHigh, kLow, false);
  CHECK(reserves.now().bytes() > 6_GiB);
}

TEST("of many plans the last ones are known, and none has more than low") {
  PlanReserves reserves;
  for (std::uint64_t plan = 1; plan <= 1000; ++plan) {
    reserves.begin_step(plan, kHigh, kLow, false);
    reserves.came_early(4_GiB, kLow);
  }
  for (std::uint64_t plan = 1000; plan > 900; --plan) {
    reserves.begin_step(plan, 4_GiB, 1_GiB, false);
    CHECK(reserves.now().bytes() <= 1_GiB);
    CHECK_EQ(reserves.now().patience(), 1);
  }
}

TEST("after long without any it is forgotten faster again") {
  PrefetchReserve reserve = entered();
  learn(reserve, 200, 1_GiB, 128_MiB);
  CHECK(reserve.patience() > 1);
  for (int i = 0; i < 1200; ++i) {
    reserve.begin_step(false);
  }
  CHECK_EQ(reserve.patience(), 1);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
