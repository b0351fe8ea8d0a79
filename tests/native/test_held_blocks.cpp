// What becomes of storages where torch's own allocator cuts the blocks: who holds them, when they
// are let go of, and what torch is asked for.
#include <algorithm>

#include "native/held_rig.hpp"

namespace stagehand::core::test {
namespace {

constexpr TorchPool kOurPool{7, 0};
constexpr TorchPool kForeignPool{9, 0};

class PoolScope {
 public:
  explicit PoolScope(TorchPool pool) { FakeTorch::use_pool(pool); }
  ~PoolScope() { FakeTorch::use_pool(kDefaultPool); }
  PoolScope(const PoolScope&) = delete;
  PoolScope& operator=(const PoolScope&) = delete;
};

// Holding -----------------------------------------------------------------------------------------

TEST("a tensor saved is held once, however often, and let go of with its last handle") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const HeldTensor tensor = rig.make(kHeldBlock, s);
  const SavedTensor one = rig.save(tensor);
  const SavedTensor two = rig.save(tensor);
  CHECK_EQ(tensor.storage->references, 2);
  CHECK_EQ(one.record.index, two.record.index);
  rig.drop_handle(one);
  CHECK_EQ(tensor.storage->references, 2);
  rig.drop_handle(two);
  CHECK_EQ(tensor.storage->references, 1);
  rig.check(tensor, s);
  rig.verify();
  rig.drop(tensor);
  rig.verify_empty();
}

TEST("a storage that torch still uses is not freed with its record, and not evicted before") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const HeldTensor tensor = rig.make(kHeldBlock, s);
  const SavedTensor saved = rig.save(tensor);
  rig.evict_all(s);
  CHECK(rig.resident(saved));
  CHECK_EQ(rig.counters().retained, 0);
  rig.drop_handle(saved);
  const HeldTensor next = rig.make(kHeldBlock, s);
  CHECK(next.address() != tensor.address());
  rig.check(tensor, s);
  rig.drop(next);
  rig.drop(tensor);
  rig.verify_empty();
}

TEST("what torch has dropped is retained once it is looked at, and free with its last handle") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const SavedTensor saved = rig.retain(kHeldBlock, s);
  rig.look(s);
  CHECK_EQ(rig.counters().retained, kHeldBlock);
  CHECK_EQ(rig.torch.allocated(), kHeldBlock);
  rig.drop_handle(saved);
  CHECK_EQ(rig.torch.allocated(), 0);
  rig.verify_empty();
}

TEST("unpack finds a live, a retained and an evicted record, each with its bytes") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const HeldTensor tensor = rig.make(kHeldBlock, s);
  const SavedTensor saved = rig.save(tensor);
  const HeldTensor live = rig.unpack(saved, s);
  CHECK(live.storage == tensor.storage);
  rig.drop(live);
  rig.drop(tensor);
  rig.look(s);
  const HeldTensor retained = rig.unpack(saved, s);
  CHECK(retained.storage == tensor.storage);
  rig.evict_all(s);  // backward has it
  CHECK(rig.resident(saved));
  rig.drop(retained);
  CHECK_EQ(rig.counters().alias_hits, 2);
  rig.evict_all(s);
  CHECK(!rig.resident(saved));
  CHECK_EQ(rig.torch.allocated(), 0);
  const HeldTensor restored = rig.unpack(saved, s);
  CHECK_EQ(rig.counters().restores, 1);
  CHECK_EQ(restored.storage->references, 2);
  rig.drop_handle(saved);
  rig.check(restored, s);
  rig.drop(restored);
  rig.verify_empty();
}

TEST("a tensor over part of a storage comes back at the same place of a storage for just that") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const HeldTensor tensor = rig.make(kHeldBlock, s);
  constexpr Bytes kAt = 1_MiB + 100;
  constexpr Bytes kPart = 2_MiB;
  const HeldTensor part{tensor.storage, kPart, s, 55, kAt};
  rig.fill(part, s);
  const SavedTensor saved = rig.save(part);
  CHECK_EQ(saved.offset, kAt);
  rig.drop(tensor);
  rig.evict_all(s);
  CHECK_EQ(rig.counters().evicted, kPart);
  const HeldTensor view = rig.unpack(saved, s);
  CHECK(view.storage->bytes < kPart + 1_KiB);
  CHECK_EQ(view.offset, kAt % 512);
  rig.drop_handle(saved);
  rig.drop(view);
  rig.verify_empty();
}

