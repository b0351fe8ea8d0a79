#include "sim/memory.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <iterator>
#include <string>

namespace stagehand::sim {

namespace {

constexpr PhysicalHandle kHandleBase = 0x7000000000000000ull;

bool granular(std::uint64_t bytes) { return bytes > 0 && bytes % kGranularity == 0; }

}  // namespace

Memory::Memory(const Settings& settings, HazardLog& log, History& history, const VectorClock& host)
    : settings_(settings), log_(log), history_(history), host_(host) {
  for (int i = 0; i < settings.devices; ++i) {
    devices_.push_back(std::make_unique<DeviceMemory>(settings.memory_bytes));
  }
}

Memory::~Memory() {
  for (const auto& [address, bytes] : reservations_) {
    addresses_.give(address, bytes);
  }
}

bool Memory::usable() const {
  for (const auto& device : devices_) {
    if (!device->usable()) {
      return false;
    }
  }
  return true;
}

std::uint64_t Memory::mapped_bytes(int device) const {
  std::uint64_t bytes = 0;
  for (const auto& [address, mapping] : mappings_) {
    bytes += mapping.physical->device == device ? mapping.bytes : 0;
  }
  return bytes;
}

Result Memory::reserve(DevicePtr* address, std::uint64_t bytes, std::uint64_t alignment) {
  if (address == nullptr || !granular(bytes) || (alignment & (alignment - 1)) != 0) {
    return kInvalidValue;
  }
  alignment = alignment < kGranularity ? kGranularity : alignment;
  const std::uint64_t taken = addresses_.take(bytes, alignment);
  if (taken == 0) {
    return kOutOfMemory;
  }
  reservations_[taken] = bytes;
  *address = taken;
  return kSuccess;
}

Result Memory::free_address(DevicePtr address, std::uint64_t bytes) {
  const auto it = reservations_.find(address);
  if (it == reservations_.end() || it->second != bytes) {
    double_free("cuMemAddressFree of addresses that are not reserved as such:", address);
    return kInvalidValue;
  }
  const auto mapping = mappings_.lower_bound(address);
  if (mapping != mappings_.end() && mapping->first < address + bytes) {
    log_.add(STAGEHAND_SIM_FREE_IN_USE, "free in use: cuMemAddressFree of " +
                                            range_text({address, bytes}) +
                                            " while memory is mapped at " +
                                            range_text({mapping->first, mapping->second.bytes}));
    return kInvalidValue;
  }
  addresses_.give(address, bytes);
  reservations_.erase(it);
  return kSuccess;
}

Result Memory::create(PhysicalHandle* handle, std::uint64_t bytes, int device) {
  if (handle == nullptr || !granular(bytes)) {
    return kInvalidValue;
  }
  if (device < 0 || device >= device_count()) {
    return kInvalidDevice;
  }
  auto physical = std::make_unique<Physical>();
  if (!this->device(device).take(bytes, &physical->pieces)) {
    return kOutOfMemory;
  }
  physical->handle = kHandleBase + ++handles_made_;
  physical->device = device;
  physical->bytes = bytes;
  *handle = physical->handle;
  handles_[physical->handle] = std::move(physical);
  return kSuccess;
}

Result Memory::release(PhysicalHandle handle) {
  const auto it = handles_.find(handle);
  if (it == handles_.end() || it->second->released) {
    double_free("cuMemRelease of a handle that is not held:", handle);
    return kInvalidValue;
  }
  it->second->released = true;
  give_back_if_unused(it->second.get());
  return kSuccess;
}

void Memory::give_back_if_unused(Physical* physical) {
  if (!physical->released || physical->mappings > 0) {
    return;
  }
  for (const Extent& piece : physical->pieces) {
    history_.forget({physical->device, piece.offset, piece.bytes, nullptr});
  }
  device(physical->device).give(physical->pieces);
  handles_.erase(physical->handle);
}

bool Memory::inside_reservation(const Range& range) const {
  const auto it = range_over(reservations_, range.address);
  return it != reservations_.end() && range.end() <= it->first + it->second;
}

Result Memory::map(DevicePtr address, std::uint64_t bytes, PhysicalHandle handle) {
  const auto found = handles_.find(handle);
  if (found == handles_.end() || found->second->released || !granular(bytes) ||
      address % kGranularity != 0 || bytes > found->second->bytes ||
      !inside_reservation({address, bytes})) {
    return kInvalidValue;
  }
  const auto next = mappings_.lower_bound(address);
  if ((next != mappings_.end() && next->first < address + bytes) ||
      mapping_over(address) != mappings_.end()) {
    return kInvalidValue;  // something is mapped there already
  }
  Physical* const physical = found->second.get();
  std::uint64_t at = address;
  for (const Extent& piece : physical->pieces) {
    const std::uint64_t part = std::min(piece.bytes, address + bytes - at);
    if (part > 0 &&
        mmap(pointer(at), part, PROT_NONE, MAP_SHARED | MAP_FIXED, device(physical->device).file(),
             static_cast<off_t>(piece.offset)) == MAP_FAILED) {
      close_range(address, bytes);
      return kOutOfMemory;
    }
    at += part;
  }
  Mapping mapping;
  mapping.bytes = bytes;
  mapping.physical = physical;
  mappings_.emplace(address, std::move(mapping));
  ++physical->mappings;
  return kSuccess;
}

std::vector<Memory::Mappings::iterator> Memory::whole_mappings(const Range& range) {
  std::vector<Mappings::iterator> whole;
  std::uint64_t at = range.address;
  for (auto it = mappings_.find(at); it != mappings_.end() && it->first == at && at < range.end();
       ++it) {
    whole.push_back(it);
    at += it->second.bytes;
  }
  if (at != range.end()) {
    whole.clear();
  }
  return whole;
}

Result Memory::unmap(DevicePtr address, std::uint64_t bytes) {
  const auto whole = whole_mappings({address, bytes});
  if (whole.empty()) {
    double_free("cuMemUnmap of a range that is not whole mappings:", address);
    return kInvalidValue;
  }
  for (const auto& it : whole) {
    for (const Access& user : it->second.users) {
      if (!user.before(host_)) {
        log_.add(STAGEHAND_SIM_FREE_IN_USE,
                 "free in use: cuMemUnmap of " + range_text({address, bytes}) + " while " +
                     describe(user) + " names it and is not known to be complete");
      }
    }
  }
  close_range(address, bytes);
  for (const auto& it : whole) {
    Physical* const physical = it->second.physical;
    mappings_.erase(it);
    --physical->mappings;
    give_back_if_unused(physical);
  }
  return kSuccess;
}

Result Memory::set_access(DevicePtr address, std::uint64_t bytes, int device, int access) {
  const auto whole = whole_mappings({address, bytes});
  if (whole.empty() || device < 0 || device >= device_count()) {
    return kInvalidValue;
  }
  const int protection =
      ((access & kRead) != 0 ? PROT_READ : 0) | ((access & kWrite) != 0 ? PROT_WRITE : 0);
  if (mprotect(pointer(address), bytes, protection) != 0) {
    return kUnknown;
  }
  for (const auto& it : whole) {
    it->second.access = access;
    Physical* const physical = it->second.physical;
    if (settings_.poison && !physical->poisoned) {
      this->device(physical->device)
          .poison(physical->pieces, settings_.seed * 31 + physical->handle);
      physical->poisoned = true;
    }
  }
  return kSuccess;
}

Memory::Mappings::const_iterator Memory::mapping_over(std::uint64_t address) const {
  auto it = mappings_.upper_bound(address);
  if (it == mappings_.begin()) {
    return mappings_.end();
  }
  --it;
  return it->first + it->second.bytes > address ? it : mappings_.end();
}

bool Memory::is_device(std::uint64_t address) const {
  return range_over(reservations_, address) != reservations_.end();
}

bool Memory::resolve(const Range& range, int access, std::vector<Piece>* pieces) const {
  std::uint64_t at = range.address;
  auto it = mapping_over(at);
  for (; at < range.end(); ++it) {
    if (it == mappings_.end() || it->first > at || (it->second.access & access) != access) {
      return false;
    }
    const Physical& physical = *it->second.physical;
    std::uint64_t begin = it->first;
    for (const Extent& extent : physical.pieces) {
      const std::uint64_t end = std::min(begin + extent.bytes, it->first + it->second.bytes);
      if (at >= begin && at < end && at < range.end()) {
        const std::uint64_t offset = extent.offset + (at - begin);
        const std::uint64_t part = std::min(end, range.end()) - at;
        pieces->push_back({physical.device, offset, part,
                           devices_[static_cast<std::size_t>(physical.device)]->view(offset)});
        at += part;
      }
      begin += extent.bytes;
    }
  }
  return true;
}

void Memory::use(const Range& range, const Access& access) {
  auto it = mappings_.upper_bound(range.address);
  if (it != mappings_.begin()) {
    --it;
  }
  for (; it != mappings_.end() && it->first < range.end(); ++it) {
    if (it->first + it->second.bytes <= range.address) {
      continue;
    }
    std::vector<Access>& users = it->second.users;
    std::erase_if(users, [&](const Access& user) { return user.slot == access.slot; });
    users.push_back(access);
  }
}

void Memory::take_from_others(const Range& range, int device) {
  for (auto it = mapping_over(range.address); it != mappings_.end() && it->first < range.end();
       ++it) {
    for (const Access& user : it->second.users) {
      if (user.device != device && !user.before(host_)) {
        log_.add(STAGEHAND_SIM_FREE_IN_USE,
                 "free in use: " + range_text(range) + " is taken from device " +
                     std::to_string(user.device) + " while " + describe(user) +
                     " names it and is not known to be complete");
      }
    }
  }
}

void Memory::double_free(const char* what, std::uint64_t address) {
  char text[160];
  std::snprintf(text, sizeof text, "double free: %s 0x%llx", what,
                static_cast<unsigned long long>(address));
  log_.add(STAGEHAND_SIM_DOUBLE_FREE, text);
}

}  // namespace stagehand::sim
