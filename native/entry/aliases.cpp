#include "entry/aliases.hpp"

#include <algorithm>
#include <memory>
#include <new>

#include "entry/hooks.hpp"
#include "entry/registry.hpp"

namespace stagehand::entry {

namespace {

// An alias: what torch's deleter gives back.
struct Alias {
  core::Runtime* runtime;
  core::Block* block;
};

void drop(void* context) {
  const std::unique_ptr<Alias> alias(static_cast<Alias*>(context));
  if (!Registry::get().forked()) {
    alias->runtime->drop_alias(alias->block);
  }
}

Alias* alias_of(const Handle& handle, const core::Unpacked& unpacked) {
  auto* alias = new (std::nothrow) Alias{handle.runtime, unpacked.block};
  if (alias == nullptr) {
    handle.runtime->drop_alias(unpacked.block);
    throw std::bad_alloc();
  }
  return alias;
}

// What an alias by DLPack is of.
struct ManagedAlias {
  dlpack::ManagedTensor managed;
  std::array<std::int64_t, 2 * Geometry::kInline> dims;
  std::unique_ptr<std::int64_t[]> far_dims;
  void* alias;
};

void drop_managed(dlpack::ManagedTensor* managed) {
  const std::unique_ptr<ManagedAlias> alias(static_cast<ManagedAlias*>(managed->manager_ctx));
  drop(alias->alias);
}

}  // namespace

void Geometry::set(const core::SeenTensor& tensor) {
  device = {tensor.device_type, tensor.device};
  dtype = {tensor.code, tensor.bits, tensor.lanes};
  ndim = tensor.ndim;
  std::int64_t* dims = near_.data();
  if (ndim > kInline) {
    far_.resize(2 * static_cast<std::size_t>(ndim));
    dims = far_.data();
  }
  std::copy_n(tensor.shape, ndim, dims);
  std::copy_n(tensor.strides, ndim, dims + ndim);
}

core::Bytes Geometry::extent() const {
  core::Bytes reach = 0;
  for (std::int32_t i = 0; i < ndim; ++i) {
    reach += static_cast<core::Bytes>(shape()[i] - 1) * static_cast<core::Bytes>(strides()[i]);
  }
  return (reach + 1) * item_bytes();
}

nb::object make_view(const Handle& handle, const core::Unpacked& unpacked,
                     driver::Stream consumer) {
  const Geometry& g = handle.geometry;
  const core::TensorPlace place{static_cast<std::int64_t>(unpacked.offset / g.item_bytes()),
                                g.shape(), g.strides(), g.ndim, handle.dtype};
  const core::TorchSide& side = *Registry::get().torch_side();
  const nb::object tensor = nb::steal(static_cast<PyObject*>(side.wrap(unpacked.storage, &place)));
  try {
    if (tensor.is_valid() && unpacked.elsewhere) {
      side.used_on(unpacked.storage, g.device.id, consumer);
    }
  } catch (...) {
    handle.runtime->drop_alias(unpacked.block);
    throw;
  }
  handle.runtime->drop_alias(unpacked.block);
  if (!tensor.is_valid()) {
    throw nb::python_error();
  }
  return tensor;
}

std::pair<nb::object, SharedStorage> make_alias(const Handle& handle,
                                                const core::Unpacked& unpacked) {
  const Geometry& g = handle.geometry;
  const core::TensorSide& side = *TorchApi::tensors();
  void* storage = side.storage(reinterpret_cast<void*>(unpacked.address), g.extent(), g.device.type,
                               g.device.id, alias_of(handle, unpacked), &drop);
  if (storage == nullptr) {
    throw std::bad_alloc();
  }
  SharedStorage shared(storage);
  const core::TensorPlace place{0, g.shape(), g.strides(), g.ndim, handle.dtype};
  nb::object tensor = nb::steal(static_cast<PyObject*>(side.view(storage, &place)));
  if (!tensor.is_valid()) {
    throw nb::python_error();
  }
  return {std::move(tensor), std::move(shared)};
}

nb::object make_alias_by_dlpack(const Handle& handle, const core::Unpacked& unpacked) {
  const Geometry& g = handle.geometry;
  void* const given_back = alias_of(handle, unpacked);
  // Until torch owns it, this scope gives the block back.
  std::unique_ptr<ManagedAlias, void (*)(ManagedAlias*)> alias(
      new (std::nothrow) ManagedAlias{},
      [](ManagedAlias* unused) { drop_managed(&unused->managed); });
  if (alias == nullptr) {
    drop(given_back);
    throw std::bad_alloc();
  }
  alias->alias = given_back;
  alias->managed.manager_ctx = alias.get();
  std::int64_t* dims = alias->dims.data();
  if (g.ndim > Geometry::kInline) {
    alias->far_dims = std::make_unique<std::int64_t[]>(2 * static_cast<std::size_t>(g.ndim));
    dims = alias->far_dims.get();
  }
  std::copy_n(g.shape(), 2 * g.ndim, dims);
  alias->managed.version = {1, 0};
  alias->managed.deleter = &drop_managed;
  alias->managed.tensor = {
      reinterpret_cast<void*>(unpacked.address), g.device, g.ndim, g.dtype, dims, dims + g.ndim, 0};
  void* tensor = nullptr;
  if (TorchApi::get().exchange->object_from_managed(&alias->managed, &tensor) != 0) {
    throw nb::python_error();
  }
  alias.release();
  return nb::steal(static_cast<PyObject*>(tensor));
}

}  // namespace stagehand::entry
