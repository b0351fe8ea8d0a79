#include "sim/physical.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace stagehand::sim {

DeviceMemory::DeviceMemory(std::uint64_t capacity)
    : capacity_(capacity / kGranularity * kGranularity) {
  file_ = memfd_create("stagehand-simulated-gpu", MFD_CLOEXEC);
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(capacity_)) != 0) {
    return;
  }
  void* view =
      mmap(nullptr, capacity_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (view != MAP_FAILED) {
    view_ = static_cast<unsigned char*>(view);
    free_[0] = capacity_;
  }
}

DeviceMemory::~DeviceMemory() {
  if (view_ != nullptr) {
    munmap(view_, capacity_);
  }
  if (file_ >= 0) {
    close(file_);
  }
}

bool DeviceMemory::take(std::uint64_t bytes, std::vector<Extent>* pieces) {
  if (bytes > capacity_ - used_) {
    return false;
  }
  used_ += bytes;
  while (bytes > 0) {
    const auto it = free_.begin();
    const Extent piece{it->first, std::min(bytes, it->second)};
    const std::uint64_t rest = it->second - piece.bytes;
    free_.erase(it);
    if (rest > 0) {
      free_[piece.offset + piece.bytes] = rest;
    }
    pieces->push_back(piece);
    bytes -= piece.bytes;
  }
  return true;
}

void DeviceMemory::give(const std::vector<Extent>& pieces) {
  for (const Extent& piece : pieces) {
    used_ -= piece.bytes;
    auto it = free_.emplace(piece.offset, piece.bytes).first;
    const auto next = std::next(it);
    if (next != free_.end() && it->first + it->second == next->first) {
      it->second += next->second;
      free_.erase(next);
    }
    if (it != free_.begin()) {
      const auto before = std::prev(it);
      if (before->first + before->second == it->first) {
        before->second += it->second;
        free_.erase(it);
      }
    }
  }
}

void DeviceMemory::poison(const std::vector<Extent>& pieces, std::uint64_t seed) {
  const auto low = static_cast<unsigned char>(0xF1 + Random(seed).below(14));
  for (const Extent& piece : pieces) {
    unsigned char* const begin = view(piece.offset);
#ifdef MADV_POPULATE_WRITE
    madvise(begin, piece.bytes, MADV_POPULATE_WRITE);  // only to save page faults
#endif
    // One page by hand, the rest by copying it: memcpy is the fastest thing at hand.
    constexpr std::size_t kPage = 4096;
    for (std::size_t i = 0; i < kPage; i += 2) {
      begin[i] = low;
      begin[i + 1] = 0xFF;
    }
    for (std::uint64_t at = kPage; at < piece.bytes; at += kPage) {
      std::memcpy(begin + at, begin, kPage);
    }
  }
}

}  // namespace stagehand::sim
