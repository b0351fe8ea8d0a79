// PoolRoute: whose requests a MemPool serves, and when it ends. torch is a table of the test's own.
#include <set>
#include <thread>

#include "core/pool_route.hpp"
#include "native/promise_rig.hpp"

namespace stagehand::core::test {
namespace {

constexpr TorchPool kFirst{0, 5};
constexpr TorchPool kSecond{0, 6};

// What torch was told. A backward is what the test says it is.
struct Told {
  bool on = false;
  TorchPool pool{};
  std::thread::id inside;
  std::set<std::thread::id> joined;
  int kept = 0;       // pools kept that were not let go
  int backwards = 0;  // whose end is to be told
  bool in_capture = false;
  bool waits = false;  // at the end
};
Told g_told;
thread_local bool t_backward = false;

TorchSide routing(TorchSide side = {}) {
  side.route = [](int, const std::uint64_t pool[2], bool backward) {
    if (g_told.in_capture || (backward && !t_backward)) {
      return false;
    }
    const TorchPool wanted{pool[0], pool[1]};
    CHECK(!g_told.on || g_told.pool == wanted);
    g_told.on = true;
    g_told.pool = wanted;
    if (backward) {
      g_told.joined.insert(std::this_thread::get_id());
      ++g_told.backwards;
    } else {
      g_told.inside = std::this_thread::get_id();
    }
    return true;
  };
  side.leave_route = [](int) { g_told.inside = {}; };
  side.end_route = [](int) {
    CHECK(g_told.on);
    g_told.on = false;
    g_told.inside = {};
    g_told.joined.clear();
    return g_told.waits;
  };
  side.keep_pool = [](int, const std::uint64_t*) {
    ++g_told.kept;
    return true;
  };
  side.let_pool_go = [](int, const std::uint64_t*) {
    CHECK(!g_told.on);
    --g_told.kept;
  };
  side.routed = [](int) {
    const std::thread::id here = std::this_thread::get_id();
    return g_told.on && (g_told.inside == here || (t_backward && g_told.joined.contains(here)));
  };
  side.in_backward = [] { return t_backward; };
  return side;
}

const TorchSide& side() {
  static const TorchSide made = routing();
  g_told = {};
  return made;
}

// On a thread of its own, as autograd's are.
template <class F>
void elsewhere(F&& body) {
  std::thread(std::forward<F>(body)).join();
}

// What the unpack hook and the end of a handle do (entry/torch_side.cpp).
void unpack(PoolRoute& route) {
  if (route.to_join()) {
    route.join();
  }
}
void handle_ends(PoolRoute& route) {
  if (route.to_settle()) {
    route.settle();
  }
}

struct Backward {
  Backward() { t_backward = true; }
  ~Backward() { t_backward = false; }
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
};

TEST("inside a pool its thread is served, another one is not, and nobody once it is left") {
  PoolRoute route(side(), 0);
  CHECK(!route.here());
  route.set_needed(true);
  route.enter(kFirst);
  CHECK(route.here() && route.on());
  elsewhere([&] { CHECK(!route.here()); });
  route.leave();
  CHECK(!route.here() && !route.on() && !g_told.on);
}

TEST("a thread is served from its first unpack in a backward until that has ended") {
  PoolRoute route(side(), 0);
  route.set_needed(true);
  route.enter(kFirst);
  route.leave();
  elsewhere([&] {
    const Backward backward;
    CHECK(!route.here());
    unpack(route);
    CHECK(route.here() && route.on());
    unpack(route);
    CHECK_EQ(g_told.backwards, 1);
    elsewhere([&] {
      const Backward of_others;
      CHECK(!route.here());
    });
    route.set_needed(false);  // the last record is gone, and nodes without any follow
    handle_ends(route);
    CHECK(route.here());
  });
  route.backward_ended();
  CHECK(!route.on() && !g_told.on);
  CHECK_EQ(g_told.kept, 0);
}

TEST("an unpack outside of a backward, as of a look at saved tensors, changes nothing") {
  PoolRoute route(side(), 0);
  route.set_needed(true);
  route.enter(kFirst);
  route.leave();
  unpack(route);
  CHECK(!route.on() && !g_told.on);
}

TEST("a graph that is kept without a backward keeps its pool, and nobody is served") {
  PoolRoute route(side(), 0);
  route.set_needed(true);
  route.enter(kFirst);
  route.leave();
  handle_ends(route);  // one of several
  CHECK(!g_told.on);
  CHECK_EQ(g_told.kept, 1);
  route.set_needed(false);
  handle_ends(route);
  CHECK_EQ(g_told.kept, 0);
}

TEST("an evaluation pass leaves nothing behind") {
  PoolRoute route(side(), 0);
  for (int pass = 0; pass < 3; ++pass) {
    route.set_needed(true);
    route.enter(kFirst);
    CHECK(route.here());
    route.set_needed(false);
    route.leave();
    handle_ends(route);
    CHECK(!g_told.on);
    CHECK_EQ(g_told.kept, 0);
  }
}

TEST("a backward that failed is over once its last record is gone") {
  PoolRoute route(side(), 0);
  route.set_needed(true);
  route.enter(kFirst);
  route.leave();
  elsewhere([&] {
    const Backward backward;
    unpack(route);
  });
  handle_ends(route);
  CHECK(g_told.on);
  route.set_needed(false);
  handle_ends(route);
  CHECK(!g_told.on && !route.on());
  CHECK_EQ(g_told.kept, 0);
}

TEST("inside a pool the end of a backward ends nothing, and leaving ends all") {
  PoolRoute route(side(), 0);
  route.set_needed(true);
  route.enter(kFirst);
  elsewhere([&] {
    const Backward backward;
    unpack(route);
    CHECK(route.here());
  });
  route.backward_ended();
  CHECK(route.here());
  route.leave();
  CHECK(!g_told.on);
}

TEST("a backward goes on in the MemPool while its pool is left, and where it is entered again") {
  PoolRoute route(side(), 0);
  route.set_needed(true);
  route.enter(kFirst);
  elsewhere([&] {
    const Backward backward;
    unpack(route);
    elsewhere([&] { route.leave(); });
    CHECK(route.here());
    elsewhere([&] {
      route.enter(kFirst);
      CHECK(route.here());
    });
    CHECK(route.here());
  });
  CHECK_EQ(g_told.kept, 1);
}

TEST("of two backwards the first to end ends both, and the next unpack goes on") {
  PoolRoute route(side(), 0);
  route.set_needed(true);
  route.enter(kFirst);
  route.leave();
  elsewhere([&] {
    const Backward backward;
    unpack(route);
    route.backward_ended();  // another one's
    CHECK(!route.here());
    unpack(route);
    CHECK(route.here());
  });
}

TEST("a pool that is entered in a capture serves nobody, and can be left") {
  PoolRoute route(side(), 0);
  route.set_needed(true);
  g_told.in_capture = true;
  route.enter(kFirst);
  CHECK(!route.here() && !route.on());
  route.leave();
  CHECK(!g_told.on);
}

TEST("another MemPool takes the place of the one before, whose backward goes on without") {
  PoolRoute route(side(), 0);
  route.set_needed(true);
  route.enter(kFirst);
  route.leave();
  elsewhere([&] {
    const Backward backward;
    unpack(route);
    elsewhere([&] { route.enter(kSecond); });
    CHECK(!route.here());
    CHECK(g_told.pool == kSecond);
    CHECK_EQ(g_told.kept, 1);
  });
}

TEST("an end that waited for the GPU is counted once") {
  PoolRoute route(side(), 0);
  g_told.waits = true;
  route.set_needed(true);
  route.enter(kFirst);
  route.leave();
  CHECK_EQ(route.take_waits(), 1U);
  CHECK_EQ(route.take_waits(), 0U);
}

TEST("where torch cannot be told, the thread inside is known all the same") {
  static const TorchSide none;
  PoolRoute route(none, 0);
  route.enter(kFirst);
  CHECK(route.here() && route.on());
  elsewhere([&] { CHECK(!route.here()); });
  {
    const Backward backward;
    CHECK(!route.to_join() && !route.to_settle());
  }
  route.leave();
  CHECK(!route.here() && !route.on());
}

// With the engine.

// Fourteen blocks of which half have to leave; made, saved and dropped inside, then back.
class Trained {
 public:
  static constexpr int kBlocks = 14;

