// torch's own caching allocator and the engine, brought together (modes "native" and "mempool").
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "core/runtime.hpp"

namespace stagehand::entry {

// The table of a trigger library: checked, tried on a CUDA tensor, and used from here on. Empty, or
// why it cannot be used; then nothing is left but that its events are listened to. Needs
// torch's CUDA initialised, and the GIL. Once per process.
std::string use_torch_side(std::uintptr_t table, int device);
// torch through Python instead.
void use_python_side();
// Whether the table can tell torch whose requests a MemPool serves; else Python does, by thread.
bool can_route();
// A MemPool stays there although its object goes, until it is let go. False: torch cannot be told.
// With the GIL, which is given up meanwhile.
bool keep_mem_pool(int device, std::uint64_t first, std::uint64_t second);
void let_mem_pool_go(int device, std::uint64_t first, std::uint64_t second);

// After the end of a record: drops what only a thread with the GIL may, and where no record is left
// the device's MemPool serves nobody. With the GIL, which is given up while torch is told.
void settle(core::Runtime& runtime);

}  // namespace stagehand::entry
