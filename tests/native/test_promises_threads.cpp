// Promises about what two threads do at once, each interleaving drawn out so that it comes.
#include <atomic>
#include <future>

#include "native/promise_rig.hpp"

namespace stagehand::core::test {
namespace {

// Which of a test's threads this is; 0: none that a script knows.
thread_local int t_who = 0;

// On a thread of its own, with device 0 current.
template <typename Body>
std::future<void> start(CoreRig& rig, int who, Body body) {
  return std::async(std::launch::async, [&rig, who, body] {
    t_who = who;
    on_device(rig, 0, body);
  });
}

bool ends(std::future<void>& thread) {
  return thread.wait_for(kPatience) == std::future_status::ready;
}

// --- Graphs

Stages* g_graphs = nullptr;
enum Graph { second_waits = 1, first_is_done = 2 };

TEST("a graph that one thread releases is not unmapped by another before the GPU has passed it") {
  Stages stages;
  g_graphs = &stages;
  Machine machine{.memory = 64_MiB};
  machine.patch = [](driver::Table& table) {
    static decltype(table.ctx_synchronize) real;
    real = table.ctx_synchronize;
    table.ctx_synchronize = [] {
      if (t_who == 2) {  // has yet to wait for the GPU
        g_graphs->reach(second_waits);
        g_graphs->await(first_is_done);
      }
      return real();
    };
  };
  CoreRig rig(machine);
  const driver::Stream s = rig.stream();
  const driver::Stream t = rig.stream();
  CHECK(rig.runtime->free(rig.allocate(4_MiB, s, 1)));
  const Tensor two{rig.allocate(4_MiB, t, 2), 4_MiB, t, 9};
  std::future<void> other;
  interludes().ctx_synchronize = [&] {  // the first has waited; its lock is not back yet
    rig.fill(two, t);                   // the second replays its graph,
    CHECK(rig.runtime->free(two.address));
    other = start(rig, 2, [&] { rig.runtime->release_graph(2); });  // and drops it
    CHECK(stages.await(second_waits));
  };
  rig.runtime->release_graph(1);
  CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_FREE_IN_USE), 0);
  stages.reach(first_is_done);
  CHECK(other.valid() && ends(other));
  CHECK_EQ(rig.counters().mapped, 0);
  rig.verify();
}

// --- Pinned memory

std::atomic<bool> g_held{false};
std::atomic<int> g_registering{0};

TEST("pinned memory given back beside an allocation that waits for some does not hang it") {
  g_held = true;
  g_registering = 0;
  Machine machine{.classes = {{1_MiB, 4_MiB}, {1, 0}}, .host_limit = 16_MiB, .ahead = true};
  machine.patch = [](driver::Table& table) {
    static decltype(table.host_register) real;
    real = table.host_register;
    table.host_register = [](void* host, std::size_t bytes, unsigned flags) {
      ++g_registering;
      g_held.wait(true);
      return real(host, bytes, flags);
    };
  };
  CoreRig rig(machine);
  const driver::Stream s = rig.stream();
  rig.budget(8_MiB, 8_MiB, 8_MiB);
  CHECK(eventually([] { return g_registering > 0; }));
  const Held held = rig.retain(4_MiB, s);
  std::future<void> other = start(rig, 1, [&] { rig.drop(rig.make(8_MiB, s)); });
  CHECK(eventually([&] { return rig.counters().host_waits > 0; }));
  rig.runtime->release_pinned(0);
  g_held = false;
  g_held.notify_all();
  CHECK(ends(other));
  // Wakes whoever pins, where it sleeps for good.
  rig.runtime->configure_pinned({{1_MiB, 4_MiB}, {1, 0}}, 16_MiB, {false, -1});
  CHECK(ends(other));
  rig.back(held, s);
  rig.verify_empty();
}

// --- torch's memory fraction

Stages* g_limits = nullptr;
enum Limit { first_asks = 1, second_asks = 2, first_has_set = 3, second_is_through = 4 };

