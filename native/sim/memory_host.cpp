// Memory of the older calls: cuMemAlloc on the device, and registered memory of the host.
#include "sim/memory.hpp"

namespace stagehand::sim {

Result Memory::allocate(DevicePtr* address, std::uint64_t bytes, int device) {
  const std::uint64_t rounded = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  PhysicalHandle handle = 0;
  if (address == nullptr || bytes == 0) {
    return kInvalidValue;
  }
  if (const Result made = create(&handle, rounded, device); made != kSuccess) {
    return made;
  }
  if (const Result reserved = reserve(address, rounded, 0); reserved != kSuccess) {
    release(handle);
    return reserved;
  }
  map(*address, rounded, handle);
  set_access(*address, rounded, device, kRead | kWrite);
  allocations_[*address] = handle;
  return kSuccess;
}

int Memory::begin_free(DevicePtr address) {
  const auto it = allocations_.find(address);
  if (it == allocations_.end()) {
    return -1;
  }
  const Physical& physical = *handles_[it->second];
  take_from_others({address, physical.bytes}, physical.device);
  return physical.device;
}

Result Memory::free_allocation(DevicePtr address) {
  const auto it = allocations_.find(address);
  if (it == allocations_.end()) {
    double_free("cuMemFree of an address that is not allocated:", address);
    return kInvalidValue;
  }
  const PhysicalHandle handle = it->second;
  const std::uint64_t bytes = handles_[handle]->bytes;
  allocations_.erase(it);
  unmap(address, bytes);
  release(handle);
  return free_address(address, bytes);
}

Result Memory::register_host(std::uint64_t address, std::uint64_t bytes) {
  if (address == 0 || bytes == 0) {
    return kInvalidValue;
  }
  const auto next = registered_.lower_bound(address);
  if (range_over(registered_, address) != registered_.end() ||
      (next != registered_.end() && next->first < address + bytes)) {
    return kHostMemoryAlreadyRegistered;
  }
  registered_[address] = bytes;
  return kSuccess;
}

Result Memory::unregister_host(std::uint64_t address) {
  const auto it = registered_.find(address);
  if (it == registered_.end()) {
    double_free("cuMemHostUnregister of host memory that is not registered:", address);
    return kHostMemoryNotRegistered;
  }
  const Piece piece{kHostSpace, address, it->second, nullptr};
  if (const Access* user = history_.unordered(piece, host_)) {
    log_.add(STAGEHAND_SIM_FREE_IN_USE,
             "free in use: cuMemHostUnregister of " + range_text({address, it->second}) +
                 " while " + describe(*user) + " names it and is not known to be complete");
  }
  history_.forget(piece);
  registered_.erase(it);
  return kSuccess;
}

bool Memory::pinned(const Range& range) const {
  std::uint64_t at = range.address;
  while (at < range.end()) {  // neighbours registered one by one are as good as one
    const auto it = range_over(registered_, at);
    if (it == registered_.end()) {
      return false;
    }
    at = it->first + it->second;
  }
  return true;
}

}  // namespace stagehand::sim
