// Routes torch's CPU tensors to the process allocator on the simulated GPU.
//
// Built by stagehand_alloc.testing on first use against the headers of the installed torch; the one
// place that includes them, and never part of the main build. While routing is on, every tensor of
// at least one byte lives in the simulated GPU's memory; what was made before, or while it is off,
// stays c10's. One deleter serves both, so tensors may be dropped at any time, in any order.
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace {

using AllocFunction = void* (*)(std::ptrdiff_t bytes, int device, void* stream);
using FreeFunction = void (*)(void* pointer, std::size_t bytes, int device, void* stream);

constexpr int kDevice = 0;
constexpr void* kLegacyStream = nullptr;  // host-synchronous on the simulated GPU
constexpr uint8_t kPriority = 1;          // above the default allocator's 0

std::atomic<bool> g_routing{false};
AllocFunction g_alloc = nullptr;
FreeFunction g_free = nullptr;

// The blocks torch holds, by address: what the deleter tells ours from c10's by. Leaked, since
// tensors die after static destructors have run.
struct Blocks {
  std::mutex mutex;
  std::unordered_map<void*, std::size_t> bytes_by_pointer;

  void add(void* pointer, std::size_t bytes) {
    std::lock_guard lock(mutex);
    bytes_by_pointer.emplace(pointer, bytes);
  }
  // Bytes of the block, which is forgotten; 0 when it is not ours.
  std::size_t take(void* pointer) {
    std::lock_guard lock(mutex);
    auto found = bytes_by_pointer.find(pointer);
    if (found == bytes_by_pointer.end()) {
      return 0;
    }
    const std::size_t bytes = found->second;
    bytes_by_pointer.erase(found);
    return bytes;
  }
};
Blocks& blocks() {
  static Blocks* leaked = new Blocks;
  return *leaked;
}

void release(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  // Out of the table first: once freed, the address may be handed out again on another thread.
  const std::size_t bytes = blocks().take(pointer);
  if (bytes != 0) {
    g_free(pointer, bytes, kDevice, kLegacyStream);
  } else {
    c10::free_cpu(pointer);
  }
}

class RoutingAllocator final : public c10::Allocator {
 public:
  // Throws what the process allocator throws: torch.OutOfMemoryError, with its report.
  c10::DataPtr allocate(std::size_t bytes) override {
    void* pointer = nullptr;
    if (bytes != 0 && g_routing.load(std::memory_order_acquire)) {
      pointer = g_alloc(static_cast<std::ptrdiff_t>(bytes), kDevice, kLegacyStream);
      try {
        blocks().add(pointer, bytes);
      } catch (...) {
        g_free(pointer, bytes, kDevice, kLegacyStream);
        throw;
      }
    } else if (bytes != 0) {
      pointer = c10::alloc_cpu(bytes);
    }
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

// A forked child has no simulated GPU: its new tensors are c10's.
void stop_in_child() { g_routing.store(false, std::memory_order_release); }

}  // namespace

// Both are called from Python with no tensor being made on another thread.
extern "C" __attribute__((visibility("default"))) void stagehand_cpu_install(AllocFunction alloc,
                                                                             FreeFunction free) {
  g_alloc = alloc;
  g_free = free;
  pthread_atfork(nullptr, nullptr, &stop_in_child);
  c10::SetCPUAllocator(new RoutingAllocator, kPriority);
}

extern "C" __attribute__((visibility("default"))) void stagehand_cpu_route(int on) {
  g_routing.store(on != 0, std::memory_order_release);
}
