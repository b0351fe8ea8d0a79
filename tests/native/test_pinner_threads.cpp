// Pinned memory made ahead, by a thread of the core. Clean under the thread sanitizer.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "native/core_rig.hpp"

namespace stagehand::core::test {
namespace {

// What goes on inside cuMemHostRegister, whichever thread calls it.
struct Registering {
  std::atomic<int> now{0};
  std::atomic<int> most{0};
  std::atomic<int> delay_ms{0};
  std::atomic<bool> held{false};
  std::atomic<std::uint64_t> bytes{0};
  // Between the end of one call and the start of the next, the least.
  std::atomic<std::int64_t> between_us{0};
  std::atomic<std::int64_t> ended_us{0};
};

std::int64_t now_us() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(since).count();
}

Registering& registering() {
  static Registering all;
  return all;
}

// A rig that pins ahead, through a driver that takes its time to register.
struct Rig {
  explicit Rig(Machine machine, int delay_ms = 0)
      : rig([&] {
          registering().now = 0;
          registering().most = 0;
          registering().bytes = 0;
          registering().between_us = registering().ended_us = 0;
          registering().delay_ms = delay_ms;
          machine.ahead = true;
          machine.patch = [](driver::Table& table) {
            static decltype(table.host_register) real;
            real = table.host_register;
            table.host_register = [](void* host, std::size_t bytes, unsigned flags) {
              Registering& all = registering();
              const int now = ++all.now;
              const std::int64_t between = now_us() - all.ended_us;
              if (all.ended_us != 0 && (all.between_us == 0 || between < all.between_us)) {
                all.between_us = between;
              }
              all.most = std::max(all.most.load(), now);
              all.bytes += bytes;
              std::this_thread::sleep_for(std::chrono::milliseconds(all.delay_ms));
              all.held.wait(true);
              const driver::Result result = real(host, bytes, flags);
              --all.now;
              all.ended_us = now_us();
              return result;
            };
          };
          return machine;
        }()) {}

