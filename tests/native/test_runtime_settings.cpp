// Settings that change, and requests that cannot be, while records and copies are about.
#include "native/core_rig.hpp"

namespace stagehand::core::test {
namespace {

TEST("bytes in pageable memory survive new pinned classes") {
  CoreRig rig({.memory = 64_MiB, .classes = {{1_MiB}, {1}}, .host_limit = 0});
  const auto stream = rig.stream();
  rig.budget(32_MiB, 32_MiB, 32_MiB);
  const Held a = rig.retain(16_MiB, stream);
  const Held b = rig.retain(12_MiB, stream);
  rig.drop(rig.make(16_MiB, stream));
  CHECK(!rig.resident(a));
  CHECK(!rig.runtime->configure_pinned({{2_MiB}, {1}}, 63_MiB));
  const Held c = rig.retain(4_MiB, stream);
  rig.evict_all(stream);
  for (const Held* held : {&c, &b, &a}) {
    rig.back(*held, stream);
  }
  rig.verify_empty();
  CHECK(rig.runtime->configure_pinned({{2_MiB}, {1}}, 63_MiB));
}

TEST("pinned classes do not change under a growth that is under way") {
  CoreRig rig({.memory = 64_MiB,
               .classes = {{1_MiB, 2_MiB, 4_MiB, 8_MiB}, {1, 1, 1, 1}},
               .host_limit = 63_MiB});
  const auto stream = rig.stream();
  rig.budget(32_MiB, 32_MiB, 32_MiB);
  const Held a = rig.retain(16_MiB, stream);
  const Held b = rig.retain(12_MiB, stream);
  bool changed = true;
  interludes().host_register = [&] {
    changed = rig.runtime->configure_pinned({{1_MiB}, {1}}, 63_MiB);
  };
  rig.drop(rig.make(16_MiB, stream));
  CHECK(!changed);
  rig.back(b, stream);
  rig.back(a, stream);
  rig.verify_empty();
}

TEST("pinned memory is given back on request, and pinned again when it is needed") {
  CoreRig rig({.memory = 64_MiB, .classes = {{1_MiB, 4_MiB}, {2, 1}}, .host_limit = 4_MiB});
  const auto stream = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  CHECK_EQ(rig.runtime->release_pinned(0), 0);
  for (int turn = 0; turn < 3; ++turn) {
    const Held held = rig.retain(4_MiB, stream);
    rig.evict_all(stream);
    CHECK_EQ(rig.counters().pinned_bytes, 4_MiB);
    CHECK_EQ(rig.runtime->release_pinned(0), 0);  // a record holds it
    rig.back(held, stream);
    stagehand_sim_drain();
    CHECK_EQ(rig.runtime->release_pinned(4_MiB), 0);
    CHECK_EQ(rig.runtime->release_pinned(0), 4_MiB);
    CHECK_EQ(rig.counters().pinned_bytes, 0);
  }
  CHECK_EQ(rig.runtime->pinned_demand().size(), 1);
  CHECK_EQ(rig.runtime->pinned_demand()[0].bytes, 4_MiB);
  CHECK_EQ(rig.runtime->pinned_demand()[0].count, 1);
  rig.runtime->reset_peaks();  // as every step of telemetry does
  CHECK_EQ(rig.runtime->pinned_demand().size(), 1);
  rig.verify_empty();
}

TEST("pinned memory that a copy still reads is not given back") {
  CoreRig rig({.memory = 64_MiB, .classes = {{4_MiB}, {1}}, .host_limit = 4_MiB});
  const auto stream = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const Held held = rig.retain(4_MiB, stream);
  rig.evict_all(stream);
  stagehand_sim_drain();
  rig.back(held, stream);  // the copy in is queued
  CHECK_EQ(rig.runtime->release_pinned(0), 0);
  stagehand_sim_drain();
  CHECK_EQ(rig.runtime->release_pinned(0), 4_MiB);
  rig.verify_empty();
}

TEST("no classes, and a limit below one slab, are survived") {
  CoreRig rig({.memory = 64_MiB});
  const auto stream = rig.stream();
  CHECK(!rig.runtime->configure_pinned({{}, {}}, 63_MiB));
  CHECK(rig.runtime->configure_pinned({{1_MiB}, {}}, 1_MiB - 1));
  rig.budget(8_MiB, 8_MiB, 8_MiB);
  const Held held = rig.retain(8_MiB, stream);
  rig.drop(rig.make(8_MiB, stream));
  CHECK_EQ(rig.counters().pinned_bytes, 0);
  CHECK_EQ(rig.counters().pageable_copies, 1);
  rig.back(held, stream);
  rig.verify_empty();
}

TEST("a request of any size beyond the device is out of memory, and harmless") {
  CoreRig rig;
  const auto stream = rig.stream();
  rig.drop(rig.make(3_MiB, stream));
  for (int bits = 40; bits < 63; ++bits) {
    CHECK_EQ(rig.try_allocate(Bytes{1} << bits, stream), Status::out_of_memory);
  }
  rig.drop(rig.make(3_MiB, stream));
  rig.verify_empty();
}

TEST("released graphs give their addresses back") {
  CoreRig rig({.memory = 64_MiB});
  const auto stream = rig.stream();
  for (std::uint64_t graph = 1; graph < 100; ++graph) {
    rig.runtime->free(rig.allocate(4_MiB, stream, graph));
    rig.runtime->release_graph(graph);
  }
  CHECK_EQ(stagehand_sim_call_count("cuMemAddressFree"), 99);
  CHECK_EQ(rig.counters().mapped, 0);
  rig.verify_empty();
}

TEST("a stream under capture gets no event and no wait, and its copies go without them") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CoreRig rig({.seed = seed});
    const auto stream = rig.stream();
    const auto captured = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const Held held = rig.retain(8_MiB, stream);
    stagehand_sim_capture(captured, 1);
    rig.runtime->capture(1);
    int mode = driver::kCaptureModeRelaxed;
    rig.driver.thread_exchange_capture_mode(&mode);
    const Address inside = rig.allocate(4_MiB, captured, 3);
    rig.runtime->record_stream(inside, stream);
    rig.runtime->free(inside);
    rig.evict_all(stream);
    rig.back(held, stream);
    rig.driver.thread_exchange_capture_mode(&mode);
    rig.runtime->capture(-1);
    stagehand_sim_capture(captured, 0);
    rig.runtime->release_graph(3);
    rig.verify_empty();
  }
}

TEST("another device may reach memory mapped before and after it was named, which is done once") {
  CoreRig rig({.devices = 2, .patch = count_opened});
  const auto stream = rig.stream();
  const Tensor before = rig.make(4_MiB, stream);
  CHECK_EQ(opened_bytes()[1], 0);
  CHECK_EQ(rig.runtime->add_peer(1), Status::ok);
  CHECK_EQ(opened_bytes()[1], rig.counters().mapped);
  CHECK_EQ(rig.runtime->add_peer(1), Status::ok);
  CHECK_EQ(opened_bytes()[1], rig.counters().mapped);
  const Tensor after = rig.make(4_MiB, stream);
  CHECK_EQ(opened_bytes()[1], rig.counters().mapped);
  rig.check(before, stream);
  rig.check(after, stream);
  rig.drop(before);
  rig.drop(after);
  rig.verify_empty();
}

}  // namespace
}  // namespace stagehand::core::test
STAGEHAND_TEST_MAIN()
