// Holds a lane to so many bytes a second. Every piece waits on the device until a word in pinned
// memory says that the lane may have moved so much; a thread of its own raises the word as time
// goes by. So nothing waits on the host, and the cap may change while copies are queued.
//
// Thread-safe. The thread is detached and its memory never freed (rule T3).
#pragma once

#include <atomic>
#include <condition_variable>

#include "core/ranked_mutex.hpp"
#include "core/types.hpp"
#include "driver/driver.hpp"

namespace stagehand::core {

class Pacer {
 public:
  explicit Pacer(const driver::Table& table) : table_(table) {}

  // Pins the word and starts the thread, the first time; waits for the driver, needs the context,
  // holds no lock. False: rates cannot be held here.
  bool prepare();
  // Bytes per second; 0 lets go of whatever is held back. `prepare` has succeeded, or it is 0.
  void set_rate(Bytes per_second);
  Bytes rate() const { return rate_.load(std::memory_order_relaxed); }
  bool paced() const { return rate() != 0; }
  // What is queued on `stream` from now on may run once `bytes` more may have moved.
  Status admit(driver::Stream stream, Bytes bytes);

 private:
  void run();
  void grant(Bytes total);

  const driver::Table& table_;
  RankedMutex mutex_{Rank::pacer};
  std::condition_variable_any changed_;
  std::atomic<Bytes> rate_{0};
  std::uint64_t* word_ = nullptr;  // the device reads it: bytes that may have moved, in all
  Bytes granted_ = 0;              // guarded by mutex_, and below
  Bytes queued_ = 0;
};

}  // namespace stagehand::core
