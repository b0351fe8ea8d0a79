// The Python object that holds a Handle. Its type is our own: nanobind keeps a map of all instances
// and looks each up there as it is made and as it ends, which is a part of what a save costs.
#pragma once

#include "entry/hooks.hpp"

namespace stagehand::entry {

class HandleObject {
 public:
  // Gives the module its type, before any other call.
  static void bind(nb::module_& module);
  static PyTypeObject* type() { return type_; }
  // With a new handle in it, which is not moved: it is large. Raises MemoryError.
  static nb::object make();
  // What the object holds. Raises TypeError where it is of another type.
  static const Handle& checked(nb::handle object);
  // The same of one that is known to be of this type.
  static Handle& in(void* object) { return static_cast<HandleObject*>(object)->handle_; }

 private:
  static void end(PyObject* object);

  inline static PyTypeObject* type_ = nullptr;  // leaked: handles may outlive the module

  PyObject head_;
  Handle handle_;
};

}  // namespace stagehand::entry
