// The mirror of torch's cache, told event by event.
#include <vector>

#include "core/cache_map.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {
namespace {

constexpr Address kBase = 1_GiB;

struct Map : CacheMap {
  driver::Stream stream = &stream_here;
  std::array<std::uint64_t, 2> pool{};
  int stream_here = 0;

  CacheEvent event(CacheEvent::Kind kind, Bytes at, Bytes bytes) const {
    return {kind, 0, kBase + at, bytes, stream, {pool[0], pool[1]}};
  }
  void segment(Bytes at, Bytes bytes) { apply(event(CacheEvent::segment, at, bytes)); }
  void segment_gone(Bytes at, Bytes bytes) { apply(event(CacheEvent::segment_gone, at, bytes)); }
  void mapped(Bytes at, Bytes bytes) { apply(event(CacheEvent::mapped, at, bytes)); }
  void unmapped(Bytes at, Bytes bytes) { apply(event(CacheEvent::unmapped, at, bytes)); }
  void alloc(Bytes at, Bytes bytes) { apply(event(CacheEvent::alloc, at, bytes)); }
  void freed(Bytes at, Bytes bytes) { apply(event(CacheEvent::freed, at, bytes)); }

  Bytes hole() { return largest_hole(Owner{stream, pool}); }
  // Every stretch as "[megabytes" of a segment's first, "m" a block, "." a hole: [.2 m3 .15
  std::string walked() {
    std::vector<Stretch> stretches;
    walk(Owner{stream, pool}, &stretches);
    std::string text;
    for (const Stretch& one : stretches) {
      text += one.begins_segment ? "[" : "";
      text += one.hole ? "." : "m";
      text += std::to_string(one.bytes >> 20) + (one.of_owner ? " " : "? ");
    }
    return text;
  }
};

TEST("a segment is one hole, and blocks cut it up and give it back") {
  Map map;
  map.segment(0, 20_MiB);
  CHECK_EQ(map.hole(), 20_MiB);
  map.alloc(0, 4_MiB);
  map.alloc(4_MiB, 2_MiB);
  CHECK_EQ(map.walked(), "[m4 m2 .14 ");
  map.freed(0, 4_MiB);
  CHECK_EQ(map.hole(), 14_MiB);
  CHECK_EQ(map.usage().allocated, 2_MiB);
  map.alloc(6_MiB, 14_MiB);
  CHECK_EQ(map.hole(), 4_MiB);
  CHECK_EQ(map.walked(), "[.4 m2 m14 ");
  map.freed(4_MiB, 2_MiB);
  map.freed(6_MiB, 14_MiB);
  CHECK_EQ(map.hole(), 20_MiB);
  CHECK_EQ(map.usage().allocated, 0);
  CHECK_EQ(map.usage().reserved, 20_MiB);
}

TEST("what torch does not cut off a block is not a hole") {
  Map map;
  map.segment(0, 20_MiB);
  map.alloc(0, 7_MiB / 2);
  map.alloc(7_MiB / 2, 2_MiB);
  map.freed(0, 7_MiB / 2);
  map.alloc(0, 3_MiB);  // gets all 3.5 MiB: half of one is not worth a block
  CHECK_EQ(map.usage().allocated, 11_MiB / 2);
  map.freed(7_MiB / 2, 2_MiB);
  CHECK_EQ(map.hole(), 33_MiB / 2);
  map.freed(0, 3_MiB);
  CHECK_EQ(map.hole(), 20_MiB);
  CHECK_EQ(map.usage().allocated, 0);
}

TEST("a request is rounded to torch's unit, and the largest since the last look is told once") {
  Map map;
  map.segment(0, 20_MiB);
  map.alloc(0, 2_MiB + 1);
  CHECK_EQ(map.usage().allocated, 2_MiB + 512);
  map.alloc(2_MiB + 512, 3_MiB);
  CHECK_EQ(map.take_largest_request(), 3_MiB);
  CHECK_EQ(map.take_largest_request(), 0);
  map.freed(0, 2_MiB + 1);
  CHECK_EQ(map.usage().allocated, 3_MiB);
}

TEST("only wholly free segments of the default pool can be released") {
  Map map;
  map.segment(0, 20_MiB);
  map.segment(64_MiB, 2_MiB);
  CHECK_EQ(map.releasable(), 22_MiB);
  map.alloc(0, 4_MiB);
  map.alloc(4_MiB, 4_MiB);
  map.alloc(64_MiB, 512);
  CHECK_EQ(map.releasable(), 0);
  map.freed(0, 4_MiB);
  CHECK_EQ(map.releasable(), 0);
  map.freed(64_MiB, 512);
  CHECK_EQ(map.releasable(), 2_MiB);
  map.freed(4_MiB, 4_MiB);
  CHECK_EQ(map.releasable(), 22_MiB);
  map.segment_gone(0, 20_MiB);
  CHECK_EQ(map.releasable(), 2_MiB);
  CHECK_EQ(map.hole(), 0);
  map.pool = {1, 0};
  map.segment(0, 20_MiB);
  CHECK_EQ(map.releasable(), 2_MiB);
  map.alloc(0, 2_MiB);
  map.freed(0, 2_MiB);
  CHECK_EQ(map.releasable(), 2_MiB);
}

TEST("a hole is its stream's and its pool's alone") {
  Map map;
  map.segment(0, 20_MiB);
  map.pool = {1, 0};
  CHECK_EQ(map.hole(), 0);
  map.segment(32_MiB, 12_MiB);
  CHECK_EQ(map.hole(), 12_MiB);
  CHECK_EQ(map.walked(), "[.20? [.12 ");
  CHECK(map.owner_of(kBase + 33_MiB)->pool == map.pool);
  map.stream = nullptr;
  CHECK_EQ(map.hole(), 0);
  CHECK(!map.owner_of(kBase + 20_MiB).has_value());
  CHECK(!map.owner_of(kBase - 1).has_value());
}

TEST("the largest hole of all is one that torch would give back") {
  Map map;
  CHECK_EQ(map.largest_hole().bytes, 0);
  map.segment(0, 20_MiB);
  map.alloc(0, 12_MiB);
  int other = 0;
  map.stream = &other;
  map.segment(20_MiB, 10_MiB);
  CHECK_EQ(map.largest_hole().bytes, 10_MiB);
  CHECK(map.largest_hole().owner.stream == &other);
  map.pool = {0, 1};
  map.segment(40_MiB, 60_MiB);  // a MemPool's
  CHECK_EQ(map.largest_hole().bytes, 10_MiB);
}

TEST("two requests have a hole each, or not; what lacks one is made of the largest") {
  Map map;
  const auto fit = [&](Bytes bytes, Bytes other) {
    return map.both_fit(CacheMap::Owner{map.stream, map.pool}, bytes, other);
  };
  CHECK(!fit(4_MiB, 2_MiB));
  map.segment(0, 40_MiB);
  CHECK(fit(20_MiB, 20_MiB));
  CHECK(!fit(20_MiB, 24_MiB));
  CHECK(!fit(50_MiB, 24_MiB));
  map.segment(60_MiB, 24_MiB);
  CHECK(fit(20_MiB, 24_MiB));
  CHECK(fit(40_MiB, 24_MiB));
  CHECK(fit(50_MiB, 24_MiB));
  CHECK(!fit(50_MiB, 28_MiB));
}

TEST("what torch would put into its smallest hole leaves another one beside it, or not") {
  Map map;
  const auto fits = [&](Bytes bytes, Bytes kept) {
    return map.fits_beside(CacheMap::Owner{map.stream, map.pool}, bytes, kept);
  };
  CHECK(fits(4_MiB, 20_MiB));  // there is none to break up
  map.segment(0, 40_MiB);
  CHECK(!fits(4_MiB, 40_MiB));
  CHECK(!fits(20_MiB, 24_MiB));
  CHECK(fits(4_MiB, 24_MiB));   // its rest is enough
  CHECK(fits(4_MiB, 60_MiB));   // it never was one
  CHECK(fits(50_MiB, 40_MiB));  // torch does not take it
  map.segment(60_MiB, 12_MiB);
  CHECK(fits(4_MiB, 40_MiB));  // the smaller one is taken
  CHECK(!fits(20_MiB, 40_MiB));
  map.segment(100_MiB, 44_MiB);
  CHECK(fits(20_MiB, 40_MiB));
}

TEST("a hole behind which an expandable segment could grow is taken last") {
  Map map;
  const auto fits = [&](Bytes bytes, Bytes kept) {
    return map.fits_beside(CacheMap::Owner{map.stream, map.pool}, bytes, kept);
  };
  map.mapped(0, 200_MiB);
  map.alloc(0, 10_MiB);
  map.alloc(50_MiB, 120_MiB);  // 40 MiB before it, 30 MiB behind it
  CHECK(!fits(4_MiB, 40_MiB));
  CHECK(fits(4_MiB, 30_MiB));
  map.alloc(180_MiB, 20_MiB);  // now the latter is one of 10 MiB like any other
  CHECK(fits(4_MiB, 40_MiB));
  map.freed(180_MiB, 20_MiB);
  map.mapped(400_MiB, 20_MiB);  // likewise
  map.alloc(400_MiB, 20_MiB);
  CHECK(!fits(4_MiB, 40_MiB));
  CHECK(fits(40_MiB, 30_MiB));
}

TEST("a request of the engine's own leaves no trace") {
  Map map;
  map.segment(0, 60_MiB);
  map.alloc(0, 4_MiB);
  map.since();
  map.alloc(4_MiB, 40_MiB);
  map.freed(4_MiB, 40_MiB);
  map.forget_request(4_MiB);
  CHECK_EQ(map.usage().allocated_peak, 4_MiB);
  const CacheMap::Since since = map.since();
  CHECK_EQ(since.largest_request, 0);
  CHECK_EQ(since.allocated_peak, 4_MiB);
}

TEST("blocks of small segments are counted, and neither holes nor walked") {
  Map map;
  map.segment(0, 2_MiB);
  map.alloc(0, 512);
  map.alloc(512, 100'000);
  CHECK_EQ(map.hole(), 0);
  CHECK_EQ(map.walked(), "");
  CHECK_EQ(map.usage().allocated, 512 + round_up(100'000, 512));
  map.freed(0, 512);
  map.freed(512, 100'000);
  CHECK_EQ(map.usage().allocated, 0);
  CHECK_EQ(map.releasable(), 2_MiB);
}

TEST("what is known and what happens meanwhile make one picture") {
  Map map;
  map.segment(512_MiB, 4_MiB);  // of before: told again below, or gone
  map.segment(600_MiB, 2_MiB);
  map.begin_step();
  map.snapshot();
  map.alloc(2_MiB, 4_MiB);  // after the snapshot: into what is told next
  map.freed(0, 2_MiB);
  map.segment(64_MiB, 20_MiB);
  CHECK_EQ(map.usage().reserved, 0);
  map.known(map.event(CacheEvent::segment, 0, 20_MiB));
  map.known(map.event(CacheEvent::alloc, 0, 2_MiB));
  map.told();
  CHECK_EQ(map.walked(), "[.2 m4 .14 [.20 ");
  CHECK_EQ(map.usage().reserved, 40_MiB);
  CHECK_EQ(map.usage().allocated, 4_MiB);
  CHECK_EQ(map.releasable(), 20_MiB);
  CHECK_EQ(map.small_growth(), 2_MiB);
  CHECK_EQ(map.take_largest_request(), 0);  // nobody asked for what was there
  map.alloc(64_MiB, 8_MiB);
  CHECK_EQ(map.walked(), "[.2 m4 .14 [m8 .12 ");
}

TEST("a block freed that nobody told of changes nothing") {
  Map map;
  map.segment(0, 20_MiB);
  map.freed(0, 4_MiB);
  map.freed(100_MiB, 4_MiB);
  CHECK_EQ(map.usage().allocated, 0);
  CHECK_EQ(map.hole(), 20_MiB);
  CHECK_EQ(map.releasable(), 20_MiB);
}

TEST("what an expandable segment maps joins what ends where it begins") {
  Map map;
  map.mapped(0, 20_MiB);
  map.alloc(0, 16_MiB);
  map.mapped(20_MiB, 20_MiB);
  CHECK_EQ(map.walked(), "[m16 .24 ");
  CHECK_EQ(map.hole(), 24_MiB);
  CHECK_EQ(map.releasable(), 24_MiB);
  map.alloc(16_MiB, 24_MiB);
  CHECK_EQ(map.hole(), 0);
  CHECK_EQ(map.releasable(), 0);
  map.freed(0, 16_MiB);
  map.freed(16_MiB, 24_MiB);
  CHECK_EQ(map.hole(), 40_MiB);
  CHECK_EQ(map.usage().reserved, 40_MiB);
}

TEST("a part of an expandable segment that goes back leaves what is around it") {
  Map map;
  map.mapped(0, 60_MiB);
  map.alloc(0, 10_MiB);
  map.alloc(10_MiB, 40_MiB);
  map.alloc(50_MiB, 10_MiB);
  map.freed(10_MiB, 40_MiB);
  map.unmapped(20_MiB, 20_MiB);
  CHECK_EQ(map.walked(), "[m10 .10 [.10 m10 ");
  CHECK_EQ(map.usage().reserved, 40_MiB);
  CHECK_EQ(map.releasable(), 20_MiB);
  CHECK_EQ(map.hole(), 10_MiB);
  map.freed(0, 10_MiB);
  CHECK_EQ(map.hole(), 20_MiB);
  map.freed(50_MiB, 10_MiB);
  map.unmapped(0, 20_MiB);
  CHECK_EQ(map.walked(), "[.20 ");
  map.unmapped(40_MiB, 20_MiB);
  CHECK_EQ(map.walked(), "");
  CHECK_EQ(map.usage().reserved, 0);
  CHECK_EQ(map.releasable(), 0);
  CHECK_EQ(map.hole(), 0);
}

TEST("what is mapped between two parts of an expandable segment makes them one") {
  Map map;
  map.mapped(0, 60_MiB);
  map.alloc(0, 10_MiB);
  map.unmapped(20_MiB, 20_MiB);
  map.alloc(40_MiB, 10_MiB);
  map.mapped(20_MiB, 20_MiB);
  CHECK_EQ(map.walked(), "[m10 .30 m10 .10 ");
  CHECK_EQ(map.hole(), 30_MiB);
  map.alloc(10_MiB, 30_MiB);  // across both seams
  CHECK_EQ(map.hole(), 10_MiB);
  CHECK_EQ(map.releasable(), 10_MiB);
  map.freed(10_MiB, 30_MiB);
  map.freed(40_MiB, 10_MiB);
  map.freed(0, 10_MiB);
  CHECK_EQ(map.hole(), 60_MiB);
  CHECK_EQ(map.releasable(), 60_MiB);
}

TEST("neighbours that are not one expandable segment stay apart") {
  Map map;
  map.mapped(0, 20_MiB);
  map.pool = {1, 0};
  map.mapped(20_MiB, 20_MiB);
  CHECK_EQ(map.walked(), "[.20? [.20 ");
  map.segment(40_MiB, 20_MiB);
  CHECK_EQ(map.walked(), "[.20? [.20 [.20 ");
}

TEST("expandable segments of small and of large blocks side by side stay apart") {
  Map map;
  map.mapped(0, 20_MiB);
  map.mapped(20_MiB, 2_MiB);
  map.mapped(22_MiB, 2_MiB);
  map.mapped(24_MiB, 20_MiB);
  CHECK_EQ(map.walked(), "[.20 [.20 ");
  map.unmapped(20_MiB, 4_MiB);  // several pages at once
  CHECK_EQ(map.walked(), "[.20 [.20 ");
  CHECK_EQ(map.usage().reserved, 40_MiB);
  CHECK_EQ(map.releasable(), 40_MiB);
  CHECK_EQ(map.hole(), 20_MiB);
}

TEST("whole pages lie between two offsets where both ends of each do") {
  CHECK_EQ(CacheMap::whole_pages(0, 60_MiB), 60_MiB);
  CHECK_EQ(CacheMap::whole_pages(1, 60_MiB), 40_MiB);
  CHECK_EQ(CacheMap::whole_pages(20_MiB, 60_MiB - 1), 20_MiB);
  CHECK_EQ(CacheMap::whole_pages(25_MiB, 39_MiB), 0);
  CHECK_EQ(CacheMap::whole_pages(25_MiB, 45_MiB), 0);
}

TEST("growth above the mark is counted to the byte, and what was above it before is not") {
  Map map;
  map.set_mark(30_MiB);
  map.segment(0, 20_MiB);
  CHECK_EQ(map.usage().over_mark, 0);
  map.segment(32_MiB, 20_MiB);
  CHECK_EQ(map.usage().over_mark, 10_MiB);
  map.segment(64_MiB, 2_MiB);
  CHECK_EQ(map.usage().over_mark, 12_MiB);
  map.segment_gone(0, 20_MiB);
  map.segment(96_MiB, 2_MiB);
  CHECK_EQ(map.usage().over_mark, 12_MiB);
  map.set_mark(kUnlimited);
  map.segment(128_MiB, 20_MiB);
  CHECK_EQ(map.usage().over_mark, 12_MiB);
}

TEST("peaks are those since the last reset, and of the last look") {
  Map map;
  map.segment(0, 20_MiB);
  map.alloc(0, 8_MiB);
  map.freed(0, 8_MiB);
  CHECK_EQ(map.usage().allocated_peak, 8_MiB);
  CHECK_EQ(map.since().allocated_peak, 8_MiB);
  CHECK_EQ(map.since().allocated_peak, 0);
  map.segment_gone(0, 20_MiB);
  CHECK_EQ(map.usage().reserved_peak, 20_MiB);
  map.reset_peaks();
  CHECK_EQ(map.usage().reserved_peak, 0);
  CHECK_EQ(map.usage().allocated_peak, 0);
}

TEST("where no event tells, the numbers given count: peaks, and growth above the mark") {
  Map map;
  map.set_mark(30_MiB);
  map.set_usage(20_MiB, 8_MiB);
  map.set_usage(40_MiB, 30_MiB);
  map.set_usage(10_MiB, 2_MiB);
  CHECK_EQ(map.usage().reserved, 10_MiB);
  CHECK_EQ(map.usage().reserved_peak, 40_MiB);
  CHECK_EQ(map.usage().allocated_peak, 30_MiB);
  CHECK_EQ(map.usage().over_mark, 10_MiB);
}

TEST("a block is kept until torch frees it") {
  Map map;
  map.segment(0, 20_MiB);
  map.alloc(0, 4_MiB);
  map.keep(kBase);
  CHECK(map.known_of(kBase).kept);
  CHECK(!map.known_of(kBase + 512).kept);
  map.freed(0, 4_MiB);
  CHECK(!map.known_of(kBase).kept);
}

TEST("a request grows the cache by the segment torch asks the driver for") {
  Map map;
  CHECK_EQ(map.growth_for(1), 2_MiB);
  CHECK_EQ(map.growth_for(1_MiB), 2_MiB);
  CHECK_EQ(map.growth_for(1_MiB + 512), 20_MiB);
  CHECK_EQ(map.growth_for(10_MiB - 512), 20_MiB);
  CHECK_EQ(map.growth_for(10_MiB), 10_MiB);
  CHECK_EQ(map.growth_for(21_MiB + 1), 22_MiB);
}

TEST("other streams are expected to have what they had at most in this step and the two before") {
  Map map;
  int side = 0;
  const driver::Stream main = map.stream;
  map.segment(0, 100_MiB);
  map.stream = &side;
  map.segment(100_MiB, 60_MiB);
  map.segment(200_MiB, 2_MiB);  // of small blocks: small_growth's
  CHECK_EQ(map.growth_of_others(main), 0);
  map.segment_gone(100_MiB, 60_MiB);
  CHECK_EQ(map.growth_of_others(main), 60_MiB);
  CHECK_EQ(map.growth_of_others(&side), 0);
  map.begin_step();
  map.pool = {1, 0};
  map.segment(100_MiB, 20_MiB);  // whatever pool its memory is in
  CHECK_EQ(map.growth_of_others(main), 40_MiB);
  map.begin_step();
  CHECK_EQ(map.growth_of_others(main), 40_MiB);
  map.begin_step();
  CHECK_EQ(map.growth_of_others(main), 0);
}

TEST(
    "what a forward lets go of is no wall, though the GPU is not done with it; nor is a small "
    "one") {
  Map map;
  const auto step = [&](bool last) {
    map.begin_step();
    map.serve_apart({}, 0, {}, 1_GiB, 1_GiB);
    CHECK_EQ(map.follows(), last);
    std::vector<Walls::One> walls;
    for (Bytes at = 0; at < 24_MiB; at += 4_MiB) {
      map.alloc(at, 4_MiB);
    }
    map.alloc(24_MiB, 512_KiB);
    if (last) {
      map.apply(map.event(CacheEvent::let_go, 4_MiB, 4_MiB));
    }
    for (const CacheMap::Young& one : map.young()) {
      CHECK_EQ(one.request, (one.address - kBase) / 4_MiB + 1);
      walls.push_back({map.stream, one.request, one.block.bytes});
    }
    CHECK_EQ(walls.size(), last ? 5u : 6u);
    map.end_saving(1_GiB, 1_GiB, walls, 1_GiB);
    for (Bytes at = 0; at < 24_MiB; at += 4_MiB) {
      map.freed(at, 4_MiB);
    }
    map.freed(24_MiB, 512_KiB);
  };
  map.segment(0, 64_MiB);
  step(false);
  step(false);
  CHECK_EQ(map.missing_apart(), 24_MiB);
  step(true);
  CHECK(map.wants_walls());
}

TEST("segments of small blocks are expected to be as many as at most in the last two steps") {
  Map map;
  const auto step = [&](Bytes segments) {
    map.begin_step();
    for (Bytes at = 0; at < segments; at += 2_MiB) {
      map.segment(at, 2_MiB);
    }
    for (Bytes at = 0; at < segments; at += 2_MiB) {
      map.segment_gone(at, 2_MiB);
    }
  };
  CHECK_EQ(map.small_growth(), 0);
  step(10_MiB);
  step(4_MiB);
  map.begin_step();
  CHECK_EQ(map.small_growth(), 10_MiB);
  map.segment(0, 2_MiB);
  map.segment(100_MiB, 20_MiB);  // for others
  CHECK_EQ(map.small_growth(), 8_MiB);
  map.begin_step();
  CHECK_EQ(map.small_growth(), 2_MiB);
  map.segment_gone(0, 2_MiB);
  step(0);
  step(0);
  map.begin_step();
  CHECK_EQ(map.small_growth(), 0);
}

TEST("what a backward left is let go of before it is free, and then no gradient of it") {
  Map map;
  const auto let_go = [&](Bytes at) { map.apply(map.event(CacheEvent::let_go, at, 4_MiB)); };
  map.begin_step();
  map.segment(0, 20_MiB);
  map.end_saving(64_MiB, 64_MiB);
  map.alloc(0, 4_MiB);
  map.alloc(4_MiB, 4_MiB);
  let_go(0);
  const std::vector<CacheMap::Young> young = map.young();
  CHECK_EQ(young.size(), 1u);
  CHECK(young.front().of_backward);
  CHECK_EQ(young.front().block.nth, 2u);
  map.begin_step();
  map.serve_apart({}, 0, {{young.front().address, {map.stream, 4_MiB, 2}}});
  CHECK(map.follows());
  map.end_saving(64_MiB, 64_MiB);
  CHECK(map.knows_gradients());
  CHECK_EQ(map.missing_apart(), 0);
  let_go(4_MiB);
  CHECK_EQ(map.missing_apart(), 0);  // no room is to be had for it yet
  map.freed(4_MiB, 4_MiB);
  CHECK_EQ(map.missing_apart(), 4_MiB);
  CHECK_EQ(map.growth_apart(map.stream), 4_MiB);
  int apart = 0;
  map.give_apart(map.stream, &apart);
  map.stream = &apart;
  map.segment(64_MiB, 20_MiB);
  CHECK_EQ(map.growth_apart(&map.stream_here), 0);
  map.alloc(64_MiB, 18_MiB);
  CHECK_EQ(map.growth_apart(&map.stream_here), 2_MiB);
  CHECK_EQ(map.growth_apart(&apart), 0);
}

TEST("where segments are expandable a request grows the cache by pages of one") {
  Map map;
  map.mapped(0, 20_MiB);
  CHECK_EQ(map.growth_for(1_MiB), 2_MiB);
  CHECK_EQ(map.growth_for(10_MiB), 20_MiB);
  CHECK_EQ(map.growth_for(21_MiB), 40_MiB);
}

TEST("an expandable segment of small blocks has no holes, and counts as reserved") {
  Map map;
  map.mapped(0, 20_MiB);
  map.alloc(0, 20_MiB);
  for (Bytes at = 100_MiB; at < 120_MiB; at += 2_MiB) {
    map.mapped(at, 2_MiB);
    map.alloc(at, 1_MiB);
  }
  CHECK_EQ(map.hole(), 0);
  CHECK_EQ(map.walked(), "[m20 ");
  CHECK_EQ(map.usage().reserved, 40_MiB);
  CHECK_EQ(map.usage().allocated, 30_MiB);
  CHECK_EQ(map.releasable(), 10_MiB);
  map.freed(104_MiB, 1_MiB);
  map.unmapped(104_MiB, 2_MiB);
  CHECK_EQ(map.usage().reserved, 38_MiB);
  CHECK_EQ(map.releasable(), 9_MiB);
  map.mapped(104_MiB, 2_MiB);
  map.freed(0, 20_MiB);
  CHECK_EQ(map.hole(), 20_MiB);
  CHECK_EQ(map.walked(), "[.20 ");
  CHECK_EQ(map.releasable(), 31_MiB);
}

// "now/at most in the step before" of the only owner.
std::string pages_of(Map& map) {
  const std::vector<CacheMap::Large> all = map.large();
  return all.size() != 1 ? std::to_string(all.size()) + " owners"
                         : std::to_string(all.front().mapped >> 20) + "/" +
                               std::to_string(all.front().peak >> 20);
}

TEST("the most pages that a stream had count from one step to the next") {
  Map map;
  map.begin_step();
  map.mapped(0, 60_MiB);
  map.unmapped(20_MiB, 40_MiB);
  CHECK_EQ(pages_of(map), "20/0");
  map.begin_step();
  CHECK_EQ(pages_of(map), "20/60");
  map.begin_step();
  CHECK_EQ(pages_of(map), "20/20");
  map.mapped(200_MiB, 2_MiB);  // for small blocks
  CHECK_EQ(pages_of(map), "20/20");
  map.unmapped(0, 20_MiB);
  map.begin_step();
  map.begin_step();
  CHECK_EQ(pages_of(map), "0 owners");
}

TEST("a stream that finds no hole needs what it has and what it grows by, though pages go back") {
  Map map;
  map.begin_step();
  map.mapped(0, 60_MiB);
  map.lacks_hole({map.stream, {}});
  map.unmapped(20_MiB, 40_MiB);
  map.mapped(100_MiB, 40_MiB);
  map.mapped(140_MiB, 20_MiB);
  map.begin_step();
  CHECK_EQ(pages_of(map), "80/100");
}

TEST("what a stream had in the lesser of two steps is known, where something else ran in between") {
  Map map;
  map.begin_step();
  map.mapped(0, 60_MiB);
  map.alloc(0, 40_MiB);
  map.begin_step();
  CHECK_EQ(map.large().front().lesser_peak, 60_MiB);  // there was one step
  map.mapped(60_MiB, 400_MiB);
  map.alloc(40_MiB, 400_MiB);
  map.freed(40_MiB, 400_MiB);
  map.unmapped(60_MiB, 400_MiB);
  map.begin_step();
  CHECK_EQ(pages_of(map), "60/460");
  CHECK_EQ(map.large().front().lesser_peak, 60_MiB);
}

TEST("what is set aside does not count as allocated, nor as asked for") {
  Map map;
  map.mapped(0, 40_MiB);
  map.alloc(0, 4_MiB);
  const CacheMap::Usage before = map.since().usage;
  map.alloc(4_MiB, 30_MiB);
  map.set_aside(kBase + 4_MiB, before.allocated_peak);
  const CacheMap::Since since = map.since();
  CHECK_EQ(since.usage.allocated, 4_MiB);
  CHECK_EQ(since.usage.aside, 30_MiB);
  CHECK_EQ(since.usage.allocated_peak, 4_MiB);
  CHECK_EQ(since.allocated_peak, 4_MiB);
  CHECK_EQ(since.largest_request, 0);
  CHECK_EQ(map.hole(), 6_MiB);
  map.freed(4_MiB, 30_MiB);
  CHECK_EQ(map.usage().allocated, 4_MiB);
  CHECK_EQ(map.usage().aside, 0);
  CHECK_EQ(map.hole(), 36_MiB);
  map.alloc(4_MiB, 30_MiB);
  map.freed(4_MiB, 30_MiB);
  CHECK_EQ(map.usage().allocated, 4_MiB);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
