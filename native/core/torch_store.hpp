// torch's caching allocator as a store (modes "native" and "mempool"): walks 4 and 5. A block is a
// storage of torch's that we hold a reference to; it leaves by dropping that, and is made again by
// asking torch.
//
// Locks: the GIL, torch's mutex, ours. So torch is asked for memory, and given it, without our
// lock: what is let go of is due once the lock is given up (Gate::due).
//
// Guarded by the device's lock, but for drop_orphans, settle_due and what torch_room.cpp says.
#pragma once

#include <array>
#include <atomic>
#include <optional>
#include <vector>

#include "core/cache_map.hpp"
#include "core/free_runs.hpp"
#include "core/held_blocks.hpp"
#include "core/holes_ahead.hpp"
#include "core/mem_pool_segments.hpp"
#include "core/pool_route.hpp"
#include "core/refusal.hpp"
#include "core/room.hpp"
#include "core/store.hpp"
#include "core/torch_limit.hpp"
#include "core/victim.hpp"

namespace stagehand::core {

struct Device;

class TorchStore final : public Store {
 public:
  TorchStore(Device& device, const TorchSide& side, CacheMap& cache);

  // What of a storage is to be saved; null with the reason where it is not ours to keep. `fresh`:
  // the reference is ours from here on. `serial`: of its allocation, 0 where nobody knows; told of
  // what is not kept, too.
  Block* hold(const HeldStorage& held, driver::Stream stream, bool may_ignore, bool* fresh,
              Refusal* why, std::uint64_t* serial);
  // Of what torch has handed out last.
  std::uint64_t serial() { return cache_.serial(); }
  // A storage that was held for nothing: the caller has its reference again.
  void forget(Block* block);
  // After a save: looks whether what a layer has just let go of is ours alone by now.
  void saved(Entry& entry, Record& record, driver::Stream stream, bool fresh);
  // At a request, whether or not it will miss: looks for the owners of what was saved since.
  void look_for_owners();
  // A bit for each device where something was saved since that is planned to leave: it is copied
  // out from where its last owner has gone on. Without the lock.
  static std::atomic_ref<std::uint64_t> awaits() {
    return std::atomic_ref<std::uint64_t>(devices_that_await_);
  }
  static std::uint64_t* devices_that_await() { return &devices_that_await_; }
  // Whether no optimizer that is there has taken its first step: what it keeps is still to be made.
  // Any thread, without the lock.
  void await_optimizer(bool due) { optimizer_due_.store(due, std::memory_order_relaxed); }
  // From here on one makes that, on that stream; until it has, or the next step begins.
  void optimizer_makes(Entry& entry, driver::Stream stream);
  void optimizer_made();
  // One steps, for the first time or not: what is asked for from here on is no gradient.
  void optimizer_steps();
  // Whether that has anything to say. Any thread, without the lock.
  bool counts_gradients() const { return counts_gradients_.load(std::memory_order_relaxed); }
  // A bit for each device where it is to be told that the program lets go of a block.
  static std::uint64_t* devices_that_follow() { return &devices_that_follow_; }
  // By device, the bits of sizes that CacheMap::place has something to say of; read atomically.
  static constexpr std::size_t kDevices = 64;
  static std::uint64_t* survivor_sizes() { return survivor_sizes_.data(); }
  // torch's cache found no free block on this thread and will grow next. True: something was given
  // back. `told`: what is asked for, 0 where torch does not tell. Under torch's mutex; never takes
  // the GIL.
  bool missed(Entry& entry, driver::Stream stream, Bytes told);
  // Gives up references that only a thread with the GIL may drop. With the GIL, without our lock.
  void drop_orphans();
  // Drops what is due, and tells torch of limits. Without any lock of ours.
  void settle_due(Due& due);
  MemPoolSegments& segments() { return segments_; }
  PoolRoute& route() { return route_; }
  // Whether a step that may use `high` should begin with a new MemPool instead of this one.
  bool outgrown(const MemPoolSegments::Pool& pool, Bytes high);
  // Whether the newest MemPool may serve the step that begins: from the second one in which
  // something has to leave.
  bool may_serve(Entry& entry);
  // It does, and has its first segment made where the step is known not to fit.
  void entered_pool(Entry& entry, driver::Stream stream);

