#include "core/pinner.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>

#include "core/check.hpp"

namespace stagehand::core {

namespace {

constexpr Bytes kHugePage = 2_MiB;
constexpr Bytes kTouchThreshold = 64_MiB;  // from here several threads fault the pages in,
constexpr unsigned kTouchThreads = 16;     // at most so many
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

void prepare(void* memory, Bytes size, int node) {
  madvise(memory, size, MADV_HUGEPAGE);
  // The GPU writes here on its own; a forked child has no use for it and must not copy it.
  madvise(memory, size, MADV_DONTFORK);
  prefer_node(memory, size, node);
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

// Calls `run(begin, end)` for shares of `size` bytes, each on a thread of its own, of which there
// are as many as this part of the cores. What no thread is to be had for is run here.
template <class Run>
void start_shares(std::vector<std::thread>* threads, Bytes size, unsigned quarters, Run run) {
  const unsigned cores = std::thread::hardware_concurrency();
  const unsigned count = std::clamp(cores * quarters / 4, 1u, kTouchThreads);
  const Bytes share = round_up(size / count, kHugePage);
  Bytes begin = 0;
  try {
    for (; begin < size; begin += share) {
      threads->emplace_back(run, begin, std::min(begin + share, size));
    }
  } catch (const std::system_error&) {
    run(begin, size);
  }
}

void join(std::vector<std::thread>* threads) {
  for (std::thread& thread : *threads) {
    thread.join();
  }
  threads->clear();
}

// Calls `part` for all that the copies are, in parts: each as where to, where from, and how many
// bytes. With several threads where it is worth it.
template <class Part>
void in_parts(std::span<const HostMove> copies, Part part) {
  Bytes all = 0;
  for (const HostMove& one : copies) {
    all += one.bytes;
  }
  // From `begin` to `end` of the copies, laid end to end.
  const auto run = [copies, &part](Bytes begin, Bytes end) {
    Bytes before = 0;
    for (const HostMove& one : copies) {
      const Bytes from = std::max(begin, before);
      const Bytes to = std::min(end, before + one.bytes);
      if (from < to) {
        part(one.to + (from - before), one.from + (from - before), to - from);
      }
      before += one.bytes;
    }
  };
  if (all < kTouchThreshold) {
    run(0, all);
    return;
  }
  std::vector<std::thread> threads;
  threads.reserve(kTouchThreads);
  start_shares(&threads, all, 3, run);  // nothing trains meanwhile
  join(&threads);
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
  prepare(host, size, node);
  return host;
}

std::byte* map_shared(int file, Bytes offset, Bytes size, int node, bool writable) {
  const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* memory = mmap(nullptr, size, access, MAP_SHARED, file, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  prepare(memory, size, node);
  return static_cast<std::byte*>(memory);
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
  start_shares(&threads_, size, 2,
               [host](Bytes begin, Bytes end) { touch(host + begin, host + end); });
}

void Toucher::wait() { join(&threads_); }

void copy_on_host(std::span<const HostMove> copies) {
  in_parts(copies,
           [](std::byte* to, const std::byte* from, Bytes bytes) { std::memcpy(to, from, bytes); });
}

bool same_on_host(std::span<const HostMove> copies) {
  std::atomic<bool> same{true};
  in_parts(copies, [&same](const std::byte* there, const std::byte* here, Bytes bytes) {
    if (std::memcmp(there, here, bytes) != 0) {
      same.store(false, std::memory_order_relaxed);
    }
  });
  return same.load(std::memory_order_relaxed);
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
