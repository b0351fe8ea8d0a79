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
  explicit Pool(SizeClasses classes = {{64_KiB, 256_KiB, 1_MiB}, {4, 2, 2}},
                Bytes host_limit = kUnlimited)
      : pool(rig.driver, counters) {
    pool.configure(classes, host_limit);
  }
  ~Pool() {
    if (pool.idle()) {
      pool.unmap(pool.take_chunks());
    }
  }
  // As the runtime does it; false when there is no more to be had.
  bool grow(Bytes wanted) {
    PinnedPool::Chunk chunk = pool.plan_growth(wanted);
    if (chunk.size == 0 || !pool.prepare(&chunk)) {
      return false;
    }
    pool.adopt(chunk);
    return true;
  }

  test::CoreRig rig;
  Counters counters;
  PinnedPool pool;
};

// Growth pins about 256 MiB where the limit lets it; tests keep to this.
constexpr Bytes kLimit = 8_MiB;

TEST("the default classes and counts are those of the v0 configuration") {
  const SizeClasses classes;
  CHECK(classes.bytes == (std::vector<Bytes>{1_MiB, 4_MiB, 16_MiB, 64_MiB, 256_MiB}));
  CHECK(classes.counts == (std::vector<std::uint32_t>{512, 2, 2, 2, 2}));
}

TEST("a request fits the smallest class that holds it, and the largest where none does") {
  const SizeClasses classes;
  CHECK_EQ(classes.fit(1), 0);
  CHECK_EQ(classes.fit(1_MiB), 0);
  CHECK_EQ(classes.fit(1_MiB + 1), 1);
  CHECK_EQ(classes.fit(16_MiB), 2);
  CHECK_EQ(classes.fit(64_MiB + 1), 4);
  CHECK_EQ(classes.fit(1_GiB), 4);
}

TEST("a new pool pins nothing and has no slab") {
  Pool pool;
  CHECK_EQ(pool.counters.pinned_bytes, 0);
  CHECK(pool.pool.take(1) == nullptr);
  CHECK_EQ(stagehand_sim_call_count(kRegister), 0);
}

TEST("the default pool's first small slabs are 512 of 1 MiB") {
  Pool pool(SizeClasses{});
  const PinnedPool::Chunk chunk = pool.pool.plan_growth(700_KiB);
  CHECK_EQ(chunk.slab_bytes, 1_MiB);
  CHECK_EQ(chunk.size, 512_MiB);
}

TEST("a request larger than every class takes slabs of the largest") {
  Pool pool({{64_KiB, 1_MiB}, {4, 2}}, kLimit);
  CHECK(pool.grow(100_MiB));
  const Slab* slab = pool.pool.take(100_MiB);
  CHECK_EQ(slab->size, 1_MiB);
  CHECK_EQ(slab->size_class, 1);
  pool.pool.give(const_cast<Slab*>(slab));
}

TEST("the smallest class that fits is taken first, then the next larger, then none") {
  Pool pool({{64_KiB, 256_KiB, 1_MiB}, {4, 2, 2}}, 256_KiB);
  CHECK(pool.grow(64_KiB));
  pool.pool.configure({{64_KiB, 256_KiB, 1_MiB}, {4, 2, 2}}, 256_KiB + 512_KiB);
  CHECK(pool.grow(256_KiB));
  std::vector<Slab*> slabs;
  for (int i = 0; i < 6; ++i) {
    slabs.push_back(pool.pool.take(1));
    CHECK(slabs.back() != nullptr);
    CHECK_EQ(slabs.back()->size, i < 4 ? 64_KiB : 256_KiB);
  }
  CHECK(pool.pool.take(1) == nullptr);
  CHECK_EQ(pool.counters.pinned_used_bytes, pool.counters.pinned_bytes);
  CHECK(!pool.grow(1));  // the host limit
  for (Slab* slab : slabs) {
    pool.pool.give(slab);
  }
  CHECK_EQ(pool.counters.pinned_used_bytes, 0);
}

TEST("a larger request is never served by a smaller class unless it is squeezed") {
  Pool pool({{64_KiB, 1_MiB}, {4, 2}}, 256_KiB);
  CHECK(pool.grow(1));
  CHECK(pool.pool.take(1_MiB) == nullptr);
  Slab* slab = pool.pool.take_smaller();
  CHECK_EQ(slab->size, 64_KiB);
  pool.pool.give(slab);
}

