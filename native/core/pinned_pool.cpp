#include "core/pinned_pool.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"

namespace stagehand::core {

void PinnedPool::configure(const SizeClasses& classes, Bytes host_limit, Bytes first,
                           bool with_weights) {
  host_limit_ = host_limit;
  with_weights_ = with_weights;
  counters_.host_limit = with_weights ? host_limit : 0;
  first_ = first;
  first_due_ = true;
  if (sizes_.bytes.empty() || classes.bytes != classes_.bytes) {
    SH_CHECK(chunks_.empty() && growing_ == 0);
    sizes_ = SlabSizes(classes);
    free_.assign(sizes_.bytes.size(), {});
    next_.assign(sizes_.bytes.size(), nullptr);
    uncut_later_.assign(sizes_.bytes.size(), nullptr);
    made_.assign(sizes_.bytes.size(), 0);
    coming_.assign(sizes_.bytes.size(), 0);
    expected_.assign(sizes_.bytes.size(), 0);
  }
  classes_ = classes;
  classes_.counts.resize(classes_.bytes.size(), 0);
  initial_.assign(sizes_.bytes.size(), 0);
  spare_due_.assign(sizes_.bytes.size(), false);
  refused_at_ = kUnlimited;
  patience_ = 1;
  retries_ = 0;
  for (std::size_t i = 0; i < classes_.bytes.size(); ++i) {
    const std::size_t size = sizes_.cells + i;
    const Bytes have = coming_[size] + made_[size];
    const Bytes wanted = classes_.counts[i] * classes_.bytes[i];
    initial_[size] = wanted - std::min(wanted, have);
  }
  due_ = true;
}

bool PinnedPool::take(Bytes bytes, bool squeeze, std::vector<Slab*>* slabs, Bytes* missing) {
  const std::size_t first = slabs->size();
  for (Bytes left = bytes; left > 0;) {
    const std::size_t size = sizes_.choose(left, bytes);
    Slab* slab = take_free(size);
    if (slab == nullptr) {
      slab = take_filling(size, left);
    }
    if (slab == nullptr && squeeze) {
      slab = take_any(size);
    }
    if (slab == nullptr) {
      *missing = sizes_.bytes[size];
      spare_due_[sizes_.class_of(size)] = true;
      due_ = true;
      while (slabs->size() > first) {
        give(slabs->back());
        slabs->pop_back();
      }
      return false;
    }
    slab->filled = std::min(left, slab->size);
    counters_.pinned_used_bytes += slab->size;
    counters_.pinned_waste_bytes += slab->size - slab->filled;
    left -= slab->filled;
    slabs->push_back(slab);
    want_spare(sizes_.class_of(size));
  }
  counters_.pool_hits += slabs->size() - first;
  (*slabs)[first]->demand = demand_.add(bytes);
  return true;
}

Slab* PinnedPool::take_free(std::size_t size) {
  auto& free = free_[size];
  if (free.empty() &&
      (sizes_.is_cell(size) ? !cut(size) : size != sizes_.cells || !make_whole_any())) {
    return nullptr;
  }
  auto found = free.lower_bound(next_[size]);
  if (found == free.end()) {
    found = free.begin();
  }
  Slab* slab = found->second;
  free.erase(found);
  if (slab->parent == nullptr) {
    next_[size] = slab->host + slab->size;
  } else {  // cells from the lowest address: the rest of their slabs come free as a whole
    taken_cell_bytes_ += slab->size;
    ++slab->parent->taken_cells;
    if (uncut_later_[size] == slab->parent) {
      uncut_later_[size] = nullptr;
    }
  }
  return slab;
}

// The largest smaller slab that `left` fills, where the smaller ones can hold all of it.
Slab* PinnedPool::take_filling(std::size_t size, Bytes left) {
  Bytes all = 0;
  std::size_t best = size;
  for (std::size_t i = sizes_.cells; i < size; ++i) {
    if (sizes_.bytes[i] >= kFill && !free_[i].empty()) {
      all += free_bytes(i);
      best = sizes_.bytes[i] <= left || best == size ? i : best;
    }
  }
  return all >= std::min(left, sizes_.bytes[size]) && best != size ? take_free(best) : nullptr;
}

Slab* PinnedPool::take_any(std::size_t size) {
  for (std::size_t i = size + 1; i < free_.size(); ++i) {
    if (!free_[i].empty()) {
      return take_free(i);
    }
  }
  for (std::size_t i = size; i-- > 0;) {
    if (!free_[i].empty()) {
      return take_free(i);
    }
  }
  return nullptr;
}

void PinnedPool::give(Slab* slab) {
  if (slab->demand != nullptr) {
    Demand::drop(slab->demand);
    slab->demand = nullptr;
  }
  if (slab->pageable) {
    counters_.pageable_bytes -= slab->size;
    spare_nodes_.push_back(slab);
    return;
  }
  counters_.pinned_used_bytes -= slab->size;
  counters_.pinned_waste_bytes -= slab->size - slab->filled;
  slab->filled = 0;
  put_back(slab);
}

void PinnedPool::put_back(Slab* slab) {
  const std::size_t size = slab->slab_size;
  free_[size].emplace(slab->host, slab);
  if (Slab* parent = slab->parent; parent != nullptr) {
    taken_cell_bytes_ -= slab->size;
    if (--parent->taken_cells > 0) {
      return;
    }
    if (uncut_later_[size] == nullptr) {
      uncut_later_[size] = parent;  // one is kept: cutting it again would cost more
    } else {
      make_whole(parent, size);
    }
  }
}

// A slab of the smallest class becomes cells, each behind the copies that named the slab.
bool PinnedPool::cut(std::size_t cell) {
  Slab* parent = take_free(sizes_.cells);
  if (parent == nullptr) {
    return false;
  }
  const Bytes bytes = sizes_.bytes[cell];
  for (Bytes at = 0; at < parent->size; at += bytes) {
    Slab* slab = node();
    slab->host = parent->host + at;
    slab->size = bytes;
    slab->slab_size = cell;
    slab->chunk = parent->chunk;
    slab->parent = parent;
    slab->fence = parent->fence;
    free_[cell].emplace(slab->host, slab);
  }
  cut_bytes_ += parent->size;
  return true;
}

// The cells become a slab again, behind the copies that named any of them (rule S5). False: more
// streams than a fence can name; the cells stay.
bool PinnedPool::make_whole(Slab* parent, std::size_t cell) {
  SH_CHECK(parent->taken_cells == 0);
  const auto begin = free_[cell].lower_bound(parent->host);
  const auto end = free_[cell].lower_bound(parent->host + parent->size);
  Fence fence = parent->fence;
  for (auto it = begin; it != end; ++it) {
    if (!fence.add(it->second->fence)) {
      return false;
    }
  }
  parent->fence = fence;
  for (auto it = begin; it != end; ++it) {
    spare_nodes_.push_back(it->second);
  }
  free_[cell].erase(begin, end);
  cut_bytes_ -= parent->size;
  put_back(parent);
  return true;
}

bool PinnedPool::make_whole_any() {
  for (std::size_t cell = 0; cell < sizes_.cells; ++cell) {
    Slab* parent = std::exchange(uncut_later_[cell], nullptr);
    if (parent != nullptr && make_whole(parent, cell)) {
      return true;
    }
  }
  return false;
}

Slab* PinnedPool::node() {
  if (spare_nodes_.empty()) {
    return &nodes_.emplace_back();
  }
  Slab* slab = spare_nodes_.back();
  spare_nodes_.pop_back();
  *slab = Slab{};
  return slab;
}

Slab* PinnedPool::add_pageable(std::byte* host, Bytes bytes) {
  Slab* slab = node();
  slab->host = host;
  slab->size = pageable_bytes(bytes);
  slab->filled = bytes;
  slab->pageable = true;
  slab->demand = demand_.add(bytes);
  counters_.pageable_bytes += slab->size;
  return slab;
}

bool PinnedPool::passed(const Fence& fence, ClockBank& clocks) const {
  return std::all_of(fence.begin(), fence.end(),
                     [&](const Tick& tick) { return clocks.at(tick.clock).passed(tick.seq); });
}

bool PinnedPool::quiet(ClockBank& clocks) const {
  return std::all_of(nodes_.begin(), nodes_.end(),
                     [&](const Slab& slab) { return passed(slab.fence, clocks); });
}

std::vector<Chunk> PinnedPool::take_chunks() {
  SH_CHECK(idle());
  std::vector<Chunk> chunks;
  chunks.swap(chunks_);
  nodes_.clear();
  spare_nodes_.clear();
  for (auto& free : free_) {
    free.clear();
  }
  uncut_later_.assign(uncut_later_.size(), nullptr);
  made_.assign(made_.size(), 0);
  expected_.assign(expected_.size(), 0);
  counters_.pinned_bytes = 0;
  cut_bytes_ = 0;
  return chunks;
}

std::vector<Chunk> PinnedPool::take_chunks_above(Bytes keep, ClockBank& clocks) {
  while (make_whole_any()) {
  }
  first_ = 0;
  initial_.assign(initial_.size(), 0);
  spare_due_.assign(spare_due_.size(), false);
  expected_.assign(expected_.size(), 0);
  std::vector<Chunk> gone;
  for (std::size_t i = chunks_.size(); i-- > 0 && counters_.pinned_bytes > keep;) {
    const Chunk chunk = chunks_[i];
    auto& free = free_[chunk.slab_size];
    const auto begin = free.lower_bound(chunk.host);
    const auto end = free.lower_bound(chunk.host + chunk.size);
    Bytes whole = 0;
    for (auto it = begin; it != end; ++it) {
      whole += passed(it->second->fence, clocks) ? it->second->size : 0;
    }
    if (whole < chunk.size) {
      continue;
    }
    for (auto it = begin; it != end; ++it) {
      it->second->fence.clear();
      spare_nodes_.push_back(it->second);
    }
    free.erase(begin, end);
    chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(i));
    counters_.pinned_bytes -= chunk.size;
    made_[chunk.slab_size] -= chunk.size;
    gone.push_back(chunk);
  }
  return gone;
}

const char* PinnedPool::broken() const {
  Bytes free_slabs = 0;
  Bytes free_cells = 0;
  for (std::size_t i = 0; i < free_.size(); ++i) {
    (sizes_.is_cell(i) ? free_cells : free_slabs) += free_bytes(i);
  }
  Bytes chunks = 0;
  for (const Chunk& chunk : chunks_) {
    chunks += chunk.size;
  }
  const Bytes taken_slabs = counters_.pinned_used_bytes - taken_cell_bytes_;
  if (chunks != counters_.pinned_bytes || free_slabs + taken_slabs + cut_bytes_ != chunks) {
    return "pinned slabs free, taken and cut differ from what is pinned";
  }
  if (free_cells + taken_cell_bytes_ != cut_bytes_) {
    return "cells free and taken differ from the slabs that were cut";
  }
  if (counters_.pinned_waste_bytes > counters_.pinned_used_bytes) {
    return "more pinned memory is wasted than used";
  }
  Bytes coming = 0;
  for (const Bytes bytes : coming_) {
    coming += bytes;
  }
  return (coming > 0) == (growing_ > 0) ? nullptr : "bytes are being pinned by nobody";
}

}  // namespace stagehand::core
