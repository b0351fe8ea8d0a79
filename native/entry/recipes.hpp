// How a saved tensor can be made again, as its handle knows it, and making it. With the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <string>

#include "core/recipe_side.hpp"
#include "core/runtime.hpp"

namespace stagehand::entry {

namespace nb = nanobind;

class Handle;
class Hooks;

// One handle's: it keeps the handles of its inputs. They go later than it by themselves, in nearly
// every graph: whoever needs an output runs before the node that made it.
class Recipe {
 public:
  Recipe() = default;
  // Of a tensor that is about to be saved in this call of a region, or in none; none where nobody
  // knows, or another call may have to run for its inputs. `sharded`: weights may be away when it
  // runs, or on their way, and nothing tells of it; so none that needs one. `leaf`: of the last one
  // that was saved before, so that a proof is of this model and of no other with the same sizes.
  static Recipe of(nb::handle tensor, nb::handle call, bool sharded, std::uint64_t leaf);
  // leaf()'s number of a tensor, 0 where there are no recipes.
  static std::uint64_t leaf_of(nb::handle tensor) {
    return side_ != nullptr ? side_->leaf(tensor.ptr()) : 0;
  }
  // Whether elementwise recipes need no proof: where everything is evicted, to find bugs. A raw
  // kernel may have written to a tensor between the op and the save, and no version tells of it.
  static void trust(bool exact) { trusts_ = exact; }
  Recipe(Recipe&& other) noexcept : found_(other.found_), depth_(other.depth_) {
    other.found_ = {};
  }
  Recipe& operator=(Recipe&& other) noexcept;
  ~Recipe();

  explicit operator bool() const { return found_.recipe != nullptr; }
  // Its op, for messages.
  const char* op() const { return found_.op; }
  // What it makes, where it is now; nothing where nobody knows.
  core::Made made() const { return found_.made; }
  // Whether all its inputs are there, or are sure to be made by recipes of theirs.
  bool ready() const;
  // Makes it again from its inputs, which may have to be made again first. Raises what torch does,
  // and RecomputeError where something else came.
  // `making` is called when those are there.
  nb::object run(Hooks& hooks, const std::function<void()>& making) const;

  // The recipe library's table; null where it is not loaded. Set once.
  static const core::RecipeSide* side() { return side_; }
  // Takes the table if it is of this version; else says why not.
  static std::string use(const core::RecipeSide* table);

 private:
  // Recipes of recipes: so many are made again for one, at most, so that this needs little memory.
  static constexpr unsigned kDepth = 4;

  inline static const core::RecipeSide* side_ = nullptr;  // both guarded by the GIL
  inline static bool trusts_ = false;

  core::FoundRecipe found_;
  unsigned depth_ = 0;
};

// RecomputeError: what was made again is not what was saved.
[[noreturn]] void raise_recompute(
    const std::string& what,
    const char* todo =
        "A region must compute the same each time it runs: take random numbers from torch, keep no "
        "state from one run to the next, change no argument; or do not checkpoint it.");

}  // namespace stagehand::entry