TEST("torch's memory fraction of before comes back where two threads set a limit at once") {
  static const TorchSide real = FakeTorch::side(true);
  TorchSide side = real;
  side.fraction = [](int device) {
    if (t_who == 1) {
      g_limits->reach(first_asks);
      g_limits->await(second_asks);
    } else if (t_who == 2) {
      g_limits->reach(second_asks);
      g_limits->await(first_has_set);
    }
    return real.fraction(device);
  };
  side.set_fraction = [](int device, double share) {
    if (t_who == 2) {
      g_limits->reach(second_is_through);
    }
    real.set_fraction(device, share);
    if (t_who == 1) {
      g_limits->reach(first_has_set);
      g_limits->await(second_is_through);
    }
  };
  static const TorchSide kept = side;  // as long as the process
  Stages stages;
  g_limits = &stages;
  SideRig rig(kept);
  CHECK_EQ(rig.torch.fraction.load(), 1.0);
  std::future<void> first = start(rig, 1, [&] {
    rig.runtime->set_budget({64_MiB, 64_MiB, 128_MiB, true});
    stages.reach(first_has_set);
  });
  std::future<void> second = start(rig, 2, [&] {
    stages.await(first_asks);
    rig.runtime->drop_handle({77, 77});  // any call at all that ends
    stages.reach(second_is_through);
  });
  CHECK(ends(first));
  CHECK(ends(second));
  CHECK(rig.torch.fraction.load() < 0.6);
  rig.runtime->clear_budget();
  CHECK(rig.torch.fraction.load() > 0.99);
  rig.verify();
}

// --- The GIL

std::atomic<int> g_shared_drops{0};
std::atomic<bool> g_in_miss{false};

TEST("what a miss drops is referred to by nobody else: it has no GIL") {
  static const TorchSide real = FakeTorch::side(true);
  static TorchSide side = real;
  side.drop = [](void* storage) {
    g_shared_drops += g_in_miss && static_cast<Storage*>(storage)->references > 1 ? 1 : 0;
    real.drop(storage);
  };
  g_shared_drops = 0;
  SideRig rig(side);
  const driver::Stream s = rig.stream();
  const driver::Stream other = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  Storage* storage = rig.torch.make(kHeldBlock, s);
  const Saved saved = rig.save(storage, s);
  rig.torch.drop(storage);
  Storage* tiny = rig.torch.make(512, s);
  rig.runtime->set_debug({true, false});
  const Saved small = rig.save(tiny, s);  // evicts the other
  rig.runtime->set_debug({});
  rig.torch.drop(tiny);
  CHECK(!rig.runtime->resident(saved.record));
  // backward asks on another stream, and the user keeps the tensor
  const Unpacked again = rig.runtime->unpack(saved.record, saved.offset, other);
  CHECK_EQ(again.status, Status::ok);
  auto* back = static_cast<Storage*>(again.storage);
  FakeTorch::hold(back);
  rig.runtime->drop_alias(again.block);
  // the block's stream is captured while the graph is dropped
  int mode = driver::kCaptureModeRelaxed;
  rig.driver.thread_exchange_capture_mode(&mode);
  stagehand_sim_capture(s, 1);
  rig.runtime->drop_handle(saved.record);
  rig.runtime->drop_orphans();
  stagehand_sim_capture(s, 0);
  rig.driver.thread_exchange_capture_mode(&mode);
  g_in_miss = true;
  rig.runtime->missed(s, 4_MiB);  // any thread, under torch's mutex
  g_in_miss = false;
  CHECK_EQ(g_shared_drops.load(), 0);
  rig.runtime->drop_orphans();  // here is the GIL
  CHECK_EQ(back->references.load(), 1);
  rig.torch.drop(back);
  rig.runtime->drop_handle(small.record);
  rig.runtime->drop_orphans();
  rig.runtime->missed(s, 0);
  CHECK_EQ(rig.torch.storages(), 0);
  rig.verify();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
