// Promises about long runs: what comes and goes leaves nothing behind, of the driver's or the
// host's.
#include "native/heap_count.hpp"
#include "native/promise_rig.hpp"

namespace stagehand::core::test {
namespace {

std::int64_t events_alive() {
  return static_cast<std::int64_t>(stagehand_sim_call_count("cuEventCreate")) -
         static_cast<std::int64_t>(stagehand_sim_call_count("cuEventDestroy"));
}

// After the first so many, which may fill what is kept for use again, the others leave less than
// this each.
constexpr int kFirst = 3000;
constexpr int kThen = 2000;
constexpr std::int64_t kBytesEach = 8;
constexpr std::int64_t kFewEvents = 16;
// Of a stream that stays, so many events are kept for use again.
constexpr std::int64_t kRing = 2048;

void check_no_growth(std::int64_t events_more, const std::function<bool(int)>& body,
                     std::int64_t bytes_more = kThen * kBytesEach, int first = kFirst) {
  std::int64_t bytes = 0;
  std::int64_t events = 0;
  for (int i = 0; i < first + kThen; ++i) {
    if (i == first) {
      bytes = g_counted_bytes;
      events = events_alive();
    }
    if (!body(i)) {
      return;  // its own checks have said why
    }
  }
  CHECK(events_alive() - events <= events_more);
  CHECK(g_counted_bytes - bytes <= bytes_more);
}

Machine counted_machine() {
  Machine machine{.memory = 256_MiB, .classes = {{1_MiB}, {8}}};
  machine.patch = uncounted::wrap;
  return machine;
}

// A tensor saved and used on a stream, which is then destroyed by its owner. `told`: memory is
// trimmed before that, so that the engine has nothing left to ask of the stream.
void come_and_go(CoreRig& rig, bool told) {
  rig.budget(64_MiB, 64_MiB);
  // Untold, what is free stays with the streams' address ranges until memory runs short: up to so
  // many lists for the whole device, however many streams there were.
  const std::int64_t bytes_more = told ? kThen * kBytesEach : std::int64_t{2} << 20;
  check_no_growth(
      kFewEvents,
      [&](int) {
        const driver::Stream s = rig.stream();
        const Address address = rig.allocate(64_KiB, s);
        if (address == 0) {
          return false;
        }
        const Saved saved = rig.runtime->save(address, address, address + 64_KiB);
        CHECK(rig.runtime->free(address));
        const Unpacked again = rig.runtime->unpack(saved.record, saved.offset, s);
        rig.runtime->drop_alias(again.block);
        rig.runtime->drop_handle(saved.record);
        CHECK_EQ(rig.driver.stream_synchronize(s), 0);
        if (told) {
          rig.runtime->trim(0);
        }
        return rig.driver.stream_destroy(s) == 0;
      },
      bytes_more);
  CHECK_EQ(rig.counters().out_of_memory, 0);
}

// The same of a stream that another's memory is used on.
void use_and_go(CoreRig& rig, bool told) {
  rig.budget(64_MiB, 64_MiB);
  const driver::Stream home = rig.stream();
  check_no_growth(kFewEvents, [&](int) {
    const driver::Stream s = rig.stream();
    const Address address = rig.allocate(64_KiB, home);
    if (address == 0) {
      return false;
    }
    rig.runtime->record_stream(address, s);
    CHECK(rig.runtime->free(address));
    CHECK_EQ(rig.driver.stream_synchronize(s), 0);
    CHECK_EQ(rig.driver.stream_synchronize(home), 0);
    if (told) {
      rig.runtime->trim(0);
    }
    return rig.driver.stream_destroy(s) == 0;
  });
  CHECK_EQ(rig.counters().out_of_memory, 0);
}

TEST("streams that come, are trimmed and go leave no events and no host memory behind") {
  CoreRig rig(counted_machine());
  come_and_go(rig, true);
  rig.verify_empty();
}

TEST("streams that come and go keep no memory from those that come later") {
  CoreRig rig(counted_machine());
  come_and_go(rig, false);
  CHECK_EQ(rig.runtime->invariants_broken(), "");
}

TEST("streams that others' memory is used on come, are trimmed and go, and leave nothing behind") {
  CoreRig rig(counted_machine());
  use_and_go(rig, true);
  rig.verify_empty();
}

TEST("streams that others' memory is used on come and go, and keep none of it") {
  CoreRig rig(counted_machine());
  use_and_go(rig, false);
  CHECK_EQ(rig.runtime->invariants_broken(), "");
}

// torch keeps what it has cached for a stream; the engine's table of it is told when it goes.
TEST("streams that are made, used once and destroyed leave nothing behind in torch's modes") {
  HeldRig rig(counted_machine());
  rig.budget(64_MiB, 64_MiB);
  check_no_growth(kFewEvents, [&](int) -> bool {
    const driver::Stream s = rig.stream();
    rig.back(rig.retain(2_MiB, s), s);
    CHECK_EQ(rig.driver.stream_synchronize(s), 0);
    rig.torch.release_cached();
    return rig.driver.stream_destroy(s) == 0;
  });
  rig.verify_empty();
}

TEST("memory pools of torch's that come and go leave nothing behind") {
  HeldRig rig(counted_machine());
  rig.budget(64_MiB, 64_MiB);
  const driver::Stream s = rig.stream();
  check_no_growth(kFewEvents, [&](int i) -> bool {
    const TorchPool pool{0, static_cast<std::uint64_t>(i) + 1};
    rig.runtime->set_torch_pool(pool);
    FakeTorch::use_pool(pool);
    rig.back(rig.retain(2_MiB, s), s);
    FakeTorch::use_pool(kDefaultPool);
    rig.runtime->set_torch_pool(kDefaultPool);
    CHECK_EQ(rig.driver.stream_synchronize(s), 0);
    rig.torch.destroy_pool(pool);
    return true;
  });
  rig.verify_empty();
}

TEST("steps that are never the same twice leave no more behind than the traces that are kept") {
  CoreRig rig(counted_machine());
  const driver::Stream s = rig.stream();
  const auto step = [&](int i) -> bool {
    rig.budget(4_MiB, 4_MiB);
    std::vector<Held> held;
    for (int n = 0; n < 4; ++n) {
      const Bytes bytes = 512 * (1 + static_cast<Bytes>(i + n) % 3001);
      const Address address = rig.allocate(bytes, s);
      const Saved saved = rig.runtime->save(address, address, address + bytes);
      CHECK(rig.runtime->free(address));
      held.push_back({{address, bytes, s, 0}, saved.record, saved.offset});
    }
    rig.runtime->clear_budget();
    for (; !held.empty(); held.pop_back()) {
      const Unpacked again = rig.runtime->unpack(held.back().record, held.back().offset, s);
      rig.runtime->drop_alias(again.block);
      rig.runtime->drop_handle(held.back().record);
    }
    return rig.driver.stream_synchronize(s) == 0;
  };
  constexpr int kUntilFull = 5000;  // the lanes' events: a few in each step
  check_no_growth(4 * kRing, step, kThen * kBytesEach, kUntilFull);
  rig.verify_empty();
}

TEST("graphs that come and go leave nothing behind") {
  CoreRig rig(counted_machine());
  const driver::Stream s = rig.stream();
  check_no_growth(kFewEvents, [&](int i) -> bool {
    const auto graph = static_cast<std::uint64_t>(i) + 1;
    CHECK(rig.runtime->free(rig.allocate(64_KiB, s, graph)));
    rig.runtime->release_graph(graph);
    return true;
  });
  rig.verify_empty();
}

// --- The host has no memory for a moment

// Every allocation that a save makes fails once, each in a save of its own. What torch holds must
// be what the books name, whichever it was.
TEST("a save that the host has no memory for leaves the storage with whoever saved it") {
  constexpr int kMost = 64;
  int failures = 0;
  for (int at = 1; at <= kMost; ++at) {
    HeldRig rig(counted_machine());
    rig.budget(64_MiB, 64_MiB);
    const driver::Stream s = rig.stream();
    HeldTensor tensor = rig.make(2_MiB, s);
    FakeTorch::hold(tensor.storage);  // what the pack hook would give the engine
    const HeldStorage held{tensor.storage, tensor.storage, tensor.storage->address,
                           tensor.storage->bytes};
    const Address first = tensor.address();
    Saved saved;
    bool threw = false;
    t_fail_at = at;
    try {
      saved = rig.runtime->save_held(held, s, first, first, first + tensor.bytes);
    } catch (const std::bad_alloc&) {
      threw = true;
    }
    const bool failed = t_fail_at == 0;
    t_fail_at = 0;
    failures += failed ? 1 : 0;
    if (threw || !saved.took_reference) {
      rig.torch.drop(tensor.storage);  // as the hook does where it is not taken
      CHECK_EQ(tensor.storage->references.load(), 1);
    } else {
      CHECK_EQ(tensor.storage->references.load(), 2);
    }
    const std::string broken = rig.runtime->invariants_broken();
    CHECK_EQ(broken, "");
    if (!broken.empty()) {
      return;  // what comes after would be of a storage that is gone
    }
    rig.runtime->missed(s, 0);
    // It may be saved again, and comes back whole.
    const SavedTensor again = rig.save(tensor);
    rig.drop(tensor);
    if (saved.took_reference) {
      rig.runtime->drop_handle(saved.record);
    }
    rig.evict_all(s);
    rig.back(again, s);
    rig.verify_empty();
    if (!failed) {
      break;  // a save makes no more than that
    }
  }
  CHECK(failures < kMost);
}

// The n-th request of the host fails, for all n: of the plan, of the books, of the copies; for
// weights at home and away.
TEST("weights for which the host has no memory at their entry leave the books right") {
  constexpr int kMost = 60;
  int failures = 0;
  for (int at = 1; at < kMost; ++at) {
    CoreRig rig(counted_machine());
    const driver::Stream s = rig.stream();
    std::vector<std::byte> host(4_MiB);
    CHECK(rig.runtime->pin(host.data(), host.size()));
    const GroupId groups[] = {rig.runtime->add_weights(2_MiB, host.data()),
                              rig.runtime->add_weights(2_MiB, host.data() + 2_MiB)};
    rig.runtime->presume_weights(groups);
    Address address = 0;
    const auto enter = [&] {
      return rig.runtime->enter_weights(groups[0], UseKind::forward, s, &address);
    };
    rig.budget(64_MiB, 64_MiB);
    CHECK_EQ(enter(), Status::ok);  // from here on its memory is mapped
    rig.runtime->leave_weights(groups[0]);
    rig.runtime->clear_budget();
    if (at % 2 == 0) {
      rig.runtime->drop_weights();
    }
    rig.budget(64_MiB, 64_MiB);
    t_fail_at = (at + 1) / 2;
    bool held = false;
    try {
      held = enter() == Status::ok;
    } catch (const std::bad_alloc&) {
    }
    t_fail_at = 0;
    failures += held ? 0 : 1;
    CHECK_EQ(rig.runtime->invariants_broken(), "");
    if (held) {
      rig.runtime->leave_weights(groups[0]);
    }
    rig.runtime->clear_budget();
    for (const GroupId group : groups) {
      rig.runtime->remove_weights(group);
    }
    CHECK_EQ(rig.runtime->invariants_broken(), "");
    rig.driver.host_unregister(host.data());
  }
  CHECK(failures > 4);
}

TEST("what a timeline notes takes no memory of the host: whoever notes is in the middle of it") {
  CoreRig rig(counted_machine());
  rig.budget(64_MiB, 64_MiB);
  CHECK(rig.runtime->start_timeline());
  t_fail_at = 1;
  rig.runtime->clear_budget();
  CHECK_EQ(t_fail_at, 1);
  t_fail_at = 0;
  CHECK_EQ(rig.runtime->stop_timeline().notes.size(), 1);
}

TEST("a timeline that the host has no memory for does not begin") {
  CoreRig rig(counted_machine());
  for (int at = 1; at <= 3; ++at) {
    t_fail_at = at;
    CHECK(!rig.runtime->start_timeline());
    CHECK_EQ(t_fail_at, 0);
  }
  CHECK(rig.runtime->start_timeline());
}

TEST("a moment that the host has no memory for is in neither of a trace's curves") {
  for (int at = 1; at <= 2; ++at) {
    Trace trace;
    bool failed = false;
    t_fail_at = at;
    try {
      trace.begin_moment();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    t_fail_at = 0;
    CHECK(failed);
    CHECK_EQ(trace.full.size(), 1);
    CHECK_EQ(trace.held.size(), 1);
    trace.begin_moment();
    CHECK_EQ(trace.full.size(), trace.held.size());
  }
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
