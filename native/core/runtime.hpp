// The story: one device's allocator, as the walks of ARCHITECTURE.md tell it. The only file of the
// core that knows all the others; mechanism lives in them.
//
// Thread-safe: every public function may be called from any thread, with or without the GIL. The
// device's lock is held for bookkeeping and for driver calls that only queue work; what can wait
// (pinning, pageable copies, trimming) runs without it, and is counted in `host_waits`.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/budget.hpp"
#include "core/cache_map.hpp"
#include "core/counters.hpp"
#include "core/device_heap.hpp"
#include "core/held_blocks.hpp"
#include "core/lane_limits.hpp"
#include "core/ledger.hpp"
#include "core/mover.hpp"
#include "core/pinned_pool.hpp"
#include "core/plan.hpp"
#include "core/ranked_mutex.hpp"
#include "core/stall_meter.hpp"
#include "core/victim.hpp"

namespace stagehand::core {

// Why a saved tensor is not ours to keep; `none` where it is.
enum class Refusal {
  none,
  foreign_storage,
  older_than_pool,
  kept,
  graph_capture,
  no_memory,
  private_pool,
};

struct Saved {
  Refusal refusal = Refusal::none;
  RecordId record;
  Bytes offset = 0;             // of the tensor's first element in its storage
  bool took_reference = false;  // to the storage; else the caller gives it up
};

struct Unpacked {
  Status status = Status::ok;
  Address address = 0;
  Block* block = nullptr;   // give back with drop_alias
  void* storage = nullptr;  // of torch's, where its own allocator cuts the blocks
  Bytes offset = 0;         // of the tensor's first element in it
  bool elsewhere = false;   // it was made again on another stream than the consumer's
};

struct DebugModes {
  bool evict_everything = false;  // every allocation first evicts all that is retained
  bool poison = false;            // evicted memory is overwritten once its copy is done
  bool checksums = false;         // every host copy is checked before it is restored
};

struct PinnedOptions {
  bool ahead = false;  // a thread of our own pins before it is needed; else whoever needs it does
  int numa_node = -1;  // where host memory should come from; -1: anywhere
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

  // A tensor over the bytes [first, last) was saved; `data` is its first element.
  Saved save(Address data, Address first, Address last);
  // Walk 2: the tensor's memory, for work queued on `consumer` from now on.
  Unpacked unpack(RecordId record, Bytes offset, driver::Stream consumer);
  // Whether unpack will find the record on the device; where not, it may have to make room.
  bool resident(RecordId record);
  // Bytes saved of the record's storage; 0 when it is gone.
  Bytes bytes_of(RecordId record);
  // What became of the record so far, in words; for the text of Status::corrupted.
  std::string history(RecordId record);
  void drop_alias(Block* block);
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
                  Address last);
  // torch's cache found no free block on this thread and will grow next. True: something was given
  // back. Under torch's mutex; never takes the GIL.
  bool missed(driver::Stream stream);
  // Gives up references that only a thread with the GIL may drop. With the GIL.
  void drop_orphans();
  // A segment of a torch.cuda.MemPool: 0 where `limit` refuses it.
  Address segment(Bytes bytes, driver::Stream stream);
  void free_segment(Address address);
  // The MemPool that this thread allocates from between pool entry and exit; {0, 0} for none.
  void set_torch_pool(std::array<std::uint64_t, 2> pool);

  // Arms the watermarks. Memory above `high` that is free goes back to the driver first, waiting
  // for the GPU where it must.
  void set_budget(const Budget& budget);
  // The pool is closed; the watermarks stay armed until the last record dies.
  void clear_budget();
  void set_limit(Bytes limit);
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
  // Gives free memory back to the driver until mapped <= target. Waits for the GPU.
  Bytes trim(Bytes target);
  void release_graph(std::uint64_t graph);
  // A CUDA graph capture begins (+1) or ends (-1) on this device: no events on captured streams.
  void capture(int change);
  // Work on `device` may reach this device's memory from now on.
  Status add_peer(int device);

  Counters counters();
  Budget budget();
  PlanState plan_state();
  void reset_peaks();
  Bytes device_bytes() const { return device_bytes_; }
  // Why the last request failed, with the numbers; for the error text.
  std::string report(Bytes bytes);
  // Empty, or the first broken invariant. Walks everything.
  std::string invariants_broken();