TEST("a storage that was resized since it was saved is not taken for what it was") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const HeldTensor tensor = rig.make(kHeldBlock, s);
  const SavedTensor before = rig.save(tensor);
  rig.torch.resize(tensor.storage, 0, s);
  const HeldTensor other = rig.make(kHeldBlock, s);  // where it was
  rig.torch.resize(tensor.storage, kHeldBlock, s);
  CHECK(tensor.address() != other.address());
  rig.fill(tensor, s);
  const SavedTensor after = rig.try_save(tensor, s);
  if (after.refusal == Refusal::none) {
    CHECK_EQ(after.offset, 0);
    rig.drop_handle(after);
  }
  rig.evict_all(s);
  const Unpacked again = rig.runtime->unpack(before.record, before.offset, s);
  CHECK_EQ(again.offset, 0);
  rig.drop(rig.view(again, before, s));
  rig.check(tensor, s);
  rig.check(other, s);
  rig.drop_handle(before);
  rig.drop(tensor);
  rig.drop(other);
  rig.verify_empty();
}

TEST("what the user keeps stays, until torch frees it") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const HeldTensor tensor = rig.make(kHeldBlock, s);
  CHECK(rig.runtime->keep(tensor.address()));
  CHECK(!rig.runtime->keep(1));
  CHECK_EQ(rig.try_save(tensor, s).refusal, Refusal::kept);
  rig.drop(tensor);
  const HeldTensor next = rig.make(kHeldBlock, s);
  CHECK_EQ(rig.try_save(next, s).refusal, Refusal::none);
  rig.drop(next);
  rig.runtime->drop_handle({0, 1});
  rig.runtime->drop_orphans();
  rig.verify_empty();
}

TEST("memory that is not torch's, and that of a pool of the user's, is refused") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  Storage foreign;
  foreign.address = rig.allocate(kHeldBlock, s);
  foreign.bytes = kHeldBlock;
  ++foreign.references;
  CHECK_EQ(rig.try_save({&foreign, kHeldBlock, s, 1}, s).refusal, Refusal::foreign_storage);
  rig.runtime->free(foreign.address);
  const PoolScope scope(kForeignPool);
  const HeldTensor tensor = rig.make(kHeldBlock, s);
  CHECK_EQ(rig.try_save(tensor, s).refusal, Refusal::private_pool);
  CHECK_EQ(tensor.storage->references, 1);
  rig.runtime->set_torch_pool(kForeignPool);  // it is ours after all
  rig.drop_handle(rig.save(tensor));
  rig.runtime->set_torch_pool({});
  rig.drop_handle(rig.save(tensor));  // still
  rig.drop(tensor);
  rig.torch.destroy_pool(kForeignPool);
  rig.verify_empty();
}

// Making room -------------------------------------------------------------------------------------

TEST("without a plan, and not told for what, a miss lets go of what brings torch down to low") {
  HeldRig rig;
  rig.torch.tells = false;
  const driver::Stream s = rig.stream();
  rig.budget(100_MiB, 80_MiB);
  std::vector<SavedTensor> saved = rig.retain_many(25, kHeldBlock, s);
  CHECK_EQ(rig.torch.reserved(), 100_MiB);
  CHECK_EQ(rig.counters().evicted, 0);
  const HeldTensor next = rig.make(kHeldBlock, s);
  CHECK_EQ(rig.torch.reserved(), 100_MiB);
  CHECK_EQ(rig.counters().evicted, 20_MiB);
  for (std::size_t i = 0; i < saved.size(); ++i) {
    CHECK_EQ(rig.resident(saved[i]), i >= 5);  // the oldest are needed last
  }
  rig.drop(next);
  rig.back_all(saved, s);
  CHECK_EQ(rig.torch.reserved_peak(), 100_MiB);
  CHECK_EQ(rig.counters().overshoot_bytes, 0);
  rig.verify_empty();
}

// A step as autograd sees it, with the budget entered around it. Returns the most that a single
// request evicted.
Bytes step(HeldRig& rig, driver::Stream s, int layers) {
  rig.budget(124_MiB, 100_MiB);
  std::vector<SavedTensor> saved;
  Bytes most = 0;
  for (int layer = 0; layer < layers; ++layer) {
    const Bytes before = rig.counters().freed_bytes;
    const HeldTensor tensor = rig.make(kHeldBlock, s);
    most = std::max(most, rig.counters().freed_bytes - before);
    saved.push_back(rig.save(tensor));
    rig.drop(tensor);
  }
  rig.runtime->clear_budget();
  rig.back_all(saved, s);
  return most;
}

