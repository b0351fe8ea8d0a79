// Walk 1, an allocation under pressure, step by step; then what surrounds it: budgets, limits,
// streams and graphs.
#include <string>
#include <vector>

#include "native/core_rig.hpp"

namespace stagehand::core::test {
namespace {

TEST("step 2: a freed block serves the next request of its size") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  const Tensor first = rig.make(8_MiB, s);
  rig.drop(first);
  CHECK_EQ(rig.allocate(8_MiB, s), first.address);
  CHECK_EQ(rig.counters().hits, 1);
}

TEST("step 2: requests of any size get what they ask for, apart from each other") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  std::vector<Tensor> tensors;
  for (Bytes bytes = 1; bytes < 64_MiB; bytes = bytes * 3 + 1) {
    tensors.push_back(rig.make(bytes, s));
  }
  for (const Tensor& tensor : tensors) {
    CHECK_EQ(tensor.address % kBlockUnit, 0);
    rig.check(tensor, s);
    rig.drop(tensor);
  }
  rig.verify_empty();
}

TEST("step 3: memory is mapped while mapped stays at or below high, and nothing is evicted") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 32_MiB);
  std::vector<Held> saved = rig.retain_many(4, 16_MiB, s);
  CHECK_EQ(rig.counters().mapped, 64_MiB);
  CHECK_EQ(rig.counters().evicted, 0);
  for (const Held& held : saved) {
    rig.back(held, s);
  }
  rig.verify_empty();
}

TEST("step 4: over high the oldest goes first, and mapped never crosses") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  std::vector<Held> saved;
  for (std::size_t i = 0; i < 8; ++i) {
    saved.push_back(rig.retain(16_MiB, s));
    for (std::size_t k = 0; k <= i; ++k) {
      CHECK_EQ(rig.resident(saved[k]), k + 4 > i);
    }
  }
  CHECK_EQ(rig.counters().mapped_peak, 64_MiB);
  CHECK_EQ(rig.counters().evicted, 64_MiB);
  CHECK_EQ(rig.counters().overshoot_bytes, 0);
  rig.back_all(saved, s);
  CHECK_EQ(rig.counters().mapped_peak, 64_MiB);
  rig.verify_empty();
}

TEST("step 4: an older record that makes no hole alone stays where its neighbour does") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const Held small = rig.retain(16_MiB, s);
  const Tensor wall = rig.make(16_MiB, s);
  const Held large = rig.retain(32_MiB, s);
  const Tensor next = rig.make(32_MiB, s);
  CHECK(rig.resident(small));
  CHECK(!rig.resident(large));
  rig.drop(next);
  rig.drop(wall);
  rig.back(large, s);
  rig.back(small, s);
  rig.verify_empty();
}

TEST("step 4: a clean record is evicted without a copy") {
  CoreRig rig({.memory = 64_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(16_MiB, 16_MiB, 16_MiB);
  const Held held = rig.retain(16_MiB, s);
  rig.drop(rig.make(16_MiB, s));
  rig.runtime->drop_alias(rig.unpack(held, s).block);  // restored, and retained again
  const std::uint64_t copies = stagehand_sim_call_count("cuMemcpyDtoHAsync");
  rig.drop(rig.make(16_MiB, s));
  CHECK(!rig.resident(held));
  CHECK_EQ(stagehand_sim_call_count("cuMemcpyDtoHAsync"), copies);
  CHECK_EQ(rig.counters().clean_evictions, 1);
  CHECK_EQ(rig.counters().dirty_evictions, 1);
  CHECK_EQ(rig.counters().evicted_bytes, 16_MiB);
  rig.back(held, s);
  rig.verify_empty();
}

TEST("step 5: eviction goes on until occupied is at or below low") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 40_MiB);
  std::vector<Held> saved = rig.retain_many(8, 8_MiB, s);
  CHECK_EQ(rig.counters().evicted, 0);
  const Tensor next = rig.make(8_MiB, s);
  CHECK(rig.counters().occupied <= 40_MiB);
  CHECK_EQ(rig.counters().evicted, 32_MiB);
  rig.drop(next);
  for (const Held& held : saved) {
    rig.back(held, s);
  }
  rig.verify_empty();
}

