// The driver boundary: every CUDA call the core makes goes through this one table.
//
// Contract
//  * Every function returns a Result; 0 is success, anything else failed and changed nothing.
//  * Types, values and calling conventions are those of the CUDA driver API (CUDA 12 and later), so
//    the table is filled with plain symbols of libcuda and needs no CUDA header to build.
//  * `void*` streams: nullptr is the legacy default stream. Handles are opaque.
//  * A function marked W may wait for the GPU. It is never called while a lock of the core is held
//    (rule T2). Everything else only queues work or edits the address space.
//  * Functions marked C use the calling thread's current context: use ContextGuard.
//  * Memory mapping is not ordered by streams: an address may be unmapped only once all work that
//    names it has finished. Physical memory may be mapped at several addresses at once; work queued
//    later on one stream sees what earlier work on that stream wrote, through either address.
//  * Events may be recorded again while waits on the earlier record are still queued: a wait takes
//    the state at the call.
//  * stream_wait_value64 holds back what is queued later on its stream, and nothing else, until the
//    64-bit word at `address` is at least `value` (kWaitValueGeq: counted round, so
//    int64(word - value) >= 0). The word is in registered host memory, at a multiple of 8; its host
//    address is its device address. Whoever waits for such a stream waits for the word, so the word
//    only grows, and it is raised by a thread that waits for nothing. It orders nothing that the
//    driver knows of: what must come before something on another stream still needs an event.
//  * memcpy_batch_async queues copies as one piece of work of a stream: after what is earlier,
//  before
//    what is later, but in any order among themselves, so no two of them touch the same bytes but
//    to read. Each moves between device memory and registered host memory. `attributes` says how:
//    one CopyAttributes and the index 0 are right for all. Not for the legacy default stream.
//  * Functions of STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS are null where the driver lacks them.
//
// Filled by stagehand_alloc._driver through cuda-python (cuGetProcAddress) in the order of
// STAGEHAND_DRIVER_FUNCTIONS and then STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS; the simulated GPU
// (native/sim) is another library with these symbols.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stagehand::driver {

using Result = int;
using Device = int;
using DevicePtr = std::uint64_t;
using Context = void*;
using Stream = void*;
using Event = void*;
using PhysicalHandle = std::uint64_t;

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotReady = 600;
inline constexpr Result kContextIsDestroyed = 709;

inline constexpr unsigned kStreamNonBlocking = 1;     // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kWaitValueGeq = 0;          // CU_STREAM_WAIT_VALUE_GEQ
inline constexpr unsigned kEventDisableTiming = 2;    // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned kHostRegisterPortable = 1;  // CU_MEMHOSTREGISTER_PORTABLE
inline constexpr int kCaptureNone = 0;                // CU_STREAM_CAPTURE_STATUS_NONE
inline constexpr int kCaptureModeRelaxed = 2;         // CU_STREAM_CAPTURE_MODE_RELAXED

// CUmemLocation, CUmemAllocationProp, CUmemAccessDesc, CUmemcpyAttributes: laid out as cuda.h lays
// them out.
struct MemLocation {
  int type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
  int id = 0;
};
struct AllocationProp {
  int type = 1;                    // CU_MEM_ALLOCATION_TYPE_PINNED
  int requested_handle_types = 0;  // CU_MEM_HANDLE_TYPE_NONE
  MemLocation location;
  void* win32_meta = nullptr;
  struct {
    unsigned char compression_type = 0;
    unsigned char gpu_direct_rdma_capable = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } alloc_flags;
};
static_assert(sizeof(AllocationProp) == 32);
struct AccessDesc {
  MemLocation location;
  int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};
static_assert(sizeof(AccessDesc) == 12);
struct CopyAttributes {
  int source_order = 1;           // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
  MemLocation source_hint{0, 0};  // CU_MEM_LOCATION_TYPE_INVALID: hints are for managed memory
  MemLocation destination_hint{0, 0};
  unsigned flags = 0;
};
static_assert(sizeof(CopyAttributes) == 24);

