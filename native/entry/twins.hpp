// What makes a tensor that unpack made look as shared as the saved one was.
//
// autograd adds to a gradient in place where nobody else seems to have its storage. A tensor that
// we make over a block has a storage of its own, which says nothing of who else needs the bytes: a
// handle of the record, torch's own tensor over the block, another tensor of ours. So one more
// reference to that storage, its *twin*, is kept for as long as somebody else does.
//
// Nobody tells when that ends, so it is looked for wherever Python calls us. A twin keeps the block
// on the GPU: whatever is looked at and of use to nobody goes at once.
//
// Guarded by the GIL. Where torch cuts the blocks itself the storage is the saved one, and our
// reference to it does the same.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>

#include "core/runtime.hpp"

namespace stagehand::entry {

namespace nb = nanobind;

// One more reference to a tensor's storage.
class SharedStorage {
 public:
  explicit SharedStorage(void* storage) : storage_(storage) {}  // the tensor library's, taken over
  explicit SharedStorage(nb::object memory);                    // of the tensor `memory`
  SharedStorage(SharedStorage&& other) noexcept;
  SharedStorage& operator=(SharedStorage&&) = delete;
  ~SharedStorage();

  // Whether nobody else refers to it.
  bool alone() const;

 private:
  void* storage_ = nullptr;
  nb::object memory_;
  nb::object address_;  // of its storage, as torch's Python has it
};

class Twins {
 public:
  static Twins& get();

  // `storage` is over the block, and that of the tensor autograd gets. Returns the twin's number.
  std::uint64_t keep(SharedStorage storage, core::Runtime& runtime, const core::Block* block);
  // Lets the twin go if it is of no more use; 0 is none. These may be called with an error set.
  void look_at(std::uint64_t number);
  // The same for the newest, and for some of the older in turn.
  void sweep();
  void sweep_all();

 private:
  struct Twin {
    SharedStorage storage;
    core::Runtime* runtime;
    const core::Block* block;  // valid as long as `storage` is there
  };
  using Place = std::map<std::uint64_t, Twin>::iterator;

  static bool of_use(const Twin& twin);
  bool release(Place place);

  std::map<std::uint64_t, Twin> twins_;  // by number: the newest is last
  std::uint64_t last_ = 0;
  std::uint64_t turn_ = 0;  // the older one that was looked at last
};

}  // namespace stagehand::entry
