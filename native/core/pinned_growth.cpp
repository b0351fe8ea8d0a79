// When the pinned pool grows, and by what.
#include <algorithm>
#include <numeric>

#include "core/check.hpp"
#include "core/pinned_pool.hpp"

namespace stagehand::core {

// What is pinned, and what is being pinned.
Bytes PinnedPool::planned() const {
  return std::accumulate(coming_.begin(), coming_.end(), counters_.pinned_bytes);
}

// Of slabs, what weights leave.
Bytes PinnedPool::limit() const {
  const Bytes weights = with_weights_ ? counters_.weights_pinned_bytes : 0;
  return host_limit_ - std::min(host_limit_, weights);
}

// What may still be pinned.
Bytes PinnedPool::room() const {
  const Bytes most = std::min(limit(), refused_at_);
  return held_ ? 0 : most - std::min(most, planned());
}

bool PinnedPool::add_weights(Bytes bytes) {
  const Bytes left = limit() - std::min(limit(), planned());
  if (with_weights_ && bytes > left) {
    return false;
  }
  counters_.weights_pinned_bytes += bytes;
  return true;
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
  const auto grow = [this](auto wanted) {
    Chunk chunk;
    for (std::size_t i = sizes_.cells; i < sizes_.bytes.size() && chunk.size == 0; ++i) {
      if (const Bytes bytes = wanted(i); bytes > 0) {
        chunk = reserve(i, bytes);
      }
    }
    return chunk;
  };
  Chunk chunk = grow([this](std::size_t i) {
    const bool due = spare_due_[i];
    spare_due_[i] = false;
    return due ? kPiece : 0;
  });
  if (chunk.size == 0) {
    chunk = grow([this](std::size_t i) {
      return expected_[i] - std::min(expected_[i], made_[i] + coming_[i]);
    });
  }
  if (chunk.size == 0) {
    chunk = grow([this](std::size_t i) { return first_waits() ? 0 : initial_[i]; });
  }
  if (chunk.size == 0) {
    chunk = grow([this](std::size_t i) {
      const bool last = i + 1 == sizes_.bytes.size() || sizes_.bytes[i + 1] > kFirst;
      return last && !first_waits() ? first_ - std::min(first_, planned()) : 0;
    });
  }
  due_ = chunk.size > 0;
  return chunk;
}

// The driver holds up who calls it while memory is registered: a first forward that has room for
// all took 240 ms more. So what nobody needs yet waits until memory may run short.
void PinnedPool::begin_step() {
  expected_.assign(expected_.size(), 0);
  first_due_ = false;
}

void PinnedPool::want_first() {
  due_ = due_ || first_waits();
  first_due_ = true;
}

// Not where the counts were asked for.
bool PinnedPool::first_waits() const { return !first_due_ && first_ > planned(); }

// As `take` would choose slabs with all of them free.
void PinnedPool::expect(Bytes bytes, Bytes of) {
  want_first();
  for (Bytes left = bytes; left > 0;) {
    const std::size_t size = sizes_.choose(left, bytes);
    const std::size_t whole = sizes_.class_of(size);
    expected_[whole] += sizes_.bytes[size] / of;
    due_ =
        due_ || (expected_[whole] > made_[whole] + coming_[whole] && room() >= sizes_.bytes[whole]);
    left -= std::min(left, sizes_.bytes[size]);
  }
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
  made_[chunk.slab_size] += chunk.size;
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
  want_first();
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