TEST("not told for what, a miss under a plan lets go of what the request needs, and no more") {
  HeldRig rig({.classes = {{kHeldBlock}, {24}}, .host_limit = 127_MiB});
  rig.torch.tells = false;
  const driver::Stream s = rig.stream();
  CHECK(step(rig, s, 36) >= 20_MiB);
  step(rig, s, 36);
  const Counters before = rig.counters();
  for (int i = 0; i < 4; ++i) {
    CHECK(step(rig, s, 36) <= kHeldBlock);
    CHECK_EQ(rig.runtime->plan_state(), PlanState::following);
  }
  CHECK(rig.counters().evicted_bytes > before.evicted_bytes);
  CHECK_EQ(rig.counters().host_waits, before.host_waits);
  CHECK_EQ(rig.counters().overshoot_bytes, 0);
  CHECK(rig.torch.reserved_peak() <= 124_MiB);
  rig.verify_empty();
}

// Of the next step: what is saved at once and dropped before the next request.
TEST("what is planned to leave is copied out from the first request after its last owner on") {
  for (const bool tells : {true, false}) {
    HeldRig rig({.classes = {{kHeldBlock}, {24}}, .host_limit = 127_MiB});
    const driver::Stream s = rig.stream();
    for (int i = 0; i < 3; ++i) {
      step(rig, s, 36);
    }
    rig.torch.tells = tells;
    rig.budget(124_MiB, 100_MiB);
    const HeldTensor first = rig.make(kHeldBlock, s);
    std::vector<SavedTensor> saved{rig.save(first)};
    rig.drop(first);
    const Counters before = rig.counters();
    CHECK_EQ(before.retained, 0);
    const HeldTensor next = rig.make(kHeldBlock, s);
    CHECK_EQ(rig.counters().retained, tells ? kHeldBlock : 0);
    CHECK_EQ(rig.counters().write_backs - before.write_backs, tells ? 1 : 0);
    rig.drop(next);
    rig.runtime->clear_budget();
    rig.back_all(saved, s);
    rig.verify_empty();
  }
}

TEST("told for what, a miss lets go of what the request needs in steps that are not known too") {
  HeldRig rig({.classes = {{kHeldBlock}, {64}}, .host_limit = 512_MiB});
  const driver::Stream s = rig.stream();
  for (int layers = 36; layers < 44; layers += 2) {  // no plan has these sizes
    CHECK(step(rig, s, layers) <= kHeldBlock);
  }
  CHECK_EQ(rig.counters().overshoot_bytes, 0);
  CHECK(rig.torch.reserved_peak() <= 124_MiB);
  rig.verify_empty();
}

TEST("told for what, no request of a step that is not known goes over high") {
  HeldRig rig({.classes = {{kHeldBlock}, {32}}, .host_limit = 256_MiB});
  const driver::Stream s = rig.stream();
  rig.budget(120_MiB, 110_MiB);
  std::vector<SavedTensor> saved = rig.retain_many(20, kHeldBlock, s);
  const HeldTensor first = rig.make(50_MiB, s);
  const HeldTensor second = rig.make(40_MiB, s);
  CHECK_EQ(rig.counters().overshoot_bytes, 0);
  CHECK_EQ(rig.runtime->plan_state(), PlanState::learning);
  rig.drop(first);
  rig.drop(second);
  rig.back_all(saved, s);
  rig.verify_empty();
}

TEST("wholly free segments go back to the driver where a request fits in none of them") {
  HeldRig rig;
  rig.torch.tells = false;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 40_MiB);
  const HeldTensor one = rig.make(30_MiB, s);
  const HeldTensor two = rig.make(30_MiB, s);
  rig.drop(one);
  rig.drop(two);
  rig.drop(rig.make(50_MiB, s));
  CHECK_EQ(rig.counters().overshoot_bytes, 46_MiB);  // one request's segment: nobody knew its size
  const HeldTensor large = rig.make(56_MiB, s);
  CHECK_EQ(rig.torch.reserved(), 56_MiB);
  CHECK(rig.counters().host_waits > 0);
  rig.drop(large);
  rig.verify_empty();
}

TEST("a trim that finds nothing does not keep segments from going back at a miss after it") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  for (int at = 0; at < 3; ++at) {
    const Bytes before = rig.counters().overshoot_bytes;
    rig.budget(64_MiB, 40_MiB);
    rig.runtime->trim(0);
    const SavedTensor saved = rig.retain(kHeldBlock, s);
    rig.runtime->trim(0);
    rig.drop(rig.make(30_MiB, s));
    rig.drop(rig.make(40_MiB, s));
    rig.runtime->clear_budget();
    CHECK(at == 0 || rig.counters().overshoot_bytes == before);
    rig.back(saved, s);
  }
  rig.verify_empty();
}

