// One device's physical memory: a sparse memfd, handed out in ranges of the granularity.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "sim/common.hpp"

namespace stagehand::sim {

struct Extent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(std::uint64_t capacity);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  bool usable() const { return view_ != nullptr; }
  std::uint64_t capacity() const { return capacity_; }
  std::uint64_t used() const { return used_; }
  int file() const { return file_; }
  // All of the memory at once, always accessible: where queued work really happens.
  unsigned char* view(std::uint64_t offset) const { return view_ + offset; }

  // Takes `bytes` in as many pieces as it needs (a driver has no fragmentation to show for it).
  // False, and nothing taken, when there is less than that.
  bool take(std::uint64_t bytes, std::vector<Extent>* pieces);
  void give(const std::vector<Extent>& pieces);
  // Fills with a 16-bit word that is a NaN as float16, bfloat16, float32 and float64.
  void poison(const std::vector<Extent>& pieces, std::uint64_t seed);

 private:
  std::uint64_t capacity_;
  std::uint64_t used_ = 0;
  int file_ = -1;
  unsigned char* view_ = nullptr;
  std::map<std::uint64_t, std::uint64_t> free_;  // offset -> bytes, coalesced
};

}  // namespace stagehand::sim
