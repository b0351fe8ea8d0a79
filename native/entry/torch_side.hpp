// torch's own caching allocator and the engine, brought together (modes "native" and "mempool").
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "core/runtime.hpp"

namespace stagehand::entry {

// The table of a trigger library: checked, tried on a CUDA tensor, and used from here on. Empty, or
// why it cannot be used; then nothing has changed but that its events are listened to. Needs
// torch's CUDA initialised, and the GIL. Once per process.
std::string use_torch_side(std::uintptr_t table, int device);
// torch through Python instead.
void use_python_side();
// Whether the table can tell torch whose requests a MemPool serves; else Python does, by thread.
bool can_route();

// The device's MemPool serves what this thread's backward asks for, if it runs one; it serves
// nobody where no record is left. With the GIL, which is given up while torch is told.
void join_route(core::Runtime& runtime);
void settle_route(core::Runtime& runtime);

}  // namespace stagehand::entry
