#include "core/pinned_pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <thread>

#include "core/check.hpp"

namespace stagehand::core {

namespace {

constexpr Bytes kGrowthBytes = 256_MiB;  // one growth pins at least this much,
constexpr Bytes kGrowthShare = 4;        // and this share of what there is: few growths, and spare
constexpr Bytes kTouchThreshold = 64_MiB;  // from here several threads fault the pages in
constexpr unsigned kTouchThreads = 8;

// Registering memory that is not yet backed faults it page by page in one thread; several threads
// touching huge pages first are about five times faster.
void touch(std::byte* host, Bytes size) {
  if (size < kTouchThreshold) {
    return;
  }
  const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1u, kTouchThreads);
  const Bytes share = round_up(size / count, 2_MiB);
  const auto touch_range = [host](Bytes begin, Bytes end) {
    for (Bytes at = begin; at < end; at += 4_KiB) {
      host[at] = std::byte{0};
    }
  };
  std::vector<std::thread> threads;
  Bytes begin = 0;
  try {
    for (; begin + share < size; begin += share) {
      threads.emplace_back(touch_range, begin, begin + share);
    }
  } catch (const std::system_error&) {
    // No more threads to be had: this one touches the rest.
  }
  touch_range(begin, size);
  for (std::thread& thread : threads) {
    thread.join();
  }
}

std::byte* map_host(Bytes size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  madvise(memory, size, MADV_HUGEPAGE);
  // The GPU writes here on its own; a forked child has no use for it and must not copy it.
  madvise(memory, size, MADV_DONTFORK);
  return static_cast<std::byte*>(memory);
}

}  // namespace

void PinnedPool::configure(const SizeClasses& classes, Bytes host_limit) {
  host_limit_ = host_limit;
  if (!chunks_.empty() && classes.bytes == classes_.bytes) {
    classes_.counts = classes.counts;
    return;
  }
  classes_ = classes;
  free_.assign(classes_.size(), {});
  made_.assign(classes_.size(), 0);
}

Slab* PinnedPool::take_from(std::size_t size_class) {
  Slab* slab = free_[size_class].front();
  free_[size_class].pop_front();
  counters_.pinned_used_bytes += slab->size;
  ++counters_.pool_hits;
  return slab;
}

Slab* PinnedPool::take(Bytes wanted) {
  for (std::size_t i = classes_.fit(wanted); i < free_.size(); ++i) {
    if (!free_[i].empty()) {
      return take_from(i);
    }
  }
  return nullptr;
}

Slab* PinnedPool::take_smaller() {
  for (std::size_t i = free_.size(); i-- > 0;) {
    if (!free_[i].empty()) {
      return take_from(i);
    }
  }
  return nullptr;
}

void PinnedPool::give(Slab* slab) {
  if (slab->pageable) {
    counters_.pageable_bytes -= slab->size;
    munmap(slab->host, slab->size);
    spare_nodes_.push_back(slab);
    return;
  }
  counters_.pinned_used_bytes -= slab->size;
  free_[slab->size_class].push_back(slab);
}

PinnedPool::Chunk PinnedPool::plan_growth(Bytes wanted) const {
  Chunk chunk;
  const std::size_t i = classes_.fit(wanted);
  const Bytes slab = classes_.bytes[i];
  const Bytes room =
      host_limit_ > counters_.pinned_bytes ? host_limit_ - counters_.pinned_bytes : 0;
  const Bytes first = made_[i] < classes_.counts[i] ? (classes_.counts[i] - made_[i]) * slab : 0;
  const Bytes growth = std::max(kGrowthBytes, counters_.pinned_bytes / kGrowthShare);
  const Bytes want = std::max({first, slab, growth / slab * slab});
  chunk.slab_bytes = slab;
  chunk.size_class = static_cast<std::uint32_t>(i);
  chunk.size = std::min(want, room / slab * slab);
  return chunk;
}

bool PinnedPool::prepare(Chunk* chunk) const {
  // A refusal is answered with less: the driver may pin some, though not all, of what was asked.
  while (chunk->size >= chunk->slab_bytes && chunk->slab_bytes > 0) {
    chunk->host = map_host(chunk->size);
    if (chunk->host != nullptr) {
      touch(chunk->host, chunk->size);
      if (table_.host_register(chunk->host, chunk->size, driver::kHostRegisterPortable) ==
          driver::kSuccess) {
        chunk->registered = true;
        return true;
      }
      munmap(chunk->host, chunk->size);
      chunk->host = nullptr;
    }
    chunk->size = chunk->size / 2 / chunk->slab_bytes * chunk->slab_bytes;
  }
  return false;
}

void PinnedPool::adopt(const Chunk& chunk) {
  SH_CHECK(chunk.registered);
  chunks_.push_back(chunk);
  counters_.pinned_bytes += chunk.size;
  for (Bytes at = 0; at + chunk.slab_bytes <= chunk.size; at += chunk.slab_bytes) {
    Slab slab;
    slab.host = chunk.host + at;
    slab.size = chunk.slab_bytes;
    slab.size_class = chunk.size_class;
    free_[chunk.size_class].push_back(&nodes_.emplace_back(slab));
    ++made_[chunk.size_class];
  }
}

Slab* PinnedPool::take_pageable(Bytes wanted) {
  const Bytes size = round_up(wanted, 4_KiB);
  std::byte* host = map_host(size);
  if (host == nullptr) {
    return nullptr;
  }
  Slab* slab = nullptr;
  if (spare_nodes_.empty()) {
    slab = &nodes_.emplace_back();
  } else {
    slab = spare_nodes_.back();
    spare_nodes_.pop_back();
    *slab = Slab{};
  }
  slab->host = host;
  slab->size = size;
  slab->pageable = true;
  counters_.pageable_bytes += size;
  return slab;
}

bool PinnedPool::quiet(ClockBank& clocks) const {
  return std::all_of(nodes_.begin(), nodes_.end(), [&](const Slab& slab) {
    return std::all_of(slab.fence.begin(), slab.fence.end(),
                       [&](const Tick& tick) { return clocks.at(tick.clock).passed(tick.seq); });
  });
}

std::vector<PinnedPool::Chunk> PinnedPool::take_chunks() {
  SH_CHECK(idle());
  std::vector<Chunk> chunks;
  chunks.swap(chunks_);
  nodes_.clear();
  spare_nodes_.clear();
  free_.assign(classes_.size(), {});
  made_.assign(classes_.size(), 0);
  counters_.pinned_bytes = 0;
  return chunks;
}

void PinnedPool::unmap(const std::vector<Chunk>& chunks) const {
  for (const Chunk& chunk : chunks) {
    if (table_.host_unregister(chunk.host) == driver::kSuccess) {
      munmap(chunk.host, chunk.size);  // else: a leak is better than memory the GPU may write
    }
  }
}

}  // namespace stagehand::core