  void set_state(Block* block, BlockState state) override { block->state.move_to(state); }
  void put_away(Block* block) override;
  bool disown(Block* block) override;
  void handed_out(Record& record) override;
  bool keep(Address address) override;
  bool fits(std::span<const Bytes> sizes, driver::Stream stream) override;
  Bytes bytes_for(const Record& record) const override { return record.returning_bytes(); }
  Block* make(Entry& entry, Record& record, Status* status) override;
  Block* make_ahead(Entry& entry, RecordId record, Bytes bytes, bool far) override;
  Block* make_weights(Entry& entry, Bytes bytes, driver::Stream stream, bool ahead,
                      Status* status) override;
  void look() override;
  void look_around(Entry& entry) override;
  bool begin_step(Bytes target) override;
  void end_step() override;
  Bytes in_use() const override { return cache_.usage().allocated; }
  void set_alarm(const Alarm& alarm) override { cache_.set_alarm(alarm); }
  bool rang() const override { return cache_.rang(); }
  Bytes trim(Entry& entry, Bytes target) override;
  void map_ahead(Entry& entry, RecordId record, Bytes target) override;
  Status add_peer(int device) override { return segments_.add_peer(device); }
  bool tells_of_captures() const override { return false; }
  bool knows_all_users() const override { return false; }  // record_stream is torch's own
  void reset_peaks() override { cache_.reset_peaks(); }
  const char* broken() const override;

 private:
  // Pools of many budgets that take turns would map it for each step.
  static constexpr int kTimesWhole = 16;
  // Where torch's memory is, at a miss, as choose_window sees it.
  struct Sight {
    std::vector<CacheMap::Stretch> stretches;
    std::vector<Candidate> candidates;    // one a stretch, and a wall before each segment
    std::vector<Block*> blocks;           // beside them
    std::vector<std::size_t> of_stretch;  // its place in `candidates`
    Bytes releasable = 0;                 // what torch can give back once what is due is gone
    bool by_pages = false;                // there are expandable segments
    std::size_t runs = 0;                 // of pages side by side, of the owner
    std::size_t end = 0;                  // the candidate for pages yet to be mapped; 0: none
  };

  Block* adopt(const HeldStorage& held, const CacheMap::Owner& owner);
  Block* adopt_made(const HeldStorage& held);
  Block* make_now(Entry& entry, Bytes bytes, driver::Stream stream, Status* status);
  Block* make_in_room(Entry& entry, Bytes bytes, driver::Stream stream, bool far);
  void weights_stay_below_high(Bytes known);
  void weights_make_way(Bytes bytes);
  // Whose blocks torch hands out to this thread for work on `stream`.
  CacheMap::Owner owner_here(driver::Stream stream) const;
  void refresh();
  void take_stuck();
  std::uint64_t device_bit() const;
  void watch(Record& record);
  bool still_used(RecordId id);
  void poll();
  void poll_newest(std::size_t most);
  void poll_others(std::size_t most);
  std::optional<Bytes> release_cached();
  // torch_room.cpp
  Bytes request_of(Bytes told) const;
  void look_at_cache(const CacheMap::Owner& owner, Bytes request = 0, Bytes growing = 0);
  void now_idle(Address address);
  void find_runs();
  Bytes free_run(std::size_t stretch, bool with) const;
  void choose_small(Bytes request, const CacheMap::Owner& owner);
  bool make_small_hole(Entry& entry, Bytes request, const CacheMap::Owner& owner, Attempt& attempt);
  void make_hole(Entry& entry, Bytes request, Bytes told, const CacheMap::Owner& owner, Bytes roof);
  Evicted evict_window(const Window& window, Attempt& attempt, std::size_t place, Bytes request,
                       const CacheMap::Owner& owner);
  Evicted evict_last(bool of_mem_pools, Attempt& attempt);
  bool is_there(const Window& window, Bytes roof);
  void evict_down(Entry& entry);
  void leave_later(Entry& entry);
  bool wait_for_copy(Entry& entry, Record& record);
  bool can_release() const;
  Bytes room_for_small();
  Bytes growth_for(Bytes request);
  Bytes roof_of_driver(Bytes growth, Bytes roof);
  Bytes room_for_others(driver::Stream stream);
  // torch_aside.cpp
  void lacked(Bytes request, const CacheMap::Owner& owner);
  void set_aside(Entry& entry);
  bool has_hole_here() const;
  bool take_aside(Bytes request, Bytes told, const CacheMap::Owner& owner);
  bool end_aside();
  bool serves_here(const CacheMap::Owner& owner);
  void serve_apart();
  bool room_lacks_apart();
  void backward_begins();
  void note_walls(Bytes request);
  bool saves_on(driver::Stream stream) const;  // this step, so far
  void settle_apart();  // streams and bits, after what is served apart has changed
  bool in_capture(driver::Stream stream);
  bool has_left() const;  // any record since the pool was entered
  static bool cuts_otherwise();
  bool maps_whole();
  Bytes map_for_owners(Bytes most);
  Bytes map_whole(Entry& entry, Bytes target);
  bool map_free(Bytes bytes, const CacheMap::Owner& owner);

