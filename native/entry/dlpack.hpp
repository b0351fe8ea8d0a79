// The part of DLPack 1.x and its C exchange API that the hooks use: the structures as the DLPack
// specification lays them out (dmlc/dlpack, include/dlpack/dlpack.h).
#pragma once

#include <cstdint>

namespace stagehand::entry::dlpack {

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCuda = 2;
inline constexpr std::uint8_t kComplex = 5;

struct Device {
  std::int32_t type;
  std::int32_t id;
};
struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct ManagedTensor {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensor* self);
  std::uint64_t flags;
  Tensor tensor;
};
struct ExchangeApi {
  Version version;
  void* previous;
  int (*allocate)(Tensor*, ManagedTensor**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void* object, ManagedTensor** out);
  int (*object_from_managed)(ManagedTensor* tensor, void** out);
  int (*tensor_from_object)(void* object, Tensor* out);
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device, void** out);
};

inline constexpr const char* kCapsuleName = "dlpack_exchange_api";

}  // namespace stagehand::entry::dlpack
