// What the weights ask of torch's storages, by a table like that of core/tensor_side.hpp. Filled by
// the storage library, which is built against the installed torch's headers
// (torch_hook/storage.cpp). Plain C types only: the two sides may come from different compilers.
//
// A storage is *sealed* while it has no memory: it keeps its size, views of it can be made, and
// every access to its data raises the error that it was sealed with. All with the GIL, without any
// lock of ours.
#pragma once

#include "core/types.hpp"

namespace stagehand::core {

struct SeenStorage {
  Address address = 0;
  Bytes bytes = 0;
  std::int32_t device_type = 0;  // DLPack's numbers: 1 the CPU, 2 CUDA
  std::int32_t device = 0;
};

struct StorageSide {
  static constexpr std::uint32_t kVersion = 2;
  std::uint32_t version = 0;
  std::uint32_t size = 0;  // of this table, in bytes

  // A reference to the tensor's storage; null where it has none whose memory can be given up.
  void* (*hold)(void* tensor, SeenStorage* seen) = nullptr;
  void (*drop)(void* storage) = nullptr;
  // Says that the tensor's storage, which has no bytes and no memory, has so many bytes. It is to
  // be sealed before anybody reads it: until then the address is null, and nothing raises.
  void (*claim)(void* tensor, Bytes bytes) = nullptr;
  // The same for all tensors over one storage; null without one. Raises nothing.
  const void* (*identity)(void* tensor) = nullptr;
  // Gives the storage's memory up, to whom it came from. `text`: of the error; null leaves it as it
  // was.
  void (*seal)(void* storage, const char* text) = nullptr;
  // Opens it over memory that stays the caller's: until it is sealed again.
  void (*open)(void* storage, Address address) = nullptr;
  // Opens it over memory of torch's, its own from here on: where that is; 0 without any.
  Address (*open_alone)(void* storage) = nullptr;
};

}  // namespace stagehand::core
