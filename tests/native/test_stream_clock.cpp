// Ticks, fences and device-side waits: core/stream_clock.
#include <utility>

#include "core/stream_clock.hpp"
#include "native/core_rig.hpp"

namespace stagehand::core {
namespace {

constexpr auto kWait = "cuStreamWaitEvent";
constexpr auto kRecord = "cuEventRecord";

// Two streams of a fresh simulated GPU and their clocks.
struct Clocks {
  explicit Clocks(std::uint64_t seed = 1) : rig({.seed = seed}) {
    stagehand_sim_progress(0);  // nothing runs unless the test says so
  }
  static std::uint64_t calls(const char* symbol) { return stagehand_sim_call_count(symbol); }

  test::CoreRig rig;
  Gate gate{rig.driver};
  ClockBank bank{gate};
  driver::Stream first = rig.stream();
  driver::Stream second = rig.stream();
  StreamClock& a = bank.of(first);
  StreamClock& b = bank.of(second);
};

TEST("a stream has one clock, found again") {
  Clocks clocks;
  CHECK(&clocks.bank.of(clocks.first) == &clocks.a);
  CHECK(&clocks.bank.of(clocks.second) == &clocks.b);
  CHECK(clocks.a.index() != clocks.b.index());
  CHECK_EQ(clocks.bank.size(), 2);
}

TEST("S7: a stream waits for its own tick without an event and without a wait") {
  Clocks clocks;
  CHECK_EQ(clocks.bank.order_after(clocks.a, clocks.a.now()), Status::ok);
  CHECK_EQ(Clocks::calls(kRecord), 0);
  CHECK_EQ(Clocks::calls(kWait), 0);
}

TEST("ordering after a tick not yet recorded records one event and queues one wait") {
  Clocks clocks;
  CHECK_EQ(clocks.bank.order_after(clocks.b, clocks.a.now()), Status::ok);
  CHECK_EQ(Clocks::calls(kRecord), 1);
  CHECK_EQ(Clocks::calls(kWait), 1);
}

TEST("a wait that an earlier one covers is not queued again") {
  Clocks clocks;
  Tick early;
  Tick late;
  clocks.a.record(&early);
  clocks.a.record(&late);
  clocks.bank.order_after(clocks.b, late);
  clocks.bank.order_after(clocks.b, late);
  clocks.bank.order_after(clocks.b, early);
  CHECK_EQ(Clocks::calls(kWait), 1);
  CHECK_EQ(clocks.b.waited(clocks.a.index()), late.seq);
  clocks.bank.order_after(clocks.b, clocks.a.now());
  CHECK_EQ(Clocks::calls(kWait), 2);
}

TEST("a device-side wait orders the work behind it, and the host does not wait") {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Clocks clocks(seed);
    const Address block = clocks.rig.allocate(64_KiB, clocks.first);
    stagehand_sim_fill(clocks.first, block, 64_KiB, seed);
    CHECK_EQ(clocks.bank.order_after(clocks.b, clocks.a.now()), Status::ok);
    stagehand_sim_check(clocks.second, block, 64_KiB, seed);
    CHECK_EQ(stagehand_sim_host_waits(), 0);
    clocks.rig.verify();
  }
}

TEST("a tick has passed once its work is done, and not before") {
  Clocks clocks;
  const Address block = clocks.rig.allocate(64_KiB, clocks.first);
  stagehand_sim_fill(clocks.first, block, 64_KiB, 1);
  Tick tick;
  clocks.a.record(&tick);
  CHECK(!clocks.a.passed(tick.seq));
  CHECK(!clocks.a.passed(clocks.a.upcoming()));
  stagehand_sim_drain();
  CHECK(clocks.a.passed(tick.seq));
  CHECK(!clocks.a.passed(clocks.a.upcoming()));  // no event tells of work after the last one
}

TEST("one answer that a tick has not passed stands for all later ticks, until the next call") {
  Clocks clocks;
  const Address block = clocks.rig.allocate(64_KiB, clocks.first);
  stagehand_sim_fill(clocks.first, block, 64_KiB, 1);
  Tick first;
  Tick second;
  clocks.a.record(&first);
  clocks.a.record(&second);
  const auto asked = [] { return Clocks::calls("cuEventQuery"); };
  const std::uint64_t before = asked();
  for (std::uint64_t call = 1; call <= 2; ++call) {
    const Entry entry(clocks.gate);
    CHECK(!clocks.a.passed(first.seq));
    CHECK(!clocks.a.passed(first.seq));
    CHECK(!clocks.a.passed(second.seq));
    CHECK_EQ(asked() - before, call);
  }
}

TEST("a passed tick is not asked about again") {
  Clocks clocks;
  Tick tick;
  clocks.a.record(&tick);
  stagehand_sim_drain();
  CHECK(clocks.a.passed(tick.seq));
  const std::uint64_t asked = Clocks::calls("cuEventQuery");
  CHECK(clocks.a.passed(tick.seq));
  CHECK_EQ(Clocks::calls("cuEventQuery"), asked);
}

TEST("a fence is settled when each tick was waited for, passed, or is the stream's own") {
  Clocks clocks;
  Tick tick;
  stagehand_sim_kernel(clocks.first, 1000, nullptr, 0, nullptr, 0, nullptr, nullptr);
  clocks.a.record(&tick);
  Fence fence;
  CHECK(clocks.bank.settled(clocks.b, fence));
  fence.add(tick);
  fence.add(clocks.b.now());
  CHECK(clocks.bank.settled(clocks.a, fence) == false);  // b's tick is recorded nowhere yet
  CHECK(!clocks.bank.settled(clocks.b, fence));
  clocks.bank.order_after(clocks.b, fence);
  CHECK(clocks.bank.settled(clocks.b, fence));
}

TEST("a fence keeps the latest tick of each clock, and says when it is full") {
  Fence fence;
  for (std::uint32_t clock = 0; clock < Fence::kCapacity; ++clock) {
    CHECK(fence.add({clock, 5}));
  }
  CHECK(fence.add({0, 9}));
  CHECK(fence.add({0, 2}));
  CHECK_EQ(fence.begin()->seq, 9);
  CHECK(!fence.add({77, 1}));
  fence.clear();
  CHECK(fence.empty());
  CHECK(fence.add({77, 1}));
}

TEST("past 512 events an old tick is answered by a later event, never by an earlier one") {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    Clocks clocks(seed);
    const Address block = clocks.rig.allocate(64_KiB, clocks.first);
    stagehand_sim_fill(clocks.first, block, 64_KiB, seed);
    Tick old;
    clocks.a.record(&old);
    Tick newest;
    for (int i = 0; i < 1500; ++i) {
      clocks.a.record(&newest);
    }
    CHECK(!clocks.a.passed(old.seq));
    CHECK_EQ(clocks.bank.order_after(clocks.b, old), Status::ok);
    CHECK(clocks.b.waited(clocks.a.index()) >= old.seq);
    stagehand_sim_check(clocks.second, block, 64_KiB, seed);
    clocks.rig.verify();
    CHECK(clocks.a.passed(old.seq));
    CHECK(clocks.a.passed(newest.seq));
  }
}

