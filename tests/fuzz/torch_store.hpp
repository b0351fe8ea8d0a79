// Torch's own allocator on device 0 (native/held_torch.hpp), and the engine beside it. Real torch
// makes its device current and holds the GIL or not; so does this, and says where the engine gives
// up what only a thread with the GIL may.
#pragma once

#include <map>

#include "fuzz/program.hpp"
#include "fuzz/store.hpp"
#include "native/held_torch.hpp"

namespace stagehand::fuzz {

class TorchStore : public Store {
 public:
  // `table`: of torch's own calls.
  TorchStore(const driver::Table& table, core::Runtime& runtime, driver::Context context,
             const Setup& setup);

  std::size_t devices() const override { return 1; }
  core::Runtime& runtime(std::size_t) override { return runtime_; }
  core::Status make(driver::Stream stream, std::uint64_t graph, Reference* made) override;
  bool drop(const Reference& reference) override;
  core::Saved save(const Reference& of, driver::Stream on, core::Address first, core::Address last,
                   Again again) override;
  bool refill(core::RecordId record, const Reference& with, driver::Stream on) override;
  core::Status unpack(std::size_t device, core::RecordId record, core::Bytes offset,
                      driver::Stream consumer, Reference* again) override;
  void drop_handle(std::size_t device, core::RecordId record) override;
  void record_stream(const Reference& of, driver::Stream user) override;
  void keep(const Reference&) override {}  // Python's own matter here
  void enter_pool() override;
  void leave_pool() override;
  void trim(std::size_t device, core::Bytes target) override;
  void capture(std::size_t device, int change) override;
  void release_graph(std::size_t device, std::uint64_t graph) override;
  std::string broken() override;
  std::string left() override;
  bool owns_memory() const override { return false; }

 private:
  void note_usage();
  void drop_orphans();

  core::Runtime& runtime_;
  core::CacheMap& cache_;
  core::test::FakeTorch torch_;
  const Setup setup_;
  bool in_pool_ = false;
  std::vector<std::uint64_t> graphs_;
};

}  // namespace stagehand::fuzz
