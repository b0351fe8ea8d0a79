// When the pinned pool grows, and by what.
#include <algorithm>

#include "core/check.hpp"
#include "core/pinned_pool.hpp"

namespace stagehand::core {

// What may still be pinned: what is being pinned counts.
Bytes PinnedPool::room() const {
  Bytes taken = counters_.pinned_bytes;
  for (const Bytes coming : coming_) {
    taken += coming;
  }
  const Bytes limit = std::min(host_limit_, refused_at_);
  return held_ ? 0 : limit - std::min(limit, taken);
}

Chunk PinnedPool::reserve(std::size_t size, Bytes want) {
  Chunk chunk;
  chunk.slab_size = size;
  chunk.slab_bytes = sizes_.bytes[size];
  const Bytes piece = std::max(std::min(want, kPiece), chunk.slab_bytes);
  chunk.size = std::min(piece, room()) / chunk.slab_bytes * chunk.slab_bytes;
  chunk.reserved = chunk.size;
  if (chunk.size > 0) {
    coming_[size] += chunk.size;
    initial_[size] -= std::min(initial_[size], chunk.size);
    ++growing_;
  }
  return chunk;
}

Chunk PinnedPool::start_growth(Bytes wanted) { return reserve(class_for(wanted), kPiece); }

Chunk PinnedPool::start_growth_ahead() {
  for (std::size_t i = sizes_.cells; i < initial_.size(); ++i) {
    if (initial_[i] > 0) {
      if (const Chunk chunk = reserve(i, initial_[i]); chunk.size > 0) {
        return chunk;
      }
    }
  }
  for (std::size_t i = sizes_.cells; i < spare_due_.size(); ++i) {
    if (spare_due_[i]) {
      spare_due_[i] = false;
      if (const Chunk chunk = reserve(i, kPiece); chunk.size > 0) {
        return chunk;
      }
    }
  }
  due_ = false;
  return {};
}

void PinnedPool::finish_growth(Chunk chunk, bool pinned) {
  coming_[chunk.slab_size] -= chunk.reserved;
  --growing_;
  if (!pinned) {
    refused_at_ = counters_.pinned_bytes;
    return;
  }
  chunk.number = ++chunk_numbers_;
  chunks_.push_back(chunk);
  counters_.pinned_bytes += chunk.size;
  patience_ = 1;
  for (Bytes at = 0; at < chunk.size; at += chunk.slab_bytes) {
    Slab* slab = node();
    slab->host = chunk.host + at;
    slab->size = chunk.slab_bytes;
    slab->slab_size = chunk.slab_size;
    slab->chunk = chunk.number;
    free_[chunk.slab_size].emplace(slab->host, slab);
  }
}

void PinnedPool::retry() {
  constexpr std::uint32_t kMostPatience = 1024;
  if (refused_at_ == kUnlimited || ++retries_ < patience_) {
    return;
  }
  retries_ = 0;
  patience_ = std::min(2 * patience_, kMostPatience);
  refused_at_ = kUnlimited;
}

// After a slab was taken: where few are left that could serve the next of its size, more are due.
void PinnedPool::want_spare(std::size_t size) {
  Bytes left = free_bytes(size) + coming_[size];
  for (std::size_t i = sizes_.cells; i < size; ++i) {
    left += sizes_.bytes[i] >= kFill ? free_bytes(i) : 0;
  }
  const Bytes spare = std::max(kSpare, counters_.pinned_used_bytes / kSpareShare);
  if (left < spare && !spare_due_[size] && room() >= sizes_.bytes[size]) {
    spare_due_[size] = true;
    due_ = true;
  }
}

}  // namespace stagehand::core
