// Pinned host memory in size classes: core/pinned_pool.
#include <cstring>
#include <vector>

#include "core/pinned_pool.hpp"
#include "native/core_rig.hpp"

namespace stagehand::core {
namespace {

constexpr auto kRegister = "cuMemHostRegister";

// A pool on a fresh simulated GPU; small classes, so that nothing large is faulted in.
struct Pool {
  explicit Pool(const SizeClasses& classes = {{64_KiB, 256_KiB, 1_MiB}, {4, 2, 2}},
                Bytes host_limit = kUnlimited)
      : pool(counters) {
    pool.configure(classes, host_limit);
  }
  ~Pool() {
    CHECK_EQ(broken(), "");
    if (pool.idle()) {
      unpin(pool.take_chunks());
    }
  }
  // As the runtime does it; false when there is no more to be had.
  bool grow(Bytes wanted) {
    Chunk chunk = pool.start_growth(wanted);
    if (chunk.size == 0) {
      return false;
    }
    const bool made = map_chunk(&chunk, -1) && pin_chunk(rig.driver, &chunk);
    pool.finish_growth(chunk, made);
    return made;
  }
  // Slabs for `bytes`, or none.
  std::vector<Slab*> take(Bytes bytes, bool squeeze = false) {
    std::vector<Slab*> slabs;
    const bool taken = pool.take(bytes, squeeze, &slabs, &missing);
    CHECK_EQ(taken, !slabs.empty());
    return slabs;
  }
  Slab* take_one(Bytes bytes) {
    const std::vector<Slab*> slabs = take(bytes);
    CHECK_EQ(slabs.size(), 1);
    return slabs.empty() ? nullptr : slabs.front();
  }
  void give(const std::vector<Slab*>& slabs) {
    for (Slab* slab : slabs) {
      pool.give(slab);
    }
  }
  void unpin(const std::vector<Chunk>& chunks) {
    for (const Chunk& chunk : chunks) {
      unpin_chunk(rig.driver, chunk);
    }
  }
  std::string broken() const {
    const char* found = pool.broken();
    return found != nullptr ? found : "";
  }

