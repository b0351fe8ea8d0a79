// Which requests a MemPool serves: what core/pool_route.hpp decides, carried out. For trigger.cpp.
#pragma once

#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>

#include "core/torch_side.hpp"

namespace stagehand::torch_hook {

namespace caching = c10::cuda::CUDACachingAllocator;

inline core::TorchListener g_listener;
inline thread_local bool t_quiet = false;  // this thread asks for what may as well be refused

inline bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}
inline bool capturing() { return capturing(c10::cuda::getCurrentCUDAStream()); }

// Whether torch takes a MemPool that serves somebody for a graph capture, as it does until it tells
// them apart (2.13). A block that is freed meanwhile, and that record_stream named another stream
// for, is then handed out again once nobody is served, without a wait for that stream.
template <class A>
concept TellsCapturesApart = requires(A& allocator) { allocator.markCaptureBegin(0); };
constexpr bool kTakenForCapture = !TellsCapturesApart<caching::CUDAAllocator>;

constexpr std::size_t kLatchBytes = 512;

struct Route {  // of one device. The engine calls for it one thread at a time
  std::atomic<bool> on{false};
  c10::MempoolId_t pool{0, 0};
  // All threads read these: whether backwards may join, which time it is on, 0 where nobody is
  // served; the thread served throughout.
  std::atomic<int> kept{0};
  std::atomic<std::uint64_t> turn{0};
  std::atomic<const void*> inside{nullptr};
  // Where torch takes it for a capture. Its free tells of a block under torch's mutex: that is
  // where the end can be put between two frees. Guarded by that mutex but for `latch`.
  std::atomic<void*> latch{nullptr};
  std::uintptr_t freeing = 0;  // torch was asked to free it, and has not
  bool waiting = false;        // blocks that other streams use were freed
};

inline std::array<Route, 64> g_routes;  // by device; the engine knows no more of them
inline std::atomic<std::uint64_t> g_turns{0};
inline thread_local char t_thread = 0;  // its address tells threads apart
inline thread_local std::array<std::uint64_t, 64>
    t_turns{};                                          // those whose backward this thread is in
inline thread_local std::array<int, 64> t_backwards{};  // whose end it has asked to be told
inline thread_local int t_ending = -1;                  // the device whose route it ends
inline thread_local bool t_waited = false;

inline Route& route_of(int device) { return g_routes[static_cast<std::size_t>(device)]; }

inline bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// A backward that failed never tells its end: the next one on the thread is served once it has
// asked to tell its own.
inline bool routed(int device) {
  const Route& route = route_of(device);
  const auto at = static_cast<std::size_t>(device);
  const std::uint64_t turn = route.turn.load(std::memory_order_relaxed);
  const int task = torch::autograd::get_current_graph_task_id();
  return route.inside.load(std::memory_order_relaxed) == &t_thread ||
         (turn != 0 && t_turns[at] == turn && task != -1 && t_backwards[at] == task + 1);
}

inline void begin_route(Route& route, int device, const c10::MempoolId_t& pool) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  if constexpr (kTakenForCapture) {
    const c10::cuda::CUDAGuard guard(index);
    t_quiet = true;
    if (route.latch.load() == nullptr) {
      route.latch.store(caching::raw_alloc(kLatchBytes));
    }
    t_quiet = false;
  }
  route.pool = pool;
  route.waiting = false;
  route.freeing = 0;
  route.on.store(true);  // first: what is freed from here on may wait for other streams
  try {
    caching::beginAllocateToPool(index, pool, [device](cudaStream_t) { return routed(device); });
  } catch (const std::exception&) {
    route.on.store(false);
    throw;
  }
}

// Where blocks wait for other streams: all that these were given is done before torch hands them
// out. Under torch's mutex where it can be, so that no block joins them meanwhile.
inline void end_now(Route& route, int device) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  if (route.waiting || route.freeing != 0) {
    const c10::cuda::CUDAGuard guard(index);
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    c10::cuda::device_synchronize();
    t_waited = true;
  }
  caching::endAllocateToPool(index, route.pool);
  caching::releasePool(index, route.pool);
  route.on.store(false);
}

