// Where a program's tensors live: the process allocator, or torch's own. One small interface, so
// that one runner drives both.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/runtime.hpp"

namespace stagehand::fuzz {

// One reference of the program's to a storage.
struct Reference {
  void* storage = nullptr;       // of torch's
  core::Block* block = nullptr;  // of an alias of ours
  core::Address address = 0;
  core::Bytes bytes = 0;  // of the storage; 0: it is an alias, which begins where its view does
  std::size_t device = 0;
};

// How a storage's bytes can be made again, if at all, as it is saved.
struct Again {
  enum How : std::uint32_t { no, exact, to_be_proven, by_call };
  How how = no;
  std::uint64_t call = 0;

  core::Made made(core::Address first, core::Bytes bytes) const {
    return how == exact || how == to_be_proven ? core::Made{first, bytes, how, how == exact}
                                               : core::Made{};
  }
  core::Inside inside() const { return {how == by_call ? call : 0, 0}; }
};

class Store {
 public:
  virtual ~Store() = default;
  virtual std::size_t devices() const = 0;
  virtual core::Runtime& runtime(std::size_t device) = 0;
  // A storage of `made->bytes` on `made->device`. `graph`: 0, or the graph `stream` is captured
  // into.
  virtual core::Status make(driver::Stream stream, std::uint64_t graph, Reference* made) = 0;
  // False: it was not known.
  virtual bool drop(const Reference& reference) = 0;
  virtual core::Saved save(const Reference& of, driver::Stream on, core::Address first,
                           core::Address last, Again again) = 0;
  // The bytes of a dropped record were made again in a storage, on a stream. False: not taken.
  virtual bool refill(core::RecordId record, const Reference& with, driver::Stream on) = 0;
  // What backward gets: an alias of the record's bytes from `offset` on.
  virtual core::Status unpack(std::size_t device, core::RecordId record, core::Bytes offset,
                              driver::Stream consumer, Reference* again) = 0;
  virtual void drop_handle(std::size_t device, core::RecordId record) = 0;
  virtual void record_stream(const Reference& of, driver::Stream user) = 0;
  virtual void keep(const Reference& reference) = 0;
  virtual void enter_pool() {}
  virtual void leave_pool() {}
  virtual void trim(std::size_t device, core::Bytes target) = 0;
  virtual void capture(std::size_t device, int change) = 0;
  virtual void release_graph(std::size_t device, std::uint64_t graph) = 0;
  // Empty, or what is wrong with the store's own books. Walks everything.
  virtual std::string broken() = 0;
  // The program has dropped everything: gives back what can be. Empty, or what is left.
  virtual std::string left() = 0;
  // Whether all memory is the runtimes' own: they count aliases, and map nothing beyond.
  virtual bool owns_memory() const = 0;

 protected:
  // What is to be proven is, mostly: the proof would make it again and compare.
  void say_proved(std::size_t device, core::RecordId record, const core::Unpacked& unpacked) {
    if (unpacked.proof.trace != 0) {
      runtime(device).proved(unpacked.proof, record.index % 4 != 0);
    }
  }
};

// The process allocator on every device.
class HeapStore : public Store {
 public:
  explicit HeapStore(std::vector<core::Runtime*> runtimes) : runtimes_(std::move(runtimes)) {}

  std::size_t devices() const override { return runtimes_.size(); }
  core::Runtime& runtime(std::size_t device) override { return *runtimes_[device]; }
  core::Status make(driver::Stream stream, std::uint64_t graph, Reference* made) override;
  bool drop(const Reference& reference) override;
  core::Saved save(const Reference& of, driver::Stream on, core::Address first, core::Address last,
                   Again again) override;
  bool refill(core::RecordId record, const Reference& with, driver::Stream on) override;
  core::Status unpack(std::size_t device, core::RecordId record, core::Bytes offset,
                      driver::Stream consumer, Reference* again) override;
  void drop_handle(std::size_t device, core::RecordId record) override;
  void record_stream(const Reference& of, driver::Stream user) override;
  void keep(const Reference& reference) override;
  void trim(std::size_t device, core::Bytes target) override;
  void capture(std::size_t device, int change) override;
  void release_graph(std::size_t device, std::uint64_t graph) override;
  std::string broken() override { return ""; }
  std::string left() override;
  bool owns_memory() const override { return true; }

 private:
  std::vector<core::Runtime*> runtimes_;
};

}  // namespace stagehand::fuzz
