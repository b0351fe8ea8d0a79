// The lanes: pieces, caps, batches, and the checksums of what they carried.
#include "core/checksum.hpp"
#include "core/link_bound.hpp"
#include "native/weights_rig.hpp"

namespace stagehand::core::test {
namespace {

std::uint64_t calls(const char* symbol) { return stagehand_sim_call_count(symbol); }

// Eight activations, evicted for the ninth's sake and brought back newest first.
void there_and_back(CoreRig& rig, Bytes bytes) {
  const driver::Stream s = rig.stream();
  std::vector<Held> saved = rig.retain_many(8, bytes, s);
  rig.evict_all(s);
  rig.back_all(saved, s);
}

TEST("a copy in pieces on two streams in turn arrives whole, whatever the schedule") {
  for (std::uint64_t seed = 0; seed < stagehand::test::seeds(100); ++seed) {
    CoreRig rig({.seed = seed});
    CHECK(rig.runtime->set_lane_limits({.piece = 256_KiB}));
    rig.budget(128_MiB, 64_MiB);
    const std::uint64_t copies = calls("cuMemcpyDtoHAsync");
    there_and_back(rig, 3_MiB);
    CHECK_EQ(calls("cuMemcpyDtoHAsync") - copies, 8 * 12);
    rig.verify_empty();
  }
}

TEST("whoever set nothing shares the link: no more than 16 MiB is queued on a stream in one go") {
  CoreRig rig({.memory = 512_MiB, .classes = {{64_MiB}, {8}}, .host_limit = 600_MiB});
  rig.budget(400_MiB, 200_MiB);
  const std::uint64_t copies = calls("cuMemcpyDtoHAsync");
  const std::uint64_t back = calls("cuMemcpyHtoDAsync");
  const std::uint64_t waits = calls("cuStreamWaitEvent");
  there_and_back(rig, 36_MiB);
  CHECK_EQ(calls("cuMemcpyDtoHAsync") - copies, 8 * 3);
  CHECK_EQ(calls("cuMemcpyHtoDAsync") - back, 8 * 3);
  CHECK(calls("cuStreamWaitEvent") - waits >= 2 * 8 * 36 / 16);  // a hop each
  rig.verify_empty();
}

TEST("steps wait for weights from an eighth of the link's time on, and down to a 16th") {
  constexpr Bytes kBytes = 55 * 8_MiB;  // 8 ms of the link, nearly
  constexpr std::uint64_t kNs = 8_MiB;
  LinkBound link;
  const auto bound = [&](Bytes back, std::uint64_t stalled_ns) {
    link.note(back, back / 4, stalled_ns);  // a quarter of it is weights
    return link.is();
  };
  CHECK(!bound(kBytes, kNs / 8 - 1));
  CHECK(!bound(2 * kBytes - 1_MiB, kNs / 8 + kNs / 16));
  CHECK(bound(3 * kBytes, 2 * kNs));
  CHECK(bound(3 * kBytes + LinkBound::kLooked - 1, 2 * kNs));  // too little came back to tell
  CHECK(bound(5 * kBytes, 2 * kNs + kNs / 8));
  CHECK(!bound(6 * kBytes, 2 * kNs + kNs / 8 + kNs / 16 - 1));
  CHECK(bound(7 * kBytes, 4 * kNs));
  link.note(8 * kBytes, 2 * kBytes - 8, 8 * kNs);  // a little less
  CHECK(!link.is());
}

// Copies out in a step, of eight records of 32 MiB. Compute waits for each copy back.
std::uint64_t copies_out(CoreRig& rig, Model* model = nullptr) {
  const std::uint64_t before = calls("cuMemcpyDtoHAsync");
  rig.budget(330_MiB, 200_MiB);
  if (model != nullptr) {
    model->run(0, rig.stream());
  }
  there_and_back(rig, 32_MiB);
  rig.runtime->clear_budget();
  stagehand_sim_drain();
  return calls("cuMemcpyDtoHAsync") - before;
}

TEST("where steps wait for weights that stream, copies go in pieces of 64 MiB") {
  CoreRig rig({.memory = 512_MiB, .classes = {{64_MiB}, {8}}, .host_limit = 800_MiB});
  CHECK_EQ(copies_out(rig), 8 * 2);
  CHECK_EQ(copies_out(rig), 8 * 2);  // a foreign copy would wait longer, and nothing gain
  {
    Model small(rig, 1, 1_MiB);
    CHECK_EQ(copies_out(rig, &small), 8 * 2);  // which stays
    CHECK_EQ(copies_out(rig, &small), 8 * 2);
  }
  {
    Model model(rig, 1, 96_MiB);
    copies_out(rig, &model);
    CHECK_EQ(copies_out(rig, &model), 8);
    CHECK(rig.runtime->set_lane_limits({.piece = 16_MiB}));
    CHECK_EQ(copies_out(rig, &model), 8 * 2);
    CHECK(rig.runtime->set_lane_limits({.rate_h2d = 100'000_MiB}));  // somebody shares the link
    CHECK_EQ(copies_out(rig, &model), 8 * 2);
    CHECK(rig.runtime->set_lane_limits({}));
    CHECK_EQ(copies_out(rig, &model), 8);
    rig.runtime->set_ranks(true);
    CHECK_EQ(copies_out(rig, &model), 8 * 2);
    rig.runtime->set_ranks(false);
    CHECK_EQ(copies_out(rig, &model), 8);
    CHECK(model.counts().counts.loads >= 8);
  }
  copies_out(rig);
  CHECK_EQ(copies_out(rig), 8 * 2);
  rig.verify_empty();
}

TEST("small records travel together: one call out") {
  for (const unsigned flags :
       {STAGEHAND_SIM_NO_POISON, STAGEHAND_SIM_NO_POISON | STAGEHAND_SIM_OLD_DRIVER}) {
    CoreRig rig({.flags = flags, .classes = {{64_KiB, 1_MiB}, {64, 8}}});
    const bool old_driver = (flags & STAGEHAND_SIM_OLD_DRIVER) != 0;
    rig.budget(128_MiB, 64_MiB);
    const std::uint64_t batches = calls("cuMemcpyBatchAsync");
    const std::uint64_t copies = calls("cuMemcpyDtoHAsync");
    there_and_back(rig, 16_KiB);
    CHECK_EQ(calls("cuMemcpyDtoHAsync") - copies, old_driver ? 8 : 0);
    CHECK(calls("cuMemcpyBatchAsync") - batches >= (old_driver ? 0u : 1u));
    const Counters now = rig.counters();
    CHECK_EQ(now.evicted_bytes, 8 * 16_KiB);
    CHECK_EQ(now.write_backs, 7);  // with the first victim
    CHECK_EQ(now.clean_evictions, 7);
    rig.verify_empty();
  }
}

TEST("under a cap on copies in flight, write-back holds back and is made up for later") {
  CoreRig rig({.seed = 3});
  const driver::Stream s = rig.stream();
  CHECK(rig.runtime->set_lane_limits({.inflight_d2h = 1}));
  std::vector<Held> saved;
  const auto forward = [&] {
    rig.budget(24_MiB, 20_MiB);
    for (int i = 0; i < 10; ++i) {
      saved.push_back(rig.retain(4_MiB, s));
    }
    rig.runtime->clear_budget();
  };
  const auto backward = [&] { rig.back_all(saved, s); };
  for (int i = 0; i < 3; ++i) {
    forward();
    backward();
  }
  stagehand_sim_drain();
  const Counters before = rig.counters();
  rig.budget(24_MiB, 20_MiB);
  for (int i = 0; i < 3; ++i) {  // all are expected to leave; nothing runs meanwhile
    saved.push_back(rig.retain(4_MiB, s));
  }
  CHECK_EQ(rig.counters().write_backs - before.write_backs, 1);
  stagehand_sim_drain();
  saved.push_back(rig.retain(4_MiB, s));
  CHECK_EQ(rig.counters().write_backs - before.write_backs, 2);
  rig.runtime->clear_budget();
  backward();
  CHECK_EQ(rig.counters().host_waits, before.host_waits);
  rig.verify_empty();
}

TEST("a cap on bytes per second holds copies on the device, never the host, and may be lifted") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(128_MiB, 64_MiB);
  there_and_back(rig, 2_MiB);  // there is pinned memory from here on
  const Counters before = rig.counters();
  CHECK(rig.runtime->set_lane_limits({.rate_d2h = 1}));
  const Held held = rig.retain(2_MiB, s);
  rig.evict_all(s);  // returns, though the copy will take weeks
  CHECK_EQ(rig.counters().evicted, Bytes{2_MiB});
  CHECK_EQ(rig.counters().host_waits, before.host_waits);
  CHECK(rig.runtime->set_lane_limits({.rate_d2h = 0}));
  rig.back(held, s);
  rig.verify_empty();
}

TEST(
    "where no word can be pinned for it, a cap on bytes per second is refused and nothing "
    "changes") {
  CoreRig rig;
  stagehand_sim_fail("cuMemHostRegister", 1, 1, driver::kOutOfMemory);
  CHECK(!rig.runtime->set_lane_limits({.inflight_d2h = 7, .rate_d2h = 1_GiB}));
  CHECK_EQ(rig.runtime->lane_limits().inflight_d2h, 0u);
}

TEST("CRC-32C is the one everybody else computes") {
  const char* text = "123456789";
  const auto* bytes = reinterpret_cast<const std::byte*>(text);
  CHECK_EQ(crc32c(0, bytes, 9), 0xE3069283u);
  CHECK_EQ(crc32c(crc32c(0, bytes, 4), bytes + 4, 5), 0xE3069283u);
}

TEST("with checksums, a host copy that changed is not given to backward") {
  CoreRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(128_MiB, 64_MiB);
  const Held good = rig.retain(2_MiB, s);
  const Held bad = rig.retain(3_MiB, s);
  rig.runtime->set_debug({true, false, true});
  rig.runtime->free(rig.allocate(512, s));
  rig.runtime->set_debug({false, false, true});
  CHECK(rig.counters().host_waits > 0);  // a checksum is taken of what has arrived
  CHECK_EQ(rig.counters().evicted, Bytes{5_MiB});
  last_host_copy().load()[100] ^= 1;  // of the newest
  CHECK_EQ(rig.runtime->unpack(bad.record, bad.offset, s).status, Status::corrupted);
  CHECK(rig.runtime->history(bad.record).find("evicted 1 times") != std::string::npos);
  rig.runtime->drop_handle(bad.record);
  rig.back(good, s);
  rig.verify_empty();
}

TEST("with checksums, a step under pressure restores every byte, whatever the schedule") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CoreRig rig({.seed = seed});
    rig.runtime->set_debug({false, false, true});
    rig.budget(12_MiB, 8_MiB);
    there_and_back(rig, 3_MiB);
    rig.verify_empty();
  }
}

}  // namespace
}  // namespace stagehand::core::test
STAGEHAND_TEST_MAIN()
