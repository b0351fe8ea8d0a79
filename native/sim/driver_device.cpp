// Initialisation, devices, contexts and error names.
#include <cstring>

#include "sim/gpu.hpp"

namespace stagehand::sim {

namespace {

struct ErrorName {
  Result error;
  const char* name;
  const char* text;
};

constexpr ErrorName kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {driver::kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorName* error_name(Result error) {
  for (const ErrorName& entry : kErrors) {
    if (entry.error == error) {
      return &entry;
    }
  }
  return nullptr;
}

// The attributes a program is likely to base decisions on; the rest read 0.
int attribute_value(int attribute) {
  switch (attribute) {
    case 1:  // max threads per block
      return 1024;
    case 10:  // warp size
      return 32;
    case 16:  // multiprocessors
      return 132;
    case 19:   // can map host memory
    case 41:   // unified addressing
    case 91:   // registered host memory has one address for both
    case 102:  // virtual memory management
    case 122:  // 64-bit waits for values
      return 1;
    case 40:  // async engines
      return 2;
    case 75:  // compute capability, major
      return 9;
    default:
      return 0;
  }
}

bool is_device(const Gpu& machine, Device device) {
  return device >= 0 && device < machine.settings.devices;
}

}  // namespace

STAGEHAND_SIM_API cuInit(unsigned flags) {
  return driver_call(Function::cuInit, [&](Gpu& machine) {
    if (flags != 0) {
      return kInvalidValue;
    }
    machine.initialized = true;
    return kSuccess;
  });
}

// Answers without cuInit, like the real one: cuda-python asks before.
STAGEHAND_SIM_API cuDriverGetVersion(int* version) {
  return driver_call(Function::cuDriverGetVersion, [&](Gpu& machine) {
    if (version == nullptr) {
      return kInvalidValue;
    }
    *version = machine.driver_version;
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuGetErrorName(Result error, const char** name) {
  const ErrorName* entry = error_name(error);
  *name = entry != nullptr ? entry->name : nullptr;
  return entry != nullptr ? kSuccess : kInvalidValue;
}

STAGEHAND_SIM_API cuGetErrorString(Result error, const char** text) {
  const ErrorName* entry = error_name(error);
  *text = entry != nullptr ? entry->text : nullptr;
  return entry != nullptr ? kSuccess : kInvalidValue;
}

STAGEHAND_SIM_API cuDeviceGet(Device* device, int ordinal) {
  return driver_call(Function::cuDeviceGet, [&](Gpu& machine) {
    if (!is_device(machine, ordinal)) {
      return kInvalidDevice;
    }
    *device = ordinal;
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuDeviceGetCount(int* count) {
  return driver_call(Function::cuDeviceGetCount, [&](Gpu& machine) {
    *count = machine.settings.devices;
    return kSuccess;
  });
}

// Every simulated device reaches every other's memory.
STAGEHAND_SIM_API cuDeviceCanAccessPeer(int* can, Device device, Device peer) {
  return driver_call(Function::cuDeviceCanAccessPeer, [&](Gpu& machine) {
    if (!is_device(machine, device) || !is_device(machine, peer)) {
      return kInvalidDevice;
    }
    *can = device != peer ? 1 : 0;
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuDeviceGetName(char* name, int length, Device device) {
  return driver_call(Function::cuDeviceGetName, [&](Gpu& machine) {
    if (!is_device(machine, device) || length <= 0) {
      return kInvalidDevice;
    }
    std::strncpy(name, "Stagehand simulated GPU", static_cast<std::size_t>(length));
    name[length - 1] = '\0';
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuDeviceGetUuid(unsigned char* uuid, Device device) {
  return driver_call(Function::cuDeviceGetUuid, [&](Gpu& machine) {
    if (!is_device(machine, device)) {
      return kInvalidDevice;
    }
    std::memcpy(uuid, "stagehand-sim-00", 16);
    uuid[15] = static_cast<unsigned char>(device);
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuDeviceTotalMem(std::size_t* bytes, Device device) {
  return driver_call(Function::cuDeviceTotalMem, [&](Gpu& machine) {
    if (!is_device(machine, device)) {
      return kInvalidDevice;
    }
    *bytes = machine.memory.device(device).capacity();
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuDeviceGetAttribute(int* value, int attribute, Device device) {
  return driver_call(Function::cuDeviceGetAttribute, [&](Gpu& machine) {
    if (!is_device(machine, device)) {
      return kInvalidDevice;
    }
    const auto told = machine.attributes.find(attribute);
    *value = told != machine.attributes.end() ? told->second : attribute_value(attribute);
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuDevicePrimaryCtxRetain(Context* context, Device device) {
  return driver_call(Function::cuDevicePrimaryCtxRetain, [&](Gpu& machine) {
    if (!is_device(machine, device)) {
      return kInvalidDevice;
    }
    *context = context_of(device);
    return kSuccess;
  });
}

// The primary context is never torn down: nothing here depends on when it would be.
STAGEHAND_SIM_API cuDevicePrimaryCtxRelease(Device device) {
  return driver_call(Function::cuDevicePrimaryCtxRelease, [&](Gpu& machine) {
    return is_device(machine, device) ? kSuccess : kInvalidDevice;
  });
}

STAGEHAND_SIM_API cuDevicePrimaryCtxGetState(Device device, unsigned* flags, int* active) {
  return driver_call(Function::cuDevicePrimaryCtxGetState, [&](Gpu& machine) {
    if (!is_device(machine, device)) {
      return kInvalidDevice;
    }
    *flags = 0;
    *active = 1;
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuCtxGetCurrent(Context* context) {
  return driver_call(Function::cuCtxGetCurrent, [&](Gpu& machine) {
    *context = thread_state(machine).current();
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuCtxSetCurrent(Context context) {
  return driver_call(Function::cuCtxSetCurrent, [&](Gpu& machine) {
    ThreadState& state = thread_state(machine);
    if (context != nullptr && device_of(machine, context) < 0) {
      return kInvalidContext;
    }
    state.depth -= state.depth > 0 ? 1 : 0;
    if (context != nullptr) {
      state.contexts[state.depth++] = context;
    }
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuCtxPushCurrent(Context context) {
  return driver_call(Function::cuCtxPushCurrent, [&](Gpu& machine) {
    ThreadState& state = thread_state(machine);
    if (device_of(machine, context) < 0 || state.depth == state.contexts.size()) {
      return kInvalidContext;
    }
    state.contexts[state.depth++] = context;
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuCtxPopCurrent(Context* context) {
  return driver_call(Function::cuCtxPopCurrent, [&](Gpu& machine) {
    ThreadState& state = thread_state(machine);
    if (state.depth == 0) {
      return kInvalidContext;
    }
    if (context != nullptr) {
      *context = state.current();
    }
    --state.depth;
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuCtxGetDevice(Device* device) {
  return driver_call(Function::cuCtxGetDevice, [&](Gpu& machine) {
    *device = current_device(machine);
    return *device >= 0 ? kSuccess : kInvalidContext;
  });
}

STAGEHAND_SIM_API cuCtxSynchronize() {
  return driver_call(Function::cuCtxSynchronize, [&](Gpu& machine) {
    const int device = current_device(machine);
    if (device < 0) {
      return kInvalidContext;
    }
    if (const Result unsafe = machine.unsafe_in_capture("cuCtxSynchronize"); unsafe != kSuccess) {
      return unsafe;
    }
    return machine.waited(machine.scheduler.finish_device(device));
  });
}

STAGEHAND_SIM_API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return driver_call(Function::cuCtxGetStreamPriorityRange, [&](Gpu& machine) {
    if (current_device(machine) < 0) {
      return kInvalidContext;
    }
    if (least != nullptr) {
      *least = 0;
    }
    if (greatest != nullptr) {
      *greatest = -5;
    }
    return kSuccess;
  });
}

STAGEHAND_SIM_ALIAS(cuDeviceGetUuid, cuDeviceGetUuid_v2)
STAGEHAND_SIM_ALIAS(cuDeviceTotalMem, cuDeviceTotalMem_v2)
STAGEHAND_SIM_ALIAS(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2)
STAGEHAND_SIM_ALIAS(cuCtxPushCurrent, cuCtxPushCurrent_v2)
STAGEHAND_SIM_ALIAS(cuCtxPopCurrent, cuCtxPopCurrent_v2)

}  // namespace stagehand::sim
