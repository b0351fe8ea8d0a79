#include "sim/address_space.hpp"

#include <sys/mman.h>

#include <iterator>

namespace stagehand::sim {

namespace {

// Enough for a hundred streams of a large device; sanitizers leave less.
constexpr std::uint64_t kMost = std::uint64_t{32} << 40;
constexpr std::uint64_t kLeast = std::uint64_t{16} << 30;

std::uint64_t closed_range(std::uint64_t bytes) {
  void* made = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return made == MAP_FAILED ? 0 : reinterpret_cast<std::uint64_t>(made);
}

std::uint64_t down(std::uint64_t address, std::uint64_t alignment) {
  return address & ~(alignment - 1);
}

// Anywhere.
std::uint64_t taken_outside(std::uint64_t bytes, std::uint64_t alignment) {
  const std::uint64_t begin = closed_range(bytes + alignment);
  if (begin == 0) {
    return 0;
  }
  const std::uint64_t aligned = down(begin + alignment - 1, alignment);
  if (aligned > begin) {
    munmap(pointer(begin), aligned - begin);
  }
  if (const std::uint64_t tail = begin + alignment - aligned; tail > 0) {
    munmap(pointer(aligned + bytes), tail);
  }
  return aligned;
}

}  // namespace

bool close_range(std::uint64_t address, std::uint64_t bytes) {
  return mmap(pointer(address), bytes, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}

AddressSpace::~AddressSpace() {
  if (base_ != 0) {
    munmap(pointer(base_), bytes_);
  }
}

void AddressSpace::find_range() {
  for (bytes_ = kMost; base_ == 0 && bytes_ >= kLeast; bytes_ /= 2) {
    base_ = closed_range(bytes_);
    if (base_ != 0) {
      free_.emplace(base_, bytes_);
      return;
    }
  }
}

std::uint64_t AddressSpace::take(std::uint64_t bytes, std::uint64_t alignment) {
  if (bytes_ == 0) {
    find_range();
  }
  const std::uint64_t wanted = bytes + alignment;
  for (auto gap = free_.rbegin(); gap != free_.rend(); ++gap) {
    const auto [begin, size] = *gap;
    const std::uint64_t end = begin + size;
    if (size < wanted || down(end - wanted, alignment) < begin) {
      continue;
    }
    const std::uint64_t address = down(end - wanted, alignment);
    if (address > begin) {
      gap->second = address - begin;
    } else {
      free_.erase(begin);
    }
    free_.emplace(address + bytes, end - address - bytes);
    return address;
  }
  return taken_outside(bytes, alignment);
}

void AddressSpace::give(std::uint64_t address, std::uint64_t bytes) {
  if (address < base_ || address >= base_ + bytes_) {
    munmap(pointer(address), bytes);
    return;
  }
  close_range(address, bytes);
  const auto after = free_.lower_bound(address);
  auto merged = free_.emplace_hint(after, address, bytes);
  if (after != free_.end() && address + bytes == after->first) {
    merged->second += after->second;
    free_.erase(after);
  }
  if (merged != free_.begin()) {
    const auto before = std::prev(merged);
    if (before->first + before->second == address) {
      before->second += merged->second;
      free_.erase(merged);
    }
  }
}

}  // namespace stagehand::sim
