// PoolRoute: whose requests a MemPool serves, and when it ends. torch is a table of the test's own.
#include <thread>

#include "core/pool_route.hpp"
#include "native/promise_rig.hpp"
#include "native/routed_torch.hpp"

namespace stagehand::core::test {
namespace {

constexpr TorchPool kFirst{0, 5};
constexpr TorchPool kSecond{0, 6};

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

// What the next node of a backward and the end of a handle do (entry/torch_side.cpp).
void next_node(PoolRoute& route) {
  if (route.to_join()) {
    route.join();
  }
}
void handle_ends(PoolRoute& route) {
  if (route.to_settle()) {
    route.settle();
  }
}

// A pool of which records are left.
void enter_and_leave(PoolRoute& route) {
  route.set_needed(true);
  route.enter(kFirst);
  route.leave();
}

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

TEST("a thread is served from the first node of its backward until that has ended") {
  PoolRoute route(side(), 0);
  enter_and_leave(route);
  elsewhere([&] {
    const Backward backward;
    CHECK(!route.here());
    next_node(route);
    CHECK(route.here() && route.on());
    next_node(route);
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

TEST("what runs outside of a backward, as a look at saved tensors does, changes nothing") {
  PoolRoute route(side(), 0);
  enter_and_leave(route);
  next_node(route);
  CHECK(!route.on() && !g_told.on);
}

TEST("a graph that is kept without a backward keeps its pool, and nobody is served") {
  PoolRoute route(side(), 0);
  enter_and_leave(route);
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
  enter_and_leave(route);
  elsewhere([&] {
    const Backward backward;
    next_node(route);
  });
  handle_ends(route);
  CHECK(g_told.on);
  route.set_needed(false);
  handle_ends(route);
  CHECK(!g_told.on && !route.on());
  CHECK_EQ(g_told.kept, 0);
}

// Autograd's thread may hold the last of them, in that backward still: nobody settles it there.
TEST("a backward that failed is over with the next one on its thread, which asks for its own end") {
  PoolRoute route(side(), 0);
  enter_and_leave(route);
  elsewhere([&] {
    {
      const Backward failed;
      next_node(route);
      route.set_needed(false);
      handle_ends(route);
    }
    CHECK(g_told.on);
    enter_and_leave(route);
    const Backward backward;
    next_node(route);
    CHECK_EQ(g_told.backwards, 2);
    route.set_needed(false);
    route.backward_ended();
  });
  CHECK(!g_told.on && !route.on());
  CHECK_EQ(g_told.kept, 0);
}

TEST("inside a pool the end of a backward ends nothing, and leaving ends all") {
  PoolRoute route(side(), 0);
  route.set_needed(true);
  route.enter(kFirst);
  elsewhere([&] {
    const Backward backward;
    next_node(route);
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
    next_node(route);
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

TEST("of two backwards the first to end ends both, and the next node goes on") {
  PoolRoute route(side(), 0);
  enter_and_leave(route);
  elsewhere([&] {
    const Backward backward;
    next_node(route);
    route.backward_ended();  // another one's
    CHECK(!route.here());
    next_node(route);
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
  enter_and_leave(route);
  elsewhere([&] {
    const Backward backward;
    next_node(route);
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
  void leave() {
    rig_.runtime->set_torch_pool(kDefaultPool);
    rig_.runtime->clear_budget();
  }
  // `last` is asked for, and dropped, when all is saved.
  void forward(Bytes last = 0) {
    for (int i = 0; i < kBlocks; ++i) {
      Storage* storage = make(kHeldBlock);
      CHECK_EQ(stagehand_sim_fill(s_, storage->address, kHeldBlock, i), 0);
      saved_.push_back(rig_.save(storage, s_));
      rig_.torch.drop(storage);
    }
    if (last > 0) {
      rig_.torch.drop(make(last));
      resident_ = 0;
      for (const Saved& one : saved_) {
        resident_ += rig_.runtime->resident(one.record) ? 1 : 0;
      }
    }
    leave();
  }
  void backward() {
    const Backward backward;
    for (int i = kBlocks; !saved_.empty(); saved_.pop_back()) {
      next_node(*rig_.runtime->route());
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
  // From where this thread's memory comes now.
  Storage* make(Bytes bytes) {
    FakeTorch::use_pool(rig_.runtime->route()->here() ? kFirst : kDefaultPool);
    Storage* storage = rig_.torch.make(bytes, s_);
    FakeTorch::use_pool(kDefaultPool);
    CHECK(storage != nullptr);
    return storage;
  }
  SideRig& rig() { return rig_; }
  int resident() const { return resident_; }  // after the last request

 private:
  SideRig rig_;
  driver::Stream s_ = rig_.stream();
  std::vector<Saved> saved_;
  int resident_ = 0;
};

TEST("what backward asks for comes from the holes that forward has left in the MemPool") {
  Trained trained;
  for (int step = 0; step < 3; ++step) {
    trained.step(40_MiB);
  }
  CHECK(trained.rig().runtime->counters().evicted_bytes > 0);
  CHECK(trained.rig().torch.reserved_peak() <= 40_MiB);
}

TEST("for a request that no run of victims makes room for, nothing leaves in vain") {
  Trained trained;
  for (int step = 0; step < 4; ++step) {
    trained.begin(40_MiB);
    CHECK_EQ(trained.rig().runtime->route()->here(), step > 0);
    trained.forward(24_MiB);  // no segment of the blocks can hold it
    CHECK(step == 0 || trained.resident() >= 5);
    trained.backward();
  }
}

TEST("an evaluation pass before the first step is torch's own, and gives nothing back") {
  Trained trained;
  FakeTorch& torch = trained.rig().torch;
  for (int pass = 0; pass < 2; ++pass) {
    trained.begin(200_MiB);
    CHECK(!trained.rig().runtime->route()->here());
    torch.drop(trained.make(24_MiB));
    trained.leave();
    CHECK_EQ(torch.reserved(), 24_MiB);
    CHECK_EQ(trained.rig().runtime->counters().host_waits, 0);
  }
}

TEST("where something had to leave, what is free beside the MemPool goes back before a step") {
  for (const bool tight : {false, true}) {
    Trained trained;
    const Bytes high = tight ? 40_MiB : 200_MiB;
    trained.step(high);
    trained.step(high);
    FakeTorch& torch = trained.rig().torch;
    const Bytes inside = torch.reserved();
    torch.drop(trained.make(24_MiB));  // by the optimizer
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
