// Memory: virtual memory management, allocations, host memory.
#include <sys/mman.h>

#include "sim/gpu.hpp"

namespace stagehand::sim {

namespace {

// A memory call: counted, failed on request, and not allowed in a strict capture.
template <typename Body>
Result memory_call(Function function, Body body) {
  return driver_call(function, [&](Gpu& machine) {
    const Result unsafe = machine.unsafe_in_capture(symbol_of(function));
    return unsafe != kSuccess ? unsafe : body(machine);
  });
}

}  // namespace

STAGEHAND_SIM_API cuMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  return driver_call(Function::cuMemGetInfo, [&](Gpu& machine) {
    const int device = current_device(machine);
    if (device < 0) {
      return kInvalidContext;
    }
    const DeviceMemory& memory = machine.memory.device(device);
    *free_bytes = memory.capacity() - memory.used();
    *total_bytes = memory.capacity();
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuMemGetAllocationGranularity(std::size_t* bytes, const AllocationProp* prop,
                                                int /*option*/) {
  return driver_call(Function::cuMemGetAllocationGranularity, [&](Gpu&) {
    if (bytes == nullptr || prop == nullptr) {
      return kInvalidValue;
    }
    *bytes = kGranularity;
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuMemAddressReserve(DevicePtr* address, std::size_t bytes, std::size_t alignment,
                                      DevicePtr /*hint*/, unsigned long long flags) {
  return memory_call(Function::cuMemAddressReserve, [&](Gpu& machine) {
    return flags != 0 ? kInvalidValue : machine.memory.reserve(address, bytes, alignment);
  });
}

STAGEHAND_SIM_API cuMemAddressFree(DevicePtr address, std::size_t bytes) {
  return memory_call(Function::cuMemAddressFree,
                     [&](Gpu& machine) { return machine.memory.free_address(address, bytes); });
}

STAGEHAND_SIM_API cuMemCreate(PhysicalHandle* handle, std::size_t bytes, const AllocationProp* prop,
                              unsigned long long flags) {
  return memory_call(Function::cuMemCreate, [&](Gpu& machine) {
    if (prop == nullptr || prop->type != 1 || prop->location.type != 1 || flags != 0) {
      return kInvalidValue;
    }
    return machine.memory.create(handle, bytes, prop->location.id);
  });
}

STAGEHAND_SIM_API cuMemRelease(PhysicalHandle handle) {
  return memory_call(Function::cuMemRelease,
                     [&](Gpu& machine) { return machine.memory.release(handle); });
}

// The offset must be 0, as cuda.h says of the real one.
STAGEHAND_SIM_API cuMemMap(DevicePtr address, std::size_t bytes, std::size_t offset,
                           PhysicalHandle handle, unsigned long long flags) {
  return memory_call(Function::cuMemMap, [&](Gpu& machine) {
    return offset != 0 || flags != 0 ? kInvalidValue : machine.memory.map(address, bytes, handle);
  });
}

STAGEHAND_SIM_API cuMemUnmap(DevicePtr address, std::size_t bytes) {
  return memory_call(Function::cuMemUnmap,
                     [&](Gpu& machine) { return machine.memory.unmap(address, bytes); });
}

// Access of one device is modelled: the last description wins.
STAGEHAND_SIM_API cuMemSetAccess(DevicePtr address, std::size_t bytes, const AccessDesc* desc,
                                 std::size_t count) {
  return memory_call(Function::cuMemSetAccess, [&](Gpu& machine) {
    if (desc == nullptr || count == 0) {
      return kInvalidValue;
    }
    const AccessDesc& last = desc[count - 1];
    if (last.location.type != 1 || (last.flags != 0 && last.flags != 1 && last.flags != 3)) {
      return kInvalidValue;
    }
    return machine.memory.set_access(address, bytes, last.location.id, last.flags);
  });
}

STAGEHAND_SIM_API cuMemAlloc(DevicePtr* address, std::size_t bytes) {
  return memory_call(Function::cuMemAlloc, [&](Gpu& machine) {
    const int device = current_device(machine);
    return device < 0 ? kInvalidContext : machine.memory.allocate(address, bytes, device);
  });
}

// Waits for the whole device, as the real one was seen to.
STAGEHAND_SIM_API cuMemFree(DevicePtr address) {
  return memory_call(Function::cuMemFree, [&](Gpu& machine) {
    if (current_device(machine) < 0) {
      return kInvalidContext;
    }
    if (address == 0) {
      return kSuccess;
    }
    const int device = machine.memory.begin_free(address);
    const Result done =
        device < 0 ? kSuccess : machine.waited(machine.scheduler.finish_device(device));
    return done == kSuccess ? machine.memory.free_allocation(address) : done;
  });
}

STAGEHAND_SIM_API cuMemHostRegister(void* host, std::size_t bytes, unsigned /*flags*/) {
  return memory_call(Function::cuMemHostRegister, [&](Gpu& machine) {
    if (current_device(machine) < 0) {
      return kInvalidContext;
    }
    return machine.memory.register_host(reinterpret_cast<std::uint64_t>(host), bytes);
  });
}

STAGEHAND_SIM_API cuMemHostUnregister(void* host) {
  return memory_call(Function::cuMemHostUnregister, [&](Gpu& machine) {
    if (current_device(machine) < 0) {
      return kInvalidContext;
    }
    const Result result = machine.memory.unregister_host(reinterpret_cast<std::uint64_t>(host));
    // The caller may give the memory back now: queued work that names it must not run later.
    machine.scheduler.drain();
    return result;
  });
}

STAGEHAND_SIM_API cuMemHostAlloc(void** host, std::size_t bytes, unsigned /*flags*/) {
  return memory_call(Function::cuMemHostAlloc, [&](Gpu& machine) {
    if (current_device(machine) < 0) {
      return kInvalidContext;
    }
    if (host == nullptr || bytes == 0) {
      return kInvalidValue;
    }
    void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) {
      return kOutOfMemory;
    }
    machine.memory.register_host(reinterpret_cast<std::uint64_t>(made), bytes);
    machine.host_allocations[made] = bytes;
    *host = made;
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuMemFreeHost(void* host) {
  return memory_call(Function::cuMemFreeHost, [&](Gpu& machine) {
    const auto it = machine.host_allocations.find(host);
    const Result result = machine.memory.unregister_host(reinterpret_cast<std::uint64_t>(host));
    if (it == machine.host_allocations.end()) {
      return kInvalidValue;
    }
    machine.scheduler.drain();
    munmap(host, it->second);
    machine.host_allocations.erase(it);
    return result;
  });
}

STAGEHAND_SIM_ALIAS(cuMemGetInfo, cuMemGetInfo_v2)
STAGEHAND_SIM_ALIAS(cuMemAlloc, cuMemAlloc_v2)
STAGEHAND_SIM_ALIAS(cuMemFree, cuMemFree_v2)
STAGEHAND_SIM_ALIAS(cuMemHostRegister, cuMemHostRegister_v2)

}  // namespace stagehand::sim
