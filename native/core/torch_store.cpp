#include "core/torch_store.hpp"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "core/check.hpp"
#include "core/device.hpp"
#include "core/giving_back.hpp"
#include "core/requests.hpp"
#include "core/wait_timer.hpp"

namespace stagehand::core {

namespace {
// The newest are what a layer has just let go of. Each look costs about what reading a storage does
// that is in no cache: most times only the very newest are looked at.
constexpr std::size_t kPolled = 64;
constexpr std::size_t kPolledOften = 8;
constexpr unsigned kPollTurn = 8;
// The parts of the budget that may be served apart.
constexpr Bytes kGradients = 4;
constexpr Bytes kWalls = 8;
constexpr Bytes kAside = 20_MiB;          // less of it is not worth the wait
constexpr std::size_t kPlacesAhead = 32;  // so many places' requests keep their hole
}  // namespace

TorchStore::TorchStore(Device& device, const TorchSide& side, CacheMap& cache)
    : d_(device),
      cache_(cache),
      held_(side, device.clocks),
      segments_(device.number, device.bytes, device.granularity, device.clocks, cache),
      route_(side, device.number) {}

// Saving ------------------------------------------------------------------------------------------

Block* TorchStore::hold(const HeldStorage& held, driver::Stream stream, bool may_ignore,
                        bool* fresh, Refusal* why, std::uint64_t* serial) {
  refresh();
  if (watched_.capacity() == watched_.size()) {
    watched_.reserve(2 * watched_.size() + 16);  // so that watching what is saved needs no memory
  }
  const CacheMap::Known known = cache_.known_of(held.address);
  *serial = known.serial;
  *why = Refusal::foreign_storage;
  if (known.kept) {
    *why = Refusal::kept;
    return nullptr;
  }
  Block* block = held_.find(held.identity);
  *fresh = block == nullptr;
  if (block != nullptr) {
    // Resized since: what is known of it is of before.
    const bool same = block->address == held.address && block->storage_bytes == held.bytes;
    if (same) {
      d_.books.revive(block);
    }
    return same ? block : nullptr;
  }
  CacheMap::Owner owner{stream, {}};
  if (held_.side().triggers != 0) {
    if (!known.owner.has_value()) {
      return nullptr;
    }
    owner = *known.owner;
  }
  // A pool of the user's has a purpose we do not know: a CUDA graph's, or registered with NCCL.
  if (owner.pool != CacheMap::Owner{}.pool && !segments_.ours(owner.pool)) {
    *why = Refusal::private_pool;
    return nullptr;
  }
  // Parameters, buffers and inputs were there before the pool was entered (rule A2).
  if (held_.side().triggers != 0 && known.serial == 0) {
    *why = Refusal::older_than_pool;
    return nullptr;
  }
  if (may_ignore && d_.books.ignore(held.bytes)) {
    *why = Refusal::small;
    return nullptr;
  }
  constexpr std::size_t kFew = 4;  // that a program computes on; others may come and go
  if (saves_on_.size() < kFew && !saves_on(owner.stream)) {
    saves_on_.push_back(owner.stream);
  }
  block = adopt(held, owner);
  block->serial = known.serial;
  return block;
}

void TorchStore::forget(Block* block) {
  block->record = nullptr;
  held_.let_go(block, true);
}

void TorchStore::saved(Entry& entry, Record& record, driver::Stream stream, bool fresh) {
  Block* block = record.block;
  if (fresh) {
    // Made again on the stream it is used on from here: autograd runs the node there, and what
    // torch was told by record_stream goes with the storage.
    record.stream = stream;
  }
  if (const StreamClock& clock = d_.clocks.of(stream); &clock != block->clock) {
    d_.clocks.add_user(block, clock);
  }
  watch(record);
  poll();
  leave_later(entry);
  set_aside(entry);
}

Block* TorchStore::adopt(const HeldStorage& held, const CacheMap::Owner& owner) {
  HeldStorage with_stream = held;
  with_stream.stream = owner.stream;
  Block* block = held_.adopt(with_stream);
  block->in_mem_pool = owner.pool != CacheMap::Owner{}.pool;
  return block;
}

// Letting go --------------------------------------------------------------------------------------

// Torch's free list has the block once the lock is given up.
void TorchStore::put_away(Block* block) {
  const Address address = block->address;
  if (held_.side().triggers == 0) {
    cache_.forget_allocated(block->size);  // no event tells
  }
  if (void* storage = held_.let_go(block, false); storage != nullptr) {
    d_.gate.due().storages.push_back({storage, address});
  }
}

// The same for a block that torch still uses. Ours may be the last reference by the time it is
// dropped, or the last but a Python object's: for a thread that has the GIL.
bool TorchStore::disown(Block* block) {
  d_.transfers.fence_users(block);
  if (void* storage = held_.let_go(block, true); storage != nullptr) {
    orphans_.push_back(storage);
    orphan_count_.store(orphans_.size(), std::memory_order_relaxed);
  }
  return true;
}

void TorchStore::drop_orphans() {
  if (orphan_count_.load(std::memory_order_relaxed) == 0) {
    return;
  }
  std::vector<void*> orphans;
  {
    Entry entry(d_.gate);
    orphans.swap(orphans_);
    orphan_count_.store(0, std::memory_order_relaxed);
  }
  for (void* storage : orphans) {
    held_.side().drop(storage);
  }
}

// What could not be let go of before: of a stream that was being captured.
void TorchStore::take_stuck() {
  held_.take_stuck(&d_.gate.due().storages, &orphans_);
  orphan_count_.store(orphans_.size(), std::memory_order_relaxed);
}

// Only storages that nobody else refers to are among those due, so no GIL is needed.
void TorchStore::settle_due(Due& due) {
  for (const Due::Storage& one : due.storages) {
    held_.side().drop(one.storage);
  }
  if (due.release_segments) {
    const std::optional<Bytes> released = release_cached();
    const Lock lock(d_.gate.mutex());
    release_failed_ |= released == Bytes{0};
  }
  if (due.apply_limit) {
    limit_.apply(held_.side(), d_.number);
  }
}

// Nothing where another thread is at it, or another device cannot be waited for.
std::optional<Bytes> TorchStore::release_cached() {
  const Bytes before = cache_.usage().reserved;
  bool asked = false;
  const WaitTimer timer;
  {
    const GivingBack giving(d_.gate.table(), d_.number);  // torch gives back of all devices
    asked = giving.safe() && held_.side().release_cached();
  }
  const Bytes released = before - std::min(before, cache_.usage().reserved);
  const Lock lock(d_.gate.mutex());
  ++d_.counters.host_waits;
  d_.counters.gpu_wait_ns += timer.ns();
  return asked ? std::optional(released) : std::nullopt;
}

// Owners ------------------------------------------------------------------------------------------

void TorchStore::handed_out(Record& record) {
  record.block->owned_by_torch = true;  // as soon as the caller has made its tensor
  watch(record);
}

bool TorchStore::saves_on(driver::Stream stream) const {
  return std::find(saves_on_.begin(), saves_on_.end(), stream) != saves_on_.end();
}

// What of the step's blocks is there by now, and cannot leave, is a wall. Weights are none.
void TorchStore::backward_begins() {
  const bool counts = held_.side().places != 0 && (pressed_ || has_left());
  const Bytes gradients = counts ? d_.budget.high / kGradients : 0;
  const bool walled = counts && walled_in_;
  if (walled) {
    poll_newest(watched_.size());
  }
  std::vector<Walls::One> walls;
  for (const CacheMap::Young& one : walled ? cache_.young() : std::vector<CacheMap::Young>{}) {
    const bool may = one.request != 0 && saves_on(one.block.stream);
    const Block* const held = may ? held_.at(one.address) : nullptr;
    const bool in_use =
        held != nullptr && held->state == BlockState::live && held->record != nullptr;
    if (may && (held == nullptr || in_use)) {
      walls.push_back({one.block.stream, one.request, one.block.bytes});
    }
  }
  const Bytes roof = cache_.knows_gradients() ? roof_of_driver(0, d_.ceiling()) : 0;
  cache_.end_saving(gradients, roof - std::min(roof, room_for_small()), std::move(walls),
                    d_.budget.high / kWalls);
  counts_gradients_.store(counts, std::memory_order_relaxed);
  settle_apart();
}

std::uint64_t TorchStore::device_bit() const { return std::uint64_t{1} << d_.number; }

void TorchStore::watch(Record& record) {
  if (!record.watched) {
    record.watched = true;
    watched_.push_back(Ledger::id_of(record));
    if (d_.saving && d_.budget.armed) {
      ++saved_since_;
      if (d_.plan.leaves(record.place)) {
        awaits().fetch_or(device_bit(), std::memory_order_relaxed);
      }
    }
  }
}

// Packs look for owners, too. Where much is packed at once, as a compiled block does at its
// forward's end, the next pack is far: what is copied out only then begins behind the next block.
void TorchStore::look_for_owners() {
  awaits().fetch_and(~device_bit(), std::memory_order_relaxed);
  poll_newest(std::exchange(saved_since_, 0));
}

// Nobody tells when torch drops a storage that we hold too: the reference count does.
bool TorchStore::still_used(RecordId id) {
  Record* record = d_.ledger.find(id);
  if (record == nullptr) {
    return false;
  }
  Block* block = record->block;
  if (block != nullptr && block->state == BlockState::live) {
    if (block->aliases > 0 || !held_.alone(*block)) {
      return true;
    }
    block->owned_by_torch = false;
    record->watched = false;
    d_.books.owner_left(block);
    return false;
  }
  record->watched = false;
  return false;
}

void TorchStore::poll() { poll_newest(++polls_ % kPollTurn == 0 ? kPolled : kPolledOften); }

void TorchStore::poll_newest(std::size_t most) {
  const std::size_t begin = watched_.size() - std::min(watched_.size(), most);
  std::size_t kept = begin;
  for (std::size_t i = begin; i < watched_.size(); ++i) {
    const RecordId id = watched_[i];
    if (id.generation == 0) {
      --unwatched_;
    } else if (still_used(id)) {
      watched_[kept++] = id;
    }
  }
  watched_.resize(kept);
}

// Goes round through all, a few at a time.
void TorchStore::poll_others(std::size_t most) {
  for (most = std::min(most, watched_.size()); most > 0; --most, ++cursor_) {
    cursor_ = cursor_ < watched_.size() ? cursor_ : 0;
    RecordId& id = watched_[cursor_];
    if (id.generation != 0 && !still_used(id)) {
      watched_[cursor_] = {};
      ++unwatched_;
    }
  }
  if (2 * unwatched_ > watched_.size()) {
    std::erase_if(watched_, [](const RecordId& id) { return id.generation == 0; });
    unwatched_ = 0;
  }
}

// The books ---------------------------------------------------------------------------------------

void TorchStore::look() { refresh(); }

CacheMap::Owner TorchStore::owner_here(driver::Stream stream) const {
  return {stream, route_.here() ? segments_.newest() : CacheMap::Owner{}.pool};
}

// What torch's cache says of itself goes into the books.
void TorchStore::refresh() {
  const CacheMap::Since since = cache_.since();
  const CacheMap::Usage& usage = since.usage;
  Counters& counters = d_.counters;
  const Bytes spare = segments_.spare();  // kept for the next MemPool: mapped too
  counters.mapped = usage.reserved + spare;
  counters.mapped_peak =
      std::max({counters.mapped_peak, counters.mapped, usage.reserved_peak + spare});
  counters.occupied = std::max(usage.allocated, counters.retained);
  counters.occupied_peak = std::max(counters.occupied_peak, usage.allocated_peak);
  counters.overshoot_bytes = usage.over_mark;
  counters.host_waits += route_.take_waits();
  if (d_.budget.armed) {
    d_.plan.requested(since.largest_request);
    // The peak was between the last look and this one; what was retained then was not less than
    // the lesser of the two, nor more than the greater, which is what keeps this from overstating.
    const Bytes peak = since.allocated_peak;
    const Bytes live = d_.live_of(peak, std::max(live_retained_, counters.retained));
    counters.live_peak = std::max(counters.live_peak, live);
    d_.plan.live(live);
    d_.weights.note_live(live);
    d_.plan.occupied(d_.without_idle(peak), d_.without_idle(counters.mapped));
    if (counters.mapped > d_.budget.high) {
      d_.books.note_overshoot(live);
    }
  }
  live_retained_ = counters.retained;
}

void TorchStore::look_around(Entry& entry) {
  refresh();
  poll();
  if (saving_) {
    backward_begins();
    saving_ = false;
  }
  leave_later(entry);
  set_aside(entry);
}

bool TorchStore::keep(Address address) {
  const bool known = held_.side().triggers == 0 || cache_.owner_of(address).has_value();
  if (known) {
    cache_.keep(address);
  }
  return known;
}

bool TorchStore::begin_step(Bytes target) {
  take_stuck();
  end_aside();
  saved_since_ = 0;
  route_.set_needed(true);
  cache_.set_mark(d_.budget.high);
  cache_.take_largest_request();  // of what ran between two steps
  d_.gate.due().apply_limit |= limit_.want(d_.budget.limit, d_.bytes);
  release_failed_ = false;
  if (held_.side().triggers == 0) {
    cache_.forget_kept();
  }
  refresh();
  const bool over = std::exchange(over_at_entry_, d_.counters.overshoot_bytes) != over_at_entry_;
  const Bytes high_before = std::exchange(high_at_entry_, d_.budget.high);
  // Where walls lay in its one segment, which are served apart from here on, that may do after all.
  const bool walls_before = std::exchange(walls_at_entry_, cache_.wants_walls());
  if (over && std::exchange(whole_, false)) {
    tight_ = walls_at_entry_ && !walls_before ? tight_ : std::max(tight_, high_before);
    start_anew_ = true;
  }
  // What the optimizer has left free in the default pool can serve nothing in a MemPool: where
  // something had to leave for want of room, it goes back.
  squeezed_ = has_left();
  gone_at_entry_ = d_.counters.gone_bytes();
  pressed_ |= squeezed_;
  raised_ = d_.budget.high - d_.budget.high / 8 > high_before;
  // What steps have cut so far (TorchStore::missed), until they begin with one segment.
  start_anew_ |= squeezed_ && !raised_ && !cache_.by_pages() && !whole_ &&
                 times_whole_ < kTimesWhole && maps_whole();
  serve_apart();
  start_anew_ |= room_lacks_apart();
  const bool aside = segments_.step_had_pool() && squeezed_ && cache_.releasable() >= kAside;
  // What the program has given back since that step would be mapped again a request at a time, in
  // pieces that hold no larger one. A MemPool has segments of its own.
  emptied_ = squeezed_ && segments_.newest() == MemPoolSegments::Pool{} &&
             gave_back(cache_.usage().reserved, target, reserved_at_end_);
  // What steps took in a trial they take once its plan is kept, if both begin with the same memory.
  // Without expandable segments that would be mapped again a request at a time.
  const bool own = d_.plan.takes_other_plan() && d_.plan.far_from_free() && !d_.plan.varies() &&
                   segments_.newest() == MemPoolSegments::Pool{} && d_.weights.standing().empty() &&
                   cache_.by_pages();
  anew_ = std::exchange(start_anew_, false) || aside || emptied_ || own;
  return emptied_ || ((d_.counters.mapped > target || anew_) &&
                      (cache_.releasable() > 0 || segments_.has_free_piece()));
}

// What the steps before have mapped leaves none for walls, or for the gradients of the cycle that
// begins: for these once for so many.
bool TorchStore::room_lacks_apart() {
  const Bytes lacking = cache_.growth_apart(nullptr);
  return lacking > 0 && !fits_under(d_.counters.mapped, lacking + room_for_small(), d_.ceiling()) &&
         (cache_.wants_walls() ||
          lacking > std::exchange(most_lacking_, std::max(lacking, most_lacking_)));
}

bool TorchStore::has_left() const { return d_.counters.gone_bytes() != gone_at_entry_; }

// What is kept for backward, or weights, is no survivor. Gradients on a stream of their own, as of
// FSDP2, do not lie between what leaves.
void TorchStore::serve_apart() {
  constexpr Bytes kPart = 64;  // of the budget
  std::vector<Survivors::One> survivors;
  std::vector<KeptGradients::Left> gradients;
  for (const CacheMap::Young& one : cache_.young()) {
    if (held_.at(one.address) != nullptr) {
      continue;
    }
    const auto& [bytes, nth, stream] = one.block;
    if (!one.of_backward) {
      survivors.push_back(one.block);
    } else if (nth != 0 && saves_on(stream)) {
      gradients.push_back({one.address, {stream, bytes, nth}});
    }
  }
  saves_on_.clear();
  cache_.begin_step();
  const Bytes roof = cache_.wants_walls() ? roof_of_driver(0, d_.ceiling()) : 0;
  cache_.serve_apart(survivors, squeezed_ ? d_.budget.high / kPart : 0, gradients,
                     d_.budget.high / kWalls, roof - std::min(roof, room_for_small()));
  saving_ = true;
  gave_back_ = false;
  settle_apart();
}

// The streams are never destroyed: torch keeps blocks by their handles.
void TorchStore::settle_apart() {
  if (const std::optional<driver::Stream> lacking = cache_.lacks_apart(); lacking.has_value()) {
    driver::Stream apart = nullptr;
    if (d_.gate->stream_create(&apart, driver::kStreamNonBlocking, 0) == driver::kSuccess) {
      cache_.give_apart(*lacking, apart);
    }
  }
  std::atomic_ref(survivor_sizes_[static_cast<std::size_t>(d_.number)])
      .store(cache_.survivor_sizes(), std::memory_order_relaxed);
  const std::atomic_ref<std::uint64_t> follow(devices_that_follow_);
  cache_.follows() ? follow.fetch_or(device_bit(), std::memory_order_relaxed)
                   : follow.fetch_and(~device_bit(), std::memory_order_relaxed);
}

// What it keeps stays for good. Among what the steps before left free it would hold whole segments
// there, or be a wall in the one that steps have. So those go back, and it gets segments of its
// own, as far as `high` has room for them beside the rest. They do not go back in a backward, where
// an optimizer of each parameter may step: what comes back needs them.
void TorchStore::optimizer_makes(Entry& entry, driver::Stream stream) {
  optimizer_steps();
  if (held_.side().triggers == 0 || !(squeezed_ || has_left()) || !d_.weights.standing().empty() ||
      in_capture(stream)) {
    return;
  }
  if (d_.ledger.size() == 0 && cache_.releasable() >= kAside && !std::exchange(gave_back_, true)) {
    const Unlocked unlocked(entry);
    release_cached();
  }
  refresh();
  cache_.serve_all_apart(stream, roof_of_driver(0, high_at_entry_));
  settle_apart();
}

void TorchStore::optimizer_steps() {
  counts_gradients_.store(false, std::memory_order_relaxed);
  cache_.end_backward();
  settle_apart();
}

void TorchStore::optimizer_made() {
  cache_.serve_few_apart();
  settle_apart();
}

void TorchStore::end_step() {
  end_aside();
  reserved_at_end_ = cache_.usage().reserved;
  route_.set_needed(false);
  cache_.set_mark(kUnlimited);
  // From the next step on a MemPool serves: what this one has left free is not for the optimizer's
  // state to lie in.
  const bool waited = std::exchange(pool_waits_, false);
  d_.gate.due().release_segments |= waited && has_left() && d_.plan.moment() > 0;
  d_.gate.due().apply_limit |= limit_.want(d_.bytes, d_.bytes);
}

// torch is told not to cut large blocks, or to round what is asked for.
bool TorchStore::cuts_otherwise() {
  for (const char* name : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    const char* value = std::getenv(name);
    const std::string_view settings = value != nullptr ? value : "";
    if (settings.find("max_split_size_mb") != settings.npos ||
        settings.find("roundup_power2_divisions") != settings.npos) {
      return true;
    }
  }
  return false;
}

// Whether what is free is mapped again in one piece, or each request gets a segment of its own. One
// segment has no walls, but gives nothing back before all of it is free. So without expandable ones
// each request has its own where other streams take more than what is left for them, where weights
// lie between what leaves, where a step had little room beside what is live, or went over, and in a
// MemPool, which has one of its own; and until an optimizer has stepped, whose state would lie in
// it for good. Smaller requests share segments of torch's anyway.
bool TorchStore::maps_whole() {
  if (cache_.by_pages()) {
    return true;
  }
  constexpr Bytes kAlone = 10_MiB;  // c10's kMinLargeAlloc
  const Plan::Peaks peaks = d_.plan.peaks();
  // Free pieces of segments that stay serve some requests, and no larger ones.
  const Bytes used = d_.counters.occupied + cache_.releasable();
  const Bytes stuck = d_.counters.mapped - std::min(d_.counters.mapped, used);
  const Bytes beside = 2 * peaks.request + peaks.request / 2;
  if (peaks.request < kAlone || !fits_under(peaks.live + stuck / 2, beside, d_.ceiling()) ||
      d_.budget.high <= tight_ || held_.side().triggers == 0 ||
      segments_.newest() != MemPoolSegments::Pool{} || !d_.weights.standing().empty() ||
      optimizer_due_.load(std::memory_order_relaxed) || cuts_otherwise()) {
    return false;
  }
  Bytes all = 0;
  Bytes most = 0;
  for (const CacheMap::Large& one : cache_.large()) {
    all += one.peak;
    most = std::max(most, one.peak);
  }
  return most >= but_for_others(all);
}

// torch gives back all that is free, or nothing. What the step needs again would have to be mapped
// again, an expandable segment's a page at a time. So the largest hole is taken meanwhile, as far
// as it may stay; other streams find a part of the budget free. Where that hole is not most of what
// may stay, as in a cache of many segments, all goes back: it would be in the way of larger ones.
Bytes TorchStore::trim(Entry& entry, Bytes target) {
  constexpr Bytes kPages = 40_MiB;  // of an expandable segment, on either side of the hole
  take_stuck();
  end_aside();
  refresh();
  const Bytes besides = room_for_small() + cache_.missing_apart() + kPages;
  const Bytes most = target - std::min(target, d_.counters.occupied + besides);
  const CacheMap::Hole hole = cache_.largest_hole();
  const Bytes stays = std::min(hole.bytes, but_for_others(most));
  const bool worth = held_.side().triggers != 0 && !anew_ && stays > 0 && stays >= most / 2;
  Bytes released = 0;
  if (std::exchange(anew_, false) && maps_whole()) {
    released = map_whole(entry, target);
  } else {
    whole_ = false;
    const Unlocked unlocked(entry);
    const Bytes peak = cache_.usage().allocated_peak;
    HeldStorage held;
    const bool kept = worth && serves_here(hole.owner) &&
                      held_.side().make(d_.number, stays, hole.owner.stream, true, &held);
    released = release_cached().value_or(0);
    if (kept) {
      held_.side().drop(held.storage);
      cache_.forget_request(peak);
    }
  }
  const bool some = segments_.has_free_piece();  // what MemPools gave back
  return released + (some && d_.room.wait_for_gpu(entry) ? segments_.trim() : 0);
}

// torch keeps a MemPool's segments as it has cut them, for as long as that is there: one that came
// to be above `high` stays there, and many small ones serve no large request, whatever leaves. So
// the next step begins with another MemPool. Not where little would go back: gradients that are
// kept lie in it too.
bool TorchStore::outgrown(const MemPoolSegments::Pool& pool, Bytes high) {
  refresh();
  const Bytes reserved = cache_.usage().reserved;
  const Bytes stays = reserved - std::min(reserved, cache_.releasable());
  const CacheMap::PoolUsage usage = cache_.usage_of(pool);
  return held_.side().triggers != 0 && stays > std::max(high, d_.plan.unavoidable()) &&
         usage.free > usage.reserved / 2;
}

// Where nothing has to leave, the default pool serves: what it has free would serve nothing in a
// MemPool. So it does in the first step that is pressed: no plan has room for what that asks for,
// and what it cuts, or goes over `high` by, would stay in a MemPool. What is free then goes back.
bool TorchStore::may_serve(Entry& entry) {
  if (held_.side().route == nullptr) {
    return true;  // torch was told by Python
  }
  pool_waits_ = !pressed_ || !d_.plan.learned();
  if (!pool_waits_ && !cache_.has_pool(segments_.newest()) && cache_.releasable() >= kAside) {
    const Unlocked unlocked(entry);
    release_cached();
  }
  return !pool_waits_;
}

// One segment of all it may have, so that what leaves side by side makes room for any request. A
// part of it is left for other streams.
void TorchStore::entered_pool(Entry& entry, driver::Stream stream) {
  if (!squeezed_ || raised_ || !route_.here() || cache_.has_pool(segments_.newest())) {
    return;
  }
  refresh();
  const Bytes roof = roof_of_driver(0, d_.ceiling());
  const Bytes most = roof - std::min(roof, d_.counters.mapped + room_for_small());
  const Bytes others = room_for_others(stream);
  const Bytes bytes = std::min(but_for_others(most), most - std::min(most, others)) /
                      CacheMap::kSmallBuffer * CacheMap::kSmallBuffer;
  const Bytes peak = cache_.usage().allocated_peak;
  const Unlocked unlocked(entry);
  HeldStorage held;
  if (bytes >= kAside && held_.side().make(d_.number, bytes, stream, true, &held)) {
    held_.side().drop(held.storage);
    cache_.forget_request(peak);
  }
}

// Making again ------------------------------------------------------------------------------------

Block* TorchStore::make(Entry& entry, Record& record, Status* status) {
  return make_now(entry, record.returning_bytes(), record.stream, status);
}

Block* TorchStore::make_weights(Entry& entry, Bytes bytes, driver::Stream stream, bool ahead,
                                Status* status) {
  return ahead ? make_in_room(entry, bytes, stream, false) : make_now(entry, bytes, stream, status);
}

Block* TorchStore::make_now(Entry& entry, Bytes bytes, driver::Stream stream, Status* status) {
  HeldStorage held;
  bool made = false;
  {
    const Unlocked unlocked(entry);
    const OwnRequest request(bytes);
    made = held_.side().make(d_.number, bytes, stream, false, &held);
  }
  if (!made) {
    ++d_.counters.out_of_memory;
    *status = Status::out_of_memory;
    return nullptr;
  }
  return adopt_made(held);
}

// The books have it, though no record has.
Block* TorchStore::adopt_made(const HeldStorage& held) {
  refresh();
  Block* block =
      adopt(held, cache_.owner_of(held.address).value_or(CacheMap::Owner{held.stream, {}}));
  block->made_again = true;
  return block;
}

// Only into a hole that is there, or below the ceiling; torch is told not to make room for it. What
// is far ahead takes no new segment: that could not be moved out of the way of a request. Nor does
// any where the driver has no memory for it: torch would empty its cache, and wait for the GPU.
Block* TorchStore::make_ahead(Entry& entry, RecordId id, Bytes bytes, bool far) {
  return make_in_room(entry, bytes, d_.ledger.find(id)->stream, far);
}

Block* TorchStore::make_in_room(Entry& entry, Bytes bytes, driver::Stream stream, bool far) {
  const CacheMap::Owner owner = owner_here(stream);
  const auto may_grow = [&](Bytes request) {
    const Bytes growth = cache_.growth_for(request);
    const Bytes roof = d_.ceiling() - std::min(d_.ceiling(), room_for_others(stream));
    return fits_under(d_.counters.mapped, growth + room_for_small(), roof) &&
           fits_under(d_.counters.mapped, growth, roof_of_driver(growth, roof));
  };
  // Not into the only hole of a request to come, while torch cannot grow for that: the copy would
  // be waited for there, and made again. Small blocks come from segments of their own.
  const Bytes kept = bytes > kSmallLimit ? d_.plan.largest_ahead(kPlacesAhead) : 0;
  const Bytes other = bytes > kSmallLimit ? d_.plan.crowding_ahead(kPlacesAhead, stream) : 0;
  for (const Bytes request : {kept, other != kept ? other : 0}) {
    if (request > bytes && !cache_.fits_beside(owner, bytes, request) && !may_grow(request)) {
      return nullptr;
    }
  }
  const Bytes hole = cache_.largest_hole(owner);
  if (hole < bytes && (far || !may_grow(bytes))) {
    return nullptr;
  }
  // Nor at the place of a request that has made such ones leave again, before it has come, while it
  // has no hole at all: the next victims make one, and this would be of them.
  const bool to_come = bytes > kSmallLimit && !d_.plan.request_came();
  const Bytes next = to_come ? d_.plan.crowding_ahead(1, stream) : 0;
  if (next > bytes && hole < next && !may_grow(next)) {
    return nullptr;
  }
  HeldStorage held;
  bool made = false;
  {
    const Unlocked unlocked(entry);
    made = held_.side().make(d_.number, bytes, stream, true, &held);
  }
  return made ? adopt_made(held) : nullptr;
}

const char* TorchStore::broken() const {
  const char* held = held_.broken();
  return held != nullptr ? held : segments_.broken();
}

}  // namespace stagehand::core
