// The tensor library: torch's tensors as the hooks see them (core/tensor_side.hpp).
//
// Built on first use against the headers of the installed torch, never part of the main build.
// Needs no CUDA. All is called with the GIL; no exception leaves.
#include <ATen/DLConvertor.h>
#include <ATen/core/Tensor.h>
#include <ATen/dlpack.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <new>
#include <typeinfo>

#include "core/tensor_side.hpp"
#include "torch_hook/over_storage.hpp"

namespace {

using stagehand::core::FollowedVersion;
using stagehand::core::SeenTensor;
using stagehand::core::TensorPlace;
using stagehand::core::TensorSide;

// A counter is kept in the place of one pointer.
static_assert(sizeof(c10::VariableVersion) == sizeof(FollowedVersion) &&
              alignof(c10::VariableVersion) <= alignof(FollowedVersion));

c10::VariableVersion& version_in(FollowedVersion* followed) {
  return *std::launder(reinterpret_cast<c10::VariableVersion*>(followed));
}
const c10::VariableVersion& version_in(const FollowedVersion* followed) {
  return *std::launder(reinterpret_cast<const c10::VariableVersion*>(followed));
}

c10::StorageImpl* impl_of(void* storage) { return static_cast<c10::StorageImpl*>(storage); }

// A parameter is a leaf, whether it asks for gradients or not.
bool is_parameter(const at::TensorBase& base, PyTypeObject* parameter) {
  if (!base.is_leaf()) {
    return false;
  }
  if (base.requires_grad()) {
    return true;
  }
  PyObject* object = THPVariable_Wrap(base);
  if (object == nullptr) {
    PyErr_Clear();
    return true;  // nobody knows: it stays as it is
  }
  const bool found = PyType_IsSubtype(Py_TYPE(object), parameter) != 0;
  Py_DECREF(object);
  return found;
}

// Whole numbers of less than a byte, of which DLPack's numbers would say int8 and uint8.
bool below_a_byte(at::ScalarType type) {
  return (type >= at::ScalarType::UInt1 && type <= at::ScalarType::UInt7) ||
         (type >= at::ScalarType::Int1 && type <= at::ScalarType::Int7);
}

SeenTensor::Kind kind_of(const at::Tensor& tensor, PyTypeObject* parameter, bool leaf) {
  if (leaf && tensor.requires_grad()) {
    return SeenTensor::saved_leaf;
  }
  if (tensor.is_view() && is_parameter(tensor._base(), parameter)) {
    return SeenTensor::view_of_leaf;
  }
  if (tensor.is_neg()) {
    return SeenTensor::neg_bit;
  }
  const bool near = tensor.is_cuda() || tensor.is_cpu();
  if (!near || tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_quantized() ||
      !tensor.has_storage() || tensor.is_conj() || below_a_byte(tensor.scalar_type()) ||
      tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return SeenTensor::layout;
  }
  return tensor.numel() == 0 || tensor.data_ptr() == nullptr ? SeenTensor::empty
                                                             : SeenTensor::plain;
}

// As it was noted when the tensor was made: asking a view may make it anew.
const char* op_of(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  const auto* node = meta != nullptr ? meta->grad_fn_.get() : nullptr;
  return node != nullptr ? typeid(*node).name() : nullptr;
}

void look(void* object, void* parameter, SeenTensor* seen) {
  seen->kind = SeenTensor::layout;
  try {
    const at::Tensor& tensor = THPVariable_Unpack(static_cast<PyObject*>(object));
    seen->leaf = tensor.is_leaf();
    const auto kind = kind_of(tensor, static_cast<PyTypeObject*>(parameter), seen->leaf);
    if (kind == SeenTensor::plain) {
      const auto type = at::getDLDataType(tensor);  // throws for what it has no word for
      seen->code = static_cast<std::uint8_t>(type.code);
      seen->bits = type.bits;
      seen->lanes = type.lanes;
      seen->device_type = tensor.is_cuda() ? 2 : 1;
      seen->device = tensor.is_cuda() ? tensor.get_device() : 0;
      seen->dtype = static_cast<std::int32_t>(tensor.scalar_type());
      seen->ndim = static_cast<std::int32_t>(tensor.dim());
      seen->shape = tensor.sizes().data();
      seen->strides = tensor.strides().data();
      seen->data = tensor.data_ptr();
      seen->version = tensor.unsafeGetTensorImpl()->version_counter().current_version();
      seen->op = op_of(tensor);
    }
    seen->kind = kind;
  } catch (const std::exception&) {  // it has no memory to look at
    PyErr_Clear();
  }
}

void follow(void* object, FollowedVersion* followed) {
  const at::Tensor& tensor = THPVariable_Unpack(static_cast<PyObject*>(object));
  new (followed) c10::VariableVersion(tensor.unsafeGetTensorImpl()->version_counter());
}

std::uint32_t current(const FollowedVersion* followed) {
  return version_in(followed).current_version();
}

void unfollow(FollowedVersion* followed) {
  std::destroy_at(&version_in(followed));
  new (followed) FollowedVersion{};
}

template <class F>
void* python_object(F&& make) {
  try {
    return make();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

void* detached(void* object) {
  return python_object([&] {
    const auto* impl = THPVariable_Unpack(static_cast<PyObject*>(object)).unsafeGetTensorImpl();
    return THPVariable_Wrap(at::Tensor(impl->shallow_copy_and_detach(
        impl->version_counter(), /*allow_tensor_metadata_change=*/false)));
  });
}

void* storage(void* data, std::uint64_t bytes, std::int32_t device_type, std::int32_t device,
              void* context, void (*drop)(void*)) {
  const c10::Device place =
      device_type == 2 ? c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device))
                       : c10::Device(c10::DeviceType::CPU);
  c10::DataPtr memory(data, context, drop, place);
  try {
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                 std::move(memory), /*allocator=*/nullptr,
                                                 /*resizable=*/false)
        .release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

void* view(void* storage, const TensorPlace* place) {
  return python_object([&] {
    return THPVariable_Wrap(stagehand::torch_hook::over_storage(impl_of(storage), *place));
  });
}

void share(void* object, const FollowedVersion* followed) {
  THPVariable_Unpack(static_cast<PyObject*>(object))
      .unsafeGetTensorImpl()
      ->set_version_counter(version_in(followed));
}

std::uint32_t use_count(void* storage) {
  return c10::raw::intrusive_ptr::use_count(impl_of(storage));
}

void drop(void* storage) { c10::raw::intrusive_ptr::decref(impl_of(storage)); }

}  // namespace

extern "C" __attribute__((visibility("default"))) const void* stagehand_tensor_side() {
  static const TensorSide side = [] {
    TensorSide made;
    made.version = TensorSide::kVersion;
    made.size = sizeof(TensorSide);
    made.look = &look;
    made.follow = &follow;
    made.current = &current;
    made.unfollow = &unfollow;
    made.detached = &detached;
    made.storage = &storage;
    made.view = &view;
    made.share = &share;
    made.use_count = &use_count;
    made.drop = &drop;
    return made;
  }();
  return &side;
}
