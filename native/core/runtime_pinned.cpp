// Pinned host memory for copies: settings, slabs for a record, and the thread that pins ahead.
#include <unistd.h>

#include <utility>

#include "core/background.hpp"
#include "core/check.hpp"
#include "core/runtime.hpp"

namespace stagehand::core {

bool Runtime::configure_pinned(const SizeClasses& classes, Bytes host_limit,
                               PinnedOptions options) {
  if (classes.bytes.empty()) {
    return false;
  }
  Lock lock(mutex_);
  const bool same = classes.bytes == pinned_.classes().bytes;
  std::vector<Chunk> chunks;
  if (!same) {
    // Slabs of other sizes go, once no record and no copy names one. What is being pinned is
    // waited for only where another thread pins it.
    pinned_.hold(true);
    growth_done_.notify_all();
    if (pinner_runs()) {
      growth_done_.wait(lock, [&] { return !pinned_.growing(); });
    }
    const bool some = counters_.pinned_bytes > 0;
    const bool idle =
        pinned_.idle() && (!some || wait_for_gpu(lock)) && pinned_.idle() && pinned_.quiet(clocks_);
    pinned_.hold(false);
    growth_due_.notify_all();
    if (!idle) {
      return false;
    }
    chunks = pinned_.take_chunks();
  }
  pinned_.configure(classes, host_limit);
  pinned_options_ = options;
  if (options.ahead) {
    start_pinner();
  }
  growth_due_.notify_all();
  growth_done_.notify_all();
  lock.unlock();
  const driver::ContextGuard guard(table_, context_);
  for (const Chunk& chunk : chunks) {
    unpin_chunk(table_, chunk);
  }
  return true;
}

Bytes Runtime::release_pinned(Bytes keep) {
  const driver::ContextGuard guard(table_, context_);
  Lock lock(mutex_);
  const std::vector<Chunk> chunks = pinned_.take_chunks_above(keep, clocks_);
  lock.unlock();
  Bytes released = 0;
  for (const Chunk& chunk : chunks) {
    released += chunk.size;
    unpin_chunk(table_, chunk);
  }
  return released;
}

std::vector<Demand::Peak> Runtime::pinned_demand() {
  Lock lock(mutex_);
  return pinned_.demand().peaks();
}

// Slabs for the whole saved range into record.copy, or none and the size that was not there.
bool Runtime::take_slabs(Record& record, bool squeeze, Bytes* missing) {
  const bool taken = pinned_.take(record.bytes(), squeeze, &record.copy.slabs, missing);
  if (!taken) {
    ++counters_.pool_misses;
  }
  if (pinned_.growth_due() && pinned_options_.ahead) {
    growth_due_.notify_one();
  }
  return taken;
}

// Waits, without the lock, for pinned memory to be made. False when there is none to be had.
bool Runtime::make_slabs(Lock& lock, Bytes wanted) {
  if (!pinned_options_.ahead || !pinner_runs()) {
    return make_slabs_here(lock, wanted);
  }
  if (!pinned_.ask(wanted)) {
    return false;
  }
  ++counters_.host_waits;
  growth_due_.notify_one();
  // Whatever is under way is waited for, and nothing is made beside it. Told to stop meanwhile, the
  // thread ends what it has begun, and asks for no more.
  const Bytes before = pinned_.made(wanted);
  do {
    growth_done_.wait(lock);
  } while (pinned_.made(wanted) == before &&
           (pinned_options_.ahead ? pinned_.ask(wanted) : pinned_.growing()));
  if (pinned_.made(wanted) != before) {
    return true;
  }
  return !pinned_options_.ahead && make_slabs_here(lock, wanted);
}

bool Runtime::make_slabs_here(Lock& lock, Bytes wanted) {
  Chunk chunk = pinned_.start_growth(wanted);
  if (chunk.size == 0) {
    return false;
  }
  ++counters_.host_waits;
  const int node = pinned_options_.numa_node;
  lock.unlock();
  bool made = map_chunk(&chunk, node);
  if (made) {
    Toucher toucher;
    toucher.start(chunk.host, chunk.size);
    toucher.wait();
    const driver::ContextGuard guard(table_, context_);
    made = pin_chunk(table_, &chunk);
  }
  lock.lock();
  pinned_.finish_growth(chunk, made);
  growth_done_.notify_all();
  return made;
}

// A forked child has the books of its parent, but not its thread.
bool Runtime::pinner_runs() const { return pinner_process_ != 0 && pinner_process_ == getpid(); }

// One thread a device. Where none can be had, whoever needs pinned memory makes it.
void Runtime::start_pinner() {
  if (pinner_process_ != 0) {
    return;
  }
  if (start_background([this] { pin_ahead(); })) {
    pinner_process_ = getpid();
  } else {
    pinned_options_.ahead = false;
  }
}

void Runtime::pin_ahead() {
  const driver::ContextGuard guard(table_, context_);
  int mode = driver::kCaptureModeRelaxed;  // a graph captured elsewhere has nothing to do with us
  table_.thread_exchange_capture_mode(&mode);
  Toucher toucher;
  Chunk next;
  Lock lock(mutex_);
  for (;;) {
    while (next.size == 0) {
      next = begin_chunk(lock, toucher);
      if (next.size == 0 && !(pinned_options_.ahead && pinned_.growth_due())) {
        growth_done_.notify_all();  // nothing more will come
        growth_due_.wait(lock);
      }
    }
    Chunk chunk = std::exchange(next, Chunk{});
    lock.unlock();
    toucher.wait();
    lock.lock();
    next = begin_chunk(lock, toucher);  // faulted in while this one is registered
    lock.unlock();
    const bool pinned = pin_chunk(table_, &chunk);
    lock.lock();
    pinned_.finish_growth(chunk, pinned);
    growth_done_.notify_all();
  }
}

// Maps the next chunk and starts to fault it in. Of size 0 when there is nothing to do, or no
// memory to do it with.
Chunk Runtime::begin_chunk(Lock& lock, Toucher& toucher) {
  Chunk chunk = pinned_options_.ahead ? pinned_.start_growth_ahead() : Chunk{};
  if (chunk.size == 0) {
    return chunk;
  }
  const int node = pinned_options_.numa_node;
  lock.unlock();
  const bool mapped = map_chunk(&chunk, node);
  if (mapped) {
    toucher.start(chunk.host, chunk.size);
  }
  lock.lock();
  if (mapped) {
    return chunk;
  }
  pinned_.finish_growth(chunk, false);
  growth_done_.notify_all();
  return Chunk{};
}

}  // namespace stagehand::core
