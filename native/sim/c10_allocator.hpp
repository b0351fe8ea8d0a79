// What the bridge needs of torch's CPU allocator, without torch's headers: the bridge is built
// once, and has to work with every torch from 2.11 on. These are c10/core/Allocator.h's types, laid
// out as there; `why_not` looks at the libc10.so that is loaded and says where it differs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

namespace stagehand::sim::c10 {

using Deleter = void (*)(void*);

struct Device {
  std::int8_t type;  // 0: the CPU
  std::int8_t index;
};

// c10::DataPtr. It is returned through memory of the caller, as it is there: neither is trivial.
struct DataPtr {
  void* data;
  std::unique_ptr<void, Deleter> context;
  Device device;
};

// c10::Allocator. The order of these is what its table of functions is.
class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual DataPtr allocate(std::size_t bytes) = 0;
  virtual bool is_simple_data_ptr(const DataPtr& pointer) const {
    return pointer.data == pointer.context.get();
  }
  virtual Deleter raw_deleter() const = 0;
  virtual void copy_data(void* to, const void* from, std::size_t bytes) const {
    std::memcpy(to, from, bytes);
  }
};

// The functions of c10 that are called, by their names in its library.
struct Functions {
  void* (*alloc_cpu)(std::size_t bytes);
  void (*free_cpu)(void* pointer);
  void (*set_cpu_allocator)(Allocator* allocator, std::uint8_t priority);
};

// Fills `functions`; nullptr, or why the torch that is loaded cannot be bridged to, in words.
const char* why_not(Functions& functions);

}  // namespace stagehand::sim::c10