TEST("step 6: another stream's free memory is lent, not added to, without a host wait") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  const driver::Stream other = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  for (int i = 0; i < 2; ++i) {
    const Tensor tensor = rig.make(48_MiB, i == 0 ? other : s);
    rig.check(tensor, tensor.stream);
    rig.drop(tensor);
  }
  CHECK(rig.counters().mapped_peak <= 64_MiB);
  CHECK_EQ(rig.counters().host_waits, 0);
  CHECK_EQ(rig.counters().loans, 1);
  CHECK_EQ(rig.counters().gathers, 0);
  rig.verify_empty();
}

TEST("step 6: evicted memory of one stream serves another") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  const driver::Stream other = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const Held first = rig.retain(32_MiB, other);
  const Held second = rig.retain(32_MiB, other);
  const Tensor next = rig.make(48_MiB, s);
  CHECK_EQ(rig.counters().mapped_peak, 64_MiB);
  rig.drop(next);
  rig.back(second, other);
  rig.back(first, other);
  rig.verify_empty();
}

TEST("step 6: memory that is free in pieces makes one large block, again and again") {
  CoreRig rig({.memory = 512_MiB});
  const driver::Stream s = rig.stream();
  for (int round = 0; round < 30; ++round) {
    std::vector<Address> blocks;
    for (int i = 0; i < 16; ++i) {
      blocks.push_back(rig.allocate(32_MiB, s));
    }
    for (std::size_t i = 0; i < 16; i += 2) {
      rig.runtime->free(blocks[i]);
    }
    const Address large = rig.allocate(256_MiB, s);
    if (large == 0) {
      return;  // already reported
    }
    stagehand_sim_fill(s, large, 4096, 1);
    rig.runtime->free(large);
    for (std::size_t i = 1; i < 16; i += 2) {
      rig.runtime->free(blocks[i]);
    }
  }
  rig.verify_empty();
}

// A piece of 2 MiB lies under several of them, whose copies end at different times.
TEST("step 7: small tensors make way for a large request to the byte, and nobody waits") {
  for (const bool copied : {false, true}) {
    for (const Bytes each : {256_KiB, 768_KiB, 1_MiB}) {
      CoreRig rig;
      const driver::Stream s = rig.stream();
      rig.budget(32_MiB, 28_MiB);
      std::vector<Held> held;
      for (Bytes bytes = 0; bytes < 30_MiB; bytes += each) {
        held.push_back(rig.retain(each, s));
        if (copied) {
          stagehand_sim_drain();
        }
      }
      const Tensor large = rig.make(20_MiB, s);
      CHECK_EQ(rig.counters().overshoot_bytes, 0);
      CHECK_EQ(rig.counters().mapped_peak, 32_MiB);
      CHECK_EQ(rig.counters().gpu_wait_ns, 0);
      rig.drop(large);
      rig.back_all(held, s);
      rig.verify_empty();
    }
  }
}

TEST("step 7: what cannot be evicted is overshot up to the limit, and counted") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(32_MiB, 32_MiB, 64_MiB);
  const Tensor live = rig.make(32_MiB, s);
  const Tensor more = rig.make(16_MiB, s);
  const Counters now = rig.counters();
  CHECK(now.mapped <= 64_MiB);
  CHECK_EQ(now.overshoot_bytes, now.mapped - 32_MiB);
  rig.drop(live);
  rig.drop(more);
  rig.verify_empty();
}

