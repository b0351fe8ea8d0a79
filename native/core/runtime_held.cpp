// Where torch's own caching allocator cuts the blocks (modes "native" and "mempool"): how a saved
// storage is let go of and made again. Everything else is the same engine.
//
// Locks: the GIL, torch's mutex, ours. So torch is asked for memory, and given it, without our
// lock: what is let go of waits in `t_departing` until the outermost call on this thread is done
// with it.
#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "core/runtime.hpp"

namespace stagehand::core {

namespace {

constexpr std::size_t kPolledAtSave = 64;  // the newest are what a layer has just let go of
// Room for segments of small requests beyond those of earlier steps: two of torch's 2 MiB and one
// of its 20 MiB segments.
constexpr Bytes kSmallSegments = 24_MiB;
// Less than so many times the request left, of free room and of what can still be evicted: the edge
// of what a step can be held to.
constexpr Bytes kEdge = 2;
constexpr Bytes kUnknownRequest = 20_MiB;  // at least: torch's next larger kind of segment

struct Departed {
  void* storage;
  Address address;
};
thread_local std::vector<Departed> t_departing;
thread_local Bytes t_request = 0;     // what this thread asks torch for, where we do so ourselves
thread_local bool t_release = false;  // torch's free segments go back to the driver after that

}  // namespace

// Only storages that nobody else refers to are among them, so no GIL is needed.
Runtime::Departing::~Departing() {
  if (!runtime_.uses_torch()) {
    return;
  }
  const TorchSide& side = runtime_.held_->side();
  while (!t_departing.empty()) {
    void* storage = t_departing.back().storage;
    t_departing.pop_back();
    side.drop(storage);
  }
  if (std::exchange(t_release, false)) {
    const std::optional<Bytes> released = runtime_.release_cached();
    Lock lock(runtime_.mutex_);
    runtime_.release_failed_ |= released == Bytes{0};
  }
  if (runtime_.limit_turn_.load(std::memory_order_acquire) != runtime_.limit_applied_) {
    runtime_.apply_limit();
  }
}

// Nothing where another thread is at it.
std::optional<Bytes> Runtime::release_cached() {
  const Bytes before = cache_->usage().reserved;
  const bool asked = held_->side().release_cached();
  const Bytes released = before - std::min(before, cache_->usage().reserved);
  Lock lock(mutex_);
  ++counters_.host_waits;
  return asked ? std::optional(released) : std::nullopt;
}

void Runtime::use_torch(const TorchSide& side, CacheMap& cache) {
  Lock lock(mutex_);
  if (held_ == nullptr) {
    cache_ = &cache;
    held_ = std::make_unique<HeldBlocks>(side, clocks_);
    uses_torch_.store(true, std::memory_order_release);
    clocks_.capture(1);  // nobody tells of torch's captures: ask each stream before an event
  }
}

// torch holds the limit itself, as a share of the device, from a pool's entry until its last record
// is gone. What is wanted is decided under our lock, and said to torch without it, again until
// nothing newer is wanted.
void Runtime::want_limit(Bytes limit) {
  share_wanted_ = limit < device_bytes_
                      ? static_cast<double>(limit) / static_cast<double>(device_bytes_)
                      : kNoShare;
  if (share_wanted_ != kNoShare || limit_turn_.load(std::memory_order_relaxed) != 0) {
    limit_turn_.fetch_add(1, std::memory_order_release);
  }
}

void Runtime::apply_limit() {
  const TorchSide& side = held_->side();
  std::uint64_t turn = 0;
  do {
    const double now = side.fraction(device_);
    double share = 0;
    {
      Lock lock(mutex_);
      turn = limit_turn_.load(std::memory_order_relaxed);
      if (now != share_told_) {
        share_before_ = now;  // the user's own, also where it was changed meanwhile
      }
      share = share_wanted_ == kNoShare ? share_before_ : std::min(share_wanted_, share_before_);
      limit_applied_ = turn;
    }
    side.set_fraction(device_, share);
    const double told = side.fraction(device_);  // torch rounds it to bytes
    Lock lock(mutex_);
    share_told_ = told;
  } while (turn != limit_turn_.load(std::memory_order_acquire));
}

// What torch's cache says of itself goes into the books. Nothing to do where it is not used.
void Runtime::refresh() {
  if (held_ == nullptr) {
    return;
  }
  const CacheMap::Usage usage = cache_->usage();
  // Segments of ours that torch has given back and we keep are mapped too.
  const Bytes spare = segment_counters_.mapped - segment_counters_.occupied;
  counters_.mapped = usage.reserved + spare;
  counters_.mapped_peak =
      std::max({counters_.mapped_peak, counters_.mapped, usage.reserved_peak + spare});
  counters_.occupied = std::max(usage.allocated, counters_.retained);
  counters_.occupied_peak = std::max(counters_.occupied_peak, usage.allocated_peak);
  counters_.overshoot_bytes = usage.over_mark;
  if (budget_.armed) {
    // The peak was between the last look and this one; what was retained then was not less than
    // the lesser of the two, nor more than the greater, which is what keeps this from overstating.
    const Bytes peak = cache_->take_allocated_peak();
    const Bytes live = peak - std::min(peak, std::max(live_retained_, counters_.retained));
    counters_.live_peak = std::max(counters_.live_peak, live);
    plan_.live(live);
    if (counters_.mapped > budget_.high && live > counters_.overshoot_live) {
      counters_.overshoot_live = live;
      counters_.overshoot_saved = saved_in_use();
    }
  }
  live_retained_ = counters_.retained;
}

// Torch's free list has the block once the caller of the outermost function is done.
void Runtime::let_go(Block* block) {
  const Address address = block->address;
  if (held_->side().triggers == 0) {
    cache_->forget_allocated(block->size);  // no event tells
  }
  if (void* storage = held_->let_go(block); storage != nullptr) {
    t_departing.push_back({storage, address});
  }
}

// What a capture kept back.
void Runtime::take_stuck() {
  for (void* storage : held_->take_stuck()) {
    t_departing.push_back({storage, 0});
  }
}

// The same for a block that torch still uses. Ours may be the last reference by the time it is
// dropped, or the last but a Python object's: for a thread that has the GIL.
void Runtime::orphan(Block* block) {
  if (block->users != 0) {
    record_users(block);
  }
  if (void* storage = held_->let_go(block); storage != nullptr) {
    orphans_.push_back(storage);
    orphan_count_.store(orphans_.size(), std::memory_order_relaxed);
  }
}

void Runtime::drop_orphans() {
  if (orphan_count_.load(std::memory_order_relaxed) == 0) {
    return;
  }
  std::vector<void*> orphans;
  {
    Lock lock(mutex_);
    orphans.swap(orphans_);
    orphan_count_.store(0, std::memory_order_relaxed);
  }
  for (void* storage : orphans) {
    held_->side().drop(storage);
  }
}

// Owners ------------------------------------------------------------------------------------------

void Runtime::watch(Record& record) {
  if (!record.watched) {
    record.watched = true;
    watched_.push_back(Ledger::id_of(record));
  }
}

// Nobody tells when torch drops a storage that we hold too: the reference count does. Looks at the
// newest `most` of those it had not dropped yet.
void Runtime::poll_owners(std::size_t most) {
  for (std::size_t i = watched_.size(); i-- > 0 && most > 0; --most) {
    Record* record = ledger_.find(watched_[i]);
    Block* block = record != nullptr ? record->block : nullptr;
    if (block != nullptr && block->state == BlockState::live) {
      if (block->aliases > 0 || !held_->alone(*block)) {
        continue;
      }
      block->owned_by_torch = false;
      owner_left(block);
    }
    if (record != nullptr) {
      record->watched = false;
    }
    watched_.erase(watched_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

Block* Runtime::adopt(HeldStorage held, const CacheMap::Owner& owner) {
  held.stream = owner.stream;
  Block* block = held_->adopt(held);
  block->serial = ++serial_;
  block->in_mem_pool = owner.pool != CacheMap::Owner{}.pool;
  return block;
}

Saved Runtime::save_held(const HeldStorage& held, driver::Stream stream, Address data,
                         Address first, Address last) {
  const Departing departing(*this);
  Lock lock(mutex_);
  const driver::ContextGuard guard(table_, context_);
  refresh();
  plan_.requested(cache_->take_largest_request());
  if (first < held.address || last > held.address + held.bytes) {
    return {Refusal::foreign_storage, {}};
  }
  if (cache_->kept(held.address)) {
    return {Refusal::kept, {}};
  }
  Block* block = held_->find(held.identity);
  const bool fresh = block == nullptr;
  if (!fresh && (block->address != held.address || block->storage_bytes != held.bytes)) {
    return {Refusal::foreign_storage, {}};  // resized since: what is known of it is of before
  }
  if (fresh) {
    CacheMap::Owner owner{stream, {}};
    if (held_->side().triggers != 0) {
      const auto known = cache_->owner_of(held.address);
      if (!known.has_value()) {
        return {Refusal::foreign_storage, {}};
      }
      owner = *known;
    }
    // A pool of the user's has a purpose we do not know: a CUDA graph's, or registered with NCCL.
    if (owner.pool != CacheMap::Owner{}.pool &&
        std::find(torch_pools_.begin(), torch_pools_.end(), owner.pool) == torch_pools_.end()) {
      return {Refusal::private_pool, {}};
    }
    // Parameters, buffers and inputs were there before the pool was entered (rule A2).
    if (held_->side().triggers != 0 && !cache_->young(held.address)) {
      return {Refusal::older_than_pool, {}};
    }
    block = adopt(held, owner);
  } else if (block->state == BlockState::retained) {
    block->arena->set_state(block, BlockState::live);
    counters_.release_retained(block->size);
  }
  block->owned_by_torch = true;
  Saved saved = tag(block, data, first, last);
  saved.took_reference = fresh;
  if (fresh) {
    // Made again on the stream it is used on from here: autograd runs the node there, and what
    // torch was told by record_stream goes with the storage.
    block->record->stream = stream;
  }
  if (const StreamClock& clock = clocks_.of(stream); &clock != &block->arena->clock) {
    block->add_user(clock.index());
  }
  watch(*block->record);
  poll_owners(kPolledAtSave);
  leave_later(lock);
  if (debug_.evict_everything) {
    evict_all(lock);
  }
  seal(lock);
  return saved;
}

// Making again ------------------------------------------------------------------------------------

Block* Runtime::make_again(Lock& lock, Record& record, Status* status) {
  HeldStorage held;
  const Bytes bytes = record.returning_bytes();
  const driver::Stream stream = record.stream;
  lock.unlock();
  t_request = bytes;
  const bool made = held_->side().make(device_, bytes, stream, false, &held);
  t_request = 0;
  lock.lock();
  if (!made) {
    ++counters_.out_of_memory;
    *status = Status::out_of_memory;
    return nullptr;
  }
  return adopt_made(held);
}

// The books have it, though no record has.
Block* Runtime::adopt_made(const HeldStorage& held) {
  refresh();
  Block* block =
      adopt(held, cache_->owner_of(held.address).value_or(CacheMap::Owner{held.stream, {}}));
  block->made_again = true;
  return block;
}

// Segments of small blocks are asked for between the large ones; nothing of a block that stays is
// moved out of their way.
Bytes Runtime::room_for_small() const { return kSmallSegments + cache_->small_growth(); }

// Whose blocks torch hands out to this thread for work on `stream`.
CacheMap::Owner Runtime::owner_here(driver::Stream stream) const {
  const bool in_pool = std::this_thread::get_id() == torch_pool_thread_;
  return {stream, in_pool ? torch_pool_ : CacheMap::Owner{}.pool};
}

// Only into a hole that is there, or below the ceiling; torch is told not to make room for it. What
// is far ahead takes no new segment: that could not be moved out of the way of a request.
bool Runtime::prefetch_held(Lock& lock, Record& record, Bytes bytes, bool far) {
  if (cache_->largest_hole(owner_here(record.stream)) < bytes &&
      (far ||
       !fits_under(counters_.mapped, cache_->growth_for(bytes) + room_for_small(), ceiling()))) {
    return false;
  }
  const RecordId id = Ledger::id_of(record);
  const driver::Stream stream = record.stream;
  HeldStorage held;
  lock.unlock();
  const bool made = held_->side().make(device_, bytes, stream, true, &held);
  lock.lock();
  if (!made) {
    return false;
  }
  Block* block = adopt_made(held);
  Record* still = ledger_.find(id);
  if (still == nullptr || still->block != nullptr || still->copying || !still->clean()) {
    give_back(block);
    return false;
  }
  still->block_begin = still->returning_begin();
  arrivals_.assign(1, {still, block});
  return flush_prefetch();
}

// The trigger -------------------------------------------------------------------------------------

bool Runtime::missed(driver::Stream stream) {
  const Departing departing(*this);
  Lock lock(mutex_);
  const driver::ContextGuard guard(table_, context_);
  for (std::uint32_t i = 0; i < clocks_.size(); ++i) {
    if (clocks_.at(i).captured()) {
      return false;  // nothing is let go of while a graph is captured
    }
  }
  take_stuck();
  if (!budget_.armed) {
    return !t_departing.empty();
  }
  ++counters_.misses;
  refresh();
  poll_owners(watched_.size());
  const Bytes known = t_request != 0 ? t_request : plan_.expected_request();
  // Once over `high` in a step that is not known, not again for what it asked for already.
  const bool over = counters_.overshoot_bytes > over_at_entry_;
  const Bytes request = known == 0 && over ? plan_.largest_request() : known;
  const Bytes between = std::max(budget_.high - budget_.low, kUnknownRequest);
  const Bytes growth = std::max(known == 0 ? between : 0,
                                request != 0 ? cache_->growth_for(request) + room_for_small() : 0);
  Bytes roof = ceiling();
  if (fits_under(counters_.mapped, growth, roof)) {
    // Others use the device too, and torch asks only once.
    std::size_t driver_free = 0;
    std::size_t total = 0;
    if (table_.mem_get_info(&driver_free, &total) == driver::kSuccess) {
      roof = std::min<Bytes>(roof, counters_.mapped + driver_free);
    }
    if (fits_under(counters_.mapped, growth, roof)) {
      return !t_departing.empty();
    }
  }
  if (known == 0) {
    evict_down(lock);
  }
  if (request != 0) {
    make_hole(lock, request, owner_here(stream), roof);
  }
  seal(lock);
  return !t_departing.empty() || t_release;
}

// torch's cache as choose_window sees it, in `candidates_`. Returns the bytes that torch can give
// back once what departs is gone: segments in which nothing is left, and free pages.
Bytes Runtime::look_at_cache(const CacheMap::Owner& owner) {
  cache_->walk(owner, &stretches_);
  candidates_.clear();
  candidate_blocks_.clear();
  Bytes free = 0;
  Bytes at = 0;         // in the segment
  Bytes run_begin = 0;  // of what is idle up to there
  const auto end_run = [&](const CacheMap::Stretch& last, bool ends_segment) {
    if (last.releasable && last.by_pages) {
      free += CacheMap::whole_pages(run_begin, at);
    } else if (last.releasable && ends_segment && run_begin == 0) {
      free += at;
    }
  };
  for (std::size_t i = 0; i < stretches_.size(); ++i) {
    const CacheMap::Stretch& stretch = stretches_[i];
    if (stretch.begins_segment) {
      at = run_begin = 0;
      candidates_.push_back({Candidate::Kind::wall});
      candidate_blocks_.push_back(nullptr);
    }
    Block* block = stretch.hole ? nullptr : held_->at(stretch.address);
    const bool departs = std::any_of(
        t_departing.begin(), t_departing.end(),
        [&](const Departed& one) { return !stretch.hole && one.address == stretch.address; });
    const bool is_idle = stretch.hole || departs;
    candidates_.push_back(stretch.of_owner ? candidate(block, stretch.bytes, is_idle, true)
                                           : Candidate{Candidate::Kind::wall, stretch.bytes});
    candidate_blocks_.push_back(block);
    const bool last = i + 1 == stretches_.size() || stretches_[i + 1].begins_segment;
    if (!is_idle) {
      end_run(stretch, false);
    }
    at += stretch.bytes;
    if (!is_idle) {
      run_begin = at;
    } else if (last) {
      end_run(stretch, true);
    }
  }
  return free;
}

// Victims side by side, so that torch finds a hole for the request; where no segment can hold it,
// enough wholly free segments for a new one of its own, which go back to the driver.
//
// Blocks that stay where they are break up large segments, by now and then more than evicting can
// make good. After a planned step that came near that, the next pool entry gives all free segments
// back: what it asks for then lies in segments of its own size. Not after every step that had to
// give segments back: each would be made again in every step.
void Runtime::make_hole(Lock& lock, Bytes request, const CacheMap::Owner& owner, Bytes roof) {
  const Bytes growth = cache_->growth_for(request) + room_for_small();
  bool squeeze = false;
  for (;;) {
    const Bytes releasable = can_release(look_at_cache(owner));
    const Bytes kept = counters_.mapped - std::min(counters_.mapped, releasable);
    Window window;
    if (request > kSmallLimit) {
      window = choose_window(candidates_, request);
    }
    if (window.found && window.victims == 0 &&
        (!t_departing.empty() || (cache_->small_growth() > 0 &&
                                  fits_under(counters_.mapped, CacheMap::kSmallBuffer, roof)))) {
      return;  // the hole is there; where it was, what torch lacks is a small segment
    }
    Bytes missing = 0;
    Evicted result = Evicted::none;
    if (window.found && window.victims > 0) {
      result = evict_window(window, squeeze, &missing);
    } else if (fits_under(kept, growth, roof)) {
      const Bytes left = roof - kept - growth + counters_.retained;
      t_release = !fits_under(counters_.mapped, growth, roof);
      start_anew_ |= t_release && plan_.follows() && left < kEdge * request;
      return;
    } else if (Record* last = last_needed(false, owner.pool != CacheMap::Owner{}.pool);
               last != nullptr) {
      result = evict(*last, squeeze, &missing);
    }
    if (!helped(lock, result, missing, &squeeze)) {
      // Torch grows above the ceiling, then: by the least.
      t_release = can_release(look_at_cache(owner)) > 0;
      start_anew_ |= t_release && plan_.follows();
      return;
    }
  }
}

// torch keeps its free segments while a thread allocates from a MemPool or captures a graph, and
// gives nothing back then: victims serve instead, until the next pool entry.
Bytes Runtime::can_release(Bytes free_segments) const {
  return release_failed_ || torch_pool_thread_ != std::thread::id{} ? 0 : free_segments;
}

// Nobody knows what is asked for: as much as there is between the two watermarks, and what the
// requests before took too much.
void Runtime::evict_down(Lock& lock) {
  // Free memory that no whole segment is part of stays mapped, whatever is evicted.
  const Bytes between = budget_.high - budget_.low;
  const Bytes over = std::min(counters_.mapped - std::min(counters_.mapped, ceiling()),
                              can_release(cache_->releasable()) + between);
  const Bytes lowest = std::min(budget_.low, ceiling() - std::min(ceiling(), kUnknownRequest));
  const Bytes target = lowest - std::min(lowest, over);
  bool squeeze = false;
  while (counters_.occupied > target) {
    Bytes missing = 0;
    Record* last = last_needed(false);
    if (last == nullptr || !helped(lock, evict(*last, squeeze, &missing), missing, &squeeze)) {
      break;
    }
  }
  t_release = over > 0 && can_release(look_at_cache({})) > 0;
}

// Without the trigger, or while it is blocked, at a pack or unpack: what has been copied out leaves
// down to `low`. Above `high` the host waits for copies, since torch has grown already. Which
// stream torch hands a block out on is not known here, so only the host can tell that nothing reads
// it any more.
void Runtime::leave_later(Lock& lock) {
  if (held_->side().triggers != 0 && !held_->side().blocked()) {
    return;
  }
  take_stuck();
  if (!budget_.armed) {
    return;
  }
  bool squeeze = false;
  while (counters_.occupied > budget_.low) {
    Record* record = last_needed(false);
    if (record == nullptr) {
      return;
    }
    if (!record->clean()) {
      Bytes missing = 0;
      if (!take_slabs(*record, squeeze, &missing)) {
        if (counters_.occupied > budget_.high &&
            helped(lock, Evicted::needs_slab, missing, &squeeze)) {
          continue;
        }
        return;
      }
      if (!copy_out(*record)) {
        return;
      }
    }
    const Tick written = record->copy.written;
    if (!clocks_.at(written.clock).passed(written.seq)) {
      if (counters_.occupied <= budget_.high || !wait_for_copy(lock, *record)) {
        return;
      }
      continue;  // it may be in use again
    }
    Bytes missing = 0;
    if (evict(*record, false, &missing) != Evicted::yes) {
      return;
    }
  }
}

// Waits, without the lock, until the record's copy out is done. False where that cannot be told.
bool Runtime::wait_for_copy(Lock& lock, Record& record) {
  const Tick written = record.copy.written;
  driver::Event event = nullptr;
  Seq actual = 0;
  if (clocks_.at(written.clock).event_for(written.seq, &event, &actual) != Status::ok) {
    return false;
  }
  record.copying = true;
  ++counters_.host_waits;
  lock.unlock();
  RankedMutex::expect_none_held();
  const bool done = table_.event_synchronize(event) == driver::kSuccess;
  lock.lock();
  record.copying = false;
  if (std::exchange(record.outdated, false)) {
    release_copy(record);
  }
  if (record.handles == 0) {
    end_record(record);
  }
  return done;
}

Bytes Runtime::trim_torch() {
  const Bytes released = release_cached().value_or(0);
  Lock lock(mutex_);  // and what MemPools gave back
  const bool some = segments_ != nullptr && segments_->has_free_piece();
  return released + (some && wait_for_gpu(lock) ? segments_->trim(0) : 0);
}

// A MemPool's segments ----------------------------------------------------------------------------

void Runtime::set_torch_pool(std::array<std::uint64_t, 2> pool) {
  Lock lock(mutex_);
  const bool any = pool != CacheMap::Owner{}.pool;
  torch_pool_ = pool;
  torch_pool_thread_ = any ? std::this_thread::get_id() : std::thread::id{};
  if (any && std::find(torch_pools_.begin(), torch_pools_.end(), pool) == torch_pools_.end()) {
    torch_pools_.push_back(pool);
  }
}

// From segments that an earlier MemPool gave back, else from the driver, below `limit`.
Address Runtime::segment(Bytes bytes, driver::Stream stream) {
  Lock lock(mutex_);
  const driver::ContextGuard guard(table_, context_);
  if (segments_ == nullptr) {
    segments_ = std::make_unique<DeviceHeap>(table_, device_, device_bytes_, granularity_, clocks_,
                                             segment_counters_);
    segments_->add_peers_of(heap_);
  }
  Arena* arena = segments_->arena_for(stream, bytes, 0);
  if (arena == nullptr) {
    return 0;
  }
  bytes = DeviceHeap::block_bytes(bytes);
  segments_->settle(*arena);
  Block* block = segments_->take(*arena, bytes);
  if (block == nullptr) {
    const Bytes reserved = cache_->usage().reserved;
    const Bytes others = reserved - std::min(reserved, segment_counters_.occupied);
    const Bytes ceiling = budget_.limit - std::min(budget_.limit, others);
    if (segments_->grow(*arena, bytes, ceiling) == Status::ok ||
        segments_->gather(*arena, bytes, ceiling) == Status::ok) {
      block = segments_->take(*arena, bytes);
    }
  }
  if (block == nullptr) {
    ++counters_.out_of_memory;
    return 0;
  }
  segment_counters_.occupy(block->size);
  block->owned_by_torch = true;
  return block->address;
}

void Runtime::free_segment(Address address) {
  Lock lock(mutex_);
  Block* block = segments_ != nullptr ? segments_->find(address) : nullptr;
  if (block != nullptr && block->state == BlockState::live) {
    segment_counters_.vacate(block->size);
    block->owned_by_torch = false;
    block->idle_from = block->arena->clock.upcoming();
    segments_->give(block);
  }
}

}  // namespace stagehand::core
