#include "core/pinned_tier.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/background.hpp"
#include "core/check.hpp"
#include "core/wait_timer.hpp"

namespace stagehand::core {

bool PinnedTier::take(Bytes bytes, bool squeeze, std::vector<Slab*>* slabs, Bytes* missing) {
  const Lock lock(mutex_);
  const bool taken = pool_.take(bytes, squeeze, slabs, missing);
  counters_.pool_misses += taken ? 0 : 1;
  grow_if_due();
  return taken;
}

// Pageable memory goes back to the system, which takes its time: the device's lock is not held for
// that long in the common case, since such copies are rare.
void PinnedTier::give(Slab* slab) {
  std::byte* pageable = nullptr;
  Bytes bytes = 0;
  {
    const Lock lock(mutex_);
    if (slab->pageable) {
      pageable = slab->host;
      bytes = slab->size;
    }
    pool_.give(slab);
  }
  if (pageable != nullptr) {
    gate_.unmap_later(pageable, bytes);
  }
}

void PinnedTier::expect(Bytes bytes, Bytes of) {
  const Lock lock(mutex_);
  pool_.expect(bytes, of);
  grow_if_due();
}

Slab* PinnedTier::take_pageable(Bytes bytes) {
  std::byte* host = map_host(PinnedPool::pageable_bytes(bytes), -1);
  if (host == nullptr) {
    return nullptr;
  }
  const Lock lock(mutex_);
  return pool_.add_pageable(host, bytes);
}

void PinnedTier::grow_if_due() {
  if (options_.ahead && pool_.growth_due()) {
    work_.notify_one();
  }
}

void PinnedTier::begin_step() {
  const Lock lock(mutex_);
  pool_.retry();
  pool_.begin_step();
}

void PinnedTier::end_empty_step() {
  const Lock lock(mutex_);
  pool_.want_first();
  grow_if_due();
}

void PinnedTier::wait_until(Lock& lock, auto done) {
#ifdef STAGEHAND_TESTING
  while (pin_by_hand != nullptr && !done()) {
    lock.unlock();
    pin_by_hand();
    lock.lock();
  }
#endif
  answers_.wait(lock, done);
}

bool PinnedTier::wait_for(Entry& entry, Bytes missing) {
  const Unlocked unlocked(entry);
  Lock lock(mutex_);
  pool_.retry();
  if (!options_.ahead || !pinner_runs()) {
    return make_here(lock, missing);
  }
  Request request{missing};
  requests_.push_back(&request);
  ++counters_.host_waits;
  work_.notify_one();
  const WaitTimer timer;
  wait_until(lock, [&] { return request.answered; });
  counters_.pinning_wait_ns += timer.ns();
  return request.made || (!options_.ahead && make_here(lock, missing));
}

// Where the memory would cross the limit, nobody waited.
bool PinnedTier::make_here(Lock& lock, Bytes wanted) {
  Chunk chunk = pool_.start_growth(wanted);
  if (chunk.size == 0) {
    return false;
  }
  ++counters_.host_waits;
  const WaitTimer timer;
  const int node = options_.numa_node;
  lock.unlock();
  bool made = map_chunk(&chunk, node);
  if (made) {
    Toucher toucher;
    toucher.start(chunk.host, chunk.size);
    toucher.wait();
    made = pin_chunk(gate_.table(), &chunk);
  }
  lock.lock();
  counters_.pinning_wait_ns += timer.ns();
  finish(chunk, made);
  return made;
}

void PinnedTier::answer(Request* request, bool made) {
  request->answered = true;
  request->made = made;
}

// Whoever waits is answered by any growth: smaller slabs may do, or larger ones.
void PinnedTier::finish(const Chunk& chunk, bool pinned) {
  pool_.finish_growth(chunk, pinned);
  for (Request* request : requests_) {
    answer(request, pinned);
  }
  requests_.clear();
  answers_.notify_all();
}

// A forked child has the books of its parent, but not its thread.
bool PinnedTier::pinner_runs() const { return pinner_process_ != 0 && pinner_process_ == getpid(); }

// One thread a device. Where none can be had, whoever needs pinned memory makes it.
void PinnedTier::start_pinner() {
  if (pinner_process_ != 0) {
    return;
  }
#ifdef STAGEHAND_TESTING
  if (pin_by_hand != nullptr) {
    pinner_process_ = getpid();
    return;
  }
#endif
  if (start_background([this] { pin_ahead(); })) {
    pinner_process_ = getpid();
  } else {
    options_.ahead = false;
  }
}

void PinnedTier::pin_ahead() {
  const driver::Table& driver = gate_.table();
  const driver::ContextGuard guard(driver, gate_.context());
  int mode = driver::kCaptureModeRelaxed;  // a graph captured elsewhere has nothing to do with us
  driver.thread_exchange_capture_mode(&mode);
  Toucher toucher;
  Chunk next;
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLongestPause{20};
  Clock::time_point others_until;
  Lock lock(mutex_);
  for (;;) {
    while (next.size == 0) {
      work_.wait(lock,
                 [&] { return !requests_.empty() || (options_.ahead && pool_.growth_due()); });
      next = begin_chunk(lock, toucher);
    }
    Chunk chunk = std::exchange(next, Chunk{});
    lock.unlock();
    toucher.wait();
    lock.lock();
    next = begin_chunk(lock, toucher);  // faulted in while this one is registered
    // Who calls the driver meanwhile waits, and does not get in between two of these in a row: one
    // launch waited for all of sixteen. So others have as long in between as one took, unless
    // somebody waits for this.
    work_.wait_until(lock, others_until, [&] { return !requests_.empty() || pool_.held(); });
    lock.unlock();
    const Clock::time_point began = Clock::now();
    const bool pinned = pin_chunk(driver, &chunk);
    const Clock::time_point ended = Clock::now();
    others_until = ended + std::min<Clock::duration>(ended - began, kLongestPause);
    lock.lock();
    finish(chunk, pinned);
  }
}

// What the requests want. Those that nothing more can be made for are answered so, unless what is
// being made already may do.
Chunk PinnedTier::start_requested() {
  for (const Request* request : requests_) {
    if (pool_.coming(request->wanted)) {
      continue;
    }
    if (const Chunk chunk = pool_.start_growth(request->wanted); chunk.size > 0) {
      return chunk;
    }
  }
  if (!pool_.growing()) {
    for (Request* request : requests_) {
      answer(request, false);
    }
    requests_.clear();
    answers_.notify_all();
  }
  return {};
}

// Maps the next chunk and starts to fault it in. Of size 0 when there is nothing to do, or no
// memory to do it with.
Chunk PinnedTier::begin_chunk(Lock& lock, Toucher& toucher) {
  Chunk chunk = requests_.empty() ? Chunk{} : start_requested();
  if (chunk.size == 0 && options_.ahead) {
    chunk = pool_.start_growth_ahead();
  }
  if (chunk.size == 0) {
    return chunk;
  }
  const int node = options_.numa_node;
  lock.unlock();
  const bool mapped = map_chunk(&chunk, node);
  if (mapped) {
    toucher.start(chunk.host, chunk.size);
  }
  lock.lock();
  if (mapped) {
    return chunk;
  }
  finish(chunk, false);
  return Chunk{};
}

#ifdef STAGEHAND_TESTING
Chunk PinnedTier::begin_chunk() {
  Toucher toucher;
  Lock lock(mutex_);
  return begin_chunk(lock, toucher);
}

void PinnedTier::end_chunk(Chunk chunk) {
  const bool pinned = pin_chunk(gate_.table(), &chunk);
  const Lock lock(mutex_);
  finish(chunk, pinned);
}
#endif

bool PinnedTier::has_classes(const SizeClasses& classes) {
  const Lock lock(mutex_);
  return classes.bytes == pool_.classes().bytes;
}

void PinnedTier::hold(bool held) {
  Lock lock(mutex_);
  pool_.hold(held);
  work_.notify_one();
  wait_until(lock, [&] { return !held || !pinner_runs() || !pool_.growing(); });
}

bool PinnedTier::idle() {
  const Lock lock(mutex_);
  return pool_.idle();
}

bool PinnedTier::quiet(ClockBank& clocks) {
  const Lock lock(mutex_);
  return pool_.quiet(clocks);
}

std::vector<Chunk> PinnedTier::take_chunks() {
  const Lock lock(mutex_);
  return pool_.take_chunks();
}

void PinnedTier::configure(const SizeClasses& classes, Bytes host_limit, PinnedOptions options) {
  const Lock lock(mutex_);
  pool_.configure(classes, host_limit, options.ahead ? options.first : 0, options.with_weights);
  options_ = options;
  if (options_.ahead) {
    start_pinner();
  }
  work_.notify_one();
}

std::vector<Chunk> PinnedTier::take_chunks_above(Bytes keep, ClockBank& clocks) {
  const Lock lock(mutex_);
  return pool_.take_chunks_above(keep, clocks);
}

void PinnedTier::unpin(const std::vector<Chunk>& chunks) {
  for (const Chunk& chunk : chunks) {
    unpin_chunk(gate_.table(), chunk);
  }
}

bool PinnedTier::add_weights(Bytes bytes) {
  const Lock lock(mutex_);
  return pool_.add_weights(bytes);
}

void PinnedTier::remove_weights(Bytes bytes) {
  const Lock lock(mutex_);
  pool_.remove_weights(bytes);
}

void PinnedTier::add_to(Counters* counters) {
  const Lock lock(mutex_);
#define STAGEHAND_ADD(name) counters->name += counters_.name;
  STAGEHAND_COUNTERS(STAGEHAND_ADD)
#undef STAGEHAND_ADD
}

std::vector<Demand::Peak> PinnedTier::demand() {
  const Lock lock(mutex_);
  return pool_.demand().peaks();
}

const char* PinnedTier::broken() {
  const Lock lock(mutex_);
  return pool_.broken();
}

}  // namespace stagehand::core
