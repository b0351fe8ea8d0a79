// How much each request asks for. For trigger.cpp.
//
// torch calls a FreeMemoryCallback without a size. So its allocator is put behind another that
// notes the size and hands all on: what torch's own
// `torch.cuda.memory.change_current_allocator` replaces, c10's `allocator`, is replaced here too.
// Blocks, deleters and all that is known of them stay those of torch's allocator, which is asked
// for a block of another stream's where a request is to be served apart (core/survivors.hpp). Who
// has a pointer to that one from before goes on with it, without a size: a storage that is resized,
// for one.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/headeronly/version.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

// 1 for releases of which every virtual function is handed on (stagehand_alloc/_built/trigger.py):
// what another one adds would end here.
#ifndef STAGEHAND_TELLS_REQUESTS
#define STAGEHAND_TELLS_REQUESTS 0
#endif

namespace stagehand::torch_hook {

struct Asked {
  std::size_t bytes = 0;  // 0: nothing that is known
  bool names_stream = false;
  cudaStream_t stream = nullptr;  // what it names; else the thread's current one is meant
};

// A request that is used on one stream, and served from the blocks of another.
struct Apart {
  cudaStream_t served_from;
  c10::cuda::CUDAStream used_on;
};

// What is told of an outermost request before torch is asked. The engine opens one around its own,
// which are not told.
struct Tells {
  void (*asks)();
  // Nothing: torch serves it as any.
  std::optional<Apart> (*place)(std::size_t bytes);
};

inline thread_local Asked t_asked;  // what this thread asks torch for
inline std::atomic<const Tells*> g_tells{nullptr};

inline const Tells* tells_now() {
  return t_asked.bytes == 0 ? g_tells.load(std::memory_order_acquire) : nullptr;
}

class Request {
 public:
  explicit Request(const Asked& asked) : before_(std::exchange(t_asked, asked)) {}
  ~Request() { t_asked = before_; }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

 private:
  const Asked before_;
};

#if STAGEHAND_TELLS_REQUESTS

namespace caching = c10::cuda::CUDACachingAllocator;

#define STAGEHAND_HAND_ON(result, name, parameters, arguments) \
  result name parameters override { return torchs_.name arguments; }

class TellingAllocator final : public caching::CUDAAllocator {
  using Device = c10::DeviceIndex;
  using Pool = c10::MempoolId_t;

