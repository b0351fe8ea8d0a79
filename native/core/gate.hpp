// The guards of a public call. `Entry` is made first in every public function of the core that may
// come from any thread: it takes the device's lock, and with the first call of the driver makes the
// device's context current and says that this thread knows what it does beside a CUDA graph
// capture. Nothing below it can forget either, since the driver is reached through `Gate` only.
//
//   Entry entry(*gate)            lock
//     gate->event_record(...)     context and capture mode, the first time
//     Unlocked open(entry)        the only way to give the lock up; all that was looked up before
//                                 must be looked up again after it
//   ~Entry                        capture mode and context back, unlock, then what is due without
//                                 the lock (`Due`)
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

#include "core/ranked_mutex.hpp"
#include "core/types.hpp"
#include "driver/driver.hpp"

namespace stagehand::core {

// What is due once the lock is given up. Collected under it, by whoever has it.
struct Due {
  struct Storage {
    void* storage;  // of torch's, that only we refer to
    Address address;
  };
  struct HostMemory {
    std::byte* host;
    Bytes bytes;
  };
  std::vector<Storage> storages;        // to be dropped; takes torch's mutex
  std::vector<HostMemory> host_memory;  // to be unmapped
  bool release_segments = false;        // torch's free segments go back to the driver after that
  bool apply_limit = false;             // torch is to be told another limit

  bool any() const {
    return !storages.empty() || !host_memory.empty() || release_segments || apply_limit;
  }
  void clear() {
    storages.clear();
    host_memory.clear();
    release_segments = apply_limit = false;
  }
};

// The door to the driver for code under the device's lock. Guarded by that lock.
class Gate {
 public:
  // Without a context none is made current: for pieces that are tested on their own.
  explicit Gate(const driver::Table& table, driver::Context context = nullptr)
      : table_(table), context_(context) {}
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  const driver::Table* operator->() {
    if (!inside_.entered) {
      enter();
    }
    return inside_.entered ? &table_ : &driver::kRefusingTable;
  }
  // Whether the device's context is current. Where it was refused, so is every call; who calls
  // without the lock, and names no stream of ours, has to ask.
  bool in_context() {
    operator->();
    return inside_.entered;
  }
  // For calls without the lock, in a scope of `Unlocked` or of a ContextGuard.
  const driver::Table& table() const { return table_; }
  driver::Context context() const { return context_; }

  RankedMutex& mutex() { return mutex_; }
  // The same for one call of ours, until the lock is given up: what the driver answered before that
  // may have changed since. Outside of any entry nothing is remembered.
  std::uint64_t turn() { return open_ ? turn_ : ++turn_; }

  Due& due() { return due_; }
  void unmap_later(std::byte* host, Bytes bytes) { due_.host_memory.push_back({host, bytes}); }
  // Does what is due, without any lock of ours. Set once, before there is anything.
  void when_unlocked(void (*does)(void* who, Due& due), void* who) {
    does_ = does;
    who_ = who;
  }

  // CUDA graph captures under way in this process, and one for good where nobody tells of them.
  // While there are any, driver calls that are harmless to them are refused unless the thread says
  // that it knows what it does.
  static std::atomic<int>& captures() {
    static std::atomic<int> count{0};
    return count;
  }

 private:
  friend class Entry;
  friend class Unlocked;
  struct Inside {
    bool entered = false;
    bool pushed = false;  // the context, which has to be popped again
    bool relaxed = false;
    int mode = 0;  // of capture, before
  };

  // Gives the lock up, and does what is due. The vectors keep their room, a pair a thread.
  void unlock() {
    if (!due_.any()) {
      mutex_.unlock();
      return;
    }
    static thread_local Due spare;
    Due due = std::exchange(spare, Due{});
    std::swap(due, due_);
    mutex_.unlock();
    does_(who_, due);
    due.clear();
    spare = std::move(due);
  }

  // A context that cannot be made current now is tried again with the next call of the driver.
  void enter() {
    driver::Context current = nullptr;
    inside_.entered = true;
    if (context_ != nullptr &&
        (table_.ctx_get_current(&current) != driver::kSuccess || current != context_)) {
      inside_.pushed = inside_.entered = table_.ctx_push_current(context_) == driver::kSuccess;
    }
    if (!inside_.relaxed && captures().load(std::memory_order_relaxed) > 0) {
      inside_.mode = driver::kCaptureModeRelaxed;
      inside_.relaxed = table_.thread_exchange_capture_mode(&inside_.mode) == driver::kSuccess;
    }
  }
  void leave() {
    if (inside_.relaxed) {
      table_.thread_exchange_capture_mode(&inside_.mode);
    }
    if (inside_.pushed) {
      driver::Context popped = nullptr;
      table_.ctx_pop_current(&popped);
    }
    inside_ = {};
  }

  const driver::Table& table_;
  const driver::Context context_;
  RankedMutex mutex_{Rank::device};
  std::uint64_t turn_ = 0;
  bool open_ = false;  // an entry is
  Inside inside_;      // of the thread that has the lock
  Due due_;
  void (*does_)(void* who, Due& due) = nullptr;
  void* who_ = nullptr;
};

class Entry {
 public:
  explicit Entry(Gate& gate) : gate_(gate) {
    gate_.mutex_.lock();
    begin();
  }
  // For what can be left out: without a wait. Not `open` where another thread has the lock.
  Entry(Gate& gate, std::try_to_lock_t) : gate_(gate), open_(gate.mutex_.try_lock()) {
    if (open_) {
      begin();
    }
  }
  ~Entry() { close(); }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  bool open() const { return open_; }
  // Ends it early; nothing under the lock may follow.
  void close() {
    if (open_) {
      open_ = false;
      gate_.open_ = false;
      gate_.leave();
      gate_.unlock();
    }
  }

 private:
  friend class Unlocked;
  void begin() {
    ++gate_.turn_;
    gate_.open_ = true;
  }
  Gate& gate_;
  bool open_ = true;
};

// Gives the lock up for a scope; the context stays current in it.
class Unlocked {
 public:
  explicit Unlocked(Entry& entry) : gate_(entry.gate_) {
    if (!gate_.inside_.entered) {
      gate_.enter();
    }
    inside_ = gate_.inside_;
    gate_.inside_ = {};
    gate_.open_ = false;
    gate_.unlock();
  }
  ~Unlocked() {
    gate_.mutex_.lock();
    gate_.inside_ = inside_;
    gate_.open_ = true;
    ++gate_.turn_;
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Gate& gate_;
  Gate::Inside inside_;
};

}  // namespace stagehand::core
