// The trigger library: torch's own caching allocator as the engine sees it (core/torch_side.hpp).
//
// Built on first use against the headers of the installed torch, never part of the main build. What
// torch calls here runs under its allocator's mutex: no Python, no GIL, and no exception leaves.
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <mutex>

#include "core/torch_side.hpp"

namespace {

using stagehand::core::CacheEvent;
using stagehand::core::HeldStorage;
using stagehand::core::Hold;
using stagehand::core::TensorPlace;
using stagehand::core::TorchListener;
using stagehand::core::TorchSide;
namespace caching = c10::cuda::CUDACachingAllocator;

constexpr std::uint64_t kSmallPage = std::uint64_t{2} << 20;  // c10's kSmallBuffer

TorchListener g_listener;
std::atomic<bool> g_listening{false};
thread_local bool t_quiet = false;   // this thread asks for what may as well be refused
thread_local bool t_making = false;  // this thread is in `make`, for t_stream
thread_local cudaStream_t t_stream = nullptr;
thread_local bool t_snapshotting = false;  // this thread takes the snapshot that `listen` needs

c10::StorageImpl* impl_of(void* storage) { return static_cast<c10::StorageImpl*>(storage); }

// Memory that torch's allocator frees as it is: no view of others' memory, no lazy copy.
bool torchs_own(const c10::DataPtr& memory) {
  return memory.get_deleter() == caching::get()->raw_deleter() &&
         memory.get() == memory.get_context();
}

bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// With its memory history or a tracer on, torch gathers Python frames where it frees, and takes the
// GIL for that: by its own rule before its mutex, which is held when free memory runs out.
bool blocked() {
  return c10::impl::GPUTrace::get_trace() != nullptr || caching::get()->isHistoryEnabled();
}

Hold hold(void* object, HeldStorage* held, std::int32_t* dtype) {
  const at::Tensor& tensor = THPVariable_Unpack(static_cast<PyObject*>(object));
  if (!tensor.has_storage() || !tensor.is_cuda() || tensor.layout() != at::kStrided) {
    return Hold::foreign;
  }
  const c10::Storage& storage = tensor.storage();
  if (!torchs_own(storage.data_ptr())) {
    return Hold::foreign;
  }
  if (capturing()) {
    return Hold::capturing;
  }
  *dtype = static_cast<std::int32_t>(tensor.scalar_type());
  held->address = reinterpret_cast<std::uintptr_t>(storage.data());
  held->bytes = storage.nbytes();
  held->identity = storage.unsafeGetStorageImpl();
  held->storage = c10::Storage(storage).unsafeReleaseStorageImpl();
  return Hold::held;
}

void* wrap(void* storage, const TensorPlace* place) {
  try {
    const auto dtype = static_cast<c10::ScalarType>(place->dtype);
    auto tensor = c10::make_intrusive<c10::TensorImpl>(
        c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl_of(storage))),
        c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::scalarTypeToTypeMeta(dtype));
    const auto count = static_cast<std::size_t>(place->ndim);
    tensor->set_sizes_and_strides({place->shape, count}, {place->strides, count}, place->offset);
    return THPVariable_Wrap(at::Tensor(std::move(tensor)));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// A storage that somebody made a Python object of counts that reference too, and is never alone.
bool alone(void* storage, std::uint64_t address, std::uint64_t bytes) {
  const c10::StorageImpl* impl = impl_of(storage);
  if (c10::raw::intrusive_ptr::use_count(impl_of(storage)) != 1) {
    return false;
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // behind what the others did with it
  return reinterpret_cast<std::uintptr_t>(impl->data()) == address && impl->nbytes() == bytes &&
         torchs_own(impl->data_ptr());
}

void used_on(void* storage, int device, stagehand::driver::Stream stream) {
  try {
    caching::recordStream(impl_of(storage)->data_ptr(),
                          c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(stream),
                                                           static_cast<c10::DeviceIndex>(device)));
  } catch (const std::exception&) {
    // Not memory of torch's allocator any more: nothing of it is handed out again.
  }
}

void drop(void* storage) { c10::raw::intrusive_ptr::decref(impl_of(storage)); }

bool make(int device, std::uint64_t bytes, stagehand::driver::Stream stream, bool quiet,
          HeldStorage* held) {
  t_quiet = quiet;
  t_making = true;
  t_stream = reinterpret_cast<cudaStream_t>(stream);
  bool made = false;
  try {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    void* memory = caching::get()->raw_alloc_with_stream(bytes, t_stream);
    const c10::Device place(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes,
        c10::DataPtr(memory, memory, caching::get()->raw_deleter(), place), caching::get(), true);
    held->address = reinterpret_cast<std::uintptr_t>(memory);
    held->bytes = bytes;
    held->stream = stream;
    held->identity = storage.get();
    held->storage = storage.release();
    made = true;
  } catch (const std::exception&) {  // out of memory; the engine says so, with its numbers
  }
  t_quiet = t_making = false;
  return made;
}

bool release_cached() {
  // torch takes the mutex of every device in turn, and this thread may hold one of them: two
  // threads at it could wait for each other.
  static std::mutex one_at_a_time;
  const std::unique_lock lock(one_at_a_time, std::try_to_lock);
  if (!lock.owns_lock()) {
    return false;
  }
  try {
    caching::emptyCache();
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

double fraction(int device) {
  try {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    return caching::getMemoryFraction(static_cast<c10::DeviceIndex>(device));
  } catch (const std::exception&) {
    return 1.0;
  }
}

void set_fraction(int device, double share) {
  try {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    caching::setMemoryFraction(share, static_cast<c10::DeviceIndex>(device));
  } catch (const std::exception&) {  // a share that torch does not know: it stays as it was
  }
}

CacheEvent event_of(CacheEvent::Kind kind, int device, std::uint64_t address, std::uint64_t bytes,
                    void* stream, const c10::MempoolId_t& pool) {
  CacheEvent event;
  event.kind = kind;
  event.device = device;
  event.address = address;
  event.bytes = bytes;
  event.stream = static_cast<stagehand::driver::Stream>(stream);
  event.pool[0] = pool.first;
  event.pool[1] = pool.second;
  event.ours = t_making;
  return event;
}

void tell_known(int device, const caching::SnapshotInfo& snapshot) {
  const auto tell = [](const CacheEvent& event) { g_listener.known(&event); };
  for (const auto& segment : snapshot.segments) {
    if (segment.device != device) {
      continue;
    }
    const auto& pool = segment.owner_private_pool_id;
    // An expandable one of small blocks by the pages it grew by, which tell what it is.
    const bool pages = segment.is_expandable && !segment.is_large;
    const std::uint64_t part = pages ? kSmallPage : segment.total_size;
    for (std::uint64_t at = 0; at < segment.total_size; at += part) {
      tell(event_of(segment.is_expandable ? CacheEvent::mapped : CacheEvent::segment, device,
                    segment.address + at, std::min(part, segment.total_size - at), segment.stream,
                    pool));
    }
    std::uint64_t address = segment.address;
    for (const auto& block : segment.blocks) {
      if (block.active) {  // allocated, or freed while another stream still uses it
        tell(event_of(CacheEvent::alloc, device, address, block.size, segment.stream, pool));
      }
      address += block.size;
    }
  }
}

// Which requests a MemPool serves ---------------------------------------------------------------

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
  // All threads read these: which time it is on, 0 where nobody is served; the thread served
  // throughout.
  std::atomic<std::uint64_t> turn{0};
  std::atomic<const void*> inside{nullptr};
  // Where torch takes it for a capture. Its free tells of a block under torch's mutex: that is
  // where the end can be put between two frees. Guarded by that mutex but for `latch`.
  std::atomic<void*> latch{nullptr};
  std::uintptr_t freeing = 0;  // torch was asked to free it, and has not
  bool waiting = false;        // blocks that other streams use were freed
};

std::array<Route, 64> g_routes;  // by device; the engine knows no more of them
std::atomic<std::uint64_t> g_turns{0};
thread_local char t_thread = 0;                        // its address tells threads apart
thread_local std::array<std::uint64_t, 64> t_turns{};  // those whose backward this thread is in
thread_local std::array<int, 64> t_backwards{};        // whose end it has asked to be told
thread_local int t_ending = -1;                        // the device whose route it ends
thread_local bool t_waited = false;

Route& route_of(int device) { return g_routes[static_cast<std::size_t>(device)]; }

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

bool routed(int device) {
  const Route& route = route_of(device);
  const std::uint64_t turn = route.turn.load(std::memory_order_relaxed);
  return route.inside.load(std::memory_order_relaxed) == &t_thread ||
         (turn != 0 && t_turns[static_cast<std::size_t>(device)] == turn && in_backward());
}

void begin_route(Route& route, int device, const c10::MempoolId_t& pool) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  if constexpr (kTakenForCapture) {
    const c10::cuda::CUDAGuard guard(index);
    t_quiet = true;
    route.latch.store(caching::raw_alloc(kLatchBytes));
    t_quiet = false;
  }
  route.pool = pool;
  route.waiting = false;
  route.freeing = 0;
  route.on.store(true);
  caching::beginAllocateToPool(index, pool, [device](cudaStream_t) { return routed(device); });
}

// Where blocks wait for other streams: all that these were given is done before torch hands them
// out. Under torch's mutex where it can be, so that no block joins them meanwhile.
void end_now(Route& route, int device) {
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

bool route(int device, const std::uint64_t pool[2], bool backward) {
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
      torch::autograd::Engine::get_default_engine().queue_callback(
          [device] { g_listener.backward_ended(device); });
      t_backwards[at] = task + 1;
    }
    t_turns[at] = route.turn.load();
    return true;
  } catch (const std::exception&) {
    t_quiet = false;
    return false;
  }
}

