// Host memory as a place for evicted bytes: a tier. Behind the interface of `Tier` is what any
// further one would be (another GPU, a disk); there is one, pinned memory, with pageable memory
// where none can be pinned.
//
// Has a lock of its own, after the device's: slabs are taken and given back under both, memory is
// mapped, pinned and unpinned under neither. Who finds no slab leaves a request and waits for the
// answer; the thread that pins answers each, in order, with memory or with "none to be had". Where
// there is no such thread, whoever waits makes the memory.
#pragma once

#include <condition_variable>
#include <deque>
#include <vector>

#include "core/gate.hpp"
#include "core/pinned_pool.hpp"
#include "core/ranked_mutex.hpp"

namespace stagehand::core {

struct PinnedOptions {
  bool ahead = false;  // a thread of our own pins before it is needed; else whoever needs it does
  int numa_node = -1;  // where host memory should come from; -1: anywhere
  Bytes first = 0;     // pinned from the start, beyond the initial counts if those are less
  bool with_weights = false;  // the host limit counts host copies of weights, too
};

class Tier {
 public:
  virtual ~Tier() = default;
  // Room for `bytes`, appended to `slabs`. With `squeeze` in whatever pieces there are. False: none
  // was taken, and one of `missing` bytes is what was not there.
  virtual bool take(Bytes bytes, bool squeeze, std::vector<Slab*>* slabs, Bytes* missing) = 0;
  virtual void give(Slab* slab) = 0;
  // One in `of` storages like this one is likely to come here in this step: room for it is made
  // ahead of need.
  virtual void expect(Bytes bytes, Bytes of) = 0;
  // Waits, without the device's lock, for room of that size to be made. False: none is to be had.
  virtual bool wait_for(Entry& entry, Bytes missing) = 0;
};

class PinnedTier final : public Tier {
 public:
  explicit PinnedTier(Gate& gate) : gate_(gate) {}

  bool take(Bytes bytes, bool squeeze, std::vector<Slab*>* slabs, Bytes* missing) override;
  void give(Slab* slab) override;
  void expect(Bytes bytes, Bytes of) override;
  bool wait_for(Entry& entry, Bytes missing) override;
  // A slab outside the pool, used when nothing can be pinned. Null when the host has no memory.
  // Maps memory: without the device's lock.
  Slab* take_pageable(Bytes bytes);
  // A step begins: memory that the driver refused may be there by now.
  void begin_step();
  // The step saved nothing: what is pinned first is, as before any step.
  void end_empty_step();

  // Settings. With other sizes, slabs of the old ones go: only while `idle`, after `hold(true)`,
  // which also waits for what is being pinned by the thread. Without the device's lock.
  bool has_classes(const SizeClasses& classes);
  void hold(bool held);
  bool idle();
  bool quiet(ClockBank& clocks);  // with the device's lock
  std::vector<Chunk> take_chunks();
  void configure(const SizeClasses& classes, Bytes host_limit, PinnedOptions options);
  // As PinnedPool::take_chunks_above; with the device's lock.
  std::vector<Chunk> take_chunks_above(Bytes keep, ClockBank& clocks);
  void unpin(const std::vector<Chunk>& chunks);  // without the device's lock

  // As PinnedPool has them.
  bool add_weights(Bytes bytes);
  void remove_weights(Bytes bytes);

  // Counted here: what is pinned, used and pageable, hits and misses, and host waits.
  void add_to(Counters* counters);
  std::vector<Demand::Peak> demand();
  const char* broken();

#ifdef STAGEHAND_TESTING
  // What the thread that pins does, by hand: `pin_by_hand` is set. Of size 0: nothing is to be
  // done.
  Chunk begin_chunk();
  void end_chunk(Chunk chunk);
#endif

 private:
  // What somebody waits for. Lives on the stack of who waits.
  struct Request {
    Bytes wanted = 0;
    bool answered = false;
    bool made = false;
  };

  void grow_if_due();  // with the lock
  bool pinner_runs() const;
  void start_pinner();
  void pin_ahead();
  Chunk begin_chunk(Lock& lock, Toucher& toucher);
  Chunk start_requested();
  bool make_here(Lock& lock, Bytes wanted);
  void finish(const Chunk& chunk, bool pinned);
  void answer(Request* request, bool made);
  void wait_until(Lock& lock, auto done);

  Gate& gate_;
  RankedMutex mutex_{Rank::host};
  // All below: guarded by mutex_.
  Counters counters_;
  PinnedPool pool_{counters_};
  PinnedOptions options_;
  int pinner_process_ = 0;  // the process whose thread pins ahead; 0: none was started
  std::deque<Request*> requests_;
  std::condition_variable_any work_;  // for the thread that pins
  std::condition_variable_any
      answers_;  // for who waits: an answer, or that nothing is being pinned
};

}  // namespace stagehand::core