// X(return-less signature): name in the table, symbol asked of cuGetProcAddress, parameters.
// clang-format off
#define STAGEHAND_DRIVER_FUNCTIONS(X)                                                              \
  X(get_error_name,        cuGetErrorName,        (Result error, const char** name))               \
  X(ctx_get_current,       cuCtxGetCurrent,       (Context* context))                              \
  X(ctx_push_current,      cuCtxPushCurrent,      (Context context))                               \
  X(ctx_pop_current,       cuCtxPopCurrent,       (Context* context))                              \
  X(ctx_synchronize,       cuCtxSynchronize,      ())  /* C, W */                                  \
  X(primary_ctx_retain,    cuDevicePrimaryCtxRetain, (Context* context, Device device))            \
  X(primary_ctx_state,     cuDevicePrimaryCtxGetState, (Device device, unsigned* flags, int* active)) \
  X(can_access_peer,       cuDeviceCanAccessPeer, (int* can, Device device, Device peer))          \
  X(mem_get_info,          cuMemGetInfo,          (std::size_t* free_bytes, std::size_t* total_bytes)) /* C */ \
  X(allocation_granularity, cuMemGetAllocationGranularity, (std::size_t* bytes, const AllocationProp* prop, int option)) \
  X(address_reserve,       cuMemAddressReserve,   (DevicePtr* address, std::size_t bytes, std::size_t alignment, DevicePtr hint, unsigned long long flags)) \
  X(address_free,          cuMemAddressFree,      (DevicePtr address, std::size_t bytes))          \
  X(mem_create,            cuMemCreate,           (PhysicalHandle* handle, std::size_t bytes, const AllocationProp* prop, unsigned long long flags)) \
  X(mem_release,           cuMemRelease,          (PhysicalHandle handle))                         \
  X(mem_map,               cuMemMap,              (DevicePtr address, std::size_t bytes, std::size_t offset, PhysicalHandle handle, unsigned long long flags)) \
  X(mem_unmap,             cuMemUnmap,            (DevicePtr address, std::size_t bytes))          \
  X(mem_set_access,        cuMemSetAccess,        (DevicePtr address, std::size_t bytes, const AccessDesc* desc, std::size_t count)) \
  X(memcpy_dtoh_async,     cuMemcpyDtoHAsync,     (void* host, DevicePtr device, std::size_t bytes, Stream stream)) \
  X(memcpy_htod_async,     cuMemcpyHtoDAsync,     (DevicePtr device, const void* host, std::size_t bytes, Stream stream)) \
  X(memset_d8_async,       cuMemsetD8Async,       (DevicePtr device, unsigned char value, std::size_t bytes, Stream stream)) \
  X(stream_create,         cuStreamCreateWithPriority, (Stream* stream, unsigned flags, int priority)) /* C */ \
  X(stream_destroy,        cuStreamDestroy,       (Stream stream))                                 \
  X(stream_wait_event,     cuStreamWaitEvent,     (Stream stream, Event event, unsigned flags))    \
  X(stream_synchronize,    cuStreamSynchronize,   (Stream stream)) /* W */                         \
  X(stream_wait_value64,   cuStreamWaitValue64,   (Stream stream, DevicePtr address, std::uint64_t value, unsigned flags)) \
  X(stream_is_capturing,   cuStreamIsCapturing,   (Stream stream, int* status))                    \
  X(stream_get_ctx,        cuStreamGetCtx,        (Stream stream, Context* context))               \
  X(thread_exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))                  \
  X(event_create,          cuEventCreate,         (Event* event, unsigned flags)) /* C */          \
  X(event_destroy,         cuEventDestroy,        (Event event))                                   \
  X(event_record,          cuEventRecord,         (Event event, Stream stream))                    \
  X(event_query,           cuEventQuery,          (Event event))                                   \
  X(event_synchronize,     cuEventSynchronize,    (Event event)) /* W */                           \
  X(event_elapsed_time,    cuEventElapsedTime,    (float* milliseconds, Event start, Event end))   \
  X(host_register,         cuMemHostRegister,     (void* host, std::size_t bytes, unsigned flags)) /* C, W */ \
  X(host_unregister,       cuMemHostUnregister,   (void* host)) /* C, W */

