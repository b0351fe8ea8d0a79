// The address space: reservations, physical handles, and the mappings between them.
//
// Reserved addresses are host addresses nobody may touch; mapping puts the handle's pieces of the
// memfd there; setting access opens them. So the host can dereference what a GPU could, and faults
// where a GPU would.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "sim/address_space.hpp"
#include "sim/hazards.hpp"
#include "sim/physical.hpp"

namespace stagehand::sim {

// A physical handle. Lives until it is released and its last mapping is gone.
struct Physical {
  PhysicalHandle handle = 0;
  int device = 0;
  std::uint64_t bytes = 0;
  std::uint64_t mappings = 0;
  bool released = false;
  bool poisoned = false;
  std::vector<Extent> pieces;
};

struct Mapping {
  std::uint64_t bytes = 0;
  Physical* physical = nullptr;
  int access = 0;             // bit 0: read, bit 1: write
  std::vector<Access> users;  // the last operations that named it, one per stream
};

inline constexpr int kRead = 1;
inline constexpr int kWrite = 2;

// The one of the ranges (begin -> bytes) that holds the address, or end.
template <typename Ranges>
auto range_over(Ranges& ranges, std::uint64_t address) {
  auto it = ranges.upper_bound(address);
  if (it == ranges.begin() || std::prev(it)->first + std::prev(it)->second <= address) {
    return ranges.end();
  }
  return std::prev(it);
}

class Memory {
 public:
  struct Settings {
    std::uint64_t memory_bytes = 0;
    int devices = 1;
    std::uint64_t seed = 0;
    bool poison = true;
  };
  // `host` is what the host knows to be complete: what is not may not be unmapped.
  Memory(const Settings& settings, HazardLog& log, History& history, const VectorClock& host);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  bool usable() const;
  DeviceMemory& device(int index) { return *devices_[static_cast<std::size_t>(index)]; }
  int device_count() const { return settings_.devices; }
  std::uint64_t mapped_bytes(int device) const;

  Result reserve(DevicePtr* address, std::uint64_t bytes, std::uint64_t alignment);
  Result free_address(DevicePtr address, std::uint64_t bytes);
  Result create(PhysicalHandle* handle, std::uint64_t bytes, int device);
  Result release(PhysicalHandle handle);
  Result map(DevicePtr address, std::uint64_t bytes, PhysicalHandle handle);
  Result unmap(DevicePtr address, std::uint64_t bytes);
  Result set_access(DevicePtr address, std::uint64_t bytes, int device, int access);
  // cuMemAlloc and cuMemFree: the same steps in one.
  Result allocate(DevicePtr* address, std::uint64_t bytes, int device);
  Result free_allocation(DevicePtr address);
  // The device that an allocation is of, -1 where there is none; the others lose it.
  int begin_free(DevicePtr address);

  // The driver takes the range, which is memory of `device`, away from all other devices.
  void take_from_others(const Range& range, int device);

  // Registered host memory (pinned), and host memory of our own.
  Result register_host(std::uint64_t address, std::uint64_t bytes);
  Result unregister_host(std::uint64_t address);
  bool pinned(const Range& range) const;

  // True when the address lies in a reservation, mapped or not.
  bool is_device(std::uint64_t address) const;
  // The pieces under a device range. False when a byte of it is unmapped or lacks the access.
  bool resolve(const Range& range, int access, std::vector<Piece>* pieces) const;
  // The operation will touch these device bytes: they may not be unmapped before it is complete.
  void use(const Range& range, const Access& access);

 private:
  using Mappings = std::map<std::uint64_t, Mapping>;
  Mappings::const_iterator mapping_over(std::uint64_t address) const;
  // The mappings that make up exactly this range without a gap; empty when they do not.
  std::vector<Mappings::iterator> whole_mappings(const Range& range);
  bool inside_reservation(const Range& range) const;
  void give_back_if_unused(Physical* physical);
  void double_free(const char* what, std::uint64_t address);

  Settings settings_;
  HazardLog& log_;
  History& history_;
  const VectorClock& host_;
  std::vector<std::unique_ptr<DeviceMemory>> devices_;
  AddressSpace addresses_;
  std::map<std::uint64_t, std::uint64_t> reservations_;  // address -> bytes
  Mappings mappings_;
  std::unordered_map<PhysicalHandle, std::unique_ptr<Physical>> handles_;
  std::map<std::uint64_t, std::uint64_t> registered_;  // host address -> bytes
  std::unordered_map<DevicePtr, PhysicalHandle> allocations_;
  std::uint64_t handles_made_ = 0;
};

}  // namespace stagehand::sim