TEST("nothing is let go of at a miss while a stream of what is held is captured into a graph") {
  for (const bool tells : {false, true}) {
    HeldRig rig;
    rig.torch.tells = tells;
    const driver::Stream s = rig.stream();
    const driver::Stream captured = rig.stream();
    // Where the request is known, there is room for small ones beside.
    rig.budget(kHeldSegment + (tells ? 26_MiB : 2_MiB), 4_MiB);
    const SavedTensor of_captured = rig.retain(512, captured);
    std::vector<SavedTensor> saved = rig.retain_many(5, kHeldBlock, s);
    CHECK_EQ(stagehand_sim_capture(captured, 1), 0);
    rig.drop(rig.make(kHeldBlock, s));
    CHECK_EQ(rig.counters().evicted, 0);
    CHECK_EQ(stagehand_sim_capture(captured, 0), 0);
    const HeldTensor first = rig.make(12_MiB, s);
    const HeldTensor second = rig.make(12_MiB, s);
    CHECK(rig.counters().evicted > 0);
    rig.drop(first);
    rig.drop(second);
    rig.back_all(saved, s);
    rig.back(of_captured, captured);
    rig.verify_empty();
  }
}

// As in steps whose backward never comes: no trace is learned of them.
TEST("told for what, the pages that a first step had cut go back once, and not at each entry") {
  HeldRig rig;
  rig.torch.expandable = true;
  const driver::Stream s = rig.stream();
  std::vector<std::uint64_t> unmapped;  // at each entry
  for (int at = 0; at < 5; ++at) {
    const std::uint64_t before = stagehand_sim_call_count("cuMemUnmap");
    rig.budget(124_MiB, 100_MiB);
    unmapped.push_back(stagehand_sim_call_count("cuMemUnmap") - before);
    for (const SavedTensor& saved : rig.retain_many(36, kHeldBlock, s)) {
      rig.drop_handle(saved);
    }
    rig.runtime->clear_budget();
  }
  CHECK(unmapped[1] > 0);
  CHECK_EQ(unmapped[2] + unmapped[3] + unmapped[4], 0);
  rig.verify_empty();
}

// A retained storage that another stream may still be reading ends while its own is captured.
void end_while_captured(HeldRig& rig, driver::Stream s) {
  const driver::Stream consumer = rig.stream();
  const SavedTensor saved = rig.retain(kHeldBlock, s);
  rig.order(s, consumer);
  rig.drop(rig.unpack(saved, consumer));
  rig.look(s);
  CHECK_EQ(rig.counters().retained, kHeldBlock);
  CHECK_EQ(stagehand_sim_capture(s, 1), 0);
  int mode = driver::kCaptureModeRelaxed;  // as entry/ does
  rig.driver.thread_exchange_capture_mode(&mode);
  rig.drop_handle(saved);
  rig.driver.thread_exchange_capture_mode(&mode);
  CHECK_EQ(stagehand_sim_capture(s, 0), 0);
  CHECK_EQ(rig.torch.storages(), 1);
  rig.CoreRig::verify();
}

TEST("a storage that cannot be let go of during a capture is let go of at a miss after it") {
  for (const bool armed : {true, false}) {
    HeldRig rig;
    const driver::Stream s = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    end_while_captured(rig, s);
    if (!armed) {
      rig.runtime->clear_budget();
    }
    rig.drop(rig.make(50_MiB, s));
    CHECK_EQ(rig.torch.storages(), 0);
    rig.verify_empty();
  }
}

TEST("without the trigger a storage kept back by a capture is let go of at the next save") {
  HeldRig rig(kHeldMachine, false);
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  end_while_captured(rig, s);
  rig.look(s);
  CHECK_EQ(rig.torch.storages(), 0);
  rig.verify_empty();
}

TEST("where torch must grow above high, its free segments go back first") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(200_MiB, 190_MiB);
  const SavedTensor first = rig.retain(30_MiB, s);
  rig.evict_all(s);
  const HeldTensor in_its_segment = rig.make(12_MiB, s);
  rig.drop(rig.make(24_MiB, s));  // its segment is free
  const Bytes full = rig.torch.reserved();
  CHECK_EQ(full, 30_MiB + 24_MiB + 2_MiB);
  rig.budget(full + 2_MiB, full);  // 2 MiB too little for 30 in place of 24 and 2
  const Counters before = rig.counters();
  rig.back(first, s);
  CHECK_EQ(rig.torch.reserved(), full + 4_MiB);
  CHECK_EQ(rig.counters().overshoot_bytes - before.overshoot_bytes, 2_MiB);
  rig.drop(in_its_segment);
  rig.verify_empty();
}

