// Walk 2, one backward: handles, aliases and torch as owners, restores and prefetch.
#include <algorithm>
#include <array>
#include <vector>

#include "native/core_rig.hpp"

namespace stagehand::core::test {
namespace {

TEST("a live tensor is unpacked where it is") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(128_MiB, 64_MiB);
  const Tensor tensor = rig.make(8_MiB, s);
  const Held held = rig.save(tensor);
  const Unpacked again = rig.unpack(held, s);
  CHECK_EQ(again.address, tensor.address);
  CHECK_EQ(rig.counters().alias_hits, 1);
  CHECK_EQ(rig.counters().restores, 0);
  rig.runtime->drop_alias(again.block);
  rig.drop(tensor);
  rig.runtime->drop_handle(held.record);
  rig.verify_empty();
}

TEST("a retained tensor is unpacked where it is, without a copy") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(128_MiB, 64_MiB);
  const Held held = rig.retain(8_MiB, s);
  CHECK_EQ(rig.counters().retained, 8_MiB);
  const Unpacked again = rig.unpack(held, s);
  CHECK_EQ(again.address, held.tensor.address);
  CHECK_EQ(rig.counters().retained, 0);
  rig.runtime->drop_alias(again.block);
  CHECK_EQ(rig.counters().retained, 8_MiB);
  rig.runtime->drop_handle(held.record);
  rig.verify_empty();
}

TEST("an evicted tensor comes back with its bytes, of any size") {
  for (const Bytes bytes : {Bytes{1}, Bytes{511}, 64_KiB + 1, 1_MiB, 5_MiB + 3, 40_MiB}) {
    CoreRig rig;
    const driver::Stream s = rig.stream();
    rig.budget(128_MiB, 64_MiB);
    const Held held = rig.retain(bytes, s);
    rig.evict_all(s);
    CHECK(!rig.resident(held));
    CHECK_EQ(rig.counters().evicted, bytes);
    CHECK_EQ(rig.counters().occupied, 0);
    rig.back(held, s);
    CHECK_EQ(rig.counters().restores, 1);
    CHECK_EQ(rig.counters().restored_bytes, bytes);
    rig.verify_empty();
  }
}

TEST("what is evicted is poisoned, and comes back right all the same") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CoreRig rig({.seed = seed});
    const driver::Stream s = rig.stream();
    rig.budget(128_MiB, 64_MiB);
    rig.runtime->set_debug({true, true});
    std::vector<Held> saved;
    for (int i = 0; i < 6; ++i) {
      saved.push_back(rig.retain(300_KiB << i, s));
    }
    rig.back_all(saved, s);
    rig.verify_empty();
  }
}

// Prefetch ---------------------------------------------------------------------------------------

// Six evicted records of 8 MiB each, with 48 MiB mapped and free.
std::vector<Held> six_evicted(CoreRig& rig, driver::Stream s) {
  std::vector<Held> saved = rig.retain_many(6, 8_MiB, s);
  rig.evict_all(s);
  stagehand_sim_drain();
  rig.drop(rig.make(48_MiB, s));  // joins what was evicted into free memory
  return saved;
}

TEST("every unpack starts what comes next in reverse order, into free room below low") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 24_MiB);
  const std::vector<Held> saved = six_evicted(rig, s);
  const Counters before = rig.counters();
  const Unpacked last = rig.unpack(saved[5], s);
  CHECK(rig.resident(saved[4]));
  CHECK(rig.resident(saved[3]));
  CHECK(!rig.resident(saved[2]));  // 24 MiB are occupied
  const Counters after = rig.counters();
  CHECK_EQ(after.prefetches, 2);
  CHECK_EQ(after.mapped, before.mapped);
  CHECK_EQ(after.dirty_evictions + after.clean_evictions,
           before.dirty_evictions + before.clean_evictions);
  rig.runtime->drop_alias(last.block);
  rig.runtime->drop_handle(saved[5].record);
  for (std::size_t i = 5; i-- > 0;) {
    rig.back(saved[i], s);
  }
  CHECK_EQ(rig.counters().restores, 1);  // all others were prefetched
  rig.verify_empty();
  CHECK_EQ(rig.counters().prefetch_hits + rig.counters().prefetch_lates, 5);
}

