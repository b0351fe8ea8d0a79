// What the hooks ask of autograd: how a saved tensor was made, and to make it again. By a table
// like that of core/tensor_side.hpp, filled by the recipe library, which is built against the
// installed torch's headers (torch_hook/recipes.cpp). Without it nothing is dropped. Plain C types
// only: the two sides may come from different compilers.
//
// All with the GIL, which the core never has: only entry/ calls this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/torch_side.hpp"

namespace stagehand::core {

// What a proof rests on, in one word (FNV-1a): begins with kMixed.
inline constexpr std::uint32_t kMixed = 2166136261U;

inline void mix(std::uint32_t* word, const void* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) {
    *word = (*word ^ static_cast<const unsigned char*>(data)[i]) * 16777619U;
  }
}

template <class Value>
void mix(std::uint32_t* word, Value value) {
  mix(word, &value, sizeof value);
}

// Sizes and strides, in one word.
inline std::uint32_t layout_of(std::int32_t dimensions, const std::int64_t* sizes,
                               const std::int64_t* strides) {
  const std::size_t bytes = static_cast<std::size_t>(dimensions) * sizeof *sizes;
  std::uint32_t word = kMixed;
  mix(&word, dimensions);
  mix(&word, sizes, bytes);
  mix(&word, strides, bytes);
  return word;
}

// `made.exact`: elementwise, each element by itself. `made.rests_on`: settings, numbers, the dtype
// of what it makes, and what the node did not save.
struct FoundRecipe {
  static constexpr std::uint32_t kInputs = Made::kInputs;  // at most

  void* recipe = nullptr;  // null: nobody knows how it was made
  Made made;
  const char* op = nullptr;
  bool leaf = false;         // it needs a leaf that the node did not save
  std::uint32_t layout = 0;  // of what it makes (layout_of)
  std::uint32_t inputs = 0;
  void* input[kInputs] = {};  // what the pack hook gave for each: PyObject*, the recipe's reference
};

struct RecipeSide {
  static constexpr std::uint32_t kVersion = 6;
  std::uint32_t version = 0;
  std::uint32_t size = 0;  // of this table, in bytes

  // How the whole storage of a tensor was made, where an autograd node did that, whose inputs are
  // all saved: `handle` is the type of what the pack hook gives. Of an unchanged storage only.
  void (*find)(void* tensor, void* handle, FoundRecipe* found) = nullptr;
  // A new tensor (PyObject*) of the same sizes, strides and dtype, of inputs as they were then
  // (PyObject* each), on the current stream. Null with a Python error set; `differs`, without one:
  // what came is of another size, stride or dtype.
  void* (*run)(void* recipe, void* const* inputs, bool* differs) = nullptr;
  // A new tensor (PyObject*) over a part of a tensor's storage. Null with a Python error set.
  void* (*view)(void* tensor, const TensorPlace* place) = nullptr;
  // A new tensor (PyObject*), true where any of those bytes on a device differ: by work queued on
  // the current stream. Null with a Python error set.
  void* (*differ)(Address one, Address other, Bytes bytes, std::int32_t device_type,
                  std::int32_t device) = nullptr;
  // A new tensor (PyObject*) of one number: the sum of those bytes on a device as words of 64 bits,
  // by work queued on the current stream. Null with a Python error set.
  void* (*sum)(Address first, Bytes bytes, std::int32_t device_type, std::int32_t device) = nullptr;
  void (*forget)(void* recipe) = nullptr;
  // A number of the leaf that a tensor is, or is a view of: no other leaf of the process ever has
  // it. 0: it is none that asks for gradients.
  std::uint64_t (*leaf)(void* tensor) = nullptr;
};

}  // namespace stagehand::core
