// The stress test and the driver contract on a driver whose functions somebody else has found: for
// a real GPU, where Python fills the table.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// Programs from `seed` on, until `seconds` have passed. `driver_addresses`: the table's functions
// in the order of STAGEHAND_DRIVER_FUNCTIONS, of a driver that is initialised. Returns 0 when all
// was right; else 1, and `text` says what broke, with the seed and the instruction.
__attribute__((visibility("default"))) int stagehand_run_stress(const void* const* driver_addresses,
                                                                int device, std::uint64_t seed,
                                                                double seconds, char* text,
                                                                std::size_t size);
// The contract of driver/driver.hpp on device 0. Returns how many promises were broken; `text` has
// a line of each.
__attribute__((visibility("default"))) int stagehand_run_contract(
    const void* const* driver_addresses, char* text, std::size_t size);
}
