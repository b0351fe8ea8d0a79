// Tensors over storages that are held: what unpacking gives. For trigger.cpp and tensors.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <optional>
#include <utility>

#include "core/torch_side.hpp"

namespace stagehand::torch_hook {

// What was saved is no tensor of inference mode, also where backward runs inside that.
class OutOfInference {
 public:
  OutOfInference() {
    if (c10::InferenceMode::is_enabled()) {
      usual_.emplace(false);
    }
  }

 private:
  std::optional<c10::InferenceMode> usual_;
};

// A new tensor over the storage. Throws what torch does.
inline at::Tensor over_storage(c10::StorageImpl* storage, const core::TensorPlace& place) {
  const OutOfInference usual;
  c10::Storage memory(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  const auto key = memory.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(memory), c10::DispatchKeySet(key),
      c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(place.dtype)));
  const auto count = static_cast<std::size_t>(place.ndim);
  impl->set_sizes_and_strides({place.shape, count}, {place.strides, count}, place.offset);
  return at::Tensor(std::move(impl));
}

}  // namespace stagehand::torch_hook
