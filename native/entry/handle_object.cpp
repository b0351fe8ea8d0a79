#include "entry/handle_object.hpp"

#include <memory>
#include <new>
#include <type_traits>
#include <vector>

namespace stagehand::entry {

namespace {

// Those that ended, which keeps their memory mapped: a forward makes thousands, and its backward
// ends them all. Guarded by the GIL.
class Spare {
 public:
  // Memory for one; null where there is none.
  void* take() {
    if (all_.empty()) {
      return PyObject_Malloc(sizeof(HandleObject));
    }
    void* const memory = all_.back();
    all_.pop_back();
    return memory;
  }
  void give(void* memory) noexcept {
    if (all_.size() < all_.capacity()) {
      all_.push_back(memory);
    } else {
      PyObject_Free(memory);
    }
  }

 private:
  static constexpr std::size_t kMost = 16384;  // a few megabytes
  std::vector<void*> all_ = [] {
    std::vector<void*> made;
    made.reserve(kMost);
    return made;
  }();
};

Spare& spare() {
  static Spare* const leaked = new Spare;  // handles may outlive the module
  return *leaked;
}

}  // namespace

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
  void* const memory = spare().take();
  if (memory == nullptr) {
    PyErr_NoMemory();
    throw nb::python_error();
  }
  PyObject* const object = PyObject_Init(static_cast<PyObject*>(memory), type_);
  static_assert(std::is_nothrow_default_constructible_v<Handle>);
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
  spare().give(object);
  Py_DECREF(type);
}

}  // namespace stagehand::entry
