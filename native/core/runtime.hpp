// One device's allocator, as the rest of the program sees it. Each public function is an Entry and
// the few calls that a walk of ARCHITECTURE.md names; what they do is in the pieces of `Device`.
//
// Thread-safe: every public function may be called from any thread, with any context current, with
// or without the GIL. The device's lock is held for bookkeeping and for driver calls that only
// queue work; what can wait (pinning, pageable copies, trimming) runs without it, and is counted in
// `host_waits`.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/contents.hpp"
#include "core/device.hpp"
#include "core/heap_store.hpp"
#include "core/lane_limits.hpp"
#include "core/link_bound.hpp"
#include "core/refusal.hpp"
#include "core/step_book.hpp"
#include "core/step_shape.hpp"
#include "core/torch_store.hpp"

namespace stagehand::core {

struct Saved {
  Refusal refusal = Refusal::none;
  RecordId record;
  Bytes offset = 0;     // of the tensor's first element in its storage
  bool inside = false;  // it was made in the call that it is saved in; said of refused ones too
  bool took_reference = false;  // to the storage; else the caller gives it up
  Bytes ignored = 0;            // where refused as small: to be said when that tensor is gone
  Plan::ToProve look = {};      // its bytes are to be looked at now and when it is asked for
};

// What is counted, and what it is to be read beside, of one moment.
struct Reading {
  Counters counters;
  Budget budget;
  PlanState plan = PlanState::none;
};

struct Unpacked {
  Status status = Status::ok;
  Address address = 0;
  Block* block = nullptr;   // give back with drop_alias
  void* storage = nullptr;  // of torch's, where its own allocator cuts the blocks
  Bytes offset = 0;         // of the tensor's first element in it
  // Where this is to be proven, the saved bytes of the record: what its recipe makes is to be
  // compared with them, and `proved` told.
  Plan::ToProve proof = {};
  Address saved = 0;
  Bytes begin = 0;  // of the storage
  Bytes bytes = 0;
  bool elsewhere = false;  // it was made again on another stream than the consumer's
};

class Runtime {
 public:
  // Opens a device: its primary context, the two lanes, granularity. Null when the driver refuses;
  // `error` then says what failed.
  static Runtime* open(const driver::Table& table, int device, std::string* error);

  // Walk 1. `bytes` > 0; the address is good for work queued on `stream` from now on.
  Status allocate(Bytes bytes, driver::Stream stream, std::uint64_t graph, Address* address);
  // torch drops its block. False: not a block of ours.
  bool free(Address address);
  void record_stream(Address address, driver::Stream stream);
  // The block's first byte and size, for interior pointers. False: not ours.
  bool base_of(Address address, Address* base, Bytes* bytes);

  // A tensor over the bytes [first, last) was saved; `data` is its first element. `may_ignore`: it
  // may be refused as small, for what its eviction would cost. `made`: what the caller can make
  // again of the storage, as it is now. `inside`: the call of a region that runs.
  Saved save(Address data, Address first, Address last, bool may_ignore = false, Made made = {},
             Inside inside = {});
  // What is allocated from now on has greater numbers.
  std::uint64_t serial();
  // What was ignored is gone.
  void ignored_ended(Bytes bytes);
  // Walk 2: the tensor's memory, for work queued on `consumer` from now on. Status::recompute: the
  // caller is to make the storage's bytes again, give them by `refill`, and ask again. `by_recipe`:
  // it is asked for to make another one again.
  Unpacked unpack(RecordId record, Bytes offset, driver::Stream consumer, bool by_recipe = false);
  // The same where the record is on the device: then no room has to be made. Else nothing.
  std::optional<Unpacked> unpack_resident(RecordId record, Bytes offset, driver::Stream consumer,
                                          bool by_recipe);
  // What makes a dropped record again is queued on `stream` from here on, until `made`: for what it
  // takes.
  void making(RecordId record, driver::Stream stream);
  // The bytes of a dropped record, made again on `stream` in the storage that begins at `first`.
  // False: that storage is not of a kind that records are of, or too small; the record stays
  // dropped. True without any use of it where another thread was quicker, or the record is gone.
  bool refill(RecordId record, Address first, driver::Stream stream);
  // It is queued, the record's own bytes last; `rerun`: by its call.
  void made(RecordId record, driver::Stream stream, bool rerun = false);
  // Whether a recipe made the very bytes that were saved.
  void proved(Plan::ToProve what, bool same);
  bool dropped(RecordId record);
  // Whether the recipes of all that saved it are sure to make the same bytes.
  bool by_node(RecordId record);
  // The region is not to run again: of these, what is not dropped yet leaves by copy.
  void forget_recipes(std::span<const RecordId> records);
  // A region is to run again; its function begins to, with its inputs at hand; it ended, whatever
  // came of it. What it takes in between is not the step's own.
  void note_rerun();
  void rerun_begins();
  void rerun_ends();
  // Whether unpack will find the record on the device; where not, it may have to make room.
  bool resident(RecordId record);
  // Bytes saved of the record's storage; 0 when it is gone.
  Bytes bytes_of(RecordId record);
  // What became of the record so far, in words; for the text of Status::corrupted.
  std::string history(RecordId record);
  void drop_alias(Block* block);
  // Whether what is saved next should come with how it was made. Without the lock: a step in which
  // nothing leaves pays for no recipes, and one too many or too few does no harm.
  bool wants_recipes() const { return wants_recipes_.load(std::memory_order_relaxed); }
  // Whether a module that is called next is worth its mark as a region (Plan::wants_regions), or
  // memory is short. Likewise.
  bool wants_regions() const { return wants_regions_.load(std::memory_order_relaxed); }
  // Whether anybody needs the block's bytes but the one tensor made over it that the caller holds:
  // a record, torch's own tensor, another alias.
  bool shared(const Block* block);
  void drop_handle(RecordId record);
  // Leaves a block on the GPU. False: not ours.
  bool keep(Address address);

