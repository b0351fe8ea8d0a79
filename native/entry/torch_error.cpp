#include "entry/torch_error.hpp"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <typeinfo>

#include "entry/object_size.hpp"

namespace c10 {

// Passed by value to the constructor: laid out as c10 lays it out.
struct SourceLocation {
  const char* function;
  const char* file;
  std::uint32_t line;
};

// For their names only: a handler compares type names, and libc10 does not export the type in every
// version. Never constructed here.
class Error : public std::exception {};
class OutOfMemoryError : public Error {};

}  // namespace c10

namespace stagehand::entry {

namespace {

using Constructor = void (*)(void* self, c10::SourceLocation where, std::string message);

// c10::Error holds two strings, a context list, a cache and a backtrace: 200 bytes or so. Its
// constructor is tried first: where it writes further than half of the room, some torch of the
// future has made it larger, and none is built. (Half: what is written later may lie behind.)
constexpr std::size_t kRoomForError = 1024;

struct ErrorSymbols {
  Constructor construct = nullptr;
  // __cxa_throw takes it without const.
  std::type_info* type = const_cast<std::type_info*>(&typeid(c10::OutOfMemoryError));
};

template <class T>
T symbol(void* library, const char* name) {
  return reinterpret_cast<T>(dlsym(library, name));
}

// The destructor is virtual, and exported by no version.
void destroy(void* error) { static_cast<std::exception*>(error)->~exception(); }

bool fits(const ErrorSymbols& error) {
  try {
    const std::size_t written = bytes_written(
        [&](void* where) { error.construct(where, {"alloc", "stagehand_alloc", 0}, "a trial"); },
        &destroy);
    return written > 0 && written <= kRoomForError / 2;
  } catch (const std::exception&) {  // out of host memory
    return false;
  }
}

ErrorSymbols find_symbols() {
  ErrorSymbols found;
  void* c10 = dlopen("libc10.so", RTLD_NOLOAD | RTLD_LAZY);
  if (c10 == nullptr) {
    return found;
  }
#define SH_CONSTRUCTOR(prefix)  \
  prefix                        \
      "C1ENS_14SourceLocationE" \
      "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
  found.construct = symbol<Constructor>(c10, SH_CONSTRUCTOR("_ZN3c1016OutOfMemoryError"));
  if (found.construct == nullptr) {
    found.construct = symbol<Constructor>(c10, SH_CONSTRUCTOR("_ZN3c105Error"));
  }
#undef SH_CONSTRUCTOR
  if (auto* type = symbol<std::type_info*>(c10, "_ZTIN3c1016OutOfMemoryErrorE"); type != nullptr) {
    found.type = type;
  }
  if (found.construct == nullptr || !fits(found)) {
    found.construct = nullptr;
  }
  return found;
}

}  // namespace

void throw_out_of_memory(const std::string& message) {
  static const ErrorSymbols symbols = find_symbols();
  if (symbols.construct == nullptr) {
    throw std::runtime_error(message);
  }
  void* error = abi::__cxa_allocate_exception(kRoomForError);
  try {
    symbols.construct(error, {"alloc", "stagehand_alloc", 0}, message);
  } catch (...) {
    abi::__cxa_free_exception(error);
    throw;
  }
  abi::__cxa_throw(error, symbols.type, &destroy);
}

std::string explain(core::Runtime& runtime, core::Status status, core::Bytes bytes) {
  if (status == core::Status::stale) {
    return "stagehand_alloc: a saved tensor was asked for after autograd had dropped it.\n"
           "Keep the graph (retain_graph=True) for a second backward.";
  }
  const std::string report = runtime.report(bytes);
  if (status == core::Status::driver_failed) {
    return "stagehand_alloc: the CUDA driver failed while making room: " + report +
           ".\nAn earlier error on this device is the likely cause: run with "
           "CUDA_LAUNCH_BLOCKING=1 to find it.";
  }
  const char* const advice =
      runtime.budget().limit < runtime.device_bytes()
          ? ".\nRaise `limit` (or leave it out), or lower what forward keeps live; where pinned "
            "memory is short, raise `host_limit`."
          : ".\nThe device has no more: lower what is live at once (a smaller batch or sequence, a "
            "sharded optimizer); where pinned memory is short, raise `host_limit`.";
  return "CUDA out of memory. stagehand_alloc: " + report + advice;
}

void raise_status(core::Runtime& runtime, core::Status status, core::Bytes bytes) {
  if (status == core::Status::out_of_memory) {
    throw_out_of_memory(explain(runtime, status, bytes));
  }
  throw std::runtime_error(explain(runtime, status, bytes));
}

}  // namespace stagehand::entry