 private:
  Runtime(const driver::Table& table, int device, driver::Context context, Bytes device_bytes,
          Bytes granularity);

  enum class Evicted { yes, needs_slab, none };

  // runtime.cpp
  Block* acquire(Lock& lock, Bytes bytes, driver::Stream stream, std::uint64_t graph,
                 Status* status);
  bool restore(Lock& lock, Record& record, Status* status);
  Saved tag(Block* block, Address data, Address first, Address last);
  void prefetch(Lock& lock, Record& from);
  Record* next_wanted(const Record& record);
  bool prefetch_one(Lock& lock, Record& record, Bytes bytes, bool far);
  bool flush_prefetch();
  void arrive(Record& record, Block* block);
  Status bring_back(std::span<const Arrival> arrivals);
  void give_back(Block* block);
  void put_away(Block* block);
  void owner_left(Block* block);
  void note_live();
  void begin_step(std::uint32_t step);
  void record_users(Block* block);
  void end_record(Record& record);
  void release_copy(Record& record);
  void disarm_if_idle();
  // runtime_control.cpp
  bool wait_for_gpu(Lock& lock);
  // runtime_limits.cpp
  void seal(Lock& lock);
  bool intact(Record& record);
  Bytes saved_in_use() const;
  // runtime_reclaim.cpp
  Block* reclaim(Lock& lock, Arena& arena, Bytes bytes, Status* status);
  Block* room_without_evicting(Arena& arena, Bytes bytes);
  bool planned_to_leave(const Record& record) const;
  Candidate candidate(const Block* block, Bytes bytes, bool idle, bool with_victims) const;
  Bytes lacking(Bytes bytes) const;
  Bytes bytes_leaving(const Window& window) const;
  Record* planned_victim(Bytes bytes);
  void look(const Arena& arena, bool with_victims);
  Block* take_idle_window(Arena& arena, Bytes bytes);
  Evicted evict_for(Arena& arena, Bytes bytes, bool squeeze, Bytes* missing);
  Evicted evict_planned(Arena& arena, Bytes bytes, bool squeeze, Bytes* missing);
  Evicted evict_for_pieces(Arena& arena, Record& record, bool squeeze, Bytes* missing);
  Evicted evict_window(const Window& window, bool squeeze, Bytes* missing);
  bool helped(Lock& lock, Evicted result, Bytes missing, bool* squeeze);
  Record* last_needed(bool small_first, bool of_mem_pools = true);
  Evicted evict(Record& record, bool squeeze, Bytes* missing);
  bool copy_out(Record& record);
  bool write_back(Record& record);
  void write_back_ahead();
  Record* next_to_leave();
  void evict_next_small(Arena& arena);
  void let_leave();
  void evict_to_low(Bytes incoming);
  void evict_all(Lock& lock);
  Block* overshoot(Arena& arena, Bytes bytes, Status* status);
  bool copy_out_pageable(Lock& lock);
  Status restore_pageable(Lock& lock, Record& record, Block* block);
  Bytes ceiling() const;
  // runtime_held.cpp
  // Made before the lock is taken: drops, after the lock, what was let go of on this thread.
  class Departing {
   public:
    explicit Departing(Runtime& runtime) : runtime_(runtime) {}
    ~Departing();
    Departing(const Departing&) = delete;
    Departing& operator=(const Departing&) = delete;

   private:
    Runtime& runtime_;
  };
  void refresh();
  void let_go(Block* block);
  void take_stuck();
  void orphan(Block* block);
  Block* adopt(HeldStorage held, const CacheMap::Owner& owner);
  void watch(Record& record);
  void poll_owners(std::size_t most);
  Block* adopt_made(const HeldStorage& held);
  Block* make_again(Lock& lock, Record& record, Status* status);
  bool prefetch_held(Lock& lock, Record& record, Bytes bytes, bool far);
  void make_hole(Lock& lock, Bytes request, const CacheMap::Owner& owner, Bytes roof);
  void evict_down(Lock& lock);
  void leave_later(Lock& lock);
  bool wait_for_copy(Lock& lock, Record& record);
  Bytes trim_torch();
  std::optional<Bytes> release_cached();
  Bytes can_release(Bytes free_segments) const;
  void want_limit(Bytes limit);
  void apply_limit();
  Bytes room_for_small() const;
  CacheMap::Owner owner_here(driver::Stream stream) const;
  Bytes look_at_cache(const CacheMap::Owner& owner);
  // runtime_pinned.cpp
  bool take_slabs(Record& record, bool squeeze, Bytes* missing);
  bool make_slabs(Lock& lock, Bytes wanted);
  bool make_slabs_here(Lock& lock, Bytes wanted);
  bool pinner_runs() const;
  void start_pinner();
  void pin_ahead();
  Chunk begin_chunk(Lock& lock, Toucher& toucher);