  // Until so much is pinned; false when it takes too long.
  bool pinned(Bytes bytes) {
    for (int i = 0; i < 10'000; ++i) {
      if (rig.counters().pinned_bytes >= bytes) {
        return true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

  CoreRig rig;
};

// A thread of the program: evicts and brings back `turns` times on a stream of its own.
void work(CoreRig& rig, Bytes bytes, int turns) {
  std::uint64_t seed = bytes;
  driver::Context context = nullptr;
  rig.driver.primary_ctx_retain(&context, 0);
  rig.driver.ctx_push_current(context);
  const driver::Stream stream = rig.stream();
  for (int i = 0; i < turns; ++i) {
    std::vector<Held> saved;
    for (int j = 0; j < 4; ++j) {
      const Tensor tensor{rig.allocate(bytes, stream), bytes, stream, ++seed};
      rig.fill(tensor, stream);
      saved.push_back(rig.save(tensor));
      rig.drop(tensor);
    }
    rig.runtime->free(rig.allocate(4_MiB, stream));
    for (const Held& held : saved) {
      rig.back(held, stream);
    }
  }
  rig.driver.ctx_pop_current(&context);
}

TEST("the initial slabs are pinned from the configuration on, and nobody waits for them") {
  Rig ahead({.classes = {{64_KiB, 1_MiB}, {16, 5}}});
  CHECK(ahead.pinned(6_MiB));
  const driver::Stream s = ahead.rig.stream();
  ahead.rig.budget(8_MiB, 8_MiB, 8_MiB);
  const Held held = ahead.rig.retain(4_MiB, s);
  ahead.rig.drop(ahead.rig.make(8_MiB, s));
  CHECK_EQ(ahead.rig.counters().host_waits, 0);
  CHECK_EQ(ahead.rig.counters().pool_misses, 0);
  ahead.rig.back(held, s);
  ahead.rig.verify_empty();
}

TEST(
    "between two calls that hold the driver up others have as long, where nobody waits for slabs") {
  constexpr int kMs = 5;
  Rig ahead({.classes = {{1_MiB, 2_MiB, 4_MiB, 8_MiB}, {8, 4, 2, 1}}}, kMs);
  CHECK(ahead.pinned(32_MiB));
  CHECK(registering().between_us >= 1000 * kMs);
}

TEST("threads that find no slab wait for the one growth under way") {
  for (int seed = 0; seed < 3; ++seed) {
    Rig ahead({.seed = static_cast<std::uint64_t>(seed), .classes = {{1_MiB, 4_MiB}, {1, 1}}}, 5);
    // Each thread evicts even where it runs alone: tensors map 4 MiB or more, the request 4.
    ahead.rig.budget(6_MiB, 4_MiB, 200_MiB);
    std::vector<std::thread> threads;
    for (const Bytes bytes : {2_MiB, 3_MiB, 700_KiB}) {
      threads.emplace_back([&ahead, bytes] { work(ahead.rig, bytes, 5); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK_EQ(registering().most, 1);
    CHECK_EQ(ahead.rig.counters().pageable_copies, 0);
    ahead.rig.verify_empty();
  }
}

TEST("a thread that waits for a slab goes on when it is there, and the wait is counted") {
  Rig ahead({.classes = {{1_MiB}, {0}}, .host_limit = 8_MiB}, 20);
  const driver::Stream s = ahead.rig.stream();
  ahead.rig.budget(8_MiB, 8_MiB, 8_MiB);
  const Held held = ahead.rig.retain(4_MiB, s);
  ahead.rig.drop(ahead.rig.make(8_MiB, s));
  CHECK(!ahead.rig.resident(held));
  CHECK(ahead.rig.counters().host_waits >= 1);
  CHECK_EQ(ahead.rig.counters().pageable_copies, 0);
  CHECK_EQ(ahead.rig.counters().pinned_bytes, 8_MiB);
  ahead.rig.back(held, s);
  ahead.rig.verify_empty();
}

TEST("threads that need more than the host limit go on without, and it is never crossed") {
  Rig ahead({.classes = {{1_MiB, 4_MiB}, {2, 1}}, .host_limit = 7_MiB});
  ahead.rig.budget(12_MiB, 8_MiB, 200_MiB);
  std::thread other([&] { work(ahead.rig, 3_MiB, 6); });
  work(ahead.rig, 2_MiB, 6);
  other.join();
  CHECK(registering().bytes <= 7_MiB);
  CHECK_EQ(ahead.rig.counters().pinned_bytes, registering().bytes.load());
  ahead.rig.verify_empty();
}

TEST("threads wait for no growth that the driver refuses") {
  Rig ahead({.classes = {{1_MiB}, {0}}});
  stagehand_sim_fail("cuMemHostRegister", 1, 1'000'000, driver::kOutOfMemory);
  ahead.rig.budget(8_MiB, 8_MiB, 200_MiB);
  std::thread other([&] { work(ahead.rig, 3_MiB, 2); });
  work(ahead.rig, 2_MiB, 2);
  other.join();
  CHECK(ahead.rig.counters().pageable_copies > 0);
  CHECK_EQ(ahead.rig.counters().pinned_bytes, 0);
  ahead.rig.verify_empty();
}

TEST("new classes wait for the growth under way and replace what it made") {
  Rig ahead({.classes = {{1_MiB}, {4}}}, 20);
  CHECK(ahead.rig.runtime->configure_pinned({{2_MiB}, {3}}, 63_MiB, {true, -1}));
  CHECK(ahead.pinned(6_MiB));
  CHECK_EQ(ahead.rig.counters().pinned_bytes, 6_MiB);
  ahead.rig.verify_empty();
}

TEST("what was given back is pinned again only when it is needed") {
  Rig ahead({.classes = {{1_MiB}, {4}}, .host_limit = 8_MiB});
  CHECK(ahead.pinned(4_MiB));
  CHECK_EQ(ahead.rig.runtime->release_pinned(0), 4_MiB);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_EQ(ahead.rig.counters().pinned_bytes, 0);
  const driver::Stream s = ahead.rig.stream();
  ahead.rig.budget(8_MiB, 8_MiB);
  const Held held = ahead.rig.retain(4_MiB, s);
  ahead.rig.drop(ahead.rig.make(8_MiB, s));
  CHECK_EQ(ahead.rig.counters().pageable_copies, 0);
  ahead.rig.back(held, s);
  ahead.rig.verify_empty();
}

TEST("who waits for the thread makes pinned memory itself when the thread is told to stop") {
  registering().held = true;
  Rig ahead({.classes = {{1_MiB, 4_MiB}, {1, 0}}, .host_limit = 16_MiB});
  const driver::Stream s = ahead.rig.stream();
  ahead.rig.budget(8_MiB, 8_MiB, 8_MiB);
  while (registering().now == 0) {  // the initial MiB: what is asked for below comes after it
    std::this_thread::yield();
  }
  const Held held = ahead.rig.retain(4_MiB, s);
  std::thread other([&] { ahead.rig.drop(ahead.rig.make(8_MiB, s)); });
  while (ahead.rig.counters().host_waits == 0) {
    std::this_thread::yield();
  }
  ahead.rig.runtime->configure_pinned({{1_MiB, 4_MiB}, {1, 0}}, 16_MiB, {false, -1});
  registering().held = false;
  registering().held.notify_all();
  other.join();
  CHECK(!ahead.rig.resident(held));
  CHECK_EQ(ahead.rig.counters().pageable_copies, 0);
  ahead.rig.back(held, s);
  ahead.rig.verify_empty();
}

TEST("told to stop, the thread ends what it has begun, and who waits for that gets it") {
  registering().held = true;
  Rig ahead({.classes = {{4_MiB}, {0}}, .host_limit = 16_MiB});
  const driver::Stream s = ahead.rig.stream();
  ahead.rig.budget(8_MiB, 8_MiB, 8_MiB);
  const Held held = ahead.rig.retain(4_MiB, s);
  std::thread other([&] { ahead.rig.drop(ahead.rig.make(8_MiB, s)); });
  while (registering().now == 0) {
    std::this_thread::yield();
  }
  ahead.rig.runtime->configure_pinned({{4_MiB}, {0}}, 16_MiB, {false, -1});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // in which `other` could give up
  registering().held = false;
  registering().held.notify_all();
  other.join();
  CHECK(!ahead.rig.resident(held));
  CHECK_EQ(ahead.rig.counters().pageable_copies, 0);
  ahead.rig.back(held, s);
  ahead.rig.verify_empty();
}

TEST("a forked child waits for no thread of its parent") {
  Rig ahead({.classes = {{1_MiB}, {1}}, .host_limit = 2_MiB});
  CHECK(ahead.pinned(1_MiB));
  const driver::Stream s = ahead.rig.stream();
  ahead.rig.budget(64_MiB, 64_MiB);
  const Held held = ahead.rig.retain(2_MiB, s);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    ahead.rig.runtime->set_debug({true, false});
    Address address = 0;
    ahead.rig.runtime->allocate(512, s, 0, &address);  // wants a slab
    ahead.rig.runtime->configure_pinned({{2_MiB}, {1}}, 63_MiB, {true, -1});
    _exit(ahead.rig.runtime->counters().pinned_bytes <= 1_MiB ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  ahead.rig.back(held, s);
  ahead.rig.verify_empty();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