 public:
  explicit TellingAllocator(caching::CUDAAllocator& torchs) : torchs_(torchs) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (c10::DataPtr served = tell(bytes); served) {
      return served;
    }
    const Request request({.bytes = bytes});
    return torchs_.allocate(bytes);
  }
  void* raw_alloc(std::size_t bytes) override {
    if (c10::DataPtr served = tell(bytes); served) {
      return served.release_context();
    }
    const Request request({.bytes = bytes});
    return torchs_.raw_alloc(bytes);
  }
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
    if (const Tells* tells = tells_now(); tells != nullptr) {
      tells->asks();
    }
    const Request request({bytes, true, stream});
    return torchs_.raw_alloc_with_stream(bytes, stream);
  }

  // c10::Allocator
  bool is_simple_data_ptr(const c10::DataPtr& memory) const override {
    return torchs_.is_simple_data_ptr(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return torchs_.raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    torchs_.copy_data(to, from, bytes);
  }

  // c10::DeviceAllocator
  STAGEHAND_HAND_ON(bool, initialized, (), ())
  STAGEHAND_HAND_ON(void, emptyCache, (Pool pool), (pool))
  STAGEHAND_HAND_ON(void, recordStream, (const c10::DataPtr& memory, c10::Stream stream),
                    (memory, stream))
  STAGEHAND_HAND_ON(c10::CachingDeviceAllocator::DeviceStats, getDeviceStats, (Device device),
                    (device))
  STAGEHAND_HAND_ON(void, resetAccumulatedStats, (Device device), (device))
  STAGEHAND_HAND_ON(void, resetPeakStats, (Device device), (device))
  using Memory = std::pair<std::size_t, std::size_t>;
  STAGEHAND_HAND_ON(Memory, getMemoryInfo, (Device device), (device))

  // c10::cuda::CUDACachingAllocator::CUDAAllocator
  STAGEHAND_HAND_ON(void, raw_delete, (void* address), (address))
  STAGEHAND_HAND_ON(void, init, (int devices), (devices))
  STAGEHAND_HAND_ON(double, getMemoryFraction, (Device device), (device))
  STAGEHAND_HAND_ON(void, setMemoryFraction, (double share, Device device), (share, device))
  STAGEHAND_HAND_ON(std::vector<caching::StreamSegmentSize>, getExpandableSegmentSizes,
                    (Device device), (device))
  STAGEHAND_HAND_ON(void, enable, (bool on), (on))
  bool isEnabled() const override { return torchs_.isEnabled(); }
  STAGEHAND_HAND_ON(void, cacheInfo, (Device device, std::size_t* largest), (device, largest))
  STAGEHAND_HAND_ON(void*, getBaseAllocation, (void* address, std::size_t* bytes), (address, bytes))
  STAGEHAND_HAND_ON(void, recordStream, (const c10::DataPtr& memory, c10::cuda::CUDAStream stream),
                    (memory, stream))
  STAGEHAND_HAND_ON(caching::SnapshotInfo, snapshot, (Pool pool, bool traces), (pool, traces))
  STAGEHAND_HAND_ON(void, beginAllocateToPool,
                    (Device device, Pool pool, std::function<bool(cudaStream_t)> filter),
                    (device, pool, std::move(filter)))
  STAGEHAND_HAND_ON(void, endAllocateToPool, (Device device, Pool pool), (device, pool))
  STAGEHAND_HAND_ON(void, releasePool, (Device device, Pool pool), (device, pool))
  STAGEHAND_HAND_ON(int, getPoolUseCount, (Device device, Pool pool), (device, pool))
  STAGEHAND_HAND_ON(void, createOrIncrefPool,
                    (Device device, Pool pool, std::shared_ptr<caching::CUDAAllocator> allocator),
                    (device, pool, std::move(allocator)))
  STAGEHAND_HAND_ON(void, setUseOnOOM, (Device device, Pool pool, bool on), (device, pool, on))
  STAGEHAND_HAND_ON(void, setNoSplit, (Device device, Pool pool), (device, pool))
  STAGEHAND_HAND_ON(bool, checkPoolLiveAllocations,
                    (Device device, Pool pool, const std::unordered_set<void*>& expected),
                    (device, pool, expected))
  STAGEHAND_HAND_ON(caching::ShareableHandle, shareIpcHandle, (void* address), (address))
  STAGEHAND_HAND_ON(std::shared_ptr<void>, getIpcDevPtr, (std::string handle), (std::move(handle)))
  STAGEHAND_HAND_ON(bool, isHistoryEnabled, (), ())
  STAGEHAND_HAND_ON(void, recordHistory,
                    (bool on, caching::CreateContextFn recorder, std::size_t entries,
                     caching::RecordContext when, bool clear, const std::vector<std::string>& skip),
                    (on, recorder, entries, when, clear, skip))
  using Annotation = std::vector<std::pair<std::string, std::string>>;
  STAGEHAND_HAND_ON(void, recordAnnotation, (const Annotation& said), (said))
  STAGEHAND_HAND_ON(void, pushCompileContext, (std::string & said), (said))
  STAGEHAND_HAND_ON(void, popCompileContext, (), ())
  STAGEHAND_HAND_ON(void, setUserMetadata, (const std::string& said), (said))
  STAGEHAND_HAND_ON(std::string, getUserMetadata, (), ())
  STAGEHAND_HAND_ON(void, attachOutOfMemoryObserver, (caching::OutOfMemoryObserver observer),
                    (std::move(observer)))
  STAGEHAND_HAND_ON(void, attachAllocatorTraceTracker, (caching::AllocatorTraceTracker tracker),
                    (std::move(tracker)))
  STAGEHAND_HAND_ON(void, enablePeerAccess, (Device device, Device peer), (device, peer))
  STAGEHAND_HAND_ON(cudaError_t, memcpyAsync,
                    (void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                     cudaStream_t stream, bool peers),
                    (to, to_device, from, from_device, bytes, stream, peers))
  STAGEHAND_HAND_ON(std::shared_ptr<caching::AllocatorState>, getCheckpointState,
                    (Device device, Pool pool), (device, pool))
  STAGEHAND_HAND_ON(caching::CheckpointDelta, setCheckpointPoolState,
                    (Device device, std::shared_ptr<caching::AllocatorState> state),
                    (device, std::move(state)))
  STAGEHAND_HAND_ON(std::string, name, (), ())
#if TORCH_VERSION_MINOR >= 12
  STAGEHAND_HAND_ON(std::shared_ptr<c10::GatheredContext>, getContextForPointer,
                    (const void* address), (address))
  STAGEHAND_HAND_ON(void, attachOomRejectionObserver, (caching::OomRejectionObserver observer),
                    (std::move(observer)))
#endif
#if TORCH_VERSION_MINOR >= 13
  STAGEHAND_HAND_ON(void, markCaptureBegin, (Device device), (device))
  STAGEHAND_HAND_ON(void, markCaptureEnd, (Device device), (device))
  c10::DataPtr allocateWithAddress(std::size_t bytes, void* address) override {
    const Request request({.bytes = bytes});
    return torchs_.allocateWithAddress(bytes, address);
  }
#endif

#if TORCH_VERSION_MINOR >= 14
  STAGEHAND_HAND_ON(bool, supportsUserMetadata, (), ())
  STAGEHAND_HAND_ON(void, annotateMemory, (const void* address, const std::string& said),
                    (address, said))
#endif

  // In front of torch's from here on. Not where somebody else's has come there meanwhile.
  void begin() { swap(&torchs_, this); }
  void end() { swap(this, &torchs_); }

 private:
  // Null: to be served as any.
  c10::DataPtr tell(std::size_t bytes) {
    const Tells* tells = tells_now();
    if (tells == nullptr) {
      return {};
    }
    tells->asks();
    const std::optional<Apart> apart = tells->place(bytes);
    return apart.has_value() ? serve(bytes, *apart) : c10::DataPtr();
  }

  // As a tensor that was made on one stream and is used on another: torch hands its block out
  // again, and gives it back, behind both. Null where only the other stream may have a hole.
  c10::DataPtr serve(std::size_t bytes, const Apart& apart) {
    const Request request({bytes, true, apart.served_from});
    try {
      void* memory = torchs_.raw_alloc_with_stream(bytes, apart.served_from);
      c10::DataPtr served(memory, memory, torchs_.raw_deleter(), apart.used_on.device());
      torchs_.recordStream(served, apart.used_on);
      return served;
    } catch (const c10::OutOfMemoryError&) {
      return {};
    }
  }

  static void swap(caching::CUDAAllocator* from, caching::CUDAAllocator* to) {
    caching::allocator.compare_exchange_strong(from, to);
  }

  caching::CUDAAllocator& torchs_;
};

#undef STAGEHAND_HAND_ON

// Never deleted: storages keep a pointer to it until the process has ended.
inline std::atomic<TellingAllocator*> g_telling{nullptr};

// Once torch's CUDA is initialised: torch refuses to change its allocator from then on.
// `tells` is of static life, and called for each that says how much it is for.
inline void tell_requests(const Tells& tells) {
  g_tells.store(&tells, std::memory_order_release);
  auto* telling = new TellingAllocator(*caching::get());
  g_telling.store(telling);
  telling->begin();
}

// It hands on what storages ask of it even so.
inline void tell_no_more() {
  if (TellingAllocator* telling = g_telling.exchange(nullptr); telling != nullptr) {
    telling->end();
  }
}

#else

inline void tell_requests(const Tells&) {}
inline void tell_no_more() {}

#endif

}  // namespace stagehand::torch_hook
