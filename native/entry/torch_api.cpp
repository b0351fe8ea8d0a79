#include "entry/torch_api.hpp"

#include <string>

namespace stagehand::entry {

namespace {

nb::object owned(PyObject* object) {
  if (object == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(object);
}

PyObject* leak(nb::object object) { return object.release().ptr(); }

// Whole numbers of less than a byte, which come back as int8 and uint8. By name: a torch may not
// have all of them. Other kinds that DLPack does not know it refuses by itself.
nb::object not_in_dlpack(const nb::module_& torch) {
  const nb::object found = nb::steal(PySet_New(nullptr));
  const auto add = [&](const std::string& name) {
    if (nb::hasattr(torch, name.c_str()) &&
        PySet_Add(found.ptr(), torch.attr(name.c_str()).ptr()) != 0) {
      throw nb::python_error();
    }
  };
  for (const char* bits : {"1", "2", "3", "4", "5", "6", "7"}) {
    add(std::string("int") + bits);
    add(std::string("uint") + bits);
  }
  return found;
}

TorchApi* load() {
  nb::module_ torch = nb::module_::import_("torch");
  auto* api = new TorchApi;
  nb::object tensor = torch.attr("Tensor");
  nb::object capsule = tensor.attr("__dlpack_c_exchange_api__");
  api->exchange = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (api->exchange == nullptr) {
    throw nb::python_error();
  }
  api->parameter_type = leak(torch.attr("nn").attr("Parameter"));
  // A shape that no default dtype or device setting of the user changes: no storage either way.
  api->empty = leak(torch.attr("empty")(0, nb::arg("device") = "cpu"));
  api->not_in_dlpack = leak(not_in_dlpack(torch));
  api->out_of_memory = leak(torch.attr("OutOfMemoryError"));
  api->storage_address = leak(torch.attr("_C").attr("_storage_address"));
  api->use_count = leak(torch.attr("_C").attr("_storage_Use_Count"));
  api->tensor_type = leak(std::move(tensor));
  const auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
  api->dtype = name("dtype");
  api->is_leaf = name("is_leaf");
  api->requires_grad = name("requires_grad");
  api->base = name("_base");
  api->version = name("_version");
  api->data = name("data");
  api->detach = name("detach");
  api->is_conj = name("is_conj");
  api->is_neg = name("is_neg");
  return api;
}

}  // namespace

const TorchApi& TorchApi::get() {
  // Guarded by the GIL and nothing else: loading runs Python, which may give the GIL up.
  static const TorchApi* leaked = nullptr;
  if (leaked == nullptr) {
    const TorchApi* made = load();
    leaked = leaked == nullptr ? made : leaked;
  }
  return *leaked;
}

bool TorchApi::is_tensor(PyObject* object) const {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == tensor_type;
}

bool TorchApi::is_parameter(PyObject* object) const {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(parameter_type)) != 0;
}

bool TorchApi::flag(PyObject* object, PyObject* name) const {
  const nb::object value = owned(PyObject_GetAttr(object, name));
  return value.ptr() == Py_True;
}

bool TorchApi::flag_call(PyObject* object, PyObject* name) const {
  const nb::object value =
      owned(PyObject_CallMethodObjArgs(object, name, static_cast<PyObject*>(nullptr)));
  return value.ptr() == Py_True;
}

bool TorchApi::same_in_dlpack(PyObject* tensor) const {
  const nb::object kind = owned(PyObject_GetAttr(tensor, dtype));
  const int found = PySet_Contains(not_in_dlpack, kind.ptr());
  if (found < 0) {
    throw nb::python_error();
  }
  return found == 0;
}

long TorchApi::version_of(PyObject* tensor) const {
  const nb::object value = owned(PyObject_GetAttr(tensor, version));
  const long number = PyLong_AsLong(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  return number;
}

nb::object TorchApi::detached(PyObject* tensor) const {
  return owned(PyObject_CallMethodObjArgs(tensor, detach, static_cast<PyObject*>(nullptr)));
}

nb::object TorchApi::version_probe(PyObject* tensor) const {
  nb::object probe = detached(tensor);
  if (PyObject_SetAttr(probe.ptr(), data, empty) != 0) {
    throw nb::python_error();
  }
  return probe;
}

nb::object TorchApi::with_version_of(PyObject* probe, const nb::object& memory) const {
  nb::object tensor = detached(probe);
  if (PyObject_SetAttr(tensor.ptr(), data, memory.ptr()) != 0) {
    throw nb::python_error();
  }
  return tensor;
}

nb::object TorchApi::storage_of(PyObject* tensor) const {
  return owned(
      PyObject_CallFunctionObjArgs(storage_address, tensor, static_cast<PyObject*>(nullptr)));
}

long TorchApi::storage_use_count(PyObject* address) const {
  const nb::object count =
      nb::steal(PyObject_CallFunctionObjArgs(use_count, address, static_cast<PyObject*>(nullptr)));
  const long number = count.is_valid() ? PyLong_AsLong(count.ptr()) : -1;
  if (number == -1) {
    PyErr_Clear();
  }
  return number;
}

}  // namespace stagehand::entry
