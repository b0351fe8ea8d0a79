// What the tests of promises share: a thread or a device of its own, waits that end, and a table of
// torch's side that a test may change.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "native/held_rig.hpp"

namespace stagehand::core::test {

// With that device's context current on this thread, as torch.cuda.device makes it.
inline void on_device(CoreRig& rig, int device, const std::function<void()>& body) {
  driver::Context context = nullptr;
  CHECK_EQ(rig.driver.primary_ctx_retain(&context, device), 0);
  CHECK_EQ(rig.driver.ctx_push_current(context), 0);
  body();
  driver::Context popped = nullptr;
  CHECK_EQ(rig.driver.ctx_pop_current(&popped), 0);
}

// Longer than anything here takes on a busy machine; only what is broken waits for so long.
inline constexpr std::chrono::seconds kPatience{10};

// Whether the condition came to hold; another thread makes it hold.
template <typename Condition>
bool eventually(Condition condition, std::chrono::milliseconds patience = kPatience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

// Where one thread waits until another has come so far. Waits end, whatever the other does.
class Stages {
 public:
  void reach(int stage) {
    const std::lock_guard lock(mutex_);
    stage_ = std::max(stage_, stage);
    changed_.notify_all();
  }
  bool await(int stage) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return stage_ >= stage; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int stage_ = 0;
};

// A HeldRig without its short names, whose table of torch's side is the test's own.
struct SideRig : CoreRig {
  explicit SideRig(const TorchSide& side, const Machine& with = kHeldMachine)
      : CoreRig(with), cache(*new_cache()), torch(driver, *runtime, cache) {
    runtime->use_torch(side, cache);
  }
  // The pack hook: the engine takes a reference to the storage.
  Saved save(Storage* storage, driver::Stream on) {
    FakeTorch::hold(storage);
    const Saved saved =
        runtime->save_held({storage, storage, storage->address, storage->bytes}, on,
                           storage->address, storage->address, storage->address + storage->bytes);
    CHECK_EQ(saved.refusal, Refusal::none);
    if (!saved.took_reference) {
      torch.drop(storage);
    }
    return saved;
  }

  CacheMap& cache;
  FakeTorch torch;

 private:
  // Lives as long as the Runtime, which is leaked on purpose (rule T3).
  static CacheMap* new_cache() {
    static auto* const all = new std::vector<CacheMap*>;
    all->push_back(new CacheMap);
    return all->back();
  }
};

}  // namespace stagehand::core::test
