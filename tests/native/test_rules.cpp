// The rules that keep data safe (docs/invariants.md), each against the simulator's schedules: kept,
// no hazard and no wrong byte under any seed; broken on purpose, the simulator finds it.
#include <utility>
#include <vector>

#include "native/core_rig.hpp"

namespace stagehand::core::test {
namespace {

const std::uint64_t kSeeds = stagehand::test::seeds(300);
constexpr Bytes kBlock = 128_KiB;

class Planted {
 public:
  explicit Planted(Rule rule) { planted_rule = rule; }
  ~Planted() { planted_rule = Rule::none; }
  Planted(const Planted&) = delete;
  Planted& operator=(const Planted&) = delete;
};

struct Share {
  std::uint64_t hazards = 0;  // seeds with one
  std::uint64_t wrong = 0;    // seeds with wrong bytes
};

// Runs a scenario under every seed with the rule broken.
template <typename Scenario>
Share broken(Rule rule, const Machine& machine, Scenario scenario) {
  Share share;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Machine with = machine;
    with.seed = seed;
    CoreRig rig(with);
    const Planted planted(rule);
    scenario(rig);
    stagehand_sim_drain();
    share.hazards += stagehand_sim_hazards(STAGEHAND_SIM_ALL) > 0 ? 1 : 0;
    share.wrong += stagehand_sim_mismatches() > 0 ? 1 : 0;
    CHECK_EQ(rig.runtime->invariants_broken(), "");  // the books know nothing of order
  }
  return share;
}

// Kept: right under every seed. Broken: a hazard under all seeds but those where the host happens
// to know that the copy is over, and wrong bytes under many.
template <typename Scenario>
void prove(Rule rule, const Machine& machine, Scenario scenario) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Machine with = machine;
    with.seed = seed;
    CoreRig rig(with);
    scenario(rig);
    rig.verify_empty();
    CHECK_EQ(rig.counters().host_waits, 1);  // the pinned pool's first growth
  }
  const Share share = broken(rule, machine, scenario);
  CHECK(share.hazards >= kSeeds * 95 / 100);
  CHECK(share.wrong >= kSeeds / 10);
}

const Machine kMachine{.memory = 64_MiB, .classes = {{kBlock, 2_MiB}, {4, 2}}, .host_limit = 8_MiB};

// Stream order -----------------------------------------------------------------------------------

TEST("S1: a copy out waits for the work queued on the block's stream") {
  prove(Rule::S1, kMachine, [](CoreRig& rig) {
    const driver::Stream s = rig.stream();
    rig.budget(32_MiB, 32_MiB);
    const Held held = rig.retain(kBlock, s);
    rig.evict_all(s);
    rig.back(held, s);
  });
}

TEST("S1: a copy out waits for the streams that record_stream named") {
  prove(Rule::S1, kMachine, [](CoreRig& rig) {
    const driver::Stream s = rig.stream();
    const driver::Stream side = rig.stream();
    rig.budget(32_MiB, 32_MiB);
    const Tensor tensor{rig.allocate(kBlock, s), kBlock, s, 5};
    rig.order(s, side);
    rig.fill(tensor, side);
    rig.runtime->record_stream(tensor.address, side);
    const Held held = rig.save(tensor);
    rig.drop(tensor);
    rig.evict_all(s);
    rig.back(held, s);
  });
}

TEST("S2: a block whose contents are being copied out is reused only behind the copy") {
  prove(Rule::S2, kMachine, [](CoreRig& rig) {
    const driver::Stream s = rig.stream();
    rig.budget(2_MiB, 2_MiB, 2_MiB);
    const Held held = rig.retain(2_MiB, s);
    const Tensor next = rig.make(2_MiB, s);  // over the limit: where the other was
    CHECK(!rig.resident(held));
    rig.check(next, s);
    rig.drop(next);
    rig.back(held, s);
  });
}

TEST("S3: a copy into a block waits for the block's previous user") {
  prove(Rule::S3, kMachine, [](CoreRig& rig) {
    const driver::Stream s = rig.stream();
    rig.budget(2_MiB, 2_MiB, 2_MiB);
    const Held held = rig.retain(2_MiB, s);
    const Tensor next = rig.make(2_MiB, s);
    stagehand_sim_drain();  // the copy out is over: only the previous user counts
    for (std::uint64_t again = next.seed; again < next.seed + 4; ++again) {
      rig.fill({next.address, next.bytes, s, again}, s);
      rig.check({next.address, next.bytes, s, again}, s);
    }
    rig.drop(next);
    rig.back(held, s);
  });
}

TEST("S4: a restore waits for its own write-back") {
  prove(Rule::S4, kMachine, [](CoreRig& rig) {
    const driver::Stream s = rig.stream();
    rig.budget(32_MiB, 32_MiB);
    const Held held = rig.retain(kBlock, s);
    rig.evict_all(s);
    rig.back(held, s);
  });
}

