#include "entry/torch_entry.hpp"

#include <functional>
#include <stdexcept>

#include "entry/registry.hpp"
#include "entry/torch_error.hpp"

namespace stagehand::entry {

namespace {

using core::Address;
using core::Bytes;
using core::Runtime;
using core::Status;

void* alloc(std::ptrdiff_t size, int device, driver::Stream stream) {
  if (size <= 0) {
    return nullptr;
  }
  Registry& registry = Registry::get();
  if (registry.forked()) {
    throw std::runtime_error(
        "stagehand_alloc: this process was forked after the GPU was used.\n"
        "Start GPU work in processes made with the 'spawn' or 'forkserver' method.");
  }
  Runtime* runtime = registry.find(device);
  if (runtime == nullptr) {
    std::string error;
    runtime = registry.open(device, &error);
    if (runtime == nullptr) {
      throw std::runtime_error("stagehand_alloc: device " + std::to_string(device) +
                               " could not be opened: " + error +
                               ".\nRun `python -m stagehand_alloc doctor`.");
    }
  }
  Address address = 0;
  const auto bytes = static_cast<Bytes>(size);
  const Status status =
      runtime->allocate(bytes, stream, registry.graph_of(device, stream), &address);
  if (status != Status::ok) {
    raise_status(*runtime, status, bytes);
  }
  return reinterpret_cast<void*>(address);
}

// Throwing from here would end the process: what is not ours is left alone, and a block that cannot
// be put away for want of host memory is leaked.
void free(void* pointer, std::size_t, int device, driver::Stream) noexcept {
  Runtime* runtime = Registry::get().find(device);
  if (pointer == nullptr || runtime == nullptr) {
    return;
  }
  try {
    runtime->free(reinterpret_cast<Address>(pointer));
  } catch (const std::exception&) {
  }
}

// torch also asks for interior pointers and for memory that is not ours.
void record_stream(void* pointer, driver::Stream stream) {
  Registry::get().each(
      [&](Runtime& runtime) { runtime.record_stream(reinterpret_cast<Address>(pointer), stream); });
}

void* base_allocation(void* pointer, std::size_t* size) noexcept {
  Address base = 0;
  Bytes bytes = 0;
  void* found = pointer;
  Registry::get().each([&](Runtime& runtime) {
    if (runtime.base_of(reinterpret_cast<Address>(pointer), &base, &bytes)) {
      found = reinterpret_cast<void*>(base);
      if (size != nullptr) {
        *size = bytes;
      }
    }
  });
  return found;
}

// A MemPool's segments. Null is torch.OutOfMemoryError here; torch holds its mutex around both.
void* segment_alloc(std::ptrdiff_t size, int device, driver::Stream stream) noexcept {
  Runtime* runtime = Registry::get().find(device);
  if (size <= 0 || runtime == nullptr || Registry::get().forked()) {
    return nullptr;
  }
  try {
    return reinterpret_cast<void*>(runtime->segment(static_cast<Bytes>(size), stream));
  } catch (const std::exception&) {
    return nullptr;
  }
}

void segment_free(void* pointer, std::size_t, int device, driver::Stream) noexcept {
  Runtime* runtime = Registry::get().find(device);
  if (pointer != nullptr && runtime != nullptr && !Registry::get().forked()) {
    try {
      runtime->free_segment(reinterpret_cast<Address>(pointer));
    } catch (const std::exception&) {
    }
  }
}

void init(int) noexcept {}  // devices open at their first allocation

void empty_cache() noexcept {
  Registry::get().each([](Runtime& runtime) { runtime.trim(0); });
}

void memory_fraction(double fraction, int device) {
  std::string error;
  Runtime* runtime = Registry::get().open(device, &error);
  if (runtime == nullptr) {
    throw std::runtime_error("stagehand_alloc: " + error);
  }
  runtime->set_limit(static_cast<Bytes>(fraction * static_cast<double>(runtime->device_bytes())));
}

void begin_allocate_to_pool(int device, GraphPoolId id, StreamFilter filter) {
  Registry::get().begin_graph(device, id, std::move(filter));
}
void end_allocate_to_pool(int device, GraphPoolId id) noexcept {
  Registry::get().end_graph(device, id);
}
void release_pool(int device, GraphPoolId id) noexcept {
  Registry::get().release_graph(device, id);
}

template <class F>
std::uintptr_t address_of(F* function) {
  return reinterpret_cast<std::uintptr_t>(function);
}

}  // namespace

std::vector<std::pair<std::string, std::uintptr_t>> entry_points() {
  return {
      {"alloc", address_of(&alloc)},
      {"free", address_of(&free)},
      {"segment_alloc", address_of(&segment_alloc)},
      {"segment_free", address_of(&segment_free)},
      {"init", address_of(&init)},
      {"record_stream", address_of(&record_stream)},
      {"empty_cache", address_of(&empty_cache)},
      {"memory_fraction", address_of(&memory_fraction)},
      {"base_allocation", address_of(&base_allocation)},
      {"begin_allocate_to_pool", address_of(&begin_allocate_to_pool)},
      {"end_allocate_to_pool", address_of(&end_allocate_to_pool)},
      {"release_pool", address_of(&release_pool)},
  };
}

}  // namespace stagehand::entry
