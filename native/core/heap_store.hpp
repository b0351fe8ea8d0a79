// Our own heap as a store: walk 1. An allocation finds a free block or makes one, in steps: what is
// idle, growth below the ceiling, idle neighbours, pieces from elsewhere, victims, and growth over
// `high`.
//
// Guarded by the device's lock.
#pragma once

#include "core/device_heap.hpp"
#include "core/room.hpp"
#include "core/store.hpp"
#include "core/usual_addresses.hpp"
#include "core/window_search.hpp"

namespace stagehand::core {

struct Device;

class HeapStore final : public Store {
 public:
  explicit HeapStore(Device& device);

  // A live block that nobody owns yet, for work on `stream`; null with a status.
  Block* allocate(Entry& entry, Bytes bytes, driver::Stream stream, std::uint64_t graph,
                  Status* status);
  Block* find(Address address) const { return heap_.find(address); }
  void record_stream(Block* block, driver::Stream stream);
  void release_graph(std::uint64_t graph) { heap_.release_graph(graph); }

  void set_state(Block* block, BlockState state) override;
  void put_away(Block* block) override { heap_.give(block); }
  bool disown(Block*) override { return false; }
  void handed_out(Record&) override {}
  bool keep(Address address) override;
  Bytes bytes_for(const Record& record) const override;
  Block* make(Entry& entry, Record& record, Status* status) override;
  Block* make_ahead(Entry& entry, RecordId record, Bytes bytes, bool far) override;
  Block* make_weights(Entry& entry, Bytes bytes, driver::Stream stream, bool ahead,
                      Status* status) override;
  bool fits(std::span<const Bytes> sizes, driver::Stream stream) override;
  bool begin_step(Bytes target) override;
  void end_step() override;
  Bytes in_use() const override;
  void set_alarm(const Alarm& alarm) override { alarm_ = alarm; }
  bool rang() const override { return alarm_.rang(); }
  Bytes trim(Entry& entry, Bytes target) override;
  void map_ahead(Entry& entry, RecordId record, Bytes target) override;
  Status add_peer(int device) override;
  bool tells_of_captures() const override { return true; }
  bool knows_all_users() const override { return true; }
  const char* broken() const override { return heap_.broken(); }
  const DeviceHeap& heap() const { return heap_; }

 private:
  // At the usual address where that is free.
  Block* serve(Entry& entry, Bytes bytes, driver::Stream stream, std::uint64_t graph,
               UsualAddresses::Key key, Status* status);
  bool has_usual(Bytes bytes) const;
  UsualAddresses::Key comes_back(const Record& record) const;
  void note_usual(UsualAddresses::Key key, const Arena& arena, const Block& block);
  Block* take_usual(Arena& arena, const UsualAddresses::Usual& usual);
  Block* reclaim(Entry& entry, Arena& arena, Bytes bytes, Status* status);
  Block* room_without_evicting(Arena& arena, Bytes bytes);
  Block* borrow(Arena& arena, Bytes bytes);
  Block* take_idle_window(Arena& arena, Bytes bytes);
  Evicted evict_for(Arena& arena, Bytes bytes, Attempt& attempt);
  Evicted evict_planned(Arena& arena, Bytes bytes, Attempt& attempt);
  Evicted evict_for_pieces(Arena& arena, Record& record, Attempt& attempt);
  Evicted evict_window(const FoundWindow& window, Attempt& attempt);
  void evict_next_small(Arena& arena);
  Block* overshoot(Arena& arena, Bytes bytes, Status* status);
  // `bytes` were served, and `before` was mapped then.
  void count_overshoot(Bytes before, Bytes bytes);
  Bytes lacking(Bytes bytes) const;

  Device& d_;
  DeviceHeap heap_;
  WindowSearch search_;
  UsualAddresses usual_;
  Alarm alarm_;
  bool gives_all_ = false;              // all idle memory is about to be given back
  bool other_plan_ = false;             // for another plan, or as it was
  Bytes mapped_at_end_ = 0;             // of the step before
  std::vector<Record*> victims_;        // scratch of evict_window
  std::vector<driver::Context> peers_;  // of other devices that reach this one's memory
};

}  // namespace stagehand::core