TEST("the ring makes 2048 events and then records them again") {
  Clocks clocks;
  const std::uint64_t before = Clocks::calls("cuEventCreate");
  Tick tick;
  for (int i = 0; i < 5000; ++i) {
    clocks.a.record(&tick);
  }
  CHECK_EQ(Clocks::calls("cuEventCreate") - before, 2048);
  CHECK_EQ(tick.seq, 5000);
}

TEST("what a stream has passed leaves its events to any clock, and is still known to be past") {
  Clocks clocks;
  const std::uint64_t before = Clocks::calls("cuEventCreate");
  for (int round = 0; round < 4; ++round) {
    StreamClock& clock = round % 2 == 0 ? clocks.a : clocks.b;
    Tick first;
    Tick last;
    clock.record(&first);
    for (int i = 0; i < 100; ++i) {
      clock.record(&last);
    }
    stagehand_sim_drain();
    CHECK(clock.passed(last.seq));
    clock.record(&last);  // which has those before it given up
    CHECK(clock.passed(first.seq));
    CHECK(!clock.passed(last.seq));
    CHECK_EQ(clocks.bank.order_after(round % 2 == 0 ? clocks.b : clocks.a, last), Status::ok);
  }
  CHECK(Clocks::calls("cuEventCreate") - before <= 105);
  clocks.rig.verify();
}

