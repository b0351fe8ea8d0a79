// The trigger library: torch's own caching allocator as the engine sees it (core/torch_side.hpp).
//
// Built on first use against the headers of the installed torch, never part of the main build. What
// torch calls here runs under its allocator's mutex: no Python, no GIL, and no exception leaves.
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>

#include "core/torch_side.hpp"
#include "torch_hook/over_storage.hpp"
#include "torch_hook/requests.hpp"
#include "torch_hook/serving.hpp"

namespace {

using stagehand::core::CacheEvent;
using stagehand::core::HeldStorage;
using stagehand::core::Hold;
using stagehand::core::TensorPlace;
using stagehand::core::TorchListener;
using stagehand::core::TorchSide;
namespace caching = c10::cuda::CUDACachingAllocator;
namespace serving = stagehand::torch_hook;
using serving::capturing;
using serving::g_listener;
using serving::t_quiet;

constexpr std::uint64_t kSmallPage = std::uint64_t{2} << 20;  // c10's kSmallBuffer

std::atomic<bool> g_listening{false};
thread_local bool t_making = false;        // this thread is in `make`
thread_local bool t_snapshotting = false;  // this thread takes the snapshot that `listen` needs

c10::StorageImpl* impl_of(void* storage) { return static_cast<c10::StorageImpl*>(storage); }

// Memory that torch's allocator frees as it is: no view of others' memory, no lazy copy.
bool torchs_own(const c10::DataPtr& memory) {
  return memory.get_deleter() == caching::get()->raw_deleter() &&
         memory.get() == memory.get_context();
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
  if (capturing(c10::cuda::getCurrentCUDAStream(tensor.get_device()))) {
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
    return THPVariable_Wrap(stagehand::torch_hook::over_storage(impl_of(storage), *place));
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
  const serving::Request request({bytes, true, reinterpret_cast<cudaStream_t>(stream)});
  bool made = false;
  try {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    void* memory = caching::get()->raw_alloc_with_stream(bytes, serving::t_asked.stream);
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

void traced(const caching::TraceEntry& entry) {
  using Entry = caching::TraceEntry;
  if constexpr (serving::kTakenForCapture) {
    if (entry.action_ == Entry::FREE_REQUESTED) {
      serving::freeing(entry.device_, entry.addr_);
    }
    if (entry.action_ == Entry::FREE_COMPLETED) {
      serving::freed(entry.device_, entry.addr_);
    }
  }
  const auto say = [&](CacheEvent::Kind kind) {
    const CacheEvent event =
        event_of(kind, entry.device_, entry.addr_, entry.size_, entry.stream_, entry.mempool_);
    g_listener.event(&event);
  };
  if (entry.action_ == Entry::FREE_REQUESTED) {
    const std::uint64_t follow =
        std::atomic_ref(*g_listener.follows).load(std::memory_order_relaxed);
    return (follow >> entry.device_ & 1) != 0 ? say(CacheEvent::let_go) : void();
  }
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

// What the engine asks for on its way into a MemPool is quiet. In a capture nothing is let go of.
void tell_asks() noexcept {
  const std::uint64_t awaited = std::atomic_ref(*g_listener.awaits).load(std::memory_order_relaxed);
  if (t_quiet || awaited == 0) {
    return;
  }
  try {
    const int device = c10::cuda::current_device();
    if ((awaited >> device & 1) != 0 && !capturing()) {
      g_listener.asks(device);
    }
  } catch (...) {  // the request itself will say so
  }
}

// In a capture, or while a MemPool serves, that pool's blocks are meant.
std::optional<serving::Apart> place(std::size_t bytes) noexcept {
  if (t_quiet || bytes <= stagehand::core::kSmallLimit) {
    return std::nullopt;
  }
  try {
    const c10::DeviceIndex device = c10::cuda::current_device();
    const std::uint64_t sizes =
        std::atomic_ref(g_listener.survivor_sizes[device]).load(std::memory_order_relaxed);
    if ((sizes & stagehand::core::size_bit(bytes)) == 0 || serving::routed(device) || capturing()) {
      return std::nullopt;
    }
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
    const stagehand::driver::Stream from = g_listener.place(device, stream.stream(), bytes);
    if (from == stream.stream()) {
      return std::nullopt;
    }
    return serving::Apart{reinterpret_cast<cudaStream_t>(from), stream};
  } catch (...) {  // the request itself will say so
    return std::nullopt;
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
    static constexpr serving::Tells kTells{&tell_asks, &place};
    serving::tell_requests(kTells);
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
      const auto& asked = serving::t_asked;
      const auto stream =
          asked.names_stream ? asked.stream : c10::cuda::getCurrentCUDAStream(device).stream();
      return !blocked() && !capturing() && g_listener.missed(device, stream, asked.bytes);
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
    made.places = STAGEHAND_TELLS_REQUESTS;
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
    made.tell_no_more = &serving::tell_no_more;
    made.route = &serving::route;
    made.leave_route = &serving::leave_route;
    made.end_route = &serving::end_route;
    made.keep_pool = &serving::keep_pool;
    made.let_pool_go = &serving::let_pool_go;
    made.watch_backwards = &serving::watch_backwards;
    made.routed = &serving::routed;
    made.in_backward = &serving::in_backward;
    return made;
  }();
  return &side;
}