void leave_route(int device) { route_of(device).inside.store(nullptr); }

// Where torch refuses, it serves nobody all the same: its filter says so.
bool end_route(int device) {
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

bool keep_pool(int device, const std::uint64_t pool[2]) {
  try {
    caching::createOrIncrefPool(static_cast<c10::DeviceIndex>(device), {pool[0], pool[1]});
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void let_pool_go(int device, const std::uint64_t pool[2]) {
  try {
    caching::releasePool(static_cast<c10::DeviceIndex>(device), {pool[0], pool[1]});
  } catch (const std::exception&) {  // of a torch that counts otherwise: it stays
  }
}

// A free that torch takes up is completed before the next one begins, unless other streams use the
// block.
void freeing(int device, std::uintptr_t address) {
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

void freed(int device, std::uintptr_t address) {
  Route& route = route_of(device);
  if (route.freeing == address) {
    route.freeing = 0;
  }
}

void traced(const caching::TraceEntry& entry) {
  using Entry = caching::TraceEntry;
  if constexpr (kTakenForCapture) {
    if (entry.action_ == Entry::FREE_REQUESTED) {
      return freeing(entry.device_, entry.addr_);
    }
    if (entry.action_ == Entry::FREE_COMPLETED) {
      freed(entry.device_, entry.addr_);
    }
  }
  const auto say = [&](CacheEvent::Kind kind) {
    const CacheEvent event =
        event_of(kind, entry.device_, entry.addr_, entry.size_, entry.stream_, entry.mempool_);
    g_listener.event(&event);
  };
  switch (entry.action_) {
    case Entry::ALLOC:
      return say(CacheEvent::alloc);
    case Entry::FREE_COMPLETED:
      return say(CacheEvent::freed);
    case Entry::SEGMENT_ALLOC:
      return say(CacheEvent::segment);
    case Entry::SEGMENT_FREE:
      return say(CacheEvent::segment_gone);
    case Entry::SEGMENT_MAP:
      return say(CacheEvent::mapped);
    case Entry::SEGMENT_UNMAP:
      return say(CacheEvent::unmapped);
    case Entry::SNAPSHOT:
      return t_snapshotting ? g_listener.snapshot(entry.device_) : void();
    default:
      return;
  }
}

// The tracker runs from before the snapshot on; a snapshot's own event, under the same mutex, marks
// where what it holds ends and what the tracker tells begins.
const char* listen(const TorchListener* listener) {
  if (caching::get()->name() != "native") {
    return "torch does not use its native caching allocator (PYTORCH_ALLOC_CONF)";
  }
  try {
    g_listener = *listener;
    caching::get()->attachAllocatorTraceTracker(&traced);
    t_snapshotting = true;
    const auto snapshot = caching::get()->snapshot({0, 0}, false);
    t_snapshotting = false;
    for (int device = 0; device < c10::cuda::device_count(); ++device) {
      tell_known(device, snapshot);
      g_listener.told(device);
    }
    g_listening.store(true, std::memory_order_release);
  } catch (const std::exception&) {
    t_snapshotting = false;
    return "torch refused the trace tracker";
  }
  return nullptr;
}

}  // namespace

namespace c10 {

class StagehandTrigger final : public FreeMemoryCallback {
 public:
  bool Execute() override {
    if (t_quiet || !g_listening.load(std::memory_order_acquire)) {
      return false;
    }
    try {
      const c10::DeviceIndex device = c10::cuda::current_device();
      const auto stream = t_making ? t_stream : c10::cuda::getCurrentCUDAStream(device).stream();
      return !blocked() && !capturing() && g_listener.missed(device, stream);
    } catch (...) {
      return false;
    }
  }
};

REGISTER_FREE_MEMORY_CALLBACK(stagehand_alloc, StagehandTrigger)

}  // namespace c10

extern "C" __attribute__((visibility("default"))) const void* stagehand_torch_side() {
  static const TorchSide side = [] {
    TorchSide made;
    made.version = TorchSide::kVersion;
    made.size = sizeof(TorchSide);
    made.triggers = 1;
    made.blocked = &blocked;
    made.hold = &hold;
    made.wrap = &wrap;
    made.alone = &alone;
    made.used_on = &used_on;
    made.drop = &drop;
    made.make = &make;
    made.release_cached = &release_cached;
    made.fraction = &fraction;
    made.set_fraction = &set_fraction;
    made.listen = &listen;
    made.route = &route;
    made.leave_route = &leave_route;
    made.end_route = &end_route;
    made.keep_pool = &keep_pool;
    made.let_pool_go = &let_pool_go;
    made.routed = &routed;
    made.in_backward = &in_backward;
    return made;
  }();
  return &side;
}