TEST(
    "step 7: beyond the limit the request fails, the report has the numbers, and less still fits") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(32_MiB, 32_MiB, 64_MiB);
  const Tensor live = rig.make(32_MiB, s);
  const Held saved = rig.save(live);
  const Counters before = rig.counters();
  CHECK_EQ(rig.try_allocate(48_MiB, s), Status::out_of_memory);
  const Counters after = rig.counters();
  CHECK_EQ(after.mapped, before.mapped);
  CHECK_EQ(after.occupied, before.occupied);
  CHECK_EQ(after.out_of_memory, 1);
  const std::string report = rig.runtime->report(48_MiB);
  for (const char* part : {"48.00", "mapped 32.00", "occupied 32.00", "retained 0.00", "64.00"}) {
    CHECK(report.find(part) != std::string::npos);
  }
  rig.verify();
  rig.drop(rig.make(24_MiB, s));
  rig.drop(live);
  rig.back(saved, s);
  rig.verify_empty();
}

TEST("walking on after every failure: a loop at the limit never loses memory") {
  CoreRig rig({.memory = 64_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(48_MiB, 40_MiB, 48_MiB);
  for (int round = 0; round < 10; ++round) {
    std::vector<Tensor> live;
    Address address = 0;
    while (rig.runtime->allocate(6_MiB, s, 0, &address) == Status::ok) {
      live.push_back({address, 6_MiB, s, 1});
    }
    CHECK_EQ(live.size(), 8);
    rig.verify();
    for (const Tensor& tensor : live) {
      rig.drop(tensor);
    }
  }
  rig.verify_empty();
}

// Budgets ----------------------------------------------------------------------------------------

TEST("entering a pool gives free memory above high back to the driver") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  const Tensor weights = rig.make(32_MiB, s);
  rig.drop(rig.make(128_MiB, s));
  rig.budget(64_MiB, 48_MiB);
  CHECK(rig.counters().mapped <= 64_MiB);
  CHECK_EQ(stagehand_sim_physical_bytes(0), rig.counters().mapped);
  rig.check(weights, s);
  rig.drop(weights);
  rig.verify_empty();
}

TEST("a budget stays armed after its pool until the last record dies") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 32_MiB);
  const Held held = rig.retain(16_MiB, s);
  rig.runtime->clear_budget();
  CHECK(rig.runtime->budget().armed);
  CHECK_EQ(rig.runtime->budget().high, 64_MiB);
  rig.back(held, s);
  CHECK(!rig.runtime->budget().armed);
}

TEST("a pool without records disarms when it closes") {
  CoreRig rig;
  rig.budget(64_MiB, 32_MiB);
  CHECK(rig.runtime->budget().armed);
  rig.runtime->clear_budget();
  CHECK(!rig.runtime->budget().armed);
}

TEST("the limit holds with and without a pool, and a pool cannot raise it") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.runtime->set_limit(64_MiB);
  CHECK_EQ(rig.try_allocate(65_MiB, s), Status::out_of_memory);
  rig.budget(128_MiB, 128_MiB, 128_MiB);
  CHECK_EQ(rig.runtime->budget().limit, 64_MiB);
  CHECK_EQ(rig.try_allocate(65_MiB, s), Status::out_of_memory);
  rig.drop(rig.make(48_MiB, s));
  CHECK(rig.counters().mapped_peak <= 64_MiB);
  rig.verify_empty();
}

TEST("trimming gives everything free back, and what is needed is mapped again") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.drop(rig.make(100, s));
  rig.drop(rig.make(100_MiB, s));
  rig.runtime->trim(0);
  CHECK_EQ(stagehand_sim_physical_bytes(0), 0);
  rig.drop(rig.make(100_MiB, s));
  rig.verify_empty();
}

// While trim waits without the lock, another thread evicts, and reuses part of the block.
TEST("trimming never unmaps what a copy came to read while it waited") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CoreRig rig({.seed = seed});
    const driver::Stream s = rig.stream();
    rig.budget(24_MiB, 24_MiB);
    const Held held = rig.retain(24_MiB, s);
    Tensor next;
    interludes().ctx_synchronize = [&] { next = rig.make(9_MiB, s); };
    rig.runtime->trim(0);
    CHECK(next.address != 0);
    rig.drop(next);
    rig.back(held, s);
    rig.verify_empty();
  }
}

// Streams ----------------------------------------------------------------------------------------