  Trained() : rig_(routed()) { rig_.torch.use_segments(kFirst); }
  ~Trained() {
    rig_.torch.destroy_pool(kFirst);
    rig_.verify();
  }
  Trained(const Trained&) = delete;
  Trained& operator=(const Trained&) = delete;

  void begin(Bytes high) {
    rig_.runtime->set_budget({high, high / 2, kUnlimited, true});
    rig_.runtime->set_torch_pool(kFirst);
  }
  void forward() {
    for (int i = 0; i < kBlocks; ++i) {
      Storage* storage = make(kFirst, kHeldBlock);
      CHECK_EQ(stagehand_sim_fill(s_, storage->address, kHeldBlock, i), 0);
      saved_.push_back(rig_.save(storage, s_));
      rig_.torch.drop(storage);
    }
    rig_.runtime->set_torch_pool(kDefaultPool);
    rig_.runtime->clear_budget();
  }
  void backward() {
    const Backward backward;
    for (int i = kBlocks; !saved_.empty(); saved_.pop_back()) {
      unpack(*rig_.runtime->route());
      const Unpacked again = rig_.runtime->unpack(saved_.back().record, saved_.back().offset, s_);
      CHECK_EQ(again.status, Status::ok);
      CHECK_EQ(stagehand_sim_check(s_, again.address, kHeldBlock, --i), 0);
      rig_.runtime->drop_alias(again.block);
      rig_.runtime->drop_handle(saved_.back().record);
      rig_.runtime->drop_orphans();
    }
    rig_.runtime->route()->backward_ended();
    CHECK(!g_told.on);
    CHECK_EQ(g_told.kept, 0);
  }
  void step(Bytes high) {
    begin(high);
    forward();
    backward();
  }
  Storage* make(TorchPool pool, Bytes bytes) {
    FakeTorch::use_pool(pool);
    Storage* storage = rig_.torch.make(bytes, s_);
    FakeTorch::use_pool(kDefaultPool);
    CHECK(storage != nullptr);
    return storage;
  }
  SideRig& rig() { return rig_; }

