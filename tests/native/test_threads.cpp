// Several threads on one runtime, and on two devices. Clean under the thread sanitizer.
#include <atomic>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "native/core_rig.hpp"

namespace stagehand::core::test {
namespace {

constexpr Bytes kSizes[] = {100, 4096, 100'000, 700_KiB, 2_MiB};
// What each worker saves to begin with: more than any budget here that has to bring evictions
// about, and so it does, however the threads take turns.
constexpr Bytes kPressing = 14_MiB;

// One thread's random program over its own tensors, on its own stream.
class Worker {
 public:
  Worker(CoreRig& rig, Runtime& runtime, driver::Stream stream, std::uint64_t seed)
      : rig_(rig), runtime_(runtime), stream_(stream), random_(seed), tags_(seed << 32) {}

  void run(int turns) {
    press();
    for (int turn = 0; turn < turns; ++turn) {
      switch (random_() % 6) {
        case 0:
        case 1:
          allocate();
          break;
        case 2:
          drop_tensor();
          break;
        case 3:
          unpack_one();
          break;
        case 4:
          drop_alias();
          break;
        default:
          drop_handle();
      }
    }
    while (!live_.empty()) {
      drop_tensor();
    }
    while (!aliases_.empty()) {
      drop_alias();
    }
    while (!held_.empty()) {
      drop_handle();
    }
  }
  int refused() const { return refused_; }

 private:
  template <typename Kept>
  Kept pick(std::vector<Kept>& from) {
    std::swap(from[random_() % from.size()], from.back());
    Kept kept = from.back();
    from.pop_back();
    return kept;
  }
  // Under a budget below kPressing at least one of these is evicted, and restored.
  void press() {
    for (Bytes saved = 0; saved < kPressing; saved += 2_MiB) {
      if (const std::optional<Tensor> tensor = make(2_MiB)) {
        save(*tensor);
      }
    }
    for (const Held& held : held_) {
      unpack(held);
      drop_alias();
    }
  }
  std::optional<Tensor> make(Bytes bytes) {
    Tensor tensor{0, bytes, stream_, ++tags_};
    if (runtime_.allocate(tensor.bytes, stream_, 0, &tensor.address) != Status::ok) {
      ++refused_;
      return std::nullopt;
    }
    rig_.fill(tensor, stream_);
    return tensor;
  }
  void save(const Tensor& tensor) {
    const Saved saved =
        runtime_.save(tensor.address, tensor.address, tensor.address + tensor.bytes);
    if (saved.refusal == Refusal::none) {
      held_.push_back({tensor, saved.record, saved.offset});
    }
    CHECK(runtime_.free(tensor.address));
  }
  void allocate() {
    const std::optional<Tensor> tensor = make(kSizes[random_() % std::size(kSizes)]);
    if (!tensor) {
      return;
    }
    if (random_() % 3 == 0) {
      live_.push_back(*tensor);
    } else {
      save(*tensor);
    }
  }
  void drop_tensor() {
    if (!live_.empty()) {
      const Tensor tensor = pick(live_);
      rig_.check(tensor, stream_);
      CHECK(runtime_.free(tensor.address));
    }
  }
  void unpack_one() {
    if (!held_.empty()) {
      unpack(held_[random_() % held_.size()]);
    }
  }
  void unpack(const Held& held) {
    const Unpacked again = runtime_.unpack(held.record, held.offset, stream_);
    if (again.status != Status::ok) {
      ++refused_;
      return;
    }
    rig_.check({again.address, held.tensor.bytes, stream_, held.tensor.seed}, stream_);
    aliases_.push_back(again);
  }
  void drop_alias() {
    if (!aliases_.empty()) {
      runtime_.drop_alias(pick(aliases_).block);
    }
  }
  void drop_handle() {
    if (!held_.empty()) {
      runtime_.drop_handle(pick(held_).record);
    }
  }

  CoreRig& rig_;
  Runtime& runtime_;
  driver::Stream stream_;
  std::mt19937_64 random_;
  std::uint64_t tags_;
  std::vector<Tensor> live_;
  std::vector<Held> held_;
  std::vector<Unpacked> aliases_;
  int refused_ = 0;
};

// `threads` workers a runtime, started together; returns how many requests were refused.
int run_workers(CoreRig& rig, std::size_t threads, int turns, std::uint64_t seed) {
  std::vector<std::thread> running;
  std::atomic<int> refused{0};
  std::atomic<bool> go{false};
  for (std::size_t i = 0; i < threads * rig.runtimes.size(); ++i) {
    const int device = static_cast<int>(i % rig.runtimes.size());
    running.emplace_back([&, i, device] {
      driver::Context context = nullptr;
      rig.driver.primary_ctx_retain(&context, device);
      rig.driver.ctx_push_current(context);
      driver::Stream stream = nullptr;
      rig.driver.stream_create(&stream, driver::kStreamNonBlocking, 0);
      Worker worker(rig, *rig.runtimes[static_cast<std::size_t>(device)], stream,
                    seed * 100 + i + 1);
      while (!go) {
        std::this_thread::yield();
      }
      worker.run(turns);
      refused += worker.refused();
      rig.driver.ctx_pop_current(&context);
    });
  }
  go = true;
  for (std::thread& thread : running) {
    thread.join();
  }
  return refused;
}

TEST("threads that share a device lose no byte and no memory, with room to spare") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    CoreRig rig({.seed = seed});
    rig.budget(256_MiB, 256_MiB);
    CHECK_EQ(run_workers(rig, 4, 120, seed), 0);
    rig.verify_empty();
  }
}

TEST("threads that share a device lose no byte and no memory under pressure") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    CoreRig rig({.seed = seed});
    rig.budget(12_MiB, 8_MiB, 256_MiB);
    CHECK_EQ(run_workers(rig, 4, 120, seed), 0);
    CHECK(rig.counters().restores > 0);
    rig.verify_empty();
  }
}