TEST("a block that another stream uses is not handed out before that stream is done") {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    CoreRig rig({.seed = seed, .memory = 32_MiB});
    const driver::Stream s = rig.stream();
    const driver::Stream side = rig.stream();
    rig.budget(16_MiB, 16_MiB, 16_MiB);
    const Tensor tensor = rig.make(16_MiB, s);
    rig.order(s, side);
    rig.check(tensor, side);
    rig.runtime->record_stream(tensor.address, side);
    rig.drop(tensor);
    rig.drop(rig.make(16_MiB, s));  // the only memory there is
    CHECK_EQ(rig.counters().host_waits, 0);
    rig.verify_empty();
  }
}

TEST("where there is room a block another stream uses is left alone") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  const driver::Stream side = rig.stream();
  stagehand_sim_progress(0);
  const Tensor tensor = rig.make(16_MiB, s);
  rig.order(s, side);
  rig.check(tensor, side);
  rig.runtime->record_stream(tensor.address, side);
  rig.drop(tensor);
  CHECK(rig.allocate(16_MiB, s) != tensor.address);
  stagehand_sim_progress(0.25);
}

TEST("naming the block's own stream costs nothing") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  const Tensor tensor = rig.make(16_MiB, s);
  rig.runtime->record_stream(tensor.address, s);
  rig.drop(tensor);
  CHECK_EQ(stagehand_sim_call_count("cuEventRecord"), 0);
  CHECK_EQ(rig.allocate(16_MiB, s), tensor.address);
}

TEST("interior pointers are told their block, and foreign ones are not ours") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  const Tensor tensor = rig.make(10_MiB, s);
  Address base = 0;
  Bytes bytes = 0;
  CHECK(rig.runtime->base_of(tensor.address + 5'000'000, &base, &bytes));
  CHECK_EQ(base, tensor.address);
  CHECK(bytes >= 10_MiB);
  CHECK(!rig.runtime->base_of(reinterpret_cast<Address>(&rig), &base, &bytes));
  CHECK(!rig.runtime->free(tensor.address + 512));
  CHECK(!rig.runtime->free(reinterpret_cast<Address>(&rig)));
  rig.drop(tensor);
  CHECK(!rig.runtime->free(tensor.address));
}

// Graphs -----------------------------------------------------------------------------------------

TEST("a graph's blocks come from memory of its own, which nobody else is given") {
  CoreRig rig({.memory = 128_MiB});
  const driver::Stream s = rig.stream();
  const Address captured = rig.allocate(64_MiB, s, 3);
  rig.runtime->free(captured);
  CHECK(rig.allocate(16_MiB, s) != captured);
  CHECK_EQ(rig.try_allocate(60_MiB, s), Status::out_of_memory);
  CHECK_EQ(rig.allocate(64_MiB, s, 3), captured);
  rig.runtime->free(captured);
  rig.runtime->release_graph(3);
  CHECK_EQ(rig.try_allocate(60_MiB, s), Status::ok);
  rig.verify();
}

TEST("a tensor of a graph is not saved") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(128_MiB, 64_MiB);
  const Address captured = rig.allocate(8_MiB, s, 3);
  CHECK_EQ(rig.runtime->save(captured, captured, captured + 8_MiB).refusal, Refusal::graph_capture);
}

TEST("memory of a gone graph that another stream used serves again") {
  for (const bool own_arena_first : {true, false}) {
    CoreRig rig;
    const driver::Stream s = rig.stream();
    const driver::Stream side = rig.stream();
    if (own_arena_first) {
      rig.drop(rig.make(2_MiB, s));
    }
    const Tensor tensor{rig.allocate(64_MiB, s, 7), 64_MiB, s, 1};
    rig.fill(tensor, s);
    rig.order(s, side);
    rig.check(tensor, side);
    rig.runtime->record_stream(tensor.address, side);
    rig.drop(tensor);
    rig.runtime->release_graph(7);
    rig.drop(rig.make(250_MiB, s));
    rig.verify_empty();
  }
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