TEST("squeezing takes the largest slab there is") {
  Pool pool({{64_KiB, 256_KiB}, {1, 1}}, 64_KiB);
  CHECK(pool.grow(1));
  pool.pool.configure({{64_KiB, 256_KiB}, {1, 1}}, 320_KiB);
  CHECK(pool.grow(256_KiB));
  Slab* large = pool.pool.take_smaller();
  CHECK_EQ(large->size, 256_KiB);
  Slab* small = pool.pool.take_smaller();
  CHECK_EQ(small->size, 64_KiB);
  CHECK(pool.pool.take_smaller() == nullptr);
  pool.pool.give(large);
  pool.pool.give(small);
}

TEST("growth stops at the host limit, in whole slabs") {
  Pool pool({{64_KiB, 1_MiB}, {4, 2}}, 2_MiB + 100);
  CHECK(pool.grow(1_MiB));
  CHECK_EQ(pool.counters.pinned_bytes, 2_MiB);
  CHECK_EQ(pool.pool.plan_growth(1_MiB).size, 0);
  CHECK_EQ(pool.pool.plan_growth(1).size, 0);
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
  pool.pool.refused();
  const std::uint64_t asked = stagehand_sim_call_count(kRegister);
  CHECK(!pool.grow(1));
  CHECK_EQ(stagehand_sim_call_count(kRegister), asked);
  CHECK_EQ(pool.counters.pinned_bytes, 0);
}

TEST("slabs do not overlap, are registered, and hold what is written") {
  Pool pool({{64_KiB, 256_KiB}, {4, 2}}, 1_MiB);
  CHECK(pool.grow(1));
  std::vector<Slab*> slabs;
  while (Slab* slab = pool.pool.take(1)) {
    std::memset(slab->host, static_cast<int>(slabs.size()), slab->size);
    slabs.push_back(slab);
  }
  for (std::size_t i = 0; i < slabs.size(); ++i) {
    CHECK_EQ(slabs[i]->host[0], static_cast<std::byte>(i));
    CHECK_EQ(slabs[i]->host[slabs[i]->size - 1], static_cast<std::byte>(i));
  }
  CHECK_EQ(stagehand_sim_call_count(kRegister), 1);  // one growth, one call
  for (Slab* slab : slabs) {
    pool.pool.give(slab);
  }
}

TEST("the slab unused longest is taken first, so its copies have most likely passed") {
  Pool pool({{64_KiB}, {2}}, 128_KiB);
  CHECK(pool.grow(1));
  Slab* first = pool.pool.take(1);
  Slab* second = pool.pool.take(1);
  pool.pool.give(second);
  pool.pool.give(first);
  CHECK(pool.pool.take(1) == second);
  CHECK(pool.pool.take(1) == first);
  pool.pool.give(first);
  pool.pool.give(second);
}

TEST("a slab keeps its fence through the free list") {
  Pool pool({{64_KiB}, {1}}, 64_KiB);
  CHECK(pool.grow(1));
  Slab* slab = pool.pool.take(1);
  slab->fence.add({3, 5});
  pool.pool.give(slab);
  CHECK(pool.pool.take(1) == slab);
  CHECK(!slab->fence.empty());
  pool.pool.give(slab);
}

TEST("pageable memory is outside the pool and given back at once") {
  Pool pool;
  Slab* slab = pool.pool.take_pageable(100'000);
  CHECK(slab->pageable);
  CHECK(slab->size >= 100'000);
  CHECK_EQ(pool.counters.pageable_bytes, slab->size);
  CHECK_EQ(pool.counters.pinned_used_bytes, 0);
  std::memset(slab->host, 1, slab->size);
  pool.pool.give(slab);
  CHECK_EQ(pool.counters.pageable_bytes, 0);
  CHECK(pool.pool.take(1) == nullptr);
}

TEST("release unregisters everything, and the pool grows again") {
  Pool pool({{64_KiB}, {4}}, kLimit);
  CHECK(pool.grow(1));
  pool.pool.unmap(pool.pool.take_chunks());
  CHECK_EQ(pool.counters.pinned_bytes, 0);
  CHECK_EQ(stagehand_sim_call_count("cuMemHostUnregister"), 1);
  CHECK(pool.pool.take(1) == nullptr);
  CHECK(pool.grow(1));
  Slab* slab = pool.pool.take(1);
  CHECK(slab != nullptr);
  pool.pool.give(slab);
  CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_ALL), 0);
}

TEST("hits are counted a slab") {
  Pool pool({{64_KiB}, {4}}, kLimit);
  CHECK(pool.grow(1));
  Slab* one = pool.pool.take(1);
  Slab* two = pool.pool.take(1);
  CHECK_EQ(pool.counters.pool_hits, 2);
  pool.pool.give(one);
  pool.pool.give(two);
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