TEST("threads that run out of memory go on, and the others' bytes stay right") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    CoreRig rig({.seed = seed, .memory = 32_MiB, .host_limit = 16_MiB});
    rig.budget(16_MiB, 12_MiB);
    run_workers(rig, 4, 120, seed);
    rig.verify_empty();
  }
}

TEST("threads with no pinned memory copy through pageable memory, side by side") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    CoreRig rig({.seed = seed});
    stagehand_sim_fail("cuMemHostRegister", 1, 1'000'000, driver::kOutOfMemory);
    rig.budget(8_MiB, 8_MiB, 64_MiB);
    run_workers(rig, 3, 100, seed);
    CHECK(rig.counters().pageable_copies > 0);
    rig.verify_empty();
  }
}

TEST("two devices work side by side, each with its own books") {
  CoreRig rig({.devices = 2});
  for (Runtime* const each : rig.runtimes) {
    each->set_budget({4_MiB, 3_MiB, 256_MiB, true});
  }
  CHECK_EQ(run_workers(rig, 2, 150, 7), 0);
  for (Runtime* const each : rig.runtimes) {
    CHECK(each->counters().restores > 0);
  }
  rig.verify_empty();
}

TEST("budgets, trimming, statistics and checks from another thread disturb nothing") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    CoreRig rig({.seed = seed});
    rig.budget(24_MiB, 16_MiB, 256_MiB);
    std::atomic<bool> done{false};
    std::thread meddler([&] {
      std::mt19937 random(static_cast<unsigned>(seed));
      driver::Context context = nullptr;
      rig.driver.primary_ctx_retain(&context, 0);
      rig.driver.ctx_push_current(context);
      while (!done) {
        const Bytes high = (16 + random() % 32) * 1_MiB;
        rig.runtime->set_budget({high, high * 3 / 4, 256_MiB, true});
        rig.runtime->trim(random() % 2 == 0 ? 0 : 32_MiB);
        CHECK_EQ(rig.runtime->invariants_broken(), "");
        rig.runtime->counters();
        rig.runtime->report(1_MiB);
        rig.runtime->reset_peaks();
      }
      rig.driver.ctx_pop_current(&context);
    });
    // Entering a pool makes what exists older than it: such tensors are refused, and that is fine.
    CHECK_EQ(run_workers(rig, 3, 150, seed), 0);
    done = true;
    meddler.join();
    rig.verify_empty();
  }
}

// Registering pinned memory gives the lock up: meanwhile another thread comes on many new streams.
Runtime* meeting = nullptr;
std::vector<driver::Stream> newcomers;
std::atomic<bool> came{true};
decltype(driver::Table::host_register) registers = nullptr;

int register_while_others_come(void* memory, std::size_t bytes, unsigned flags) {
  if (!came.exchange(true)) {
    std::thread([] {
      for (const driver::Stream stream : newcomers) {
        Address address = 0;
        if (meeting->allocate(512, stream, 0, &address) == Status::ok) {
          meeting->free(address);
        }
      }
    }).join();
  }
  return registers(memory, bytes, flags);
}

TEST("a stream's first request that waits finds its arena after others came on many streams") {
  Machine with{.memory = 256_MiB, .classes = {{4_MiB}, {0}}, .host_limit = 60_MiB};
  with.patch = [](driver::Table& table) {
    registers = std::exchange(table.host_register, &register_while_others_come);
  };
  CoreRig rig(with);
  meeting = rig.runtime;
  const driver::Stream busy = rig.stream();
  const driver::Stream fresh = rig.stream();
  for (int i = 0; i < 40; ++i) {
    newcomers.push_back(rig.stream());
  }
  rig.budget(64_MiB, 32_MiB);
  std::vector<Saved> saved;
  for (int i = 0; i < 16; ++i) {
    const Address address = rig.allocate(4_MiB, busy);
    saved.push_back(rig.runtime->save(address, address, address + 4_MiB));
    rig.runtime->free(address);
  }
  came = false;
  const Address address = rig.allocate(4_MiB, fresh);
  CHECK(came);
  CHECK_EQ(rig.runtime->invariants_broken(), "");
  CHECK(rig.runtime->free(address));
  for (const Saved& one : saved) {
    rig.runtime->drop_handle(one.record);
  }
  newcomers.clear();
  rig.verify_empty();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