// Two storages, one after the other, in the one slab there is: the first one's bytes go back while
// its copy in is queued.
void prove_reuse(Bytes first_bytes, Bytes second_bytes) {
  Machine machine = kMachine;
  machine.classes = {{kBlock}, {1}};
  machine.host_limit = kBlock;
  prove(Rule::S5, machine, [=](CoreRig& rig) {
    const driver::Stream s = rig.stream();
    const driver::Stream other = rig.stream();
    rig.budget(32_MiB, 32_MiB);
    const Held first = rig.retain(first_bytes, s);
    rig.evict_all(s);
    stagehand_sim_drain();
    rig.back(first, s);
    const Held second = rig.retain(second_bytes, other);
    rig.evict_all(other);
    CHECK_EQ(rig.counters().pinned_used_bytes, second_bytes);
    rig.back(second, other);
  });
}

TEST("S5: a slab is reused only behind the last copy that names it") {
  prove_reuse(kBlock, kBlock);
}

TEST("S5: a cell is reused only behind the last copy that names it, and a slab behind its cells'") {
  constexpr Bytes kCell = kBlock / 2;
  prove_reuse(kCell, kCell);
  prove_reuse(kCell, kBlock);  // cut into cells, then whole
  prove_reuse(kBlock, kCell);  // whole, then cut
}

TEST("S6: the consumer waits for the restore on its current stream, asked at the call") {
  prove(Rule::S6, kMachine, [](CoreRig& rig) {
    const driver::Stream s = rig.stream();
    const driver::Stream consumer = rig.stream();
    rig.budget(32_MiB, 32_MiB);
    const Held held = rig.retain(kBlock, s);
    rig.evict_all(s);
    rig.back(held, consumer);
  });
}

TEST("S6: each consumer of one restore waits on its own stream") {
  prove(Rule::S6, kMachine, [](CoreRig& rig) {
    const driver::Stream s = rig.stream();
    const driver::Stream consumer = rig.stream();
    rig.budget(32_MiB, 32_MiB);
    const Held held = rig.retain(kBlock, s);
    rig.evict_all(s);
    const Unpacked one = rig.unpack(held, s);
    const Unpacked two = rig.unpack(held, consumer);
    CHECK_EQ(one.address, two.address);
    rig.runtime->drop_alias(one.block);
    rig.runtime->drop_alias(two.block);
    rig.runtime->drop_handle(held.record);
  });
}

// Freed on its stream, lent to another, and back on its own: a copy out may read it all the while.
TEST("S2: memory lent to another stream waits for the copy out, the lender and the borrower") {
  prove(Rule::S2, kMachine, [](CoreRig& rig) {
    const driver::Stream s = rig.stream();
    const driver::Stream other = rig.stream();
    rig.budget(2_MiB, 2_MiB);
    const Held held = rig.retain(kBlock, s);
    rig.evict_all(s);
    for (const driver::Stream on : {other, s, other}) {
      const Tensor tensor = rig.make(1_MiB, on);
      rig.check(tensor, on);
      rig.drop(tensor);
    }
    CHECK(planted_rule != Rule::none || rig.counters().loans > 0);
    rig.back(held, s);
  });
}

TEST("S2, S3: memory gathered from more streams than a fence names waits for all of them") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CoreRig rig({.seed = seed, .classes = {{16_MiB}, {2}}});
    std::vector<driver::Stream> streams;
    for (int i = 0; i < 6; ++i) {
      streams.push_back(rig.stream());
    }
    rig.budget(256_MiB, 256_MiB);
    for (std::size_t i = 1; i < 5; ++i) {
      rig.drop(rig.make(16_MiB, streams[i]));
    }
    const Held held = rig.retain(16_MiB, streams[5]);
    rig.evict_all(streams[0]);
    rig.drop(rig.make(240_MiB, streams[0]));
    CHECK(rig.counters().gathers > 0);
    rig.back(held, streams[5]);
    rig.verify_empty();
  }
}

TEST("S2, S3: a restore into a block that four foreign streams used waits for the copy out of it") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CoreRig rig({.seed = seed, .memory = 64_MiB, .classes = {{16_MiB}, {2}}});
    const driver::Stream s = rig.stream();
    rig.budget(18_MiB, 18_MiB, 18_MiB);  // 2 MiB are what evict_all's small block needs
    const Held first = rig.retain(16_MiB, s);
    rig.evict_all(s);
    stagehand_sim_drain();
    const Tensor tensor = rig.make(16_MiB, s);
    for (int i = 0; i < 4; ++i) {
      const driver::Stream side = rig.stream();
      rig.order(s, side);
      rig.check(tensor, side);
      rig.runtime->record_stream(tensor.address, side);
    }
    const Held second = rig.save(tensor);
    rig.drop(tensor);
    rig.back(first, s);
    rig.back(second, s);
    rig.verify_empty();
  }
}

