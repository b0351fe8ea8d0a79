// The size of an object whose type is not known here, only where its constructor is.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace stagehand::entry {

// How far into an object its constructor writes, found by making it twice over different bytes: one
// may happen to write what was there. 0: no memory to try it in. `construct(where)` and
// `destroy(where)` must not throw. Behind the room for the trial is a page nobody may write to.
template <class Construct, class Destroy>
std::size_t bytes_written(const Construct& construct, const Destroy& destroy) {
  constexpr std::size_t kTrial = std::size_t{64} << 10;
  constexpr std::size_t kGuard = std::size_t{64} << 10;  // a whole page, however large they are
  void* const room =
      mmap(nullptr, kTrial + kGuard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) {
    return 0;
  }
  auto* const first = static_cast<unsigned char*>(room);
  std::size_t written = 0;
  if (mprotect(first + kTrial, kGuard, PROT_NONE) == 0) {
    for (const unsigned char fill : {0xA5, 0x5A}) {
      std::memset(first, fill, kTrial);
      construct(room);
      std::size_t end = kTrial;
      while (end > 0 && first[end - 1] == fill) {
        --end;
      }
      written = std::max(written, end);
      destroy(room);
    }
  }
  munmap(room, kTrial + kGuard);
  return written;
}

}  // namespace stagehand::entry
