// Addresses that cuMemAddressReserve hands out: host addresses nobody may touch.
//
// From one range, the highest that is free first, as Linux does, and with some that stay free
// behind each: what runs over its end faults. Where the host's kernel would put them depends on
// what else the process has mapped, so on sanitizers and machines; and what an allocator does hangs
// on which of two addresses is the lower one.
#pragma once

#include <cstdint>
#include <map>

namespace stagehand::sim {

inline void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

// Back to reserved: no memory behind it, and any touch faults.
bool close_range(std::uint64_t address, std::uint64_t bytes);

class AddressSpace {
 public:
  AddressSpace() = default;
  ~AddressSpace();
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

  // Of a multiple of `alignment`, a power of two and at least a page; 0: there are none.
  std::uint64_t take(std::uint64_t bytes, std::uint64_t alignment);
  // What was taken, and whatever is mapped there.
  void give(std::uint64_t address, std::uint64_t bytes);

 private:
  void find_range();

  std::uint64_t base_ = 0;
  std::uint64_t bytes_ = 0;                      // 0: not looked for yet
  std::map<std::uint64_t, std::uint64_t> free_;  // begin -> bytes
};

}  // namespace stagehand::sim