TEST("what a step needs was made as the first pool was entered; what comes on top is counted") {
  Clocks clocks;
  clocks.bank.events.fill();
  const std::uint64_t before = Clocks::calls("cuEventCreate");
  clocks.bank.events.fill();
  Tick tick;
  for (int i = 0; i < 1536; ++i) {
    clocks.a.record(&tick);
    clocks.b.record(&tick);
  }
  CHECK_EQ(Clocks::calls("cuEventCreate"), before);
  CHECK_EQ(clocks.bank.events.late(), 0);
  clocks.a.record(&tick);
  CHECK_EQ(clocks.bank.events.late(), 1);
}

TEST("a step begins with events to spare where the host is ahead of the GPU by whole steps") {
  Clocks clocks;
  Tick tick;
  for (int step = 0; step < 12; ++step) {  // the GPU comes to nothing
    clocks.bank.events.fill();
    for (int i = 0; i < 700; ++i) {
      clocks.a.record(&tick);
    }
  }
  CHECK_EQ(clocks.bank.events.late(), 0);
}

TEST("a step that needs more events than were made has more before the next one, up to a limit") {
  Clocks clocks;
  clocks.bank.events.fill();
  Tick tick;
  const auto step = [&] {  // the GPU comes to nothing while it is queued
    for (int i = 0; i < 2000; ++i) {
      clocks.a.record(&tick);
      clocks.b.record(&tick);
    }
  };
  step();
  const std::uint64_t late = clocks.bank.events.late();
  CHECK(late > 0);
  clocks.bank.events.fill();
  step();
  CHECK_EQ(clocks.bank.events.late(), late);
  const std::uint64_t before = Clocks::calls("cuEventCreate");
  clocks.bank.events.fill();  // nothing was late, and a quarter is to spare
  CHECK_EQ(Clocks::calls("cuEventCreate"), before);
  for (std::uint64_t i = 1; i <= 40; ++i) {
    while (clocks.bank.events.late() < late + 1000 * i) {
      clocks.bank.events.take(SpareEvents::Kind::order);
    }
    clocks.bank.events.fill();
  }
  const std::uint64_t made = Clocks::calls("cuEventCreate") - before;
  CHECK(made < clocks.bank.events.late() - late + 8 * 3072);
  CHECK(made > clocks.bank.events.late() - late + 4 * 3072);
}

TEST("one event that was lacking is made up for by what is to spare, not by as many again") {
  Clocks clocks;
  clocks.bank.events.fill();
  while (clocks.bank.events.late() == 0) {
    clocks.bank.events.take(SpareEvents::Kind::order);
  }
  const std::uint64_t before = Clocks::calls("cuEventCreate");
  clocks.bank.events.fill();
  CHECK_EQ(Clocks::calls("cuEventCreate"), before + 3072 / 4);
}

TEST("where none is left, what has passed is looked for before another is made") {
  Clocks clocks;
  clocks.bank.events.fill();
  Tick tick;
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 1000; ++i) {
      clocks.a.record(&tick);  // and nobody asks how far the stream is
    }
    stagehand_sim_drain();
    for (int i = 0; i < 1000; ++i) {
      clocks.b.record(&tick);
    }
    stagehand_sim_drain();
  }
  CHECK_EQ(clocks.bank.events.late(), 0);
}

TEST("O4: an event that cannot be made or recorded is no tick, and the next one is whole") {
  Clocks clocks;
  for (const char* symbol : {"cuEventCreate", kRecord}) {
    const Seq upcoming = clocks.a.upcoming();
    stagehand_sim_fail(symbol, 1, 1, 999);
    Tick tick;
    CHECK_EQ(clocks.a.record(&tick), Status::driver_failed);
    CHECK_EQ(clocks.a.upcoming(), upcoming);
    CHECK(!clocks.a.passed(upcoming));
    CHECK_EQ(clocks.a.record(&tick), Status::ok);
    CHECK_EQ(tick.seq, upcoming);
  }
}

