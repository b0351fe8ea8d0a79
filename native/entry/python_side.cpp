#include "entry/python_side.hpp"

#include <nanobind/nanobind.h>

#include <array>
#include <vector>

#include "entry/registry.hpp"
#include "entry/torch_api.hpp"

namespace stagehand::entry {

namespace {

namespace nb = nanobind;
using core::Bytes;
using core::HeldStorage;
using core::Hold;
using core::TensorPlace;

// Torch's functions, looked up once.
struct Functions {
  nb::object storage_address;  // of a tensor; makes no Python object of the storage
  nb::object use_count;        // of a storage's address
  nb::object empty;
  nb::object no_grad;
  nb::object uint8;
  nb::object device;
  nb::object capturing;
  nb::object empty_cache;
  nb::object memory_stats;
  nb::object external_stream;
  nb::object get_fraction;
  nb::object set_fraction;
};

const Functions& functions() {
  static const Functions* leaked = nullptr;
  if (leaked == nullptr) {
    const nb::module_ torch = nb::module_::import_("torch");
    const nb::object c = torch.attr("_C");
    const nb::object cuda = torch.attr("cuda");
    auto* made = new Functions;
    made->storage_address = c.attr("_storage_address");
    made->use_count = c.attr("_storage_Use_Count");
    made->empty = torch.attr("empty");
    made->no_grad = torch.attr("no_grad");
    made->uint8 = torch.attr("uint8");
    made->device = torch.attr("device");
    made->capturing = cuda.attr("is_current_stream_capturing");
    made->empty_cache = cuda.attr("empty_cache");
    made->memory_stats = cuda.attr("memory_stats_as_nested_dict");
    made->external_stream = cuda.attr("ExternalStream");
    made->get_fraction = cuda.attr("get_per_process_memory_fraction");
    made->set_fraction = cuda.attr("set_per_process_memory_fraction");
    leaked = made;
  }
  return *leaked;
}

// A tensor of bytes over the whole storage, and how many of the storage's references are its.
struct Reference {
  nb::object bytes;
  std::uintptr_t storage = 0;
  long count = 0;
};

long use_count(std::uintptr_t storage) { return nb::cast<long>(functions().use_count(storage)); }

std::uintptr_t storage_of(nb::handle tensor) {
  return nb::cast<std::uintptr_t>(functions().storage_address(tensor));
}

nb::object without_grad(const nb::object& tensor, Bytes storage_bytes) {
  const auto item = nb::cast<Bytes>(tensor.attr("element_size")());
  return tensor.attr("detach")()
      .attr("as_strided")(nb::make_tuple(storage_bytes / item), nb::make_tuple(1), 0)
      .attr("view")(functions().uint8);
}

// How many references of a storage one of ours is: measured once, on a storage that no other thread
// has, since others may come and go while a real one is made.
long references_of_one() {
  static const long count = [] {
    const nb::object tensor = functions().empty(16, nb::arg("device") = "cpu");
    const std::uintptr_t storage = storage_of(tensor);
    const long before = use_count(storage);
    const nb::object bytes = without_grad(tensor, nb::cast<Bytes>(tensor.attr("nbytes")));
    return use_count(storage) - before;
  }();
  return count;
}

std::vector<PyObject*>& dtypes() {
  static auto* leaked = new std::vector<PyObject*>;
  return *leaked;
}

std::int32_t number_of(const nb::object& dtype) {
  auto& known = dtypes();
  for (std::size_t i = 0; i < known.size(); ++i) {
    if (known[i] == dtype.ptr()) {
      return static_cast<std::int32_t>(i);
    }
  }
  known.push_back(nb::object(dtype).release().ptr());
  return static_cast<std::int32_t>(known.size() - 1);
}

Hold hold(void* object, HeldStorage* held, std::int32_t* dtype) {
  const nb::object tensor = nb::borrow(static_cast<PyObject*>(object));
  if (!nb::cast<bool>(tensor.attr("is_cuda"))) {
    return Hold::foreign;
  }
  if (nb::cast<bool>(functions().capturing())) {
    return Hold::capturing;
  }
  auto reference = std::make_unique<Reference>();
  reference->storage = storage_of(tensor);
  // The saved tensor tells neither its storage's size nor its first byte without making a Python
  // object of the storage; sizes and strides tell what is reachable from offset 0.
  const auto item = nb::cast<Bytes>(tensor.attr("element_size")());
  const auto offset = nb::cast<Bytes>(tensor.attr("storage_offset")());
  Bytes reach = 0;
  const nb::tuple shape = nb::cast<nb::tuple>(tensor.attr("shape"));
  const nb::tuple strides = nb::cast<nb::tuple>(tensor.attr("stride")());
  for (std::size_t i = 0; i < shape.size(); ++i) {
    reach += (nb::cast<Bytes>(shape[i]) - 1) * nb::cast<Bytes>(strides[i]);
  }
  const Bytes bytes = (offset + reach + 1) * item;
  reference->bytes = without_grad(tensor, bytes);
  reference->count = references_of_one();
  *dtype = number_of(tensor.attr("dtype"));
  held->address = nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()) - offset * item;
  held->bytes = bytes;
  held->identity = reinterpret_cast<const void*>(reference->storage);
  held->storage = reference.release();
  return Hold::held;
}

void* wrap(void* storage, const TensorPlace* place) {
  const auto* reference = static_cast<const Reference*>(storage);
  try {
    nb::list shape;
    nb::list strides;
    for (std::int32_t i = 0; i < place->ndim; ++i) {
      shape.append(place->shape[i]);
      strides.append(place->strides[i]);
    }
    const nb::object dtype = nb::borrow(dtypes()[static_cast<std::size_t>(place->dtype)]);
    nb::object tensor = functions().empty(0, nb::arg("dtype") = dtype,
                                          nb::arg("device") = reference->bytes.attr("device"));
    tensor.attr("set_")(reference->bytes, place->offset, nb::tuple(shape), nb::tuple(strides));
    return tensor.release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  }
}

bool alone(void* storage, core::Address, Bytes) {
  const auto* reference = static_cast<const Reference*>(storage);
  return use_count(reference->storage) == reference->count;
}

void used_on(void* storage, int device, driver::Stream stream) {
  const auto* reference = static_cast<const Reference*>(storage);
  const nb::object external = functions().external_stream(reinterpret_cast<std::uintptr_t>(stream),
                                                          nb::arg("device") = device);
  reference->bytes.attr("record_stream")(external);
}

void drop(void* storage) { delete static_cast<Reference*>(storage); }

bool make(int device, Bytes bytes, driver::Stream, bool, HeldStorage* held) {
  try {
    const nb::object place = functions().device("cuda", device);
    auto reference = std::make_unique<Reference>();
    reference->bytes =
        functions().empty(bytes, nb::arg("dtype") = functions().uint8, nb::arg("device") = place);
    reference->storage = storage_of(reference->bytes);
    reference->count = use_count(reference->storage);
    held->address = nb::cast<std::uintptr_t>(reference->bytes.attr("data_ptr")());
    held->bytes = bytes;
    if (TorchApi::get().exchange->current_work_stream(dlpack::kCuda, device, &held->stream) != 0) {
      throw nb::python_error();
    }
    held->identity = reinterpret_cast<const void*>(reference->storage);
    held->storage = reference.release();
    return true;
  } catch (nb::python_error&) {
    return false;
  }
}

// The engine calls the next three where it cannot fail, destructors included: what Python raises is
// reported, as from a destructor of its own, and the answer is the one that changes nothing. Their
// callers hold no lock, and may have given the GIL up.
template <class Answer, class Call>
Answer or_else(Answer answer, const char* where, const Call& call) {
  const nb::gil_scoped_acquire locked;
  const nb::error_scope callers;
  try {
    answer = call();
  } catch (nb::python_error& error) {
    error.discard_as_unraisable(where);
  } catch (const std::exception& error) {  // an answer of another type
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(nullptr);
  }
  return answer;
}

bool release_cached() {
  return or_else(false, "stagehand_alloc: torch.cuda.empty_cache", [] {
    functions().empty_cache();
    return true;
  });
}

double fraction(int device) {
  return or_else(1.0, "stagehand_alloc: torch.cuda.get_per_process_memory_fraction",
                 [&] { return nb::cast<double>(functions().get_fraction(device)); });
}

void set_fraction(int device, double share) {
  or_else(false, "stagehand_alloc: torch.cuda.set_per_process_memory_fraction", [&] {
    functions().set_fraction(share, device);
    return true;
  });
}

}  // namespace

