// Every driver symbol the simulator has. The names in the list are those asked of cuGetProcAddress;
// driver_*.cpp also export the versioned names that libcuda itself exports.
#pragma once

#include "sim/common.hpp"

// X(symbol, parameters), beside STAGEHAND_DRIVER_FUNCTIONS: the control plane of cuda-python.
// clang-format off
#define STAGEHAND_SIM_EXTRA_FUNCTIONS(X)                                                           \
  X(cuInit,                   (unsigned flags))                                                    \
  X(cuDriverGetVersion,       (int* version))                                                      \
  X(cuGetErrorString,         (Result error, const char** text))                                   \
  X(cuDeviceGet,              (Device* device, int ordinal))                                       \
  X(cuDeviceGetCount,         (int* count))                                                        \
  X(cuDeviceGetName,          (char* name, int length, Device device))                             \
  X(cuDeviceGetUuid,          (unsigned char* uuid, Device device))                                \
  X(cuDeviceTotalMem,         (std::size_t* bytes, Device device))                                 \
  X(cuDeviceGetAttribute,     (int* value, int attribute, Device device))                          \
  X(cuDevicePrimaryCtxRelease, (Device device))                                                    \
  X(cuCtxSetCurrent,          (Context context))                                                   \
  X(cuCtxGetDevice,           (Device* device))                                                    \
  X(cuCtxGetStreamPriorityRange, (int* least, int* greatest))                                      \
  X(cuStreamCreate,           (Stream* stream, unsigned flags))                                    \
  X(cuStreamQuery,            (Stream stream))                                                     \
  X(cuMemAlloc,               (DevicePtr* address, std::size_t bytes))                             \
  X(cuMemFree,                (DevicePtr address))                                                 \
  X(cuMemHostAlloc,           (void** host, std::size_t bytes, unsigned flags))                    \
  X(cuMemFreeHost,            (void* host))                                                        \
  X(cuMemcpyDtoDAsync,        (DevicePtr to, DevicePtr from, std::size_t bytes, Stream stream))
// clang-format on

#define STAGEHAND_SIM_API \
  extern "C" __attribute__((visibility("default"))) stagehand::driver::Result

namespace stagehand::sim {

// One number per symbol, for counts and faults.
enum class Function : unsigned {
#define STAGEHAND_SIM_NUMBER(name, symbol, parameters) symbol,
#define STAGEHAND_SIM_EXTRA_NUMBER(symbol, parameters) symbol,
#define STAGEHAND_SIM_OPTIONAL_NUMBER(name, symbol, parameters, version) symbol,
  STAGEHAND_DRIVER_FUNCTIONS(STAGEHAND_SIM_NUMBER)
      STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(STAGEHAND_SIM_OPTIONAL_NUMBER)
          STAGEHAND_SIM_EXTRA_FUNCTIONS(STAGEHAND_SIM_EXTRA_NUMBER)
#undef STAGEHAND_SIM_NUMBER
#undef STAGEHAND_SIM_OPTIONAL_NUMBER
#undef STAGEHAND_SIM_EXTRA_NUMBER
              kCount
};
inline constexpr std::size_t kFunctions = static_cast<std::size_t>(Function::kCount);

const char* symbol_of(Function function);
// A version suffix is ignored. kCount: there is no such symbol.
Function function_of(const char* symbol);
void* address_of(Function function);

#define STAGEHAND_SIM_DECLARE(name, symbol, parameters) STAGEHAND_SIM_API symbol parameters;
#define STAGEHAND_SIM_DECLARE_EXTRA(symbol, parameters) STAGEHAND_SIM_API symbol parameters;
#define STAGEHAND_SIM_DECLARE_OPTIONAL(name, symbol, parameters, version) \
  STAGEHAND_SIM_API symbol parameters;
STAGEHAND_DRIVER_FUNCTIONS(STAGEHAND_SIM_DECLARE)
STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(STAGEHAND_SIM_DECLARE_OPTIONAL)
STAGEHAND_SIM_EXTRA_FUNCTIONS(STAGEHAND_SIM_DECLARE_EXTRA)
#undef STAGEHAND_SIM_DECLARE
#undef STAGEHAND_SIM_DECLARE_OPTIONAL
#undef STAGEHAND_SIM_DECLARE_EXTRA

}  // namespace stagehand::sim

// A second exported name of a function defined in this file.
#define STAGEHAND_SIM_ALIAS(symbol, alias_symbol) \
  extern "C" __attribute__((alias(#symbol),       \
                            visibility("default"))) decltype(stagehand::sim::symbol) alias_symbol;
