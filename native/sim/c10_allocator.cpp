#include "sim/c10_allocator.hpp"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <new>

namespace stagehand::sim::c10 {

namespace {

constexpr std::size_t kBefore = 2;  // of a table: the offset to the top, and the type
// Two destructors, allocate, is_simple_data_ptr, raw_deleter, copy_data.
constexpr std::size_t kAllocate = 2, kIsSimple = 3, kCopyData = 5, kVirtuals = 6;

template <class Address>
bool find(void* library, const char* name, Address& address) {
  address = reinterpret_cast<Address>(dlsym(library, name));
  return address != nullptr;
}

// The base's own table says which function is in which place.
bool has_our_table(void* library) {
  void** table = nullptr;
  void* is_simple = nullptr;
  Dl_info info;
  ElfW(Sym)* symbol = nullptr;
  if (!find(library, "_ZTVN3c109AllocatorE", table) ||
      !find(library, "_ZNK3c109Allocator18is_simple_data_ptrERKNS_7DataPtrE", is_simple) ||
      dladdr1(table, &info, reinterpret_cast<void**>(&symbol), RTLD_DL_SYMENT) == 0 ||
      symbol == nullptr || symbol->st_size != (kBefore + kVirtuals) * sizeof(void*)) {
    return false;
  }
  void* const pure = reinterpret_cast<void*>(&abi::__cxa_pure_virtual);
  void** const virtuals = table + kBefore;
  return virtuals[kAllocate] == pure && virtuals[kIsSimple] == is_simple &&
         virtuals[kCopyData] == pure;
}

// One block of torch's own allocator, looked at through our types. There is room behind it, so that
// a larger one is seen and harms nothing.
bool has_our_data_ptr(Allocator& allocator) {
  constexpr std::byte kPattern{0xa5};
  alignas(DataPtr) std::array<std::byte, 4 * sizeof(DataPtr)> room;
  room.fill(kPattern);
  DataPtr* const made = ::new (room.data()) DataPtr(allocator.allocate(64));
  const bool same = std::all_of(room.begin() + sizeof(DataPtr), room.end(),
                                [](std::byte one) { return one == kPattern; }) &&
                    made->data != nullptr && made->data == made->context.get() &&
                    made->device.type == 0 &&
                    made->context.get_deleter() == allocator.raw_deleter();
  if (same) {
    made->~DataPtr();
  }
  return same;
}

}  // namespace

const char* why_not(Functions& functions) {
  void* const library = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return "torch's library libc10.so is not loaded";
  }
  Allocator* (*get_cpu_allocator)() = nullptr;
  if (!find(library, "_ZN3c109alloc_cpuEm", functions.alloc_cpu) ||
      !find(library, "_ZN3c108free_cpuEPv", functions.free_cpu) ||
      !find(library, "_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh", functions.set_cpu_allocator) ||
      !find(library, "_ZN3c1015GetCPUAllocatorEv", get_cpu_allocator)) {
    return "a function of its CPU allocator has another name";
  }
  if (!has_our_table(library)) {
    return "its c10::Allocator has other functions";
  }
  if (!has_our_data_ptr(*get_cpu_allocator())) {
    return "its c10::DataPtr has another layout";
  }
  return nullptr;
}

}  // namespace stagehand::sim::c10