  const driver::Table& table_;
  const int device_;
  const driver::Context context_;
  const Bytes device_bytes_;
  const Bytes granularity_;
  RankedMutex mutex_{Rank::device};
  // All below: guarded by mutex_.
  ClockBank clocks_;
  Counters counters_;
  DeviceHeap heap_;
  PinnedPool pinned_;
  Ledger ledger_;
  Mover* mover_ = nullptr;
  StallMeter stalls_;
  Plan plan_;
  Budget budget_;
  Bytes process_limit_ = 0;  // torch's memory fraction; pools may only set less
  bool pool_open_ = false;
  Bytes prefetch_reserve_ =
      0;  // room below `low` that prefetch leaves; learned, and forgotten slowly
  unsigned prefetch_turn_ = 0;
  int resident_ahead_ = 0;  // so many records that are wanted next were there when prefetch looked
  std::uint64_t serial_ = 0;       // of the last allocation
  std::uint64_t pool_serial_ = 0;  // blocks up to here existed before the pool was entered
  PinnedOptions pinned_options_;
  int pinner_process_ = 0;  // the process whose thread pins ahead; 0: none was started
  std::condition_variable_any growth_due_;   // the pinner waits for work,
  std::condition_variable_any growth_done_;  // and others for what it made
  DebugModes debug_;
  LaneLimits lane_limits_;
  std::vector<std::uint64_t> released_graphs_;  // whose memory could not be taken back yet
  std::uint32_t step_ = 0;                      // the plan's, of the newest record
  bool saving_ = false;                // the last that happened to a record: saved, not asked for
  std::deque<RecordId> to_leave_;      // planned victims, in the order of their copies
  std::size_t held_back_ = 0;          // planned write-backs that a cap held back
  std::deque<RecordId> unsealed_;      // copied out, and no checksum yet
  std::vector<Candidate> candidates_;  // scratch of look
  std::vector<Block*> candidate_blocks_;
  std::vector<Record*> leaving_;   // scratch of write_back
  std::vector<Arrival> arrivals_;  // scratch of prefetch
  // Where torch's own allocator cuts the blocks; else null and unused.
  std::unique_ptr<HeldBlocks> held_;
  std::atomic<bool> uses_torch_{false};       // held_ is there
  CacheMap* cache_ = nullptr;                 // has a lock of its own
  std::deque<RecordId> watched_;              // whose blocks torch or backward may still reach
  std::vector<void*> orphans_;                // storages to drop with the GIL
  std::atomic<std::size_t> orphan_count_{0};  // of them
  Counters segment_counters_;
  std::unique_ptr<DeviceHeap> segments_;  // what MemPools are cut from
  std::array<std::uint64_t, 2> torch_pool_{};
  std::vector<std::array<std::uint64_t, 2>> torch_pools_;  // all there were
  std::thread::id torch_pool_thread_;
  // torch's own limit: a share of the device, or kNoShare for none of ours.
  static constexpr double kNoShare = -1;
  double share_wanted_ = kNoShare;
  double share_told_ = kNoShare;                 // what torch said after we set it last
  double share_before_ = 1;                      // the user's
  std::atomic<std::uint64_t> limit_turn_{0};     // goes up with what is wanted
  std::atomic<std::uint64_t> limit_applied_{0};  // the turn that torch was told last
  bool release_failed_ = false;                  // torch gave nothing back when asked last
  Bytes over_at_entry_ = 0;                      // overshoot bytes when the pool was entered
  bool start_anew_ = false;  // the next pool entry gives torch's free segments back
  Bytes live_retained_ = 0;  // retained at the last refresh
  std::vector<CacheMap::Stretch> stretches_;  // scratch of look_at_cache
};

}  // namespace stagehand::core