const core::TorchSide& python_side() {
  static const core::TorchSide* leaked = nullptr;
  if (leaked == nullptr) {
    functions();
    auto* made = new core::TorchSide;
    made->version = core::TorchSide::kVersion;
    made->size = sizeof(core::TorchSide);
    made->hold = &hold;
    made->wrap = &wrap;
    made->alone = &alone;
    made->used_on = &used_on;
    made->drop = &drop;
    made->make = &make;
    made->release_cached = &release_cached;
    made->fraction = &fraction;
    made->set_fraction = &set_fraction;
    leaked = made;
  }
  return *leaked;
}

void note_usage(int device, Bytes bytes) {
  static std::array<Bytes, kMaxDevices> since{};  // guarded by the GIL
  static std::array<bool, kMaxDevices> looked{};  // guarded by the GIL
  core::Runtime* runtime = Registry::get().find(device);
  const core::Budget budget = runtime->budget();
  auto& seen = since[static_cast<std::size_t>(device)];
  seen += bytes;
  bool& ever = looked[static_cast<std::size_t>(device)];
  if (ever && seen < (budget.high - budget.low) / 4) {
    return;
  }
  ever = true;
  seen = 0;
  const nb::object stats = functions().memory_stats(device);
  const auto current = [&](const char* name) {
    return nb::cast<Bytes>(stats[name]["all"]["current"]);
  };
  Registry::get().torch_cache(device).set_usage(current("reserved_bytes"),
                                                current("allocated_bytes"));
}

}  // namespace stagehand::entry
