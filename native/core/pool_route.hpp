// Which of torch's requests the MemPool of a device serves: the decisions. What carries them out is
// TorchSide (docs/decisions/0016-mempool-route.md).
//
//   inside a pool       those of the thread that entered it
//   in a backward       those of a thread, from its first node on until that backward has ended
//   else                none: the optimizer, other threads, a graph that is kept and never goes
//                       backward
//
// While the pool serves anybody, torch gives no free segment of the default pool back, so it never
// stays on longer than that.
//
// Its lock is the outermost but the GIL: torch's mutex is taken under it. So nothing here that
// takes it may be called under torch's mutex or a lock of ours, or with the GIL.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <thread>

#include "core/torch_side.hpp"

namespace stagehand::core {

class PoolRoute {
 public:
  using Pool = std::array<std::uint64_t, 2>;  // torch's MempoolId_t

  PoolRoute(const TorchSide& side, int device) : side_(side), device_(device) {}

  // This thread is inside a pool, until somebody leaves for it.
  void enter(Pool pool);
  void leave();
  // Where this thread runs a backward, that uses the MemPool too.
  void join();
  void backward_ended();
  // No record is left: a backward that is not over by now has failed.
  void settle();

  // Whether `join` or `settle` would do anything. Take no lock.
  bool to_join() const;
  bool to_settle() const;
  // Whether this thread's requests are served by the MemPool.
  bool here() const;
  // Whether no pool is needed, nor serves anybody: the next may be another one.
  bool idle() const { return !kept_.load(std::memory_order_relaxed) && !on(); }
  // Whether anybody's are.
  bool on() const { return on_.load(std::memory_order_relaxed); }
  // Whether a record may still need the MemPool: from pool entry until the last one is gone.
  void set_needed(bool needed) { needed_.store(needed, std::memory_order_release); }
  // How often the end of it waited for the GPU, since the last call.
  std::uint64_t take_waits() { return waits_.exchange(0, std::memory_order_relaxed); }

 private:
  void end_if_idle();
  void let_pool_go();

  const TorchSide& side_;
  const int device_;
  std::mutex mutex_;
  Pool pool_{};                    // guarded by mutex_
  bool inside_ = false;            // guarded by mutex_
  bool backward_ = false;          // guarded by mutex_
  std::atomic<bool> kept_{false};  // pool_ is; written under mutex_
  std::atomic<bool> on_{false};    // written under mutex_
  std::atomic<bool> needed_{false};
  std::atomic<std::uint64_t> waits_{0};
  std::atomic<std::thread::id> thread_{};  // inside, where torch is told by Python
};

}  // namespace stagehand::core
