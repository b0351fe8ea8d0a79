// Several threads on torch's own allocator: its mutex is held while room is made on one, and others
// save, unpack and drop under the GIL meanwhile. Clean under the thread sanitizer.
#include <atomic>
#include <mutex>
#include <random>
#include <thread>

#include "native/held_rig.hpp"

namespace stagehand::core::test {
namespace {

constexpr Bytes kSizes[] = {100, 300_KiB, 1_MiB + 512, 2_MiB, 3_MiB};
// What each worker saves to begin with: more than any budget here that has to bring evictions
// about, and so it does, however the threads take turns.
constexpr Bytes kPressing = 27_MiB;

// One thread's random program over its own tensors, on its own stream; `gil` is held where Python
// would hold it.
class Worker {
 public:
  Worker(HeldRig& rig, std::mutex& gil, std::uint64_t seed)
      : rig_(rig), gil_(gil), stream_(rig.stream()), random_(seed) {}

  void run(int turns, bool backward_only) {
    press();
    for (int turn = 0; turn < turns; ++turn) {
      switch (random_() % 6) {
        case 0:
        case 1:
          if (saved_.empty() || !backward_only) {
            forward(kSizes[random_() % std::size(kSizes)]);
          }
          break;
        case 2:
          scratch();
          break;
        case 3:
        case 4:
          unpack_one();
          break;
        default:
          drop_handle();
      }
    }
    while (!saved_.empty()) {
      drop_handle();
    }
    rig_.drop_all(views_);
  }
  int refused() const { return refused_; }

 private:
  // Under a budget below kPressing at least one of these is evicted, and restored.
  void press() {
    for (Bytes saved = 0; saved < kPressing; saved += 3_MiB) {
      forward(3_MiB);
    }
    for (const SavedTensor& saved : saved_) {
      unpack(saved);
    }
  }
  void forward(Bytes bytes) {
    const HeldTensor tensor = rig_.try_make(bytes, stream_);
    if (tensor.storage == nullptr) {
      ++refused_;
      return;
    }
    const std::lock_guard gil(gil_);
    const SavedTensor saved = rig_.try_save(tensor, stream_);
    if (saved.refusal == Refusal::none) {
      saved_.push_back(saved);
    } else {  // a pool was entered since the tensor was made
      CHECK_EQ(saved.refusal, Refusal::older_than_pool);
    }
    rig_.drop(tensor);
  }
  // As a kernel's workspace is: without the GIL.
  void scratch() {
    const HeldTensor tensor = rig_.try_make(kSizes[random_() % std::size(kSizes)], stream_);
    if (tensor.storage == nullptr) {
      ++refused_;
      return;
    }
    rig_.check(tensor, stream_);
    rig_.drop(tensor);
  }
  void unpack_one() {
    if (!saved_.empty()) {
      unpack(saved_[random_() % saved_.size()]);
    }
  }
  void unpack(const SavedTensor& saved) {
    Unpacked again;
    if (rig_.resident(saved)) {
      const std::lock_guard gil(gil_);
      again = rig_.runtime->unpack(saved.record, saved.offset, stream_);
    } else {
      again = rig_.runtime->unpack(saved.record, saved.offset, stream_);
    }
    const std::lock_guard gil(gil_);
    if (again.status != Status::ok) {
      ++refused_;
      return;
    }
    views_.push_back(rig_.view(again, saved, stream_));
    rig_.check(again, saved, stream_);
    if (views_.size() > 3) {
      rig_.drop(views_.front());
      views_.erase(views_.begin());
    }
  }
  void drop_handle() {
    if (!saved_.empty()) {
      std::swap(saved_[random_() % saved_.size()], saved_.back());
      const std::lock_guard gil(gil_);
      rig_.drop_handle(saved_.back());
      saved_.pop_back();
    }
  }

  HeldRig& rig_;
  std::mutex& gil_;
  driver::Stream stream_;
  std::mt19937_64 random_;
  std::vector<SavedTensor> saved_;
  std::vector<HeldTensor> views_;
  int refused_ = 0;
};

int run_workers(HeldRig& rig, std::uint64_t seed, bool meddle) {
  constexpr int kWorkers = 3;
  std::mutex gil;
  std::atomic<int> refused{0};
  std::atomic<int> left{kWorkers};
  std::vector<std::thread> running;
  const auto in_context = [&](const auto& body) {
    driver::Context context = nullptr;
    rig.driver.primary_ctx_retain(&context, 0);
    rig.driver.ctx_push_current(context);
    body();
    rig.driver.ctx_pop_current(&context);
  };
  for (int i = 0; i < kWorkers; ++i) {
    running.emplace_back([&, i] {
      in_context([&] {
        Worker worker(rig, gil, seed * 10 + static_cast<std::uint64_t>(i));
        worker.run(80, i == 0);
        refused += worker.refused();
        --left;
      });
    });
  }
  if (meddle) {
    in_context([&] {
      std::mt19937 random(static_cast<unsigned>(seed));
      while (left > 0) {
        const Bytes high = (24 + random() % 40) * 1_MiB;
        rig.budget(high, high * 3 / 4);
        rig.runtime->trim(0);
        CHECK_EQ(rig.runtime->invariants_broken(), "");
        rig.runtime->counters();
        rig.runtime->report(1_MiB);
        const std::lock_guard holds(gil);
        rig.runtime->drop_orphans();
      }
    });
  }
  for (std::thread& thread : running) {
    thread.join();
  }
  return refused;
}

TEST("threads that make room, unpack and drop side by side finish, and lose no byte or storage") {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    HeldRig rig({.seed = seed});
    rig.budget(24_MiB, 12_MiB);
    CHECK_EQ(run_workers(rig, seed, false), 0);
    CHECK(rig.counters().restores > 0);
    rig.verify_empty();
  }
}

TEST("budgets, trimming, statistics and checks from another thread disturb nothing") {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    HeldRig rig({.seed = seed});
    rig.budget(32_MiB, 24_MiB);
    CHECK_EQ(run_workers(rig, seed, true), 0);
    rig.verify_empty();
  }
}

TEST("threads that run out of memory go on, and the others' bytes stay right") {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    HeldRig rig({.seed = seed, .memory = 48_MiB, .host_limit = 16_MiB});
    rig.budget(40_MiB, 24_MiB);
    run_workers(rig, seed, false);
    rig.verify_empty();
  }
}

TEST("what can be left out does not wait for a thread that is in the engine") {
  Gate gate{sim::table()};
  Entry entry(gate);
  const auto elsewhere = [&] {
    bool open = false;
    std::thread([&] { open = Entry(gate, std::try_to_lock).open(); }).join();
    return open;
  };
  CHECK(!elsewhere());
  entry.close();
  CHECK(elsewhere());
  CHECK(elsewhere());  // and gives the lock back
}

TEST("without the trigger threads finish too") {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    HeldRig rig({.seed = seed}, false);
    rig.budget(24_MiB, 12_MiB);
    CHECK_EQ(run_workers(rig, seed, false), 0);
    rig.verify_empty();
  }
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
