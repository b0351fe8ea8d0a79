// Routes torch's CPU tensors to the process allocator on the simulated GPU.
//
// While routing is on, every tensor of at least one byte lives in the simulated GPU's memory; what
// was made before, or while it is off, stays c10's. One deleter serves both, so tensors may be
// dropped at any time, in any order.
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>

#include "sim/c10_allocator.hpp"

namespace {

namespace c10 = stagehand::sim::c10;

using AllocFunction = void* (*)(std::ptrdiff_t bytes, int device, void* stream);
using FreeFunction = void (*)(void* pointer, std::size_t bytes, int device, void* stream);

constexpr int kDevice = 0;
constexpr void* kLegacyStream = nullptr;  // host-synchronous on the simulated GPU
constexpr uint8_t kPriority = 1;          // above the default allocator's 0

std::atomic<bool> g_routing{false};
AllocFunction g_alloc = nullptr;
FreeFunction g_free = nullptr;
c10::Functions g_c10;

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
    g_c10.free_cpu(pointer);
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
      pointer = g_c10.alloc_cpu(bytes);
    }
    return {pointer, {pointer, &release}, {0, -1}};
  }
  c10::Deleter raw_deleter() const override { return &release; }
};

// A forked child has no simulated GPU: its new tensors are c10's.
void stop_in_child() { g_routing.store(false, std::memory_order_release); }

}  // namespace

// Both are called from Python with no tensor being made on another thread. `stagehand_cpu_install`
// returns nullptr, or why it did nothing.
extern "C" __attribute__((visibility("default"))) const char* stagehand_cpu_install(
    AllocFunction alloc, FreeFunction free) {
  if (const char* why = c10::why_not(g_c10)) {
    return why;
  }
  g_alloc = alloc;
  g_free = free;
  pthread_atfork(nullptr, nullptr, &stop_in_child);
  g_c10.set_cpu_allocator(new RoutingAllocator, kPriority);
  return nullptr;
}

extern "C" __attribute__((visibility("default"))) void stagehand_cpu_route(int on) {
  g_routing.store(on != 0, std::memory_order_release);
}
