// Controls of the simulated GPU: what a test may ask of it beyond the driver API.
//
// Plain C symbols, so that Python reaches them through ctypes. Every call is safe from any thread.
// Device addresses are host addresses too: the host may dereference what is mapped and accessible.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "driver/driver.hpp"

#define STAGEHAND_SIM_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
struct stagehand_sim_range {
  uint64_t address;
  uint64_t bytes;
};
typedef void (*stagehand_sim_callback)(void* user);
}

// Flags of stagehand_sim_configure.
// The legacy default stream runs what is queued on it at once, and the host has then waited for it.
inline constexpr unsigned STAGEHAND_SIM_HOST_SYNCHRONOUS = 1;
// Fresh device memory reads as zeros instead of poison: for large sparse devices.
inline constexpr unsigned STAGEHAND_SIM_NO_POISON = 2;
// The driver is of CUDA 12.0: it lacks what is optional in driver/driver.hpp.
inline constexpr unsigned STAGEHAND_SIM_OLD_DRIVER = 4;

// Kinds of hazard. 0 asks for all of them.
inline constexpr int STAGEHAND_SIM_ALL = 0;
inline constexpr int STAGEHAND_SIM_DEVICE_RACE = 1;  // device bytes touched by unordered work
inline constexpr int STAGEHAND_SIM_HOST_RACE = 2;    // host (slab) bytes touched by unordered work
inline constexpr int STAGEHAND_SIM_DOUBLE_FREE = 3;  // released, unmapped or freed twice
inline constexpr int STAGEHAND_SIM_FREE_IN_USE = 4;  // unmapped or unregistered under queued work
inline constexpr int STAGEHAND_SIM_UNMAPPED = 5;     // work that names memory it may not touch
inline constexpr int STAGEHAND_SIM_DESTROYED = 6;    // a destroyed stream or event used again
inline constexpr int STAGEHAND_SIM_CAPTURE = 7;      // a call that breaks a graph capture
inline constexpr int STAGEHAND_SIM_KINDS = 8;

// Start over on a fresh machine: every address, handle, stream and event of before is gone.
// Bandwidth in bytes per second, 0 for the default (25 GB/s). Returns 0, or 1 when the settings
// make no sense.
STAGEHAND_SIM_EXPORT int stagehand_sim_configure(uint64_t memory_bytes, int devices, uint64_t seed,
                                                 uint64_t d2h_bytes_per_s, uint64_t h2d_bytes_per_s,
                                                 unsigned flags);
// The same with the settings of before.
STAGEHAND_SIM_EXPORT void stagehand_sim_reset(void);
// Probability that the device makes unasked progress where it may: at a query, beside a wait, and
// beside host-synchronous work. Default 0.25. A query repeated 64 times always makes progress.
STAGEHAND_SIM_EXPORT void stagehand_sim_progress(double probability);
// All work finishes, and what the scheduler draws from here on is what this seed draws: a test's
// schedule does not depend on which tests ran before it.
STAGEHAND_SIM_EXPORT void stagehand_sim_seed(uint64_t seed);

// Work. All three queue one operation on a stream and return a driver result.
// The callback runs when the kernel does, under the simulator's lock: it may touch memory, but must
// call neither the driver nor Python. Null: the kernel only declares what it touches.
STAGEHAND_SIM_EXPORT int stagehand_sim_kernel(void* stream, uint64_t duration_ns,
                                              const stagehand_sim_range* reads, size_t read_count,
                                              const stagehand_sim_range* writes, size_t write_count,
                                              stagehand_sim_callback callback, void* user);
// Writes pattern(seed) to the bytes; checks that the bytes hold it, adding wrong ones to
// mismatches.
STAGEHAND_SIM_EXPORT int stagehand_sim_fill(void* stream, uint64_t address, uint64_t bytes,
                                            uint64_t seed);
