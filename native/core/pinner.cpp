#include "core/pinner.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

#include "core/check.hpp"

namespace stagehand::core {

namespace {

constexpr Bytes kHugePage = 2_MiB;
constexpr Bytes kTouchThreshold = 64_MiB;  // from here several threads fault the pages in,
constexpr unsigned kTouchThreads = 16;     // at most so many, and half of the cores
constexpr int kPreferred = 1;              // MPOL_PREFERRED of linux/mempolicy.h

// Preferred, not bound: memory of another node is slower, no memory is worse. Where it cannot be
// said (one node, a container that forbids it), memory comes from where it comes.
void prefer_node(void* memory, Bytes size, int node) {
#ifdef SYS_mbind
  constexpr int kMostNodes = 1024;
  constexpr int kBits = 8 * sizeof(unsigned long);
  if (node >= 0 && node < kMostNodes) {
    unsigned long mask[kMostNodes / kBits] = {};
    mask[node / kBits] = 1ul << (node % kBits);
    syscall(SYS_mbind, memory, size, kPreferred, mask, static_cast<unsigned long>(kMostNodes), 0u);
  }
#else
  (void)memory, (void)size, (void)node;
#endif
}

#ifdef STAGEHAND_TESTING
bool touches() { return pinned_is_touched; }
#else
constexpr bool touches() { return true; }
#endif

void touch(std::byte* begin, const std::byte* end) {
  for (volatile std::byte* at = begin; at < end; at += 4_KiB) {
    *at = std::byte{0};
  }
}

bool halve(Chunk* chunk) {
  const Bytes less = chunk->size / 2 / chunk->slab_bytes * chunk->slab_bytes;
  if (chunk->host != nullptr) {
    unmap_host(chunk->host + less, chunk->size - less);
  }
  chunk->size = less;
  return less > 0;
}

}  // namespace

std::byte* map_host(Bytes size, int node) {
  // On a huge page's border, so that the first one is huge too.
  const Bytes spare = size >= kHugePage ? kHugePage : 0;
  void* memory =
      mmap(nullptr, size + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  auto* host = static_cast<std::byte*>(memory);
  if (spare > 0) {
    const Bytes before = (spare - reinterpret_cast<std::uintptr_t>(host) % spare) % spare;
    unmap_host(host, before);
    unmap_host(host + before + round_up(size, 4_KiB), spare - before);
    host += before;
  }
  madvise(host, size, MADV_HUGEPAGE);
  // The GPU writes here on its own; a forked child has no use for it and must not copy it.
  madvise(host, size, MADV_DONTFORK);
  prefer_node(host, size, node);
  return host;
}

void unmap_host(std::byte* host, Bytes size) {
  if (size > 0) {
    munmap(host, size);
  }
}

// Registering memory that is not yet backed faults it page by page in one thread; several threads
// touching huge pages first are about five times faster.
void Toucher::start(std::byte* host, Bytes size) {
  if (size < kTouchThreshold || !touches()) {
    return;
  }
  const unsigned count = std::clamp(std::thread::hardware_concurrency() / 2, 1u, kTouchThreads);
  const Bytes share = round_up(size / count, kHugePage);
  Bytes begin = 0;
  try {
    for (; begin < size; begin += share) {
      threads_.emplace_back(touch, host + begin, host + std::min(begin + share, size));
    }
  } catch (const std::system_error&) {
    touch(host + begin, host + size);  // no more threads to be had: this one touches the rest
  }
}

void Toucher::wait() {
  for (std::thread& thread : threads_) {
    thread.join();
  }
  threads_.clear();
}

bool map_chunk(Chunk* chunk, int node) {
  while (chunk->size > 0) {
    chunk->host = map_host(chunk->size, node);
    if (chunk->host != nullptr) {
      return true;
    }
    halve(chunk);
  }
  return false;
}

bool pin_chunk(const driver::Table& table, Chunk* chunk) {
  do {
    if (table.host_register(chunk->host, chunk->size, driver::kHostRegisterPortable) ==
        driver::kSuccess) {
      return true;
    }
  } while (halve(chunk));
  return false;
}

void unpin_chunk(const driver::Table& table, const Chunk& chunk) {
  if (table.host_unregister(chunk.host) == driver::kSuccess) {
    unmap_host(chunk.host, chunk.size);  // else: a leak is better than memory the GPU may write
  }
}

}  // namespace stagehand::core