 private:
  // torch's memory for records that come back is that of the thread.
  static const TorchSide& routed() {
    static TorchSide side;
    side = routing(FakeTorch::side(true));
    g_told = {};
    side.make = [](int device, Bytes bytes, driver::Stream stream, bool quiet, HeldStorage* held) {
      FakeTorch::use_pool(side.routed(device) ? g_told.pool : kDefaultPool);
      const bool made = FakeTorch::side(true).make(device, bytes, stream, quiet, held);
      FakeTorch::use_pool(kDefaultPool);
      return made;
    };
    return side;
  }

  SideRig rig_;
  driver::Stream s_ = rig_.stream();
  std::vector<Saved> saved_;
};

TEST("what backward asks for comes from the holes that forward has left in the MemPool") {
  Trained trained;
  for (int step = 0; step < 3; ++step) {
    trained.step(40_MiB);
  }
  CHECK(trained.rig().runtime->counters().evicted_bytes > 0);
  CHECK(trained.rig().torch.reserved_peak() <= 40_MiB);
}

TEST("where something had to leave, what is free beside the MemPool goes back before a step") {
  for (const bool tight : {false, true}) {
    Trained trained;
    const Bytes high = tight ? 40_MiB : 200_MiB;
    trained.step(high);
    FakeTorch& torch = trained.rig().torch;
    const Bytes inside = torch.reserved();
    torch.drop(trained.make(kDefaultPool, 24_MiB));  // by the optimizer
    CHECK_EQ(torch.reserved(), inside + 24_MiB);
    trained.begin(2 * high);
    CHECK_EQ(torch.reserved(), tight ? inside : inside + 24_MiB);
    trained.forward();
    trained.backward();
  }
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