  alignas(std::atomic_ref<std::uint64_t>::required_alignment) inline static std::uint64_t
      devices_that_await_ = 0;
  alignas(std::atomic_ref<std::uint64_t>::required_alignment) inline static std::uint64_t
      devices_that_follow_ = 0;
  alignas(std::atomic_ref<std::uint64_t>::required_alignment) inline static std::array<
      std::uint64_t, kDevices> survivor_sizes_{};

  Device& d_;
  CacheMap& cache_;  // has a lock of its own
  HeldBlocks held_;
  MemPoolSegments segments_;
  PoolRoute route_;
  TorchLimit limit_;
  std::vector<RecordId> watched_;  // whose blocks torch or backward may still reach; 0 for none
  std::size_t unwatched_ = 0;      // of them none
  unsigned polls_ = 0;
  std::size_t saved_since_ = 0;  // a request has looked for owners, of the newest watched
  std::size_t cursor_ = 0;       // where poll_others goes on
  std::vector<void*> orphans_;   // storages to drop with the GIL
  std::atomic<std::size_t> orphan_count_{0};
  Sight sight_;
  std::vector<FreeRun> runs_;  // of what was seen last
  HolesAhead ahead_;
  HeldStorage aside_;      // in the place of the hole; null for none
  HolesAhead::Hole hole_;  // that one, or the last
  std::uint32_t hole_step_ = 0;
  std::vector<Record*> victims_;    // scratch of evict_window and choose_small
  std::vector<Address> departing_;  // scratch of look_at_cache
  Bytes high_at_entry_ = 0;         // `high` then
  Bytes over_at_entry_ = 0;         // overshoot bytes when the pool was entered
  Bytes live_retained_ = 0;         // retained at the last refresh
  Bytes gone_at_entry_ = 0;         // how much had left then
  Bytes reserved_at_end_ = 0;       // torch's when the step before ended
  bool release_failed_ = false;     // torch gave nothing back when asked last
  bool start_anew_ = false;         // the next pool entry gives torch's free segments back
  bool cut_ = false;                // it did so for what a first step had cut: once
  bool anew_ = false;               // as it does now
  bool emptied_ = false;            // the program has, since the step before
  bool squeezed_ = false;           // in the step before something had to leave
  bool raised_ = false;             // `high` is a good part more than it was in that step
  bool whole_ = false;              // what was free was mapped in one segment, not expandable
  Bytes tight_ = 0;                 // with so much for `high`, or less, a step in it went over
  bool walls_at_entry_ = false;     // were wanted apart
  int times_whole_ = 0;             // it was
  Bytes most_lacking_ = 0;          // all that was free went back for gradients that stay
  bool pressed_ = false;            // in any step
  bool pool_waits_ = false;         // there is a MemPool that does not serve this step
  std::atomic<bool> optimizer_due_ = false;     // as of await_optimizer
  std::atomic<bool> counts_gradients_ = false;  // a backward asks for some that may stay
  bool gave_back_ = false;                      // for an optimizer, since the step began
  bool walled_in_ = false;                      // no hole could be made for a request, for walls
  bool saving_ = false;                         // nothing has been asked for in this step
  std::vector<driver::Stream> saves_on_;        // whose blocks were saved since it began
};

}  // namespace stagehand::core
