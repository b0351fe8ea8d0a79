// torch's caching allocator, and the storages it hands out, as far as the engine can tell it from
// the real one: the TorchSide of native tests. Segments are simulated device memory; blocks are
// cut, joined and found again by torch's own rules (c10's CUDACachingAllocator); memory that is
// freed is handed out again at once, in the order of its stream, so that a wait which is missing
// shows up as a hazard of the simulator's or as wrong bytes. With `expandable`, each stream of a
// pool of the driver's memory has one segment for small and one for large blocks, which grow and
// shrink by pages.
//
// One at a time: TorchSide is a table of plain functions.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/runtime.hpp"

namespace stagehand::core::test {

using TorchPool = std::array<std::uint64_t, 2>;
inline constexpr TorchPool kDefaultPool{};

struct Storage {
  std::atomic<int> references{1};
  Address address = 0;
  Bytes bytes = 0;
};

class FakeTorch {
 public:
  FakeTorch(const driver::Table& table, Runtime& runtime, CacheMap& cache, bool triggers = true);
  ~FakeTorch();
  FakeTorch(const FakeTorch&) = delete;
  FakeTorch& operator=(const FakeTorch&) = delete;

  static const TorchSide& side(bool triggers = true);

  // A storage with one reference, from this thread's pool. Null: out of memory.
  Storage* make(Bytes bytes, driver::Stream stream, bool quiet = false);
  // The same where the engine asks, which no request tells of.
  Storage* make_for_engine(Bytes bytes, driver::Stream stream, bool quiet);
  static void hold(Storage* storage) { ++storage->references; }
  void drop(Storage* storage);
  // storage.resize_(0), and to another size again: other memory, the same storage.
  void resize(Storage* storage, Bytes bytes, driver::Stream stream);
  // The block is reused only once what `stream` has queued when it is freed is done.
  void record_stream(const Storage* storage, driver::Stream stream);
  bool release_cached();
  // What torch has cached on other devices goes back first, in the same call.
  std::function<void()> release_others = [] {};
  bool expandable = false;            // from the first request on
  Bytes max_split = kUnlimited;       // max_split_size_mb: larger free blocks are not cut
  bool tells = true;                  // of requests, and how much they are for
  std::atomic<bool> blocked{false};   // as torch is while it records a history
  std::atomic<double> fraction{1.0};  // what the engine has set; nothing here keeps to it
  // From here on this thread allocates from that pool. Segments of those named by `use_segments`
  // come from Runtime::segment, of others from the driver.
  static void use_pool(TorchPool pool);
  void use_segments(TorchPool pool) { segment_pools_.push_back(pool); }
  // The pool is destroyed: what is free in it goes back.
  void destroy_pool(TorchPool pool);

  // Tells the cache map all there is, as TorchSide::listen does; `meanwhile` is what another thread
  // does between the snapshot and the telling.
  void tell_all(const std::function<void()>& meanwhile = [] {});

  Bytes reserved();
  Bytes largest_segment() const;
  Bytes allocated();
  Bytes reserved_peak();
  // On which the block at the address is handed out.
  driver::Stream stream_of(Address address);
  std::size_t storages() const { return storages_; }
  std::uint64_t misses() const { return misses_; }
  // Empty, or how the cache map differs from what is here.
  std::string differs(CacheMap& cache);

 private:
  struct Segment {
    Bytes bytes = 0;
    driver::Stream stream = nullptr;
    TorchPool pool{};
    bool small = false;
    driver::PhysicalHandle handle = 0;  // 0: of the runtime's, or expandable
    Bytes page = 0;                     // of an expandable one, whose `bytes` are addresses
    std::map<Address, driver::PhysicalHandle> pages;

    Bytes mapped() const { return page != 0 ? page * pages.size() : bytes; }
  };
  struct Chunk {  // a block, or free memory
    Bytes bytes = 0;
    bool used = false;
    Address segment = 0;
    Bytes requested = 0;
    std::vector<driver::Stream> users;
  };
  struct Pending {
    Address address;
    std::vector<driver::Event> events;
  };
  using Chunks = std::map<Address, Chunk>;
  using Segments = std::map<Address, Segment>;
  using RecursiveLock = std::lock_guard<std::recursive_mutex>;

  bool allocate(Bytes bytes, driver::Stream stream, bool quiet, Address* address);
  bool may_cut(const Chunk& chunk, Bytes bytes) const;
  Chunks::iterator best_fit(Bytes bytes, driver::Stream stream, TorchPool pool);
  bool grow(Bytes bytes, driver::Stream stream, TorchPool pool);
  bool expand(Bytes bytes, driver::Stream stream, TorchPool pool);
  // Where in the segment that many free and unmapped bytes begin, the lowest that ends unmapped.
  Address room_in(Address base, const Segment& segment, Bytes bytes);
  void map_at(Address address, Bytes bytes, driver::PhysicalHandle handle);
  void unmap_at(Address address, Bytes bytes, driver::PhysicalHandle handle);
  void drop_pages(Segment& segment, Address first, Address last);
  bool map_pages(Address base, Address first, Bytes bytes);
  void unmap_pages(Address base, Chunks::iterator free);
  bool ours(TorchPool pool) const;  // its segments come from the runtime
  void free(Address address);
  void free_now(Chunks::iterator chunk);
  void join_free(Chunks::iterator chunk);
  void process_events();
  Segments::iterator shrink(Segments::iterator segment);
  void release_wholly_free(const std::function<bool(const Segment&)>& which);
  CacheEvent event(CacheEvent::Kind kind, Address address, Bytes bytes, Address segment);
  void tell(CacheEvent::Kind kind, Address address, Bytes bytes, Address segment);

  const driver::Table& table_;
  Runtime& runtime_;
  CacheMap& cache_;
  const bool triggers_;
  std::recursive_mutex mutex_;  // torch's
  Segments segments_;
  Chunks chunks_;
  std::vector<Pending> pending_;
  std::vector<TorchPool> segment_pools_;
  Bytes reserved_peak_ = 0;
  std::atomic<std::size_t> storages_{0};
  std::atomic<std::uint64_t> misses_{0};
};

}  // namespace stagehand::core::test
