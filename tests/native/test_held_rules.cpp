// The rules of order and ownership where torch's own allocator cuts the blocks: kept, no hazard and
// no wrong byte under any seed; broken on purpose, the simulator finds it.
#include "native/held_rig.hpp"

namespace stagehand::core::test {
namespace {

const std::uint64_t kSeeds = stagehand::test::seeds(40);

// Runs a scenario under every seed, with the rule kept and then broken.
template <typename Scenario>
void prove(Rule rule, Scenario scenario) {
  std::uint64_t hazards = 0;
  std::uint64_t wrong = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Machine with = kHeldMachine;
    with.seed = seed;
    {
      HeldRig rig(with);
      scenario(rig);
      rig.verify_empty();
      CHECK_EQ(rig.counters().host_waits, 1);  // the pinned pool's first growth
    }
    HeldRig rig(with);
    planted_rule = rule;
    scenario(rig);
    planted_rule = Rule::none;
    stagehand_sim_drain();
    hazards += stagehand_sim_hazards(STAGEHAND_SIM_ALL) > 0 ? 1 : 0;
    wrong += stagehand_sim_mismatches() > 0 ? 1 : 0;
    CHECK_EQ(rig.runtime->invariants_broken(), "");
  }
  CHECK(hazards >= kSeeds * 95 / 100);
  CHECK(wrong >= kSeeds / 20);
}

TEST("S2: a storage let go of is handed out again only behind its copy out") {
  prove(Rule::S2, [](HeldRig& rig) {
    const driver::Stream s = rig.stream();
    rig.budget(kHeldSegment, 16_MiB);
    const SavedTensor saved = rig.retain(kHeldBlock, s);
    const HeldTensor rest{rig.torch.make(16_MiB, s), 16_MiB, s, 0};
    CHECK(rig.resident(saved));
    const HeldTensor next = rig.make(kHeldBlock, s);  // over high: where the other was
    CHECK(!rig.resident(saved));
    rig.check(next, s);
    rig.drop(next);
    rig.drop(rest);
    rig.back(saved, s);
  });
}

TEST("S2: torch may hand it out to a stream that joins in later, behind the copy too") {
  prove(Rule::S2, [](HeldRig& rig) {
    const driver::Stream s = rig.stream();
    const driver::Stream side = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const SavedTensor saved = rig.retain(kHeldBlock, s);
    rig.evict_all(s);
    HeldTensor next{rig.torch.make(kHeldBlock, s), kHeldBlock, s, 77};
    rig.order(s, side);
    rig.fill(next, side);
    rig.check(next, side);
    rig.order(side, s);
    rig.drop(next);
    rig.back(saved, s);
  });
}

TEST("S1: a copy out waits for the block's stream") {
  prove(Rule::S1, [](HeldRig& rig) {
    const driver::Stream s = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const SavedTensor saved = rig.retain(kHeldBlock, s);
    rig.evict_all(s);
    rig.back(saved, s);
  });
}

TEST("S1: a copy out waits for the stream it was saved on, where that is not the block's") {
  prove(Rule::S1, [](HeldRig& rig) {
    const driver::Stream s = rig.stream();
    const driver::Stream side = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const HeldTensor tensor{rig.torch.make(kHeldBlock, s), kHeldBlock, s, 5};
    rig.order(s, side);
    rig.fill(tensor, side);
    const SavedTensor saved = rig.save(tensor, side);
    rig.torch.record_stream(tensor.storage, side);
    rig.drop(tensor);
    rig.evict_all(s);
    rig.back(saved, side);
  });
}

TEST("S3: a restore into a block waits for the block's previous user") {
  prove(Rule::S3, [](HeldRig& rig) {
    const driver::Stream s = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const SavedTensor saved = rig.retain(kHeldBlock, s);
    rig.evict_all(s);
    const HeldTensor next = rig.make(kHeldBlock, s);
    stagehand_sim_drain();  // the copy out is over: only the previous user counts
    for (int again = 0; again < 4; ++again) {
      rig.fill(next, s);
      rig.check(next, s);
    }
    rig.drop(next);
    rig.back(saved, s);
  });
}

TEST("S6: the consumer waits for the restore on its current stream") {
  prove(Rule::S6, [](HeldRig& rig) {
    const driver::Stream s = rig.stream();
    const driver::Stream consumer = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const SavedTensor saved = rig.retain(kHeldBlock, s);
    rig.evict_all(s);
    rig.back(saved, consumer);
  });
}

// How backward ends with a tensor it read on a stream of its own.
enum class End { tensor_then_handle, handle_then_tensor, noticed_between };

TEST("S2: what backward read on another stream is handed out again only behind that") {
  for (const bool restored : {false, true}) {
    for (const End end : {End::tensor_then_handle, End::handle_then_tensor, End::noticed_between}) {
      for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
        Machine with = kHeldMachine;
        with.seed = seed;
        HeldRig rig(with);
        const driver::Stream s = rig.stream();
        const driver::Stream consumer = rig.stream();
        rig.budget(64_MiB, 64_MiB);
        const SavedTensor saved = rig.retain(kHeldBlock, s);
        if (restored) {
          rig.evict_all(s);
        }
        rig.order(s, consumer);
        const HeldTensor view = rig.unpack(saved, consumer);
        const Address address = view.address();
        if (end == End::handle_then_tensor) {
          rig.drop_handle(saved);
        }
        rig.drop(view);
        if (end == End::noticed_between) {
          rig.look(s);
        }
        if (end != End::handle_then_tensor) {
          rig.drop_handle(saved);
        }
        const HeldTensor next = rig.make(kHeldBlock, s);
        CHECK(restored || next.address() == address);  // torch knows of that use of a restored one
        rig.drop(next);
        rig.verify_empty();
      }
    }
  }
}

TEST("O5: a storage saved again after it was changed brings back what it held then") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Machine with = kHeldMachine;
    with.seed = seed;
    HeldRig rig(with);
    const driver::Stream s = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const SavedTensor first = rig.retain(kHeldBlock, s);
    rig.evict_all(s);
    HeldTensor view = rig.unpack(first, s);
    CHECK(rig.counters().pinned_used_bytes == kHeldBlock);
    view.seed = 99;
    rig.fill(view, s);  // in place
    const SavedTensor second = rig.save(view);
    CHECK_EQ(rig.counters().pinned_used_bytes, 0);
    CHECK_EQ(second.record.index, first.record.index);
    rig.drop(view);
    rig.evict_all(s);
    CHECK(!rig.resident(second));
    rig.drop_handle(first);
    rig.back(second, s);
    rig.verify_empty();
  }
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