TEST("S1, S2: streams beyond the 64th are waited for like the others") {
  for (const bool saved : {false, true}) {
    CoreRig rig({.memory = 32_MiB});
    const driver::Stream s = rig.stream();
    rig.budget(32_MiB, 32_MiB);
    driver::Stream last = nullptr;
    for (int i = 0; i < 70; ++i) {
      last = rig.stream();
      rig.runtime->record_stream(rig.allocate(512, s), last);
    }
    const Tensor tensor = rig.make(20_MiB, s);
    rig.order(s, last);
    if (saved) {
      const Held held = rig.save(tensor);
      rig.drop(tensor);
      rig.back(held, last);
    } else {
      rig.runtime->record_stream(tensor.address, last);
      rig.check(tensor, last);
      rig.drop(tensor);
    }
    rig.drop(rig.make(20_MiB, s));
    rig.verify();
  }
}

TEST("S7: an allocation that hits costs no driver call") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.drop(rig.make(8_MiB, s));
  const auto calls = [] {
    std::uint64_t all = 0;
    for (const char* symbol : driver::kSymbols) {
      all += stagehand_sim_call_count(symbol);
    }
    return all;
  };
  const std::uint64_t before = calls();
  for (int i = 0; i < 100; ++i) {
    rig.runtime->free(rig.allocate(8_MiB, s));
    rig.runtime->free(rig.allocate(5_MiB, s));
  }
  CHECK_EQ(calls(), before);
  CHECK_EQ(rig.counters().hits, 200);
}

// A forward that does not fit and a backward, as a training step does them.
void step(CoreRig& rig, driver::Stream s) {
  std::vector<Held> saved;
  rig.budget(24_MiB, 20_MiB);
  for (int layer = 0; layer < 8; ++layer) {
    saved.push_back(rig.retain(4_MiB, s));
    rig.drop(rig.make(3_MiB, s));
  }
  rig.runtime->clear_budget();
  while (!saved.empty()) {
    rig.back(saved.back(), s);
    rig.drop(rig.make(3_MiB, s));
    saved.pop_back();
  }
}

TEST("S8: the host never waits in steady state") {
  CoreRig rig({.classes = {{4_MiB}, {8}}});
  const driver::Stream s = rig.stream();
  step(rig, s);  // pins
  const Bytes counted = rig.counters().host_waits;
  const std::uint64_t waited = stagehand_sim_host_waits();
  for (int i = 0; i < 20; ++i) {
    step(rig, s);
  }
  CHECK(rig.counters().evicted_bytes > 160_MiB);
  CHECK_EQ(rig.counters().host_waits, counted);
  CHECK_EQ(stagehand_sim_host_waits(), waited);
  rig.verify_empty();
}

TEST("S8: what does wait is counted") {
  CoreRig rig({.memory = 64_MiB});
  const driver::Stream s = rig.stream();
  rig.drop(rig.make(16_MiB, s));
  rig.runtime->trim(0);
  CHECK_EQ(rig.counters().host_waits, 1);
  CHECK_EQ(rig.counters().mapped, 0);
}

// Ownership --------------------------------------------------------------------------------------

TEST("O2: an id is refused after its record is gone, also where its slot and address serve again") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(256_MiB, 256_MiB);
  const Held gone = rig.retain(8_MiB, s);
  rig.runtime->drop_handle(gone.record);
  const Held fresh = rig.retain(8_MiB, s);
  CHECK_EQ(fresh.tensor.address, gone.tensor.address);
  CHECK_EQ(fresh.record.index, gone.record.index);
  CHECK_EQ(rig.runtime->unpack(gone.record, 0, s).status, Status::stale);
  CHECK(!rig.resident(gone));
  CHECK_EQ(rig.runtime->bytes_of(gone.record), 0);
  rig.runtime->drop_handle(gone.record);  // harmless
  rig.back(fresh, s);
  rig.verify_empty();
}

TEST("O3: host bytes outlive the handle until the restore that reads them is over") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    CoreRig rig({.seed = seed, .memory = 64_MiB, .classes = {{kBlock}, {1}}, .host_limit = kBlock});
    const driver::Stream s = rig.stream();
    const driver::Stream other = rig.stream();
    rig.budget(32_MiB, 32_MiB);
    const Held first = rig.retain(kBlock, s);
    rig.evict_all(s);
    const Unpacked again = rig.unpack(first, s);
    rig.runtime->drop_handle(first.record);  // the alias lives on
    const Held second = rig.retain(kBlock, other);
    rig.evict_all(other);  // into the one slab there is
    rig.check({again.address, kBlock, s, first.tensor.seed}, s);
    rig.runtime->drop_alias(again.block);
    rig.back(second, other);
    rig.verify_empty();
  }
}

TEST("O1: an evicted block handed out again has one owner, and the record none") {
  CoreRig rig({.memory = 64_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(2_MiB, 2_MiB, 2_MiB);
  const Held held = rig.retain(2_MiB, s);
  const Tensor next = rig.make(2_MiB, s);
  CHECK_EQ(next.address, held.tensor.address);
  CHECK_EQ(rig.counters().occupied, next.bytes);
  CHECK_EQ(rig.counters().evicted, held.tensor.bytes);
  rig.verify();
  rig.drop(next);
  rig.back(held, s);
  rig.verify_empty();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