// After all that was queued for the end of this backward before: FSDP2 reduces the gradients of the
// first layers there, which are the MemPool's like all others.
inline void tell_its_end(int device) {
  torch::autograd::Engine::get_default_engine().queue_callback([device] {
    try {
      torch::autograd::Engine::get_default_engine().queue_callback(
          [device] { g_listener.backward_ended(device); });
    } catch (const std::exception&) {
      g_listener.backward_ended(device);
    }
  });
}

inline bool route(int device, const std::uint64_t pool[2], bool backward) {
  Route& route = route_of(device);
  try {
    const c10::MempoolId_t wanted{pool[0], pool[1]};
    if (capturing() || (backward && !in_backward())) {
      return false;
    }
    if (route.on && route.pool != wanted) {  // torch had refused to end it
      end_now(route, device);
    }
    if (!route.on) {
      begin_route(route, device, wanted);
    }
    if (route.turn.load() == 0) {
      route.turn.store(++g_turns);
    }
    if (!backward) {
      route.inside.store(&t_thread);
      return true;
    }
    const auto at = static_cast<std::size_t>(device);
    const int task = torch::autograd::get_current_graph_task_id();
    if (t_backwards[at] != task + 1) {
      tell_its_end(device);
      t_backwards[at] = task + 1;
    }
    t_turns[at] = route.turn.load();
    return true;
  } catch (const std::exception&) {
    t_quiet = false;
    return false;
  }
}

inline void leave_route(int device) { route_of(device).inside.store(nullptr); }

// Where torch refuses, it serves nobody all the same: its filter says so.
inline bool end_route(int device) {
  Route& route = route_of(device);
  route.inside.store(nullptr);
  route.turn.store(0);
  t_waited = false;
  try {
    if (void* latch = route.latch.load(); route.on && latch != nullptr) {
      t_ending = device;
      caching::raw_delete(latch);
      t_ending = -1;
      route.latch.store(nullptr);
    }
    if (route.on) {
      end_now(route, device);
    }
  } catch (const std::exception&) {
    t_ending = -1;
  }
  return t_waited;
}

inline bool keep_pool(int device, const std::uint64_t pool[2]) {
  try {
    caching::createOrIncrefPool(static_cast<c10::DeviceIndex>(device), {pool[0], pool[1]});
    route_of(device).kept.fetch_add(1);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

inline void let_pool_go(int device, const std::uint64_t pool[2]) {
  const c10::MempoolId_t id{pool[0], pool[1]};
  route_of(device).kept.fetch_sub(1);
  try {
    caching::releasePool(static_cast<c10::DeviceIndex>(device), id);
    caching::emptyCache(id);         // refused while any pool serves somebody, until 2.13
  } catch (const std::exception&) {  // the next time that torch gives back what is free
  }
}

// A free that torch takes up is completed before the next one begins, unless other streams use the
// block.
inline void freeing(int device, std::uintptr_t address) {
  Route& route = route_of(device);
  if (t_ending == device && address == reinterpret_cast<std::uintptr_t>(route.latch.load())) {
    try {
      end_now(route, device);
    } catch (const std::exception&) {  // tried once more, without the mutex
    }
  } else if (route.on.load()) {
    route.waiting |= route.freeing != 0;
    route.freeing = address;
  }
}

inline void freed(int device, std::uintptr_t address) {
  Route& route = route_of(device);
  if (route.freeing == address) {
    route.freeing = 0;
  }
}

// A node may take memory before it unpacks anything: the mean's gradient is as large as what it is
// the mean of. torch tells profilers of each node before it runs, and so this.
inline std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction&) {
  try {
    const int device = c10::cuda::current_device();
    if (route_of(device).kept.load(std::memory_order_relaxed) > 0 && in_backward() &&
        !routed(device) && PyGILState_Check() == 0) {
      g_listener.backward_goes_on(device);
    }
  } catch (const std::exception&) {  // no device: nothing of ours
  }
  return nullptr;
}

// Once, and for good: torch has no way to end it while others run.
inline void watch_backwards() {
  static const at::CallbackHandle watching = at::addGlobalCallback(
      at::RecordFunctionCallback(&node_begins).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  static_cast<void>(watching);
}

}  // namespace stagehand::torch_hook
