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
  // Of a tensor that is about to be saved; none where nobody knows.
  static Recipe of(nb::handle tensor);
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

  inline static const core::RecipeSide* side_ = nullptr;  // guarded by the GIL

  core::FoundRecipe found_;
  unsigned depth_ = 0;
};

}  // namespace stagehand::entry