  // Where torch's own caching allocator cuts the blocks (docs/decisions/0011-modes.md). Once,
  // before anything is saved; both live as long as the process.
  void use_torch(const TorchSide& side, CacheMap& cache);
  bool uses_torch() const { return uses_torch_.load(std::memory_order_acquire); }
  // A tensor over [first, last) of a storage of torch's was saved on `stream`; `data` is its first
  // element. With the GIL.
  Saved save_held(const HeldStorage& held, driver::Stream stream, Address data, Address first,
                  Address last, bool may_ignore = false, Made made = {}, Inside inside = {});
  // `refill` with a storage of torch's. `took_reference` as in Saved.
  bool refill_held(RecordId record, const HeldStorage& held, driver::Stream stream,
                   bool* took_reference);
  // torch's cache found no free block on this thread and will grow next. True: something was given
  // back. `request`: what is asked for, 0 where torch does not tell. Under torch's mutex; never
  // takes the GIL.
  bool missed(driver::Stream stream, Bytes request);
  // torch is about to be asked for memory on the device, and has not taken its mutex yet: owners of
  // what was saved since are looked for. Nothing where another thread is in the engine: a later
  // request does.
  void asks();
  // A bit for each device that wants `asks` to be called; and where the bits are, for the other
  // side.
  static std::atomic_ref<std::uint64_t> awaits() { return TorchStore::awaits(); }
  static std::uint64_t* devices_that_await() { return TorchStore::devices_that_await(); }
  // As of TorchStore; nothing in other modes.
  void await_optimizer(bool due);
  void optimizer_makes(driver::Stream stream);
  void optimizer_made();
  void optimizer_steps();
  // Gives up references that only a thread with the GIL may drop. With the GIL.
  void drop_orphans();
  // A segment of a torch.cuda.MemPool: 0 where `limit` refuses it.
  Address segment(Bytes bytes, driver::Stream stream);
  void free_segment(Address address);
  // The MemPool that this thread allocates from between pool entry and exit, for the most part on
  // `stream`; {0, 0} for none. Without the GIL.
  void set_torch_pool(MemPoolSegments::Pool pool, driver::Stream stream = nullptr);
  // Whether another MemPool should take this one's place in a step that may use `high`.
  bool outgrown(MemPoolSegments::Pool pool, Bytes high);
  // What that pool serves, to be joined and settled; null where torch's allocator is not used.
  PoolRoute* route() { return uses_torch() ? &torch_->route() : nullptr; }

  // Walks 6 and 7 (core/weights.hpp). A group of so many bytes, which are at `host` for as long as
  // it stands; away at first.
  GroupId add_weights(Bytes bytes, std::byte* host);
  // They are used in this order, as far as anybody knows.
  void presume_weights(std::span<const GroupId> groups);
  // Nobody holds it. Waits for the GPU: `host` is the caller's again.
  void remove_weights(GroupId id);
  // Holds the group: its bytes are at `address` for work queued on `consumer` from now on. With a
  // status that is not ok nothing has changed.
  Status enter_weights(GroupId id, UseKind kind, driver::Stream consumer, Address* address);
  void leave_weights(GroupId id);
  // Work queued on `writer` so far writes to the group's first `bytes`, while somebody holds it:
  // they go to the host copy before it leaves. `stale` where nobody does.
  Status wrote_weights(GroupId id, Bytes bytes, driver::Stream writer);
  // Waits until the host copy has all that was written so far.
  Status weights_to_host(GroupId id);
  // Whether the next group lacked room, and without the lock. It comes if it has it now.
  bool lacks_weights() const { return d_.weights.lacks_room(); }
  void more_weights(driver::Stream consumer);
  // All that nobody holds leaves; for tests, and for who needs the memory.
  void drop_weights();
  struct WeightCounts {
    Weights::Counts counts;
    Bytes bytes = 0;
    Bytes home = 0;
    Bytes largest = 0;  // group
  };
  WeightCounts weight_counts();
  // Page-locks host memory for good, and gives it up again. Both wait; without any lock.
  bool pin(std::byte* host, Bytes bytes);
  void unpin(std::byte* host, Bytes bytes);
  // Copies out, behind the work queued on the streams, and waits for them. False: not all have
  // moved.
  bool read_out(std::span<const Copy> copies, std::span<const driver::Stream> streams);
  // Copies in, behind and before the work queued on `stream`. What has failed has ended, too.
  Status write_in(std::span<const Copy> copies, driver::Stream stream);