TEST("after a planned step that hardly fits the next pool entry gives torch's free segments back") {
  HeldRig rig({.classes = {{kHeldBlock}, {32}}, .host_limit = 256_MiB});
  rig.torch.tells = false;
  const driver::Stream s = rig.stream();
  Bytes at_first_save = 0;
  for (int at = 0; at < 3; ++at) {
    rig.budget(42_MiB, 40_MiB);
    const SavedTensor first = rig.retain(kHeldBlock, s);
    at_first_save = rig.torch.reserved();
    std::vector<SavedTensor> rest = rig.retain_many(8, kHeldBlock, s);
    rig.drop(rig.make(24_MiB, s));  // fits in no segment of theirs
    rig.runtime->clear_budget();
    rig.back_all(rest, s);
    rig.back(first, s);
  }
  CHECK_EQ(at_first_save, kHeldSegment);
  CHECK_EQ(rig.runtime->plan_state(), PlanState::following);
  rig.verify_empty();
}

TEST(
    "a planned step that gives segments back with much room left keeps its segments for the next") {
  HeldRig rig({.classes = {{kHeldBlock}, {32}}, .host_limit = 256_MiB});
  const driver::Stream s = rig.stream();
  Bytes at_entry = 0;
  for (int at = 0; at < 3; ++at) {
    rig.budget(200_MiB, 190_MiB);
    at_entry = rig.torch.reserved();
    const SavedTensor first = rig.retain(kHeldBlock, s);
    std::vector<SavedTensor> rest = rig.retain_many(44, kHeldBlock, s);
    rig.runtime->clear_budget();
    rig.back_all(rest, s);
    const Bytes before = rig.torch.reserved();
    rig.drop(rig.make(48_MiB, s));  // fits in no segment of theirs, and all but one are free
    CHECK(at == 0 || rig.torch.reserved() < before + 48_MiB);
    rig.back(first, s);
  }
  CHECK(at_entry > 0);
  CHECK_EQ(rig.runtime->plan_state(), PlanState::following);
  rig.verify_empty();
}

TEST("what large requests leave below high has room for as many small segments as the last step") {
  HeldRig rig({.classes = {{kHeldBlock}, {64}}, .host_limit = 256_MiB});
  const driver::Stream s = rig.stream();
  for (int at = 0; at < 4; ++at) {
    const Bytes before = rig.counters().overshoot_bytes;
    rig.runtime->trim(0);
    rig.budget(140_MiB, 130_MiB);
    std::vector<SavedTensor> saved;
    std::vector<HeldTensor> live;  // in every segment of theirs: none goes back
    for (int i = 0; i < 9; ++i) {
      live.push_back(rig.make(kHeldBlock, s));
      const std::vector<SavedTensor> more = rig.retain_many(4, kHeldBlock, s);
      saved.insert(saved.end(), more.begin(), more.end());
    }
    for (int i = 0; i < 48; ++i) {
      live.push_back(rig.make(1_MiB, s));  // two to a segment
    }
    CHECK(at == 0 || rig.counters().overshoot_bytes == before);
    rig.drop_all(live);
    rig.runtime->clear_budget();
    rig.back_all(saved, s);
  }
  CHECK_EQ(rig.runtime->plan_state(), PlanState::following);
  CHECK(rig.torch.reserved_peak() > 140_MiB);  // in the first step
  rig.verify_empty();
}

TEST("not told for what, a new step goes over high for a request, and not again for one like it") {
  HeldRig rig({.classes = {{kHeldBlock}, {32}}, .host_limit = 256_MiB});
  rig.torch.tells = false;
  const driver::Stream s = rig.stream();
  rig.budget(120_MiB, 110_MiB);
  std::vector<SavedTensor> saved = rig.retain_many(20, kHeldBlock, s);
  const HeldTensor first = rig.make(50_MiB, s);
  CHECK_EQ(rig.counters().overshoot_bytes, 10_MiB);
  rig.look(s);
  const Bytes over = rig.counters().overshoot_bytes;
  const HeldTensor second = rig.make(50_MiB, s);
  CHECK_EQ(rig.counters().overshoot_bytes, over);
  CHECK_EQ(rig.runtime->plan_state(), PlanState::learning);
  rig.drop(first);
  rig.drop(second);
  rig.back_all(saved, s);
  rig.verify_empty();
}

TEST("a small request takes no segment back from the large one that is expected") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  for (int at = 0; at < 4; ++at) {
    rig.runtime->trim(0);
    rig.budget(200_MiB, 190_MiB);
    const SavedTensor saved = rig.retain(kHeldBlock, s);
    rig.drop(rig.make(100_MiB, s));
    const std::uint64_t waits = rig.counters().host_waits;
    std::vector<HeldTensor> small;
    for (int i = 0; i < 8; ++i) {
      small.push_back(rig.make(1_MiB, s));
    }
    CHECK(at == 0 || rig.torch.reserved() == kHeldSegment + 100_MiB + 8_MiB);
    CHECK(at == 0 || rig.counters().host_waits == waits);
    CHECK(rig.resident(saved));
    rig.drop_all(small);
    rig.runtime->clear_budget();
    rig.back(saved, s);
  }
  CHECK_EQ(rig.runtime->plan_state(), PlanState::following);
  rig.verify_empty();
}