TEST("prefetch never evicts and never grows, however much is missing") {
  CoreRig rig({.memory = 128_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(16_MiB, 16_MiB);
  std::vector<Held> saved = rig.retain_many(6, 8_MiB, s);
  const Bytes mapped = rig.counters().mapped;
  const Unpacked newest = rig.unpack(saved[5], s);  // resident: no room has to be made
  const Unpacked next = rig.unpack(saved[4], s);
  CHECK_EQ(rig.counters().prefetches, 0);
  CHECK_EQ(rig.counters().mapped, mapped);
  rig.runtime->drop_alias(newest.block);
  rig.runtime->drop_alias(next.block);
  for (std::size_t i = 6; i-- > 0;) {
    rig.back(saved[i], s);
  }
  CHECK_EQ(rig.counters().mapped_peak, 16_MiB);
  rig.verify_empty();
}

TEST("a prefetched record that is dropped unused gives everything back") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 48_MiB);
  const std::vector<Held> saved = six_evicted(rig, s);
  const Unpacked last = rig.unpack(saved[5], s);
  CHECK(rig.counters().prefetches > 0);
  for (const Held& held : saved) {
    rig.runtime->drop_handle(held.record);
  }
  rig.runtime->drop_alias(last.block);
  rig.drop(rig.make(48_MiB, s));
  rig.verify_empty();
}

// Owners -----------------------------------------------------------------------------------------

// What the counters must say: occupied while anybody owns it, retained while only a handle does.
void expect_owners(CoreRig& rig, bool torch, bool handle, bool alias) {
  const Bytes bytes = 8_MiB;
  CHECK_EQ(rig.counters().occupied, torch || handle || alias ? bytes : 0);
  CHECK_EQ(rig.counters().retained, handle && !torch && !alias ? bytes : 0);
  CHECK_EQ(rig.counters().records, handle ? 1 : 0);
  CHECK_EQ(rig.runtime->invariants_broken(), "");
}