  // Arms the watermarks. Memory above `high` that is free goes back to the driver first, waiting
  // for the GPU where it must.
  void set_budget(const Budget& budget);
  // The pool is closed; the watermarks stay armed until the last record dies.
  void clear_budget();
  void set_limit(Bytes limit);
  // Looks from here on at what is in use as the program asks for memory.
  void set_alarm(const Alarm& alarm);
  struct Calm {
    bool rang = false;   // the alarm
    Bytes in_use = 0;    // now
    Bytes pressed = 0;   // what left, went over `high` or could not be had, since the start
    bool shown = false;  // what happens is noted for somebody
  };
  Calm read_alarm();
  // Bytes beyond what is in use that the device has for us. Asks the driver.
  Bytes available();
  // For copies queued from now on. False: rates cannot be held here, and nothing has changed.
  bool set_lane_limits(const LaneLimits& limits);
  LaneLimits lane_limits();
  // False: slabs of other sizes are in use, and nothing has changed.
  bool configure_pinned(const SizeClasses& classes, Bytes host_limit, PinnedOptions options = {});
  // Gives pinned memory that no record holds and no copy names back to the system, in the pieces
  // it was pinned in, until pinned_bytes <= keep. Returns how much. Waits for the driver.
  Bytes release_pinned(Bytes keep);
  // The sizes storages asked host memory for, and how many of each held some at once at most.
  std::vector<Demand::Peak> pinned_demand();
  void set_debug(DebugModes modes);
  void set_checksums(bool on);
  // Whether other processes take part in the steps from here on (Trace::measured).
  void set_ranks(bool ranks);
  // As if no step had been, so that what follows depends on nothing earlier; for tests.
  void forget_steps();
  // Gives free memory back to the driver until mapped <= target. Waits for the GPU.
  Bytes trim(Bytes target);
  void release_graph(std::uint64_t graph);
  // A CUDA graph capture begins (+1) or ends (-1) on this device: no events on captured streams.
  void capture(int change);
  // Work on `device` may reach this device's memory from now on.
  Status add_peer(int device);

  Reading read();
  // What was counted since the last call, with the peaks since then: a step ends, the next begins.
  Reading read_step();
  Counters counters() { return read().counters; }
  // Records that are alive.
  Bytes records();
  Budget budget();
  PlanState plan_state();
  Plan::Shown plan_shown();
  // The kind of step that was learned last; empty before the first. Copies what it knows.
  StepShape step_shape();
  // Between the two what the engine does is noted. The caller has made the GPU idle at both.
  bool start_timeline();
  Timeline::Taken stop_timeline();
  // All blocks and records as they are. Walks everything.
  Contents contents();
  std::uint32_t step_kind();  // its number alone
  void reset_peaks();
  Bytes device_bytes() const { return d_.bytes; }
  // Why the last request failed, with the numbers; for the error text.
  std::string report(Bytes bytes);
  // Empty, or the first broken invariant. Walks everything.
  std::string invariants_broken();
#ifdef STAGEHAND_TESTING
  PinnedTier& pinned() { return d_.host; }  // to pin by hand
  const Prefetcher& prefetcher() const { return d_.prefetcher; }
#endif

 private:
  Runtime(const driver::Table& table, int device, driver::Context context, Bytes device_bytes,
          Bytes granularity, const LaneStreams& lanes);

  void map_ahead(Entry& entry, RecordId record);
  Saved tagged(Block* block, Address data, Address first, Address last, Made made, Inside inside);
  void fill(Record& record, Block* block, driver::Stream stream);
  Unpacked unpack_in(Entry& entry, RecordId id, Bytes offset, driver::Stream consumer,
                     bool by_recipe);
  static constexpr std::size_t kMostToMake = 16;  // blocks that a proof may take
  Plan::ToProve to_prove(const Record& record, driver::Stream consumer);
  std::size_t blocks_to_make(const Record& record, std::array<Bytes, kMostToMake>& sizes);
  Unpacked hand_out(Entry& entry, Record& record, Bytes offset, driver::Stream consumer);
  Counters counted();      // as the books are
  Counters counted_now();  // once they are up to date
  Reading reading(const Counters& counters) const;
  void start_peaks();
  void look_for_recipes();
  void release_graphs(Entry& entry);
  void limit_lanes();

  Device d_;
  HeapStore heap_;
  std::unique_ptr<TorchStore> torch_;    // where torch's own allocator cuts the blocks
  std::atomic<bool> uses_torch_{false};  // it is there
  std::atomic<bool> wants_recipes_{true};
  std::atomic<bool> wants_regions_{true};
  LaneLimits lane_limits_;
  LinkBound link_bound_;
  StepBook step_;
  bool quiet_ = false;  // the step's alarm is to be told: what it saves is not shown to us
  std::uint64_t pool_serial_ = 0;  // blocks up to here existed before the pool was entered
  std::vector<std::uint64_t> released_graphs_;  // whose memory could not be taken back yet
};

}  // namespace stagehand::core