TEST("free pages of an expandable segment go back where a request finds no room between blocks") {
  HeldRig rig;
  rig.torch.expandable = true;
  const driver::Stream s = rig.stream();
  for (int at = 0; at < 4; ++at) {
    const Bytes before = rig.counters().overshoot_bytes;
    rig.runtime->trim(0);
    rig.budget(150_MiB, 140_MiB);
    const SavedTensor saved = rig.retain(kHeldBlock, s);
    const HeldTensor left = rig.make(60_MiB, s);
    const HeldTensor stays = rig.make(12_MiB, s);
    const HeldTensor right = rig.make(60_MiB, s);
    rig.drop(left);
    rig.drop(right);
    const HeldTensor large = rig.make(100_MiB, s);
    CHECK(at == 0 || rig.counters().overshoot_bytes == before);
    rig.drop(large);
    rig.drop(stays);
    rig.runtime->clear_budget();
    rig.back(saved, s);
  }
  CHECK_EQ(rig.runtime->plan_state(), PlanState::following);
  rig.verify_empty();
}

TEST("a prefetch never grows torch above high, also where another pool has room") {
  for (const bool pool : {false, true}) {
    HeldRig rig;
    const driver::Stream s = rig.stream();
    rig.budget(200_MiB, 200_MiB);
    const SavedTensor first = rig.retain(kHeldBlock, s);
    rig.evict_all(s);
    const SavedTensor second = rig.retain(kHeldBlock, s);
    const HeldTensor rest = rig.make(16_MiB, s);
    if (pool) {
      const PoolScope scope(kForeignPool);
      rig.drop(rig.make(16_MiB, s));
    }
    const Bytes full = rig.torch.reserved();
    rig.budget(full, full);
    rig.drop(rig.unpack(second, s));
    CHECK_EQ(rig.torch.reserved(), full);
    CHECK(!rig.resident(first));
    rig.drop(rest);
    const std::uint64_t misses = rig.torch.misses();
    rig.drop(rig.unpack(second, s));  // there is a hole now
    CHECK(rig.resident(first));
    CHECK_EQ(rig.torch.reserved(), full);
    CHECK_EQ(rig.torch.misses(), misses);
    rig.back(second, s);
    rig.back(first, s);
    rig.torch.destroy_pool(kForeignPool);
    rig.verify_empty();
  }
}

TEST("what is needed far ahead comes back early into a hole, and into no new segment") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(200_MiB, 190_MiB);
  const SavedTensor first = rig.retain(12_MiB, s);
  rig.evict_all(s);
  CHECK(!rig.resident(first));
  const HeldTensor in_its_place = rig.make(12_MiB, s);
  std::vector<SavedTensor> later = rig.retain_many(100, 64_KiB, s);
  const auto back = [&](int count) {
    for (int i = 0; i < count; ++i) {
      rig.back(later.back(), s);
      later.pop_back();
    }
  };
  back(16);
  CHECK(!rig.resident(first));
  rig.drop(in_its_place);
  back(16);
  CHECK(rig.resident(first));
  rig.back_all(later, s);
  rig.back(first, s);
  rig.verify_empty();
}

TEST("without the trigger room is made at the next save: above high with a wait, below without") {
  HeldRig rig(kHeldMachine, false);
  const driver::Stream s = rig.stream();
  rig.budget(16_MiB, 8_MiB);
  std::vector<SavedTensor> saved = rig.retain_many(6, kHeldBlock, s);
  rig.look(s);
  CHECK(rig.torch.allocated() <= 16_MiB);
  const Bytes waits = rig.counters().host_waits;
  CHECK(waits > 1);  // the pinned pool's growth, and a copy's end
  rig.budget(64_MiB, 8_MiB);
  for (const SavedTensor& more : rig.retain_many(2, kHeldBlock, s)) {
    saved.push_back(more);
  }
  for (int i = 0; i < 4; ++i) {
    rig.look(s);
    stagehand_sim_drain();
  }
  CHECK(rig.torch.allocated() <= 8_MiB);
  CHECK_EQ(rig.counters().host_waits, waits);
  CHECK_EQ(rig.torch.misses(), 0);
  rig.back_all(saved, s);
  rig.verify_empty();
}

