// What the hooks ask of torch's tensors, by a table like that of core/torch_side.hpp. Filled by the
// tensor library, which is built against the installed torch's headers (torch_hook/tensors.cpp).
// Where that cannot be built, entry/torch_api.cpp asks through Python, which takes five times as
// long. Plain C types only: the two sides may come from different compilers.
//
// All with the GIL, which the core never has: only entry/ calls this.
#pragma once

#include "core/torch_side.hpp"
#include "core/types.hpp"

namespace stagehand::core {

// A tensor as pack sees it. All but `kind` and `leaf` is said of plain ones only.
struct SeenTensor {
  enum Kind : int {
    plain,
    saved_leaf,    // a leaf that asks for gradients: a parameter
    view_of_leaf,  // of such a leaf, or of a parameter that asks for none
    neg_bit,
    layout,  // DLPack could not carry it as it is
    empty,
  };
  Kind kind = layout;
  bool leaf = false;
  std::int32_t device_type = 0;  // DLPack's numbers: 1 the CPU, 2 CUDA
  std::int32_t device = 0;
  std::uint8_t code = 0;  // DLPack's dtype
  std::uint8_t bits = 0;
  std::uint16_t lanes = 0;
  std::int32_t dtype = 0;  // torch's
  std::int32_t ndim = 0;
  const std::int64_t* shape = nullptr;  // the tensor's own
  const std::int64_t* strides = nullptr;
  void* data = nullptr;  // its first element
  std::uint32_t version = 0;
  const char* op = nullptr;  // the type of the node that made it, the same text for the same type
};

// A tensor's version counter, without the tensor: it follows every in-place change, and keeps
// nothing else alive.
struct FollowedVersion {
  void* counter = nullptr;
};

struct TensorSide {
  static constexpr std::uint32_t kVersion = 2;
  std::uint32_t version = 0;
  std::uint32_t size = 0;  // of this table, in bytes

  // `tensor` is exactly a torch.Tensor, `parameter` the type torch.nn.Parameter.
  void (*look)(void* tensor, void* parameter, SeenTensor* seen) = nullptr;
  void (*follow)(void* tensor, FollowedVersion* followed) = nullptr;
  std::uint32_t (*current)(const FollowedVersion* followed) = nullptr;
  void (*unfollow)(FollowedVersion* followed) = nullptr;
  // A new tensor (PyObject*) over the same memory without its graph, of the same version. Only of
  // plain ones. Null with a Python error set.
  void* (*detached)(void* tensor) = nullptr;
  // A reference to a new storage over memory of ours. `drop(context)` is called once nobody refers
  // to it, on any thread, and at once where null is returned: there is no memory for it.
  void* (*storage)(void* data, Bytes bytes, std::int32_t device_type, std::int32_t device,
                   void* context, void (*drop)(void* context)) = nullptr;
  // A new tensor (PyObject*) over a storage. Null with a Python error set.
  void* (*view)(void* storage, const TensorPlace* place) = nullptr;
  // Gives a new tensor the counter in place of its own.
  void (*share)(void* tensor, const FollowedVersion* followed) = nullptr;
  std::uint32_t (*use_count)(void* storage) = nullptr;
  void (*drop)(void* storage) = nullptr;
};

}  // namespace stagehand::core