TEST("torch, handle and alias own a block independently: dropped in every order") {
  std::array<int, 3> order{0, 1, 2};
  do {
    CoreRig rig;
    const driver::Stream s = rig.stream();
    rig.budget(128_MiB, 64_MiB);
    const Tensor tensor = rig.make(8_MiB, s);
    const Held held = rig.save(tensor);
    const Unpacked alias = rig.unpack(held, s);
    bool owned[3] = {true, true, true};
    for (const int owner : order) {
      if (owner == 0) {
        rig.drop(tensor);
      } else if (owner == 1) {
        rig.runtime->drop_handle(held.record);
      } else {
        rig.runtime->drop_alias(alias.block);
      }
      owned[owner] = false;
      expect_owners(rig, owned[0], owned[1], owned[2]);
      if (owned[0] || owned[2]) {
        rig.check(tensor, s);
      }
    }
    rig.drop(rig.make(8_MiB, s));
    rig.verify_empty();
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST("handle and alias own a restored block independently, in both orders") {
  for (const bool handle_first : {true, false}) {
    CoreRig rig;
    const driver::Stream s = rig.stream();
    rig.budget(128_MiB, 64_MiB);
    const Held held = rig.retain(8_MiB, s);
    rig.evict_all(s);
    const Unpacked alias = rig.unpack(held, s);
    expect_owners(rig, false, true, true);
    if (handle_first) {
      rig.runtime->drop_handle(held.record);
      expect_owners(rig, false, false, true);
      rig.check({alias.address, 8_MiB, s, held.tensor.seed}, s);
      rig.runtime->drop_alias(alias.block);
    } else {
      rig.runtime->drop_alias(alias.block);
      expect_owners(rig, false, true, false);
      rig.runtime->drop_handle(held.record);
    }
    expect_owners(rig, false, false, false);
    rig.verify_empty();
  }
}

TEST("an alias keeps its block from being evicted, and two aliases count as two") {
  CoreRig rig({.memory = 64_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(16_MiB, 16_MiB);
  const Held held = rig.retain(16_MiB, s);
  const Unpacked one = rig.unpack(held, s);
  const Unpacked two = rig.unpack(held, s);
  rig.runtime->drop_alias(one.block);
  const Tensor next = rig.make(16_MiB, s);
  CHECK(rig.resident(held));
  rig.runtime->drop_alias(two.block);
  const Tensor more = rig.make(16_MiB, s);
  CHECK(!rig.resident(held));
  rig.drop(next);
  rig.drop(more);
  rig.back(held, s);
  rig.verify_empty();
}

TEST("A3: one storage is one record and one copy, however many tensors over it were saved") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(128_MiB, 64_MiB);
  const Tensor tensor = rig.make(8_MiB, s);
  std::vector<Held> saved;
  for (int i = 0; i < 5; ++i) {
    saved.push_back(rig.save(tensor));
  }
  CHECK_EQ(rig.counters().records, 1);
  CHECK_EQ(rig.counters().handles, 5);
  CHECK_EQ(rig.counters().activations_saved, 5);
  rig.drop(tensor);
  rig.evict_all(s);
  CHECK_EQ(rig.counters().evicted_bytes, 8_MiB);
  for (const Held& held : saved) {
    rig.back(held, s);
  }
  CHECK_EQ(rig.counters().restores, 1);
  rig.verify_empty();
}

TEST("only the hull of what was saved travels, and every tensor finds its bytes") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(128_MiB, 64_MiB);
  const Address base = rig.allocate(32_MiB, s);
  const Tensor views[] = {{base + 4_MiB + 8, 1_MiB, s, 11}, {base + 7_MiB + 100, 500'000, s, 12}};
  std::vector<Held> saved;
  for (const Tensor& view : views) {
    rig.fill(view, s);
    saved.push_back(rig.save(view));
  }
  const Bytes hull = views[1].address + views[1].bytes - views[0].address;
  CHECK_EQ(rig.runtime->bytes_of(saved[0].record), hull);
  rig.runtime->free(base);
  rig.evict_all(s);
  CHECK_EQ(rig.counters().evicted_bytes, hull);
  rig.back(saved[1], s);
  rig.back(saved[0], s);
  CHECK(rig.counters().occupied_peak < 32_MiB + 4_MiB);  // the storage did not come back whole
  rig.verify_empty();
}

TEST("a tensor re-made after eviction may be saved again") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CoreRig rig({.seed = seed});
    const driver::Stream s = rig.stream();
    rig.budget(128_MiB, 64_MiB);
    const Held held = rig.retain(3_MiB, s);
    rig.evict_all(s);
    const Unpacked alias = rig.unpack(held, s);
    const Held again = rig.save({alias.address, 3_MiB, s, held.tensor.seed});
    CHECK_EQ(rig.counters().records, 1);
    rig.runtime->drop_handle(held.record);
    rig.runtime->drop_alias(alias.block);
    rig.evict_all(s);
    CHECK_EQ(rig.counters().dirty_evictions, 2);  // it may have been changed meanwhile
    rig.back(again, s);
    rig.verify_empty();
  }
}

TEST("an alias that was changed in place and saved again comes back as it was then") {
  for (const bool written_back : {false, true}) {
    CoreRig rig;
    const driver::Stream s = rig.stream();
    rig.budget(32_MiB, 2_MiB);
    rig.back(rig.retain(4_MiB, s), s);        // there is pinned memory from here on
    const Held first = rig.retain(4_MiB, s);  // above low: copied out ahead of need
    if (!written_back) {
      rig.evict_all(s);
    }
    const Unpacked alias = rig.unpack(first, s);
    stagehand_sim_drain();  // the copy out may be under way: it reads what nobody will ask for
    const Tensor changed{alias.address, 4_MiB, s, 1000};
    rig.fill(changed, s);
    const Held second = rig.save(changed);
    rig.runtime->drop_alias(alias.block);
    rig.runtime->drop_handle(first.record);
    rig.evict_all(s);
    CHECK(!rig.resident(second));
    rig.back(second, s);
    rig.verify_empty();
  }
}

TEST("a tensor that outlives its record starts a new one when saved") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(128_MiB, 64_MiB);
  const Held held = rig.retain(3_MiB, s);
  rig.evict_all(s);
  const Unpacked alias = rig.unpack(held, s);
  rig.runtime->drop_handle(held.record);
  const Held again = rig.save({alias.address, 3_MiB, s, held.tensor.seed});
  rig.runtime->drop_alias(alias.block);
  rig.evict_all(s);
  rig.back(again, s);
  const Counters now = rig.counters();
  CHECK_EQ(now.dirty_evictions + now.clean_evictions, 2);
  CHECK_EQ(now.evicted_bytes, Bytes{6_MiB});  // each storage was copied out
  rig.verify_empty();
}

// What is not taken ------------------------------------------------------------------------------

TEST("A2: what existed before the pool was entered is refused") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  const Tensor weight = rig.make(8_MiB, s);
  rig.budget(128_MiB, 64_MiB);
  const auto refused = [&](const Tensor& t) {
    return rig.runtime->save(t.address, t.address, t.address + t.bytes).refusal;
  };
  CHECK_EQ(refused(weight), Refusal::older_than_pool);
  CHECK_EQ(refused(rig.make(8_MiB, s)), Refusal::none);
  CHECK_EQ(rig.counters().records, 1);
}

TEST("a block marked to be kept is refused, and the mark leaves with the block") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(128_MiB, 64_MiB);
  const Tensor tensor = rig.make(8_MiB, s);
  CHECK(rig.runtime->keep(tensor.address + 100));
  CHECK_EQ(rig.runtime->save(tensor.address, tensor.address, tensor.address + 8).refusal,
           Refusal::kept);
  rig.drop(tensor);
  rig.back(rig.retain(8_MiB, s), s);
  CHECK(!rig.runtime->keep(reinterpret_cast<Address>(&rig)));
  rig.verify_empty();
}