TEST("while torch records a history nothing is freed under its mutex: room is made at saves") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(16_MiB, 8_MiB);
  rig.torch.blocked = true;
  std::vector<SavedTensor> saved = rig.retain_many(6, kHeldBlock, s);
  rig.look(s);
  CHECK_EQ(rig.torch.misses(), 0);
  CHECK(rig.counters().dirty_evictions + rig.counters().clean_evictions > 0);
  CHECK(rig.torch.allocated() <= 16_MiB);
  rig.back_all(saved, s);
  rig.torch.blocked = false;
  rig.verify_empty();
}

TEST("a pool's limit is torch's own from its entry until its last record is gone") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  const auto near = [&](double share) {
    const double now = rig.torch.fraction;
    return now <= share && now > share - 1e-5;  // torch rounds down to bytes
  };
  const Bytes device = rig.runtime->device_bytes();
  rig.torch.fraction = 0.9;  // the user's
  for (int step = 0; step < 3; ++step) {
    rig.runtime->set_budget({device / 4, device / 8, device / 2, true});
    CHECK(near(0.5));
    const SavedTensor saved = rig.retain(kHeldBlock, s);
    rig.runtime->clear_budget();
    CHECK(near(0.5));  // backward is still to come
    rig.back(saved, s);
    CHECK(near(0.9));
  }
  const double before = rig.torch.fraction;
  rig.runtime->set_budget({device / 4, device / 8, device, true});
  CHECK(rig.torch.fraction == before);
  rig.runtime->clear_budget();
  rig.torch.fraction = 0.4;  // the user's again: lower than the pool's
  rig.runtime->set_budget({device / 4, device / 8, device / 2, true});
  CHECK(near(0.4));
  rig.runtime->clear_budget();
  CHECK(near(0.4));
  rig.verify_empty();
}

TEST("a budget whose watermarks are one evicts before torch grows past it") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  std::vector<SavedTensor> saved = rig.retain_many(20, kHeldBlock, s);
  CHECK(rig.torch.reserved() <= 64_MiB);
  rig.back_all(saved, s);
  rig.verify_empty();
}

TEST("what is older than the pool is not tagged, also where its address was used before") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 32_MiB);
  const HeldTensor gone = rig.make(kHeldBlock, s);
  rig.drop(gone);
  const HeldTensor weight = rig.make(kHeldBlock, s);  // at the same address
  rig.drop_handle(rig.save(weight));
  rig.budget(64_MiB, 32_MiB);  // the next step's pool
  CHECK_EQ(rig.try_save(weight, s).refusal, Refusal::older_than_pool);
  rig.drop(weight);
  rig.verify_empty();
}

TEST("a restore that torch has no memory for changes nothing, and works once there is some") {
  HeldRig rig({.memory = 64_MiB, .classes = {{kHeldBlock}, {8}}});
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const SavedTensor saved = rig.retain(kHeldBlock, s);
  rig.evict_all(s);
  rig.torch.release_cached();
  const HeldTensor all = rig.make(60_MiB, s);
  CHECK_EQ(rig.runtime->unpack(saved.record, saved.offset, s).status, Status::out_of_memory);
  CHECK_EQ(rig.counters().evicted, kHeldBlock);
  CHECK_EQ(rig.counters().aliases, 0);
  rig.verify();
  rig.drop(all);
  rig.back(saved, s);
  rig.verify_empty();
}

// A MemPool's segments ----------------------------------------------------------------------------

TEST("a MemPool's segments are reused by the next, and refused above limit") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.torch.use_segments(kOurPool);
  rig.torch.use_segments({8, 0});
  rig.budget(64_MiB, 64_MiB, 64_MiB);
  {
    const PoolScope scope(kOurPool);
    const HeldTensor one = rig.make(kHeldBlock, s);
    const HeldTensor two = rig.make(36_MiB, s);
    CHECK_EQ(rig.counters().mapped, 56_MiB);
    if (const HeldTensor three = rig.try_make(12_MiB, s); three.storage != nullptr) {
      rig.drop(three);
    }
    CHECK(rig.torch.reserved() <= 64_MiB);
    CHECK(rig.try_make(30_MiB, s).storage == nullptr);
    CHECK(rig.counters().out_of_memory > 0);
    rig.check(one, s);
    rig.check(two, s);
    rig.verify();
    rig.drop(one);
    rig.drop(two);
  }
  rig.torch.destroy_pool(kOurPool);
  const std::uint64_t created = stagehand_sim_call_count("cuMemCreate");
  {
    const PoolScope scope({8, 0});
    const HeldTensor again = rig.make(30_MiB, s);
    CHECK_EQ(stagehand_sim_call_count("cuMemCreate"), created);
    CHECK(rig.counters().mapped <= 64_MiB);
    rig.drop(again);
  }
  rig.torch.destroy_pool({8, 0});
  rig.verify();
}

