#include "entry/handle_object.hpp"

#include <memory>
#include <new>

namespace stagehand::entry {

void HandleObject::bind(nb::module_& module) {
  PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&HandleObject::end)},
                         {0, nullptr}};
  PyType_Spec spec{"stagehand_alloc._native.Handle", sizeof(HandleObject), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  type_ = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module.ptr(), &spec, nullptr));
  if (type_ == nullptr) {
    throw nb::python_error();
  }
  module.attr("Handle") = nb::borrow(reinterpret_cast<PyObject*>(type_));
}

nb::object HandleObject::make() {
  PyObject* const object = PyObject_New(PyObject, type_);
  if (object == nullptr) {
    throw nb::python_error();
  }
  new (&in(object)) Handle;
  return nb::steal(object);
}

const Handle& HandleObject::checked(nb::handle object) {
  if (Py_TYPE(object.ptr()) != type_) {
    throw nb::type_error("stagehand_alloc: unpack was given what no pack has returned");
  }
  return in(object.ptr());
}

// What ends with a handle may run Python, while an error is on its way too.
void HandleObject::end(PyObject* object) {
  {
    const nb::error_scope error;
    std::destroy_at(&in(object));
  }
  PyTypeObject* const type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

}  // namespace stagehand::entry
