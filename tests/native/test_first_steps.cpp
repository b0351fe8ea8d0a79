// The first step inside a budget: what it does before anybody knows what will leave.
#include <algorithm>
#include <string>

#include "native/first_steps.hpp"

namespace stagehand::core::test {
namespace {

// A budget of that share of the activations, as benchmarks/measures.py has it. What the first step
// takes, in percent of the settled ones; a step without it came before, and pinning is charged for.
// `cold`: the same where nothing came before.
struct Bar {
  double share;
  double percent;
  double cold;
};

template <typename Side>
void expect_at_most(const std::string& trace, const std::vector<Bar>& bars) {
  const auto [start, peak] = measured<Side>(trace);
  const Bytes activations = peak - start;
  for (const Bar& bar : bars) {
    for (const bool cold : {false, true}) {
      FirstSteps<Side> steps(trace);
      cold ? steps.finish_pinning() : steps.warm_up();
      const Bytes high = start + static_cast<Bytes>(bar.share * static_cast<double>(activations));
      steps.set(high, high - std::min<Bytes>(1_GiB, activations / 10));
      const Done first = steps.step();
      CHECK(first.evicted >= peak - high);
      CHECK_EQ(first.events_made, 0);
      for (int i = 0; i < 3; ++i) {
        steps.step();
      }
      const Done later = steps.step();
      const double most = (cold ? bar.cold : bar.percent) / 100;
      CHECK(static_cast<double>(first.ns) <= most * static_cast<double>(later.ns));
      steps.verify();
    }
  }
}

TEST("GPT: a first step takes hardly longer than a later one") {
  expect_at_most<HeapSide>("gpt_8k.txt", {{0.85, 105, 105}, {0.75, 110, 115}, {0.5, 115, 115}});
  expect_at_most<HeldSide>("gpt_8k.txt", {{0.85, 105, 110}, {0.75, 115, 120}, {0.5, 120, 120}});
}

// Here the link, and then host memory, is what a first step waits for.
TEST("ViT: what the link does not carry in forward is all that a first step waits for") {
  expect_at_most<HeapSide>("vit.txt", {{0.85, 130, 145}, {0.75, 115, 115}});
  expect_at_most<HeldSide>("vit.txt", {{0.85, 130, 135}, {0.75, 120, 120}});
}

TEST("no step of many makes events: those of what has passed serve again") {
  for (const char* trace : {"fsdp2.txt", "llama.txt", "pipeline.txt"}) {
    const auto [start, peak] = measured<HeapSide>(trace);
    FirstSteps<HeapSide> steps(trace);
    steps.finish_pinning();
    const Bytes activations = peak - start;
    const Bytes high = start + activations / 4 * 3;
    steps.set(high, high - activations / 10);
    for (int i = 0; i < 12; ++i) {
      CHECK_EQ(steps.step().events_made, 0);
    }
    steps.verify();
  }
}

TEST("FSDP2: memory of several streams in a first step") {
  expect_at_most<HeapSide>("fsdp2.txt", {{0.75, 110, 115}});
  expect_at_most<HeldSide>("fsdp2.txt", {{0.75, 110, 110}});
}

// What 32 MiB of tensors that are saved and dropped have copied out, with as much memory mapped
// already as is said.
Bytes copied(Bytes mapped, Bytes high) {
  HandPinner pinner;
  CoreRig rig({.classes = {{1_MiB}, {32}}, .ahead = true});
  pinner.work_for(*rig.runtime);
  pinner.finish();
  const driver::Stream s = rig.stream();
  std::vector<Tensor> tensors;
  for (Bytes at = 0; at < mapped; at += 2_MiB) {
    tensors.push_back(rig.make(2_MiB, s));
  }
  for (const Tensor& tensor : tensors) {
    rig.drop(tensor);
  }
  rig.budget(high, high);
  std::vector<Held> held = rig.retain_many(16, 2_MiB, s);
  rig.runtime->clear_budget();
  CHECK_EQ(rig.counters().evicted, 0);
  const Bytes bytes = rig.counters().evicted_bytes;
  rig.back_all(held, s);
  pinner.finish();
  rig.verify_empty();
  return bytes;
}

TEST("where high was near before, a new step copies a part of what it saves ahead of need") {
  const Bytes bytes = copied(64_MiB, 64_MiB);
  CHECK(bytes >= 4_MiB);
  CHECK(bytes <= 8_MiB);  // not all of it
}

TEST("where memory is still to be mapped, or there is plenty, a new step copies nothing ahead") {
  CHECK_EQ(copied(16_MiB, 64_MiB), 0);
  CHECK_EQ(copied(64_MiB, 128_MiB), 0);
}

TEST(
    "the first step maps the rest of its budget once half of it is in use, and copies from there") {
  for (const int tensors : {31, 40}) {
    const bool half = tensors == 40;
    HandPinner pinner;
    CoreRig rig({.classes = {{1_MiB}, {64}}, .ahead = true});
    pinner.work_for(*rig.runtime);
    pinner.finish();
    const driver::Stream s = rig.stream();
    rig.budget(128_MiB, 128_MiB);
    std::vector<Held> held = rig.retain_many(tensors, 2_MiB, s);
    CHECK_EQ(rig.counters().mapped, half ? 120_MiB : 62_MiB);  // a part is left for other streams
    CHECK_EQ(rig.counters().evicted_bytes >= 12_MiB, half);
    CHECK(rig.counters().evicted_bytes <= 18_MiB);
    rig.back_all(held, s);
    rig.runtime->clear_budget();
    pinner.finish();
    rig.verify_empty();
  }
}

TEST("memory that cannot be mapped ahead comes as it is asked for, and nothing is copied before") {
  for (const char* symbol : {"cuMemCreate", "cuMemMap", "cuMemSetAccess"}) {
    CoreRig rig({.classes = {{1_MiB}, {64}}});
    const driver::Stream s = rig.stream();
    rig.budget(128_MiB, 128_MiB);
    const Tensor last = rig.make(2_MiB, s);
    std::vector<Held> held = rig.retain_many(32, 2_MiB, s);
    CHECK_EQ(rig.counters().mapped, 66_MiB);
    stagehand_sim_fail(symbol, 1, 1, 2);
    held.push_back(rig.save(last));  // which would map
    rig.drop(last);
    CHECK_EQ(rig.counters().mapped, 66_MiB);
    std::vector<Held> more = rig.retain_many(16, 2_MiB, s);
    CHECK_EQ(rig.counters().mapped, 98_MiB);
    CHECK_EQ(rig.counters().evicted_bytes, 0);
    rig.back_all(more, s);
    rig.back_all(held, s);
    rig.verify_empty();
  }
}

TEST("what was to be mapped ahead in one budget is not mapped in the next, nor above a limit") {
  for (const bool next : {false, true}) {
    CoreRig rig({.memory = 1_GiB, .classes = {{1_MiB}, {64}}});
    const driver::Stream s = rig.stream();
    rig.budget(512_MiB, 512_MiB);
    std::vector<Held> held{rig.retain(300_MiB, s)};  // the last that the step saves
    if (next) {
      rig.back_all(held, s);
      rig.runtime->clear_budget();
      rig.runtime->trim(0);
      rig.budget(64_MiB, 64_MiB);
    } else {
      rig.runtime->set_limit(330_MiB);
    }
    held.push_back(rig.retain(4_MiB, s));
    CHECK(rig.counters().mapped <= (next ? 64_MiB : 330_MiB));
    rig.back_all(held, s);
    rig.verify_empty();
  }
}

TEST("nothing is mapped ahead that the driver does not have") {
  CoreRig rig({.memory = 160_MiB, .classes = {{1_MiB}, {64}}});
  const driver::Stream s = rig.stream();
  driver::PhysicalHandle others{};
  const driver::AllocationProp prop;
  CHECK_EQ(rig.driver.mem_create(&others, 60_MiB, &prop, 0), driver::kSuccess);
  rig.budget(128_MiB, 128_MiB);
  std::vector<Held> held = rig.retain_many(34, 2_MiB, s);
  CHECK_EQ(rig.counters().mapped, 68_MiB);
  rig.driver.mem_release(others);
  rig.back_all(held, s);
  rig.verify_empty();
}

TEST("whatever is saved as half of the room is in use, large requests find what is mapped") {
  for (const Bytes last : {2_MiB, Bytes{96} << 10}) {
    CoreRig rig({.memory = 1_GiB, .classes = {{1_MiB}, {256}}});
    const driver::Stream s = rig.stream();
    rig.budget(512_MiB, 512_MiB);
    std::vector<Held> held = rig.retain_many(129, 2_MiB, s);
    held.push_back(rig.retain(last, s));
    CHECK(rig.counters().mapped >= 480_MiB);
    const std::uint64_t calls = rig.counters().map_calls;
    for (int i = 0; i < 60; ++i) {
      held.push_back(rig.retain(2_MiB, s));
    }
    CHECK_EQ(rig.counters().map_calls, calls);
    rig.back_all(held, s);
    rig.verify_empty();
  }
}

TEST("torch's cache: likewise, in one piece that torch then cuts") {
  HandPinner pinner;
  HeldRig rig({.memory = 4_GiB, .classes = {{16_MiB}, {64}}, .ahead = true});
  rig.torch.expandable = true;
  pinner.work_for(*rig.runtime);
  pinner.finish();
  const driver::Stream s = rig.stream();
  rig.budget(2_GiB, 2_GiB);
  std::vector<SavedTensor> held = rig.retain_many(34, 40_MiB, s);
  CHECK(rig.torch.reserved() <= 2_GiB);
  CHECK(rig.torch.reserved() >= 1800_MiB);
  CHECK_EQ(rig.counters().mapped, rig.torch.reserved());
  CHECK(rig.counters().occupied_peak <= 35 * 40_MiB);
  rig.runtime->clear_budget();
  rig.back_all(held, s);
  pinner.finish();
  rig.verify_empty();
}

TEST("a step that stays below half of its room has no host memory made for it") {
  for (const int tensors : {14, 40}) {
    HandPinner pinner;
    CoreRig rig({.classes = {{1_MiB, 2_MiB}, {1, 0}}, .ahead = true});
    pinner.work_for(*rig.runtime);
    pinner.finish();
    const driver::Stream s = rig.stream();
    rig.budget(120_MiB, 120_MiB);
    std::vector<Held> held = rig.retain_many(tensors, 2_MiB, s);
    pinner.finish();
    CHECK_EQ(rig.counters().pinned_bytes > 1_MiB, tensors == 40);
    CHECK_EQ(rig.counters().evicted_bytes, 0);
    rig.back_all(held, s);
    rig.verify_empty();
  }
}

// Expandable, as in benchmarks: one hole is all that is free.
TEST(
    "a lower budget leaves torch's largest hole mapped as far as it may stay, and asks for "
    "nothing") {
  HeldRig rig({.memory = 2_GiB, .classes = {{4_MiB}, {8}}});
  rig.torch.expandable = true;
  const driver::Stream s = rig.stream();
  rig.budget(1_GiB, 1_GiB);
  std::vector<HeldTensor> tensors;
  for (int i = 0; i < 40; ++i) {
    tensors.push_back(rig.make(20_MiB, s));
  }
  rig.drop_all(tensors);
  rig.runtime->clear_budget();
  rig.runtime->reset_peaks();
  rig.budget(500_MiB, 450_MiB);
  CHECK(rig.torch.reserved() <= 500_MiB);
  CHECK(rig.torch.reserved() >= 380_MiB);
  CHECK_EQ(rig.torch.storages(), 0);
  CHECK_EQ(rig.counters().live_peak, 0);
  CHECK_EQ(rig.cache.take_largest_request(), 0);
  rig.runtime->clear_budget();
  rig.runtime->trim(0);
  CHECK_EQ(rig.torch.reserved(), 0);  // asked for all, it gives all
  rig.verify_empty();
}

TEST(
    "what is pinned first waits in a step, and goes on after one that is known to have saved "
    "nothing") {
  HandPinner pinner;  // first: else a thread pins beside it
  CoreRig rig(first_machine());
  const auto stream = rig.stream();
  PinnedTier& host = rig.runtime->pinned();
  const auto pins = [&] {
    const Chunk chunk = host.begin_chunk();
    if (chunk.size > 0) {
      host.end_chunk(chunk);
    }
    return chunk.size > 0;
  };
  CHECK(pins());
  rig.budget(1_GiB, 1_GiB);
  CHECK(!pins());
  rig.runtime->clear_budget();
  CHECK(pins());
  rig.runtime->set_alarm({1_GiB, [](int) noexcept { return true; }, 0});
  rig.budget(1_GiB, 1_GiB);
  rig.runtime->clear_budget();
  CHECK(!pins());  // what a quiet step saved was not shown
  rig.runtime->set_alarm({});
  rig.budget(1_GiB, 1_GiB);
  const Address address = rig.allocate(4_MiB, stream);
  const Saved saved = rig.runtime->save(address, address, address + 4_MiB);
  CHECK(!pins());
  rig.runtime->clear_budget();
  CHECK(!pins());
  rig.runtime->drop_handle(saved.record);
  CHECK(rig.runtime->free(address));
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