// In FSDP2 with a MemPool a segment of 2 MiB took 32, of which 30 were above what there was room
// for.
TEST("a MemPool's segments take no more than torch asks for") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.torch.use_segments(kOurPool);
  rig.budget(128_MiB, 128_MiB);
  {
    const PoolScope scope(kOurPool);
    std::vector<HeldTensor> all;
    for (const Bytes bytes : {4_KiB, 12_MiB, 46_MiB}) {
      all.push_back(rig.make(bytes, s));
      CHECK_EQ(rig.counters().mapped, rig.torch.reserved());
    }
    CHECK_EQ(rig.torch.reserved(), 60_MiB);
    rig.drop_all(all);
  }
  rig.torch.destroy_pool(kOurPool);
}

TEST("another device may reach a MemPool's segments made before and after it was named") {
  Machine machine = kHeldMachine;
  machine.devices = 2;
  machine.patch = count_opened;
  HeldRig rig(machine);
  const auto stream = rig.stream();
  const Address before = rig.runtime->segment(kHeldSegment, stream);
  CHECK_EQ(opened_bytes()[1], 0);
  CHECK_EQ(rig.runtime->add_peer(1), Status::ok);
  CHECK_EQ(opened_bytes()[1], kHeldSegment);
  const Address after = rig.runtime->segment(kHeldSegment, stream);
  CHECK_EQ(opened_bytes()[1], 2 * kHeldSegment);
  rig.runtime->free_segment(before);
  rig.runtime->free_segment(after);

  HeldRig named_first(machine);
  CHECK_EQ(named_first.runtime->add_peer(1), Status::ok);
  const Address segment = named_first.runtime->segment(kHeldSegment, named_first.stream());
  CHECK_EQ(opened_bytes()[1], kHeldSegment);
  named_first.runtime->free_segment(segment);
}

TEST("what a MemPool gave back does not count twice, nor is it held against the next request") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.torch.use_segments(kOurPool);
  rig.runtime->set_torch_pool(kOurPool);
  rig.budget(84_MiB, 60_MiB);
  {
    const PoolScope scope(kOurPool);
    rig.drop(rig.make(40_MiB, s));
  }
  rig.torch.destroy_pool(kOurPool);
  CHECK_EQ(rig.torch.reserved(), 0);
  CHECK_EQ(rig.counters().mapped, 40_MiB);
  {
    const PoolScope scope(kOurPool);
    std::vector<SavedTensor> saved = rig.retain_many(10, kHeldBlock, s);
    CHECK_EQ(rig.counters().mapped, 40_MiB);
    CHECK_EQ(rig.counters().evicted, 0);
    rig.back_all(saved, s);
  }
  rig.runtime->set_torch_pool({});
  rig.torch.destroy_pool(kOurPool);
  rig.verify();
}

TEST("what MemPools gave back goes to the driver where it is trimmed, and where high is lower") {
  for (const bool trimmed : {false, true}) {
    HeldRig rig({.memory = 64_MiB});
    const driver::Stream s = rig.stream();
    rig.torch.use_segments(kOurPool);
    {
      const PoolScope scope(kOurPool);
      rig.drop(rig.make(40_MiB, s));
    }
    rig.torch.destroy_pool(kOurPool);
    if (trimmed) {
      CHECK_EQ(rig.runtime->trim(0), 40_MiB);
    } else {
      rig.budget(20_MiB, 20_MiB);
    }
    CHECK_EQ(rig.counters().mapped, 0);
    rig.drop(rig.make(50_MiB, s));
    rig.verify_empty();
  }
}

TEST("records in a MemPool leave and come back like others") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.torch.use_segments(kOurPool);
  rig.runtime->set_torch_pool(kOurPool);
  rig.budget(40_MiB, 20_MiB, 64_MiB);
  {
    const PoolScope scope(kOurPool);
    std::vector<SavedTensor> saved = rig.retain_many(14, kHeldBlock, s);
    CHECK(rig.counters().evicted > 0);
    CHECK(rig.torch.reserved_peak() <= 40_MiB);
    rig.back_all(saved, s);
  }
  rig.runtime->set_torch_pool({});
  rig.torch.destroy_pool(kOurPool);
  rig.verify();
}

TEST("a pool entry takes nothing from a user's MemPool that is active around it") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.drop(rig.make(100_MiB, s));
  const PoolScope users(kForeignPool);
  rig.budget(90_MiB, 80_MiB);
  CHECK(rig.cache.usage_of(kForeignPool).reserved < 20_MiB);
  CHECK(rig.torch.reserved() <= 90_MiB);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