TEST("a stream whose events cannot be recorded takes none from the others") {
  Clocks clocks;
  clocks.bank.events.fill();
  const std::uint64_t destroyed = Clocks::calls("cuEventDestroy");
  stagehand_sim_fail(kRecord, 1, 3000, 2);
  Tick tick;
  for (int i = 0; i < 3000; ++i) {
    CHECK_EQ(clocks.a.record(&tick), Status::driver_failed);
  }
  for (int i = 0; i < 1000; ++i) {
    CHECK_EQ(clocks.b.record(&tick), Status::ok);
  }
  CHECK_EQ(clocks.bank.events.late(), 0);
  CHECK_EQ(Clocks::calls("cuEventDestroy"), destroyed);  // somebody may wait for one
}

TEST("an event that has not passed serves no other stream") {
  Clocks clocks;
  Tick tick;
  clocks.a.record(&tick);
  driver::Event event = nullptr;
  Seq actual = 0;
  CHECK_EQ(clocks.a.event_for(tick.seq, &event, &actual), Status::ok);
  for (int i = 0; i < 2048; ++i) {
    clocks.a.mark();  // its slot goes to another number
  }
  clocks.b.record(&tick);
  driver::Event other = nullptr;
  CHECK_EQ(clocks.b.event_for(tick.seq, &other, &actual), Status::ok);
  CHECK(other != event);
  stagehand_sim_drain();
}

TEST("a clock that serves a stream of another context records events of that one") {
  test::CoreRig rig({.devices = 3});
  stagehand_sim_progress(0);
  Gate gate{rig.driver};
  ClockBank bank{gate};
  std::array<driver::Context, 2> contexts{};
  std::array<driver::Stream, 2> streams{};
  for (int i = 0; i < 2; ++i) {
    rig.driver.primary_ctx_retain(&contexts[i], i + 1);
    rig.driver.ctx_push_current(contexts[i]);
    streams[i] = rig.stream();
    driver::Context popped = nullptr;
    rig.driver.ctx_pop_current(&popped);
  }
  StreamClock& clock = bank.of(streams[0], contexts[0]);
  Tick tick;
  for (int i = 0; i < 10; ++i) {
    CHECK_EQ(clock.record(&tick), Status::ok);
  }
  stagehand_sim_drain();
  while (bank.size() < 16) {
    bank.hold(bank.of(rig.stream()));
  }
  CHECK(&bank.of(streams[1], contexts[1]) == &clock);
  for (int i = 0; i < 12; ++i) {
    CHECK_EQ(clock.record(&tick), Status::ok);
  }
  stagehand_sim_drain();
}

TEST("an event that another thread's capture has taken is no tick, and is not asked about") {
  test::CoreRig rig;
  static decltype(driver::Table::event_record) record;
  driver::Table table = rig.driver;
  record = std::exchange(table.event_record, [](driver::Event event, driver::Stream stream) {
    stagehand_sim_capture(stream, 1);
    return record(event, stream);
  });
  Gate gate{table};
  ClockBank bank{gate};
  bank.capture(1);
  StreamClock& clock = bank.of(rig.stream());
  const Seq upcoming = clock.upcoming();
  Tick tick;
  CHECK_EQ(clock.record(&tick), Status::driver_failed);
  CHECK_EQ(clock.upcoming(), upcoming);
  CHECK(!clock.passed(upcoming));
  stagehand_sim_capture(clock.stream(), 0);
  stagehand_sim_drain();
  CHECK(!clock.passed(upcoming));
  CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_CAPTURE), 0);
}

TEST("O4: a wait that the driver refuses is not remembered as queued") {
  Clocks clocks;
  Tick tick;
  clocks.a.record(&tick);
  stagehand_sim_fail(kWait, 1, 1, 999);
  CHECK_EQ(clocks.bank.order_after(clocks.b, tick), Status::driver_failed);
  CHECK_EQ(clocks.b.waited(clocks.a.index()), 0);
  CHECK_EQ(clocks.bank.order_after(clocks.b, tick), Status::ok);
  CHECK_EQ(Clocks::calls(kWait), 2);
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