  test::CoreRig rig;
  Counters counters;
  PinnedPool pool;
  Bytes missing = 0;  // of the last take that failed
};

std::vector<Bytes> sizes_of(const std::vector<Slab*>& slabs) {
  std::vector<Bytes> sizes;
  for (const Slab* slab : slabs) {
    sizes.push_back(slab->size);
  }
  return sizes;
}

// Growth pins about 256 MiB where the limit lets it; tests keep to this.
constexpr Bytes kLimit = 8_MiB;

TEST("a new pool pins nothing and has no slab") {
  Pool pool;
  CHECK_EQ(pool.counters.pinned_bytes, 0);
  CHECK(pool.take(1).empty());
  CHECK_EQ(stagehand_sim_call_count(kRegister), 0);
}

TEST("the default pool's first slabs are those of the counts, in pieces, small ones first") {
  Pool pool(SizeClasses{});
  const Bytes slabs[] = {1_MiB, 1_MiB, 4_MiB, 16_MiB, 64_MiB, 256_MiB, 256_MiB};
  const Bytes sizes[] = {256_MiB, 256_MiB, 8_MiB, 32_MiB, 128_MiB, 256_MiB, 256_MiB};
  std::vector<Chunk> chunks;
  for (std::size_t i = 0; i < std::size(sizes); ++i) {
    chunks.push_back(pool.pool.start_growth_ahead());
    CHECK_EQ(chunks.back().slab_bytes, slabs[i]);
    CHECK_EQ(chunks.back().size, sizes[i]);
  }
  CHECK_EQ(pool.pool.start_growth_ahead().size, 0);
  CHECK(!pool.pool.growth_due());
  for (const Chunk& chunk : chunks) {
    pool.pool.finish_growth(chunk, false);
  }
}

TEST("a request larger than every class takes slabs of the largest") {
  Pool pool({{64_KiB, 1_MiB}, {4, 2}}, kLimit);
  CHECK(pool.grow(4_MiB));
  const auto slabs = pool.take(4_MiB);
  CHECK(sizes_of(slabs) == std::vector<Bytes>(4, 1_MiB));
  pool.give(slabs);
}

TEST("a storage's slabs are neighbours where they can be") {
  Pool pool({{1_MiB}, {8}}, kLimit);
  CHECK(pool.grow(1_MiB));
  const auto first = pool.take(3_MiB);
  const auto second = pool.take(3_MiB);
  for (const auto& slabs : {first, second}) {
    CHECK(slabs[0]->runs_into(*slabs[1]));
    CHECK(slabs[1]->runs_into(*slabs[2]));
  }
  CHECK(!second[0]->runs_into(*first[0]));
  pool.give(second);
  pool.give(first);
}

TEST("without a free slab of its size a storage fills smaller ones, of a MiB at least") {
  Pool pool({{64_KiB, 1_MiB, 4_MiB}, {4, 2, 2}}, 1_MiB);
  CHECK(pool.grow(64_KiB));
  pool.pool.configure(pool.pool.classes(), 5_MiB);
  CHECK(pool.grow(1_MiB));
  const auto slabs = pool.take(4_MiB);
  CHECK(sizes_of(slabs) == std::vector<Bytes>(4, 1_MiB));
  CHECK(pool.take(1_MiB).empty());  // 16 slabs of 64 KiB are free
  CHECK_EQ(pool.missing, 1_MiB);
  pool.give(slabs);
}

TEST("smaller slabs that cannot hold all of it are left alone, and the preferred size is missing") {
  Pool pool({{1_MiB, 4_MiB}, {3, 2}}, 3_MiB);
  CHECK(pool.grow(1_MiB));
  CHECK(pool.take(4_MiB).empty());
  CHECK_EQ(pool.missing, 4_MiB);
  CHECK_EQ(pool.counters.pinned_used_bytes, 0);
  CHECK_EQ(pool.counters.pinned_waste_bytes, 0);
}

TEST("a larger slab is taken only when squeezed") {
  Pool pool({{1_MiB, 4_MiB}, {1, 2}}, 8_MiB);
  CHECK(pool.grow(4_MiB));
  CHECK(pool.take(1_MiB).empty());
  const auto slabs = pool.take(1_MiB, true);
  CHECK(sizes_of(slabs) == std::vector<Bytes>{4_MiB});
  CHECK_EQ(pool.counters.pinned_waste_bytes, 3_MiB);
  pool.give(slabs);
  CHECK_EQ(pool.counters.pinned_waste_bytes, 0);
}

TEST("squeezing spreads a storage over whatever is left") {
  Pool pool({{64_KiB, 256_KiB}, {1, 1}}, 128_KiB);
  CHECK(pool.grow(1));
  CHECK(pool.take(256_KiB, true).empty());  // 128 KiB are not enough
  pool.pool.configure(pool.pool.classes(), 448_KiB);
  CHECK(pool.grow(256_KiB));
  const auto slabs = pool.take(384_KiB, true);
  CHECK(sizes_of(slabs) == (std::vector<Bytes>{256_KiB, 64_KiB, 64_KiB}));
  CHECK(pool.take(1, true).empty());
  pool.give(slabs);
}

// Cells ------------------------------------------------------------------------------------------

TEST("storages below the smallest class share a slab of it") {
  Pool pool({{1_MiB}, {2}}, 1_MiB);
  CHECK(pool.grow(1));
  std::vector<Slab*> cells;
  for (int i = 0; i < 64; ++i) {
    cells.push_back(pool.take_one(16_KiB));
    std::memset(cells.back()->host, i, 16_KiB);
  }
  CHECK_EQ(pool.counters.pinned_used_bytes, 1_MiB);
  CHECK_EQ(pool.counters.pinned_waste_bytes, 0);
  CHECK_EQ(pool.broken(), "");
  CHECK(pool.take(16_KiB).empty());
  CHECK(pool.take(1_MiB).empty());
  for (int i = 0; i < 64; ++i) {
    const auto at = static_cast<std::size_t>(i);
    CHECK_EQ(cells[at]->host[16_KiB - 1], static_cast<std::byte>(i));
    CHECK(i == 0 || cells[at - 1]->runs_into(*cells[at]));
  }
  pool.give(cells);
  CHECK_EQ(pool.counters.pinned_used_bytes, 0);
}

TEST("a slab whose cells are all back serves whole again, and in cells of other sizes") {
  Pool pool({{1_MiB}, {2}}, 1_MiB);
  CHECK(pool.grow(1));
  for (const Bytes bytes : {4_KiB, 1_MiB, 512_KiB, 16_KiB, 1_MiB, 128_KiB}) {
    Slab* slab = pool.take_one(bytes);
    CHECK_EQ(slab->size, bytes);
    CHECK_EQ(pool.broken(), "");
    pool.pool.give(slab);
    CHECK_EQ(pool.broken(), "");
  }
}

TEST("S5: a slab made whole is behind the copies of all its cells, and its cells behind its own") {
  Pool pool({{1_MiB}, {1}}, 1_MiB);
  CHECK(pool.grow(1));
  Slab* whole = pool.take_one(1_MiB);
  whole->fence.add({1, 7});
  pool.pool.give(whole);
  Slab* one = pool.take_one(16_KiB);
  Slab* two = pool.take_one(16_KiB);
  CHECK_EQ(two->fence.begin()->seq, 7);
  one->fence.add({1, 9});
  two->fence.add({2, 3});
  pool.give({one, two});
  whole = pool.take_one(1_MiB);
  Seq seqs[3] = {};
  for (const Tick& tick : whole->fence) {
    seqs[tick.clock] = tick.seq;
  }
  CHECK_EQ(seqs[1], 9);
  CHECK_EQ(seqs[2], 3);
  pool.pool.give(whole);
}

TEST("cells whose copies ran on more streams than a fence names stay cells, and serve again") {
  Pool pool({{64_KiB}, {1}}, 64_KiB);
  CHECK(pool.grow(1));
  std::vector<Slab*> cells;
  for (std::uint32_t i = 0; i < 8; ++i) {
    cells.push_back(pool.take_one(8_KiB));
    cells.back()->fence.add({i, 1});
  }
  pool.give(cells);
  CHECK(pool.take(64_KiB).empty());
  CHECK_EQ(pool.broken(), "");
  Slab* again = pool.take_one(8_KiB);
  pool.pool.give(again);
}

// Growth -----------------------------------------------------------------------------------------

TEST("growth counts what is under way against the host limit") {
  Pool pool({{1_MiB}, {1}}, 400_MiB);
  const Chunk first = pool.pool.start_growth(1);
  const Chunk second = pool.pool.start_growth(1);
  CHECK_EQ(first.size, 256_MiB);
  CHECK_EQ(second.size, 144_MiB);
  CHECK_EQ(pool.pool.start_growth(1).size, 0);
  CHECK(!pool.pool.idle());
  pool.pool.finish_growth(first, false);
  pool.pool.finish_growth(second, false);
}

TEST("what the driver refuses is asked for again after a while, then after twice as long") {
  Pool pool({{1_MiB, 4_MiB}, {4, 2}}, 64_MiB);
  const auto refused = [&] {
    const Chunk chunk = pool.pool.start_growth(4_MiB);
    CHECK_EQ(chunk.slab_bytes, 4_MiB);
    pool.pool.finish_growth(chunk, false);
  };
  refused();
  for (const int patience : {1, 2, 4}) {
    for (int i = 0; i < patience; ++i) {
      CHECK_EQ(pool.pool.start_growth(4_MiB).size, 0);
      pool.pool.retry();
    }
    refused();
  }
  CHECK_EQ(pool.pool.start_growth(4_MiB).size, 0);
}

TEST("slabs that are being made are known to be coming") {
  Pool pool({{1_MiB, 4_MiB}, {4, 2}}, 64_MiB);
  const Chunk chunk = pool.pool.start_growth(4_MiB);
  CHECK(pool.pool.coming(4_MiB));
  CHECK(!pool.pool.coming(1_MiB));
  pool.pool.finish_growth(chunk, false);
  CHECK(!pool.pool.coming(4_MiB));
}

TEST("spare slabs are due when few are left where slabs are taken") {
  Pool pool({{1_MiB}, {4}}, 8_MiB);
  CHECK(pool.grow(1));
  pool.pool.configure(pool.pool.classes(), 16_MiB);
  CHECK_EQ(pool.pool.start_growth_ahead().size, 0);  // no demand yet
  Slab* slab = pool.take_one(1_MiB);
  CHECK(pool.pool.growth_due());
  const Chunk chunk = pool.pool.start_growth_ahead();
  CHECK_EQ(chunk.size, 8_MiB);
  pool.pool.finish_growth(chunk, false);
  pool.pool.give(slab);
}

TEST("what a step is likely to take is made ahead: of each size its share, until it is there") {
  Pool pool({{1_MiB, 4_MiB}, {0, 0}});
  CHECK_EQ(pool.pool.start_growth_ahead().size, 0);
  for (int i = 0; i < 8; ++i) {
    pool.pool.expect(4_MiB, 4);
  }
  pool.pool.expect(8_MiB, 4);  // two slabs
  CHECK(pool.pool.growth_due());
  const Chunk large = pool.pool.start_growth_ahead();
  CHECK_EQ(large.slab_bytes, 4_MiB);
  CHECK_EQ(large.size, 8_MiB);  // of 10 MiB, whole slabs
  pool.pool.finish_growth(large, false);
  pool.pool.begin_step();
  CHECK_EQ(pool.pool.start_growth_ahead().size, 0);  // of the step before
}

TEST("slabs of the first amount come after the initial ones, and whoever takes slabs comes first") {
  Pool pool({{1_MiB, 4_MiB, 32_MiB}, {2, 0, 0}}, 64_MiB);
  pool.pool.configure(pool.pool.classes(), 64_MiB, 10_MiB);
  std::vector<Slab*> none;
  Bytes missing = 0;
  CHECK(!pool.pool.take(32_MiB, false, &none, &missing));
  const Chunk asked = pool.pool.start_growth_ahead();
  CHECK_EQ(asked.slab_bytes, 32_MiB);
  pool.pool.finish_growth(asked, false);
  pool.pool.configure(pool.pool.classes(), 64_MiB, 10_MiB);
  const Chunk initial = pool.pool.start_growth_ahead();
  CHECK_EQ(initial.slab_bytes, 1_MiB);
  CHECK_EQ(initial.size, 2_MiB);
  const Chunk first = pool.pool.start_growth_ahead();
  CHECK_EQ(first.slab_bytes, 4_MiB);  // the largest of at most 16 MiB
  CHECK_EQ(first.size, 8_MiB);
  CHECK_EQ(pool.pool.start_growth_ahead().size, 0);  // there are 10 MiB
  pool.pool.finish_growth(initial, false);
  pool.pool.finish_growth(first, false);
}

TEST("once a step has begun the first amount waits until a slab is taken or expected") {
  for (const bool taken : {true, false}) {
    Pool pool({{1_MiB, 4_MiB}, {2, 0}}, 1_GiB);
    pool.pool.configure(pool.pool.classes(), 1_GiB, 600_MiB);
    const Chunk before = pool.pool.start_growth_ahead();
    CHECK_EQ(before.size, 2_MiB);
    pool.pool.finish_growth(before, false);
    pool.pool.configure(pool.pool.classes(), 1_GiB, 600_MiB);
    CHECK(pool.grow(1_MiB));
    pool.pool.begin_step();
    CHECK_EQ(pool.pool.start_growth_ahead().size, 0);
    CHECK(!pool.pool.growth_due());
    if (taken) {
      pool.give(pool.take(1_MiB));
    } else {
      pool.pool.expect(1_MiB, 64);
    }
    CHECK(pool.pool.growth_due());
    Bytes pinned = 0;
    for (Chunk chunk = pool.pool.start_growth_ahead(); chunk.size > 0;
         chunk = pool.pool.start_growth_ahead()) {
      pinned += chunk.size;
      pool.pool.finish_growth(chunk, false);
    }
    CHECK(pinned > 0);
  }
}

TEST("a pool that is made between two steps has its first amount pinned at once") {
  Pool pool({{1_MiB, 4_MiB}, {2, 0}}, 1_GiB);
  pool.pool.begin_step();
  pool.pool.configure(pool.pool.classes(), 1_GiB, 600_MiB);
  CHECK(pool.pool.growth_due());
  const Chunk chunk = pool.pool.start_growth_ahead();
  CHECK_EQ(chunk.size, 2_MiB);
  pool.pool.finish_growth(chunk, false);
}

TEST("counts that were asked for are pinned though a step has begun") {
  Pool pool({{1_MiB, 4_MiB}, {2, 0}}, 64_MiB);
  pool.pool.begin_step();
  CHECK_EQ(pool.pool.start_growth_ahead().size, 2_MiB);
}

TEST("a limit below one slab of the smallest class pins nothing") {
  Pool pool({{1_MiB, 4_MiB}, {4, 2}}, 1_MiB - 1);
  CHECK_EQ(pool.pool.start_growth_ahead().size, 0);
  CHECK(!pool.grow(1));
  CHECK(pool.take(1, true).empty());
}

TEST("growth stops at the host limit, in whole slabs") {
  Pool pool({{64_KiB, 1_MiB}, {4, 2}}, 2_MiB + 100);
  CHECK(pool.grow(1_MiB));
  CHECK_EQ(pool.counters.pinned_bytes, 2_MiB);
  CHECK_EQ(pool.pool.start_growth(1_MiB).size, 0);
  CHECK_EQ(pool.pool.start_growth(1).size, 0);
}

TEST("a refusal to pin is answered with less, and what was pinned is used") {
  Pool pool({{64_KiB}, {16}}, 1_MiB);
  stagehand_sim_fail(kRegister, 1, 2, driver::kOutOfMemory);
  CHECK(pool.grow(1));
  CHECK_EQ(pool.counters.pinned_bytes, 256_KiB);
  CHECK_EQ(stagehand_sim_call_count(kRegister), 3);
}

TEST("after a final refusal the driver is not asked again") {
  Pool pool({{64_KiB}, {16}}, kLimit);
  stagehand_sim_fail(kRegister, 1, 1000, driver::kOutOfMemory);
  CHECK(!pool.grow(1));
  const std::uint64_t asked = stagehand_sim_call_count(kRegister);
  CHECK(!pool.grow(1));
  CHECK_EQ(stagehand_sim_call_count(kRegister), asked);
  CHECK_EQ(pool.counters.pinned_bytes, 0);
}

TEST("slabs do not overlap, are registered, and hold what is written") {
  Pool pool({{64_KiB, 256_KiB}, {4, 2}}, 1_MiB);
  CHECK(pool.grow(1));
  const auto slabs = pool.take(1_MiB, true);
  CHECK_EQ(slabs.size(), 16);
  for (std::size_t i = 0; i < slabs.size(); ++i) {
    std::memset(slabs[i]->host, static_cast<int>(i), slabs[i]->size);
  }
  for (std::size_t i = 0; i < slabs.size(); ++i) {
    CHECK_EQ(slabs[i]->host[0], static_cast<std::byte>(i));
    CHECK_EQ(slabs[i]->host[slabs[i]->size - 1], static_cast<std::byte>(i));
  }
  CHECK_EQ(stagehand_sim_call_count(kRegister), 1);  // one growth, one call
  pool.give(slabs);
}

TEST("slabs are handed out round, so the copies of the next have most likely passed") {
  Pool pool({{64_KiB}, {3}}, 192_KiB);
  CHECK(pool.grow(1));
  Slab* first = pool.take_one(64_KiB);
  Slab* second = pool.take_one(64_KiB);
  pool.give({first, second});
  Slab* third = pool.take_one(64_KiB);
  CHECK(third != first && third != second);
  CHECK(pool.take_one(64_KiB) == first);
  pool.give({third, first});
}

TEST("a slab keeps its fence through the free list") {
  Pool pool({{64_KiB}, {1}}, 64_KiB);
  CHECK(pool.grow(1));
  Slab* slab = pool.take_one(64_KiB);
  slab->fence.add({3, 5});
  pool.pool.give(slab);
  CHECK(pool.take_one(64_KiB) == slab);
  CHECK(!slab->fence.empty());
  pool.pool.give(slab);
}

TEST("pageable memory is outside the pool, and its giver's again once it is given back") {
  Pool pool;
  std::byte* host = map_host(PinnedPool::pageable_bytes(100'000), -1);
  Slab* slab = pool.pool.add_pageable(host, 100'000);
  CHECK(slab->pageable);
  CHECK(slab->size >= 100'000);
  CHECK_EQ(pool.counters.pageable_bytes, slab->size);
  CHECK_EQ(pool.counters.pinned_used_bytes, 0);
  std::memset(slab->host, 1, slab->size);
  pool.pool.give(slab);
  CHECK_EQ(pool.counters.pageable_bytes, 0);
  CHECK(pool.take(1).empty());
  unmap_host(host, PinnedPool::pageable_bytes(100'000));
}

// Shrinking --------------------------------------------------------------------------------------

TEST("taking all chunks unregisters everything, and the pool grows again") {
  Pool pool({{64_KiB}, {4}}, kLimit);
  CHECK(pool.grow(1));
  pool.pool.give(pool.take_one(8_KiB));
  pool.unpin(pool.pool.take_chunks());
  CHECK_EQ(pool.counters.pinned_bytes, 0);
  CHECK_EQ(stagehand_sim_call_count("cuMemHostUnregister"), 1);
  CHECK(pool.take(1).empty());
  CHECK(pool.grow(1));
  pool.pool.give(pool.take_one(64_KiB));
  CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_ALL), 0);
}

TEST("shrinking gives back chunks no slab of which is taken or named by a copy under way") {
  Pool pool({{1_MiB}, {2}}, 2_MiB);
  Gate gate(pool.rig.driver);
  ClockBank clocks(gate);
  const driver::Stream s = pool.rig.stream();
  for (Bytes limit = 2_MiB; limit <= 6_MiB; limit += 2_MiB) {
    pool.pool.configure(pool.pool.classes(), limit);
    CHECK(pool.grow(1));  // a chunk of two slabs
  }
  const auto slabs = pool.take(6_MiB);
  CHECK_EQ(slabs.size(), 6);
  Tick tick;
  stagehand_sim_fill(s, pool.rig.allocate(1_MiB, s), 1_MiB, 1);
  CHECK_EQ(clocks.of(s).record(&tick), Status::ok);
  slabs[4]->fence.add(tick);
  pool.give({slabs[0], slabs[2], slabs[3], slabs[4], slabs[5]});  // one of the first stays taken
  pool.pool.give(pool.take_one(16_KiB));  // an empty cut slab is no hindrance
  auto gone = pool.pool.take_chunks_above(0, clocks);
  CHECK_EQ(gone.size(), 1);
  CHECK_EQ(pool.counters.pinned_bytes, 4_MiB);
  CHECK_EQ(pool.broken(), "");
  pool.unpin(gone);
  stagehand_sim_drain();
  gone = pool.pool.take_chunks_above(0, clocks);
  CHECK_EQ(gone.size(), 1);
  pool.unpin(gone);
  CHECK_EQ(pool.pool.start_growth_ahead().size, 0);  // what was given back is not made again
  pool.pool.give(slabs[1]);
  CHECK_EQ(pool.pool.take_chunks_above(2_MiB, clocks).size(), 0);
}

TEST("hits are counted a slab") {
  Pool pool({{64_KiB}, {4}}, kLimit);
  CHECK(pool.grow(1));
  const auto slabs = pool.take(128_KiB);
  CHECK_EQ(pool.counters.pool_hits, 2);
  pool.give(slabs);
}

// Demand -----------------------------------------------------------------------------------------

TEST("what storages asked for is remembered by size, with the most at once") {
  Pool pool({{64_KiB}, {4}}, kLimit);
  CHECK(pool.grow(1));
  const auto one = pool.take(100_KiB);
  const auto two = pool.take(100_KiB);
  std::byte* host = map_host(PinnedPool::pageable_bytes(77), -1);
  Slab* pageable = pool.pool.add_pageable(host, 77);
  pool.give(one);
  pool.give(two);
  pool.give(pool.take(100_KiB));
  pool.pool.give(pageable);
  unmap_host(host, PinnedPool::pageable_bytes(77));
  const auto peaks = pool.pool.demand().peaks();
  CHECK_EQ(peaks.size(), 2);
  CHECK_EQ(peaks[0].bytes, 77);
  CHECK_EQ(peaks[0].count, 1);
  CHECK_EQ(peaks[1].bytes, 100_KiB);
  CHECK_EQ(peaks[1].count, 2);
}

TEST("demand stays bounded: past 256 sizes new ones are rounded up by less than an eighth") {
  Demand demand;
  std::vector<Demand::Entry*> entries;
  for (Bytes bytes = 1_MiB; bytes < 2_MiB; bytes += 512) {
    entries.push_back(demand.add(bytes));
  }
  CHECK(demand.peaks().size() <= 256 + 8);
  std::size_t count = 0;
  for (const Demand::Peak& peak : demand.peaks()) {
    count += peak.count;
  }
  CHECK_EQ(count, entries.size());
}

TEST("a limit that counts weights: slabs get what these leave, and they what slabs leave") {
  Pool pool;
  pool.pool.configure(pool.pool.classes(), 2_MiB, 0, true);
  CHECK(pool.pool.add_weights(1_MiB + 512_KiB));
  CHECK(pool.grow(64_KiB));
  CHECK_EQ(pool.counters.pinned_bytes, 512_KiB);
  CHECK(!pool.grow(64_KiB));
  CHECK(!pool.pool.add_weights(1));  // refused, it is not counted
  CHECK_EQ(pool.counters.weights_pinned_bytes, 1_MiB + 512_KiB);
  pool.pool.remove_weights(512_KiB);
  CHECK(!pool.pool.add_weights(512_KiB + 1));
  CHECK(pool.pool.add_weights(256_KiB));
  CHECK(pool.grow(64_KiB));
  CHECK_EQ(pool.counters.pinned_bytes, 768_KiB);
}

TEST("a limit that counts weights counts slabs that are being made") {
  Pool pool;
  pool.pool.configure(pool.pool.classes(), 1_MiB, 0, true);
  Chunk chunk = pool.pool.start_growth(64_KiB);
  CHECK_EQ(chunk.size, 1_MiB);
  CHECK(!pool.pool.add_weights(1));
  pool.pool.finish_growth(chunk, false);
  CHECK(pool.pool.add_weights(1_MiB));
}

TEST("any other limit is of slabs alone") {
  Pool pool;
  pool.pool.configure(pool.pool.classes(), 512_KiB);
  CHECK(pool.pool.add_weights(8_MiB));
  CHECK(pool.grow(64_KiB));
  CHECK_EQ(pool.counters.pinned_bytes, 512_KiB);
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