STAGEHAND_SIM_EXPORT int stagehand_sim_check(void* stream, uint64_t address, uint64_t bytes,
                                             uint64_t seed);
STAGEHAND_SIM_EXPORT uint64_t stagehand_sim_mismatches(void);  // wrong bytes that checks have seen
// The same pattern for the host: byte i of `out` is byte `offset + i` of pattern(seed).
STAGEHAND_SIM_EXPORT void stagehand_sim_pattern(void* out, uint64_t bytes, uint64_t seed,
                                                uint64_t offset);
// The host touches these bytes (device or slab) now: a hazard where queued work is not known to it
// to have finished with them.
STAGEHAND_SIM_EXPORT void stagehand_sim_host_access(const void* address, uint64_t bytes,
                                                    int is_write);

// These bytes, memory of `device`, are about to go back to the driver, which takes them away from
// other devices before it waits for anything: a hazard where those have work on them. cuMemFree
// does the same.
STAGEHAND_SIM_EXPORT void stagehand_sim_take_from_others(uint64_t address, uint64_t bytes,
                                                         int device);

// Progress and time.
// All work finishes, and the host knows. Waits half a minute for values that hold work back.
STAGEHAND_SIM_EXPORT void stagehand_sim_drain(void);
STAGEHAND_SIM_EXPORT uint64_t stagehand_sim_step(uint64_t steps);  // random steps; how many ran
STAGEHAND_SIM_EXPORT uint64_t stagehand_sim_queued(void);          // operations not yet complete
STAGEHAND_SIM_EXPORT uint64_t stagehand_sim_clock_ns(void);        // virtual time of the host
STAGEHAND_SIM_EXPORT void stagehand_sim_advance_ns(uint64_t nanoseconds);  // the host computes

// Hazards, in the order found. Texts are kept for the first 1000. `text` copies at most `size - 1`
// bytes and returns the full length, 0 when there is no such hazard.
STAGEHAND_SIM_EXPORT uint64_t stagehand_sim_hazards(int kind);
STAGEHAND_SIM_EXPORT size_t stagehand_sim_hazard_text(uint64_t index, char* text, size_t size);
STAGEHAND_SIM_EXPORT int stagehand_sim_hazard_kind(uint64_t index);  // 0 when there is none
STAGEHAND_SIM_EXPORT void stagehand_sim_clear_hazards(void);

// Faults and counts, by symbol ("cuMemMap"; a version suffix is ignored). `nth` 1 is the next call;
// `times` calls in a row from there return `result` and do nothing. `times` 0 takes the fault back.
// fail returns 1 when there is no such symbol.
STAGEHAND_SIM_EXPORT int stagehand_sim_fail(const char* symbol, uint64_t nth, uint64_t times,
                                            int result);
STAGEHAND_SIM_EXPORT uint64_t stagehand_sim_call_count(const char* symbol);
STAGEHAND_SIM_EXPORT uint64_t stagehand_sim_host_waits(void);  // calls that really had to wait

// Memory of one device, in bytes: created and not yet given back; mapped (an alias counts again).
STAGEHAND_SIM_EXPORT uint64_t stagehand_sim_physical_bytes(int device);
STAGEHAND_SIM_EXPORT uint64_t stagehand_sim_mapped_bytes(int device);
// What the driver says of itself until the next reset: its version (13000 is CUDA 13.0), and a
// CUdevice_attribute (102 is support for virtual memory management).
STAGEHAND_SIM_EXPORT void stagehand_sim_set_driver_version(int version);
STAGEHAND_SIM_EXPORT void stagehand_sim_set_attribute(int attribute, int value);
// Marks a stream as being captured into a graph, or not.
STAGEHAND_SIM_EXPORT int stagehand_sim_capture(void* stream, int on);

namespace stagehand::sim {

// The simulated driver as the core sees it; cuInit has been called. For native tests that link the
// simulator instead of loading it.
driver::Table table();

}  // namespace stagehand::sim
