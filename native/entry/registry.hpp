// The process-wide state: the driver table and one Runtime a device, opened at first use.
// Leaked on purpose: torch frees tensors until the very end of the process (rule T3).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/runtime.hpp"
#include "driver/driver.hpp"

namespace stagehand::entry {

inline constexpr int kMaxDevices = 64;

using GraphPoolId = std::pair<unsigned long long, unsigned long long>;  // c10::MempoolId_t
using StreamFilter = std::function<bool(driver::Stream)>;

class Registry {
 public:
  static Registry& get();

  // Fills the driver table. False when it is filled already with other addresses.
  bool install_driver(const std::vector<std::uintptr_t>& addresses);
  bool driver_installed() const { return table_.ctx_get_current != nullptr; }
  const driver::Table& table() const { return table_; }

  // The device's runtime, opened on the first call; null with the reason when that fails.
  core::Runtime* open(int device, std::string* error);
  // The same if it is open already: what frees and statistics use.
  core::Runtime* find(int device) const;
  template <class F>
  void each(F&& call) const {
    for (const auto& slot : runtimes_) {
      core::Runtime* runtime = slot.load(std::memory_order_acquire);
      if (runtime != nullptr && !forked()) {
        call(*runtime);
      }
    }
  }
  // Settings for devices opened from now on, and those that are open. False: in use, not all
  // changed.
  struct PinnedSettings {
    core::SizeClasses classes;
    core::Bytes host_limit = core::kUnlimited;
    bool ahead = false;           // as core::PinnedOptions says,
    bool with_weights = false;    // as is this
    std::vector<int> numa_nodes;  // by device; devices beyond it have none
    core::Bytes first_share = 0;  // pinned first: one part in so many of each device; 0: no more
                                  // than the counts say
  };
  bool configure_pinned(const PinnedSettings& settings);

  // In a forked child every callback does nothing.
  bool forked() const { return forked_.load(std::memory_order_relaxed); }

  // CUDA graphs: while a pool is open on a device, requests whose stream passes its filter are
  // served from arenas of that graph alone.
  void begin_graph(int device, GraphPoolId id, StreamFilter filter);
  void end_graph(int device, GraphPoolId id);
  void release_graph(int device, GraphPoolId id);
  // 0, or the graph that serves this request. One relaxed load when nothing is captured.
  std::uint64_t graph_of(int device, driver::Stream stream);
  // Whether a capture that we were told of is under way.
  bool capturing() const { return open_graphs_.load(std::memory_order_relaxed) > 0; }

  // Memory mapped by hand is out of reach of other devices until they are named: does so for each
  // pair of `device` and one that this process uses, as cudaDeviceEnablePeerAccess would for memory
  // of cudaMalloc. Devices do so when they open; once more where others may be used by torch alone.
  // False: the driver refused what is mapped already.
  bool connect_peers(int device);

  // Where torch's own caching allocator cuts the blocks: how it is reached, set once, and what its
  // cache holds, by device. Null: the process allocator only.
  const core::TorchSide* torch_side() const { return torch_side_.load(std::memory_order_acquire); }
  void set_torch_side(const core::TorchSide* side);
  core::CacheMap& torch_cache(int device) { return torch_caches_[device]; }

 private:
  struct Graph {
    int device;
    GraphPoolId id;
    std::uint64_t number;
    int uses;
    bool open;
    StreamFilter filter;
  };
  Graph* find_graph(int device, GraphPoolId id);
  bool connect(int device);
  bool let_reach(int from, int device);
  static bool configure_pinned(core::Runtime& runtime, int device, const PinnedSettings& settings);
  void count_capture(int device, int change);

  core::RankedMutex mutex_{core::Rank::registry};
  driver::Table table_{};
  std::atomic<core::Runtime*> runtimes_[kMaxDevices]{};
  std::atomic<bool> forked_{false};
  std::atomic<int> open_graphs_{0};
  std::atomic<const core::TorchSide*> torch_side_{nullptr};
  core::CacheMap torch_caches_[kMaxDevices];
  std::vector<Graph> graphs_;     // guarded by mutex_
  std::uint64_t last_graph_ = 0;  // guarded by mutex_
  PinnedSettings pinned_;         // guarded by mutex_
  bool pinned_set_ = false;       // guarded by mutex_
};

// The device's runtime; std::runtime_error where it cannot be opened.
core::Runtime& opened(int device);

}  // namespace stagehand::entry
