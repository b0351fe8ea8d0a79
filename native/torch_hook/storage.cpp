// The storage library: storages of torch's that give their memory up and get it back at another
// address (core/storage_side.hpp).
//
// Built on first use against the headers of the installed torch, never part of the main build.
// Needs no CUDA. All is called with the GIL; no exception leaves.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>

#include "core/storage_side.hpp"

namespace {

using stagehand::core::SeenStorage;
using stagehand::core::StorageSide;

// The flag that makes every access to the data raise. torch can set it; that it can be taken back
// came with 2.12. Explicit instantiation may name what is private.
template <bool c10::StorageImpl::* Member>
struct Reach {
  friend bool& raises(c10::StorageImpl& storage) { return storage.*Member; }
};
bool& raises(c10::StorageImpl& storage);
template struct Reach<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

c10::StorageImpl* impl_of(void* storage) { return static_cast<c10::StorageImpl*>(storage); }

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

void* hold(void* object, SeenStorage* seen) {
  try {
    const at::Tensor& tensor = THPVariable_Unpack(static_cast<PyObject*>(object));
    c10::StorageImpl* storage = storage_of(tensor);
    if (storage == nullptr || tensor.layout() != at::kStrided || storage->allocator() == nullptr ||
        storage->received_cuda() || !(tensor.is_cuda() || tensor.is_cpu())) {
      return nullptr;
    }
    seen->address = reinterpret_cast<std::uintptr_t>(storage->data());
    seen->bytes = storage->nbytes();
    seen->device_type = tensor.is_cuda() ? 2 : 1;
    seen->device = tensor.is_cuda() ? tensor.get_device() : 0;
    return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage).release();
  } catch (const std::exception&) {  // sealed by somebody else, or of unknown size
    return nullptr;
  }
}

void claim(void* object, std::uint64_t bytes) {
  storage_of(THPVariable_Unpack(static_cast<PyObject*>(object)))
      ->set_nbytes(static_cast<std::size_t>(bytes));
}

void drop(void* storage) { c10::raw::intrusive_ptr::decref(impl_of(storage)); }

const void* identity(void* object) {
  return storage_of(THPVariable_Unpack(static_cast<PyObject*>(object)));
}

void seal(void* storage, const char* text) {
  c10::StorageImpl& impl = *impl_of(storage);
  if (text != nullptr) {
    impl.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(text));
  }
  raises(impl) = true;
  // Second: this is what looks at the flag.
  impl.set_data_ptr_noswap(at::DataPtr(nullptr, impl.device()));
}

void open(void* storage, std::uint64_t address) {
  c10::StorageImpl& impl = *impl_of(storage);
  raises(impl) = false;
  impl.set_data_ptr_noswap(at::DataPtr(reinterpret_cast<void*>(address), impl.device()));
}

std::uint64_t open_alone(void* storage) {
  c10::StorageImpl& impl = *impl_of(storage);
  try {
    const c10::DeviceGuard guard(impl.device());  // the allocator gives memory of the current one
    at::DataPtr memory = impl.allocator()->allocate(impl.nbytes());
    const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
    raises(impl) = false;
    impl.set_data_ptr_noswap(std::move(memory));
    return address;
  } catch (const std::exception&) {
    return 0;
  }
}

constexpr const char* kTrialText = "stagehand_alloc: a trial";

template <class F>
bool refused(F&& access) {
  try {
    access();
    return false;
  } catch (const std::exception& error) {
    return std::string(error.what()).find(kTrialText) != std::string::npos;
  }
}

// A storage that never had memory, with a tensor over it from before it was sealed.
const char* trial_of_claim(const at::Tensor& copy) {
  const at::Tensor none = at::empty(0, copy.options());
  c10::StorageImpl* storage = storage_of(none);
  storage->set_nbytes(copy.nbytes());
  const at::Tensor weight = at::empty(0, copy.options());
  at::Tensor(weight).set_(none.storage(), 0, copy.sizes(), copy.strides());
  seal(storage, kTrialText);
  if (storage->nbytes() != copy.nbytes() || !refused([&] { weight.const_data_ptr(); })) {
    return "a storage that was given a size and no memory can be read";
  }
  if (open_alone(storage) == 0) {
    return "a storage that was given a size got no memory";
  }
  at::Tensor(weight).copy_(copy);
  return weight.equal(copy) ? nullptr : "a storage that was given a size does not keep its bytes";
}

// One small weight through it all: what a torch unknown to us may do otherwise shows here.
const char* trial() {
  const c10::NoGradGuard no_grad;
  const at::Tensor weight = at::arange(6, at::kFloat).view({2, 3});
  const at::Tensor turned = weight.t();
  const at::Tensor copy = weight.clone();
  at::Tensor elsewhere = weight.clone();
  c10::StorageImpl* storage = storage_of(weight);
  const auto bytes = storage->nbytes();
  seal(storage, kTrialText);
  if (storage->nbytes() != bytes || weight.sizes() != copy.sizes() ||
      weight.view({6}).numel() != 6) {
    return "a sealed storage lost its size";
  }
  if (!refused([&] { weight.const_data_ptr(); }) || !refused([&] { weight.mutable_data_ptr(); }) ||
      !refused([&] { (void)weight.data_ptr(); }) || !refused([&] { (void)at::mm(copy, turned); }) ||
      !refused([&] { at::Tensor(weight).add_(1); }) || !refused([&] { elsewhere.copy_(weight); })) {
    return "an access to a sealed storage did not raise the text it was sealed with";
  }
  elsewhere.copy_(copy);
  open(storage, reinterpret_cast<std::uintptr_t>(elsewhere.data_ptr()));
  if (!weight.equal(copy) || !turned.equal(copy.t()) || turned.data_ptr() != elsewhere.data_ptr()) {
    return "a storage that was opened elsewhere does not have the bytes that are there";
  }
  seal(storage, nullptr);
  if (!refused([&] { weight.const_data_ptr(); })) {
    return "a storage that was sealed again lost its text";
  }
  if (open_alone(storage) == 0) {
    return "a storage got no memory from its allocator";
  }
  at::Tensor(weight).copy_(copy);
  if (!turned.equal(copy.t())) {
    return "a storage with memory of its own does not keep it";
  }
  return trial_of_claim(copy);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const void* stagehand_storage_side() {
  static const StorageSide side = [] {
    StorageSide made;
    made.version = StorageSide::kVersion;
    made.size = sizeof(StorageSide);
    made.hold = &hold;
    made.claim = &claim;
    made.drop = &drop;
    made.identity = &identity;
    made.seal = &seal;
    made.open = &open;
    made.open_alone = &open_alone;
    return made;
  }();
  return &side;
}

// Null, or what the installed torch does otherwise than is needed.
extern "C" __attribute__((visibility("default"))) const char* stagehand_storage_trial() {
  try {
    return trial();
  } catch (const std::exception&) {
    return "the trial of a sealed storage raised an error of its own";
  }
}