// Those an older driver may lack: also the CUDA version whose form of it this is.
#define STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(X)                                                     \
  X(memcpy_batch_async,    cuMemcpyBatchAsync,    (DevicePtr* destinations, DevicePtr* sources, std::size_t* sizes, std::size_t count, CopyAttributes* attributes, std::size_t* attribute_starts, std::size_t attribute_count, Stream stream), 13000)
// clang-format on

struct Table {
#define STAGEHAND_DECLARE(name, symbol, parameters) Result(*name) parameters = nullptr;
#define STAGEHAND_DECLARE_OPTIONAL(name, symbol, parameters, version) \
  Result(*name) parameters = nullptr;
  STAGEHAND_DRIVER_FUNCTIONS(STAGEHAND_DECLARE)
  STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(STAGEHAND_DECLARE_OPTIONAL)
#undef STAGEHAND_DECLARE
#undef STAGEHAND_DECLARE_OPTIONAL
};

// A table of which every call is refused: for who could not get the context that the calls are
// about. Made in another one, a call on a default stream would succeed, and order nothing.
template <class Function>
struct Refused;
template <class... Parameters>
struct Refused<Result (*)(Parameters...)> {
  static Result call(Parameters...) { return kInvalidContext; }
};
inline constexpr Table kRefusingTable = {
#define STAGEHAND_REFUSE(name, symbol, parameters) &Refused<decltype(Table::name)>::call,
#define STAGEHAND_REFUSE_OPTIONAL(name, symbol, parameters, version) \
  &Refused<decltype(Table::name)>::call,
    STAGEHAND_DRIVER_FUNCTIONS(STAGEHAND_REFUSE)
        STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(STAGEHAND_REFUSE_OPTIONAL)
#undef STAGEHAND_REFUSE
#undef STAGEHAND_REFUSE_OPTIONAL
};

// The symbols in table order, for whoever fills the table.
inline constexpr const char* kSymbols[] = {
#define STAGEHAND_NAME(name, symbol, parameters) #symbol,
#define STAGEHAND_NAME_OPTIONAL(name, symbol, parameters, version) #symbol,
    STAGEHAND_DRIVER_FUNCTIONS(STAGEHAND_NAME)
        STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(STAGEHAND_NAME_OPTIONAL)
#undef STAGEHAND_NAME
#undef STAGEHAND_NAME_OPTIONAL
};
// The optional ones among them, and the version to ask each for: not of an older driver, which
// would answer with an older form of it.
struct OptionalSymbol {
  const char* symbol;
  int version;
};
inline constexpr OptionalSymbol kOptionalSymbols[] = {
#define STAGEHAND_OPTIONAL(name, symbol, parameters, version) {#symbol, version},
    STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(STAGEHAND_OPTIONAL)
#undef STAGEHAND_OPTIONAL
};
inline constexpr std::size_t kFunctionCount = sizeof(kSymbols) / sizeof(kSymbols[0]);
static_assert(sizeof(Table) == kFunctionCount * sizeof(void*));

// Makes `context` current for a scope. One cheap query where it already is.
class ContextGuard {
 public:
  ContextGuard(const Table& table, Context context) : table_(table) {
    Context current = nullptr;
    if (table_.ctx_get_current(&current) == kSuccess && current == context) {
      return;
    }
    pushed_ = table_.ctx_push_current(context) == kSuccess;
  }
  ~ContextGuard() {
    if (pushed_) {
      Context popped = nullptr;
      table_.ctx_pop_current(&popped);
    }
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  const Table& table_;
  bool pushed_ = false;
};

}  // namespace stagehand::driver
