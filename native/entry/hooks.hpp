// The pack and unpack hooks: they tag what autograd saves and hand it back. All decisions are the
// runtime's. Called by autograd with the GIL, on any thread.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <memory>
#include <vector>

#include "core/runtime.hpp"
#include "entry/aliases.hpp"
#include "entry/recipes.hpp"
#include "entry/torch_api.hpp"

namespace stagehand::entry {

class Call;

// Why a saved tensor is handed back as it came, in the words of PoolStats.passed_through.
enum class Reason : std::uint8_t {
  leaf,
  view_of_leaf,
  subclass,
  layout,
  neg_bit,
  empty,
  foreign_storage,
  older_than_pool,
  kept,
  graph_capture,
  private_pool,
  small,
  count
};

// What the pack hook gives autograd for one saved tensor. It dies when autograd drops the saved
// variable; the record goes with its last handle.
class Handle {
 public:
  Handle() = default;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle();

  // Whether its recipe makes it again as it was, with inputs that are there or come likewise.
  bool by_node() const;

  core::Runtime* runtime = nullptr;  // null: passed through
  core::Runtime* ignored_by = nullptr;
  core::Bytes ignored = 0;
  core::RecordId record;
  core::Bytes offset = 0;
  std::int32_t dtype = 0;  // torch's
  Geometry geometry;
  Followed followed;
  Recipe recipe;
  nb::object call;           // of the region it was saved in, if any (regions.hpp)
  std::uint32_t index = 0;   // of the save in there
  bool made_inside = false;  // that call can make it again
  nb::object weights;        // the group whose storage it is over
  nb::object passed;         // where passed through: the tensor itself without its graph
  nb::object sum;            // of its bytes when it was saved, where they are looked at
  core::Plan::ToProve look;
  driver::Stream looked_on = nullptr;
  long version = 0;                // when it was saved
  mutable std::uint64_t twin = 0;  // of the newest tensor made from it (twins.hpp)
};

class Hooks {
 public:
  // `modified(tensor_or_none, dtype, shape, is_cuda, version, expected)` raises autograd's error
  // for an in-place change. `proof(found, now, stream, what, op)` is told of each comparison by
  // work on that stream: `found` is a tensor of one bool, whether what a recipe made differs from
  // what was saved, and `now` None; or they are sums of the bytes, as saved and as there since.
  Hooks(int device, nb::object modified, nb::object keep, nb::object proof);

  // The pool was entered: the order that `keep` is told starts again. `recompute`: what can be made
  // again may be dropped. `sharded`: weights may be away between their uses. `ranks`: other
  // processes take part in the step. `late`: something was saved before, which nobody was shown.
  void begin_step(bool recompute, bool sharded, bool ranks, bool late);
  // It was left.
  static void end_step();
  // Fills a new handle.
  void pack(nb::handle tensor, Handle& handle);
  // `by_recipe`: for one that makes another tensor again, and not for backward itself.
  nb::object unpack(const Handle& handle, bool by_recipe = false);
  nb::dict passed_through() const;
  // What it holds of Python, for the cycle collector; and lets go of it, when nobody can call it.
  int visit(visitproc visit, void* arg) const;
  void clear();
  // Gives a dropped record the storage of a tensor that was made again, whose first element is
  // `offset` bytes into it. False: that is not such as records are of, and is left alone.
  bool refill(core::Runtime& runtime, core::RecordId record, nb::handle tensor, core::Bytes offset);

 private:
  void pack_in(Call* call, nb::handle tensor, Handle& handle, core::SeenTensor* looked);
  bool wants_recipes(const core::Runtime* runtime);
  void see_leaf(const core::Runtime* runtime, nb::handle tensor);
  void pass(nb::object passed, Reason reason, Handle& handle);
  core::Saved save_held(core::Runtime& runtime, nb::handle tensor, Handle& handle,
                        core::Address first, core::Address last, core::Made made,
                        core::Inside inside) const;
  core::Unpacked find(const Handle& handle, driver::Stream consumer, bool by_recipe);
  nb::object make_again(const Handle& handle, driver::Stream consumer);
  static nb::object sum_of(const Handle& handle, core::Address first);
  void look_again(const Handle& handle, nb::handle tensor);
  void tell(const nb::object& found, const nb::object& now, driver::Stream stream,
            const core::Plan::ToProve& what, const char* op);
  void prove(const Handle& handle, const core::Unpacked& unpacked, driver::Stream consumer);
  nb::object tensor_of(const Handle& handle, const core::Unpacked& unpacked,
                       driver::Stream consumer);
  [[noreturn]] void raise_modified(const Handle& handle, long version) const;
  [[noreturn]] static void raise_failed(const Handle& handle, core::Status status);

  const int device_;
  nb::object modified_;
  nb::object keep_;  // predicate, or None
  nb::object proof_;
  std::array<std::uint64_t, static_cast<std::size_t>(Reason::count)> passed_{};
  std::uint64_t order_ = 0;
  std::uint64_t leaf_ = 0;  // Recipe::leaf_of the last one saved in this step
  bool knows_leaf_ = true;  // leaf_ is the last one
  bool recompute_ = false;
  bool sharded_ = false;
};

}  // namespace stagehand::entry