TEST("storages that are not ours, or reach beyond the block, are refused") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(128_MiB, 64_MiB);
  const auto foreign = reinterpret_cast<Address>(&rig);
  CHECK_EQ(rig.runtime->save(foreign, foreign, foreign + 8).refusal, Refusal::foreign_storage);
  const Tensor tensor = rig.make(8_MiB, s);
  CHECK_EQ(rig.runtime->save(tensor.address, tensor.address, tensor.address + 9_MiB).refusal,
           Refusal::foreign_storage);
  rig.drop(tensor);
  CHECK_EQ(rig.runtime->save(tensor.address, tensor.address, tensor.address + 8).refusal,
           Refusal::foreign_storage);
}

TEST("small storages stay on the GPU, a MiB for each GiB of high at a time, and no more") {
  Machine machine;
  machine.memory = 4_GiB;
  CoreRig rig(machine);
  const driver::Stream s = rig.stream();
  rig.budget(2_GiB + 512_MiB, 1_GiB);
  Bytes ignored = 0;
  const auto save = [&](Bytes bytes, bool may_ignore) {
    const Tensor t = rig.make(bytes, s);
    const Saved saved = rig.runtime->save(t.address, t.address, t.address + t.bytes, may_ignore);
    CHECK_EQ(saved.ignored, saved.refusal == Refusal::small ? bytes : 0);
    ignored += saved.ignored;
    if (saved.refusal == Refusal::none) {
      rig.runtime->drop_handle(saved.record);
    }
    rig.drop(t);
    return saved.refusal;
  };
  CHECK_EQ(save(32_KiB, false), Refusal::none);  // where nobody says that it may
  CHECK_EQ(save(64_KiB, true), Refusal::none);   // a copy of it costs more than being queued
  for (Bytes bytes = 0; bytes < 2_MiB; bytes += 32_KiB) {
    CHECK_EQ(save(32_KiB, true), Refusal::small);
  }
  CHECK_EQ(save(512, true), Refusal::none);
  rig.runtime->ignored_ended(32_KiB);
  CHECK_EQ(save(16_KiB, true), Refusal::small);
  CHECK_EQ(ignored, 2_MiB + 16_KiB);
  rig.budget(1023_MiB, 512_MiB);  // a budget under a GiB is held to the byte
  rig.runtime->ignored_ended(ignored - 32_KiB);
  CHECK_EQ(save(512, true), Refusal::none);
  rig.verify_empty();
}

TEST("a storage that is saved already is never ignored: its record has one more handle") {
  Machine machine;
  machine.memory = 4_GiB;
  CoreRig rig(machine);
  const driver::Stream s = rig.stream();
  rig.budget(3_GiB, 2_GiB);
  const Tensor t = rig.make(32_KiB, s);
  const Saved first = rig.runtime->save(t.address, t.address, t.address + t.bytes);
  const Saved second = rig.runtime->save(t.address, t.address, t.address + t.bytes, true);
  CHECK_EQ(second.refusal, Refusal::none);
  CHECK_EQ(rig.counters().records, 1);
  rig.runtime->drop_handle(first.record);
  rig.runtime->drop_handle(second.record);
  rig.drop(t);
  rig.verify_empty();
}

// Branches of a program --------------------------------------------------------------------------

TEST("a graph dropped without backward gives everything back, evicted or not") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(32_MiB, 24_MiB);
  std::vector<Held> saved = rig.retain_many(8, 8_MiB, s);
  CHECK(rig.counters().evicted > 0);
  for (const Held& held : saved) {
    rig.runtime->drop_handle(held.record);
  }
  rig.verify_empty();
}

TEST("two graphs at once, backward in either order, on two streams") {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    CoreRig rig({.seed = seed, .memory = 128_MiB});
    const driver::Stream streams[] = {rig.stream(), rig.stream()};
    rig.budget(24_MiB, 16_MiB);
    std::vector<Held> saved[2];
    for (int i = 0; i < 12; ++i) {
      const int graph = i % 2;
      saved[graph].push_back(rig.retain(3_MiB, streams[graph]));
    }
    for (const std::uint64_t graph : {seed % 2, 1 - seed % 2}) {
      for (auto held = saved[graph].rbegin(); held != saved[graph].rend(); ++held) {
        rig.back(*held, streams[graph]);
      }
    }
    CHECK(rig.counters().mapped_peak <= 24_MiB);
    rig.verify_empty();
  }
}

TEST("a backward that retains its graph runs twice with the same bytes") {
  CoreRig rig({.memory = 128_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(16_MiB, 12_MiB);
  std::vector<Held> saved = rig.retain_many(8, 4_MiB, s);
  for (int round = 0; round < 2; ++round) {
    for (auto held = saved.rbegin(); held != saved.rend(); ++held) {
      rig.runtime->drop_alias(rig.unpack(*held, s).block);
    }
  }
  CHECK(rig.counters().dirty_evictions <= 8);  // no record is copied out twice
  CHECK(rig.counters().clean_evictions > 0);
  for (const Held& held : saved) {
    rig.runtime->drop_handle(held.record);
  }
  rig.verify_empty();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
