// What the hooks use of torch, looked up once: the tensor library's table where it is loaded, else
// Python attributes by interned name, and the DLPack C exchange API for pointers, shapes and making
// tensors over memory. All calls need the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "core/tensor_side.hpp"
#include "entry/dlpack.hpp"

namespace stagehand::entry {

namespace nb = nanobind;

struct TorchApi {
  // Imports torch on the first call. Raises what the import raises.
  static const TorchApi& get();

  PyObject* tensor_type;      // torch.Tensor
  PyObject* parameter_type;   // torch.nn.Parameter
  PyObject* out_of_memory;    // torch.OutOfMemoryError
  PyObject* empty;            // one tensor without storage, shared by every version probe
  PyObject* not_in_dlpack;    // a set of the dtypes that DLPack has no word for
  PyObject* storage_address;  // torch._C's: the address of a tensor's storage, without making a
                              // Python object of that, and how often a storage is referred to
  PyObject* use_count;
  const dlpack::ExchangeApi* exchange;
  // Interned attribute names.
  PyObject* dtype;
  PyObject* is_leaf;
  PyObject* requires_grad;
  PyObject* base;
  PyObject* version;
  PyObject* data;
  PyObject* detach;
  PyObject* is_conj;
  PyObject* is_neg;

  // The tensor library's table; null where it is not loaded. Set once, before there are hooks.
  static const core::TensorSide* tensors() { return tensors_; }
  // Takes the table if it does what is expected of it; else says why not.
  static std::string use_tensors(const core::TensorSide* table);

  // What pack must know of what is exactly a Tensor.
  core::SeenTensor look(PyObject* tensor) const;
  bool is_tensor(PyObject* object) const;             // exactly a Tensor: no subclass
  bool is_parameter(PyObject* object) const;          // or a subclass, as FSDP's flat parameter is
  bool flag(PyObject* object, PyObject* name) const;  // attribute as a bool
  bool flag_call(PyObject* object, PyObject* name) const;  // method without arguments as a bool
  // A tensor over the same memory without its graph, of one that `look` found to be plain.
  nb::object detached_plain(PyObject* tensor) const;
  // Whether the C interface says the tensor's dtype as it is: it says int8 of an int4.
  bool same_in_dlpack(PyObject* tensor) const;
  long version_of(PyObject* tensor) const;
  nb::object detached(PyObject* tensor) const;
  // A tensor that shares `tensor`'s version counter and holds no storage: it follows every in-place
  // change and keeps nothing alive.
  nb::object version_probe(PyObject* tensor) const;
  // A tensor over `memory` that shares the probe's version counter.
  nb::object with_version_of(PyObject* probe, const nb::object& memory) const;
  // The address of the tensor's storage, as an int.
  nb::object storage_of(PyObject* tensor) const;
  // How many references a storage has; -1 where torch does not say. Raises nothing.
  long storage_use_count(PyObject* address) const;

 private:
  core::SeenTensor look_through_python(PyObject* tensor) const;

  inline static const core::TensorSide* tensors_ = nullptr;  // guarded by the GIL
};

// The autograd node that core::SeenTensor::op names, as Python calls it.
std::string op_name(const char* type);

// This thread's stream of a CUDA device; null of others.
driver::Stream current_stream(const dlpack::Device& device);

// The version of a tensor, followed without keeping its memory: the library holds the counter
// itself; through Python a probe does, a tensor that shares the counter and has no storage.
class Followed {
 public:
  Followed() = default;
  explicit Followed(PyObject* tensor);
  Followed(Followed&& other) noexcept;
  Followed& operator=(Followed&& other) noexcept;
  ~Followed();

  bool by_library() const { return counter_.counter != nullptr; }
  long current() const;
  // A tensor over `memory`, a new one, that shares the counter.
  nb::object shared_by(nb::object memory) const;

 private:
  core::FollowedVersion counter_;
  nb::object probe_;
};

}  // namespace stagehand::entry
