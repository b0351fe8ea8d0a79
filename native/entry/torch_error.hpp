// Raising torch.OutOfMemoryError without linking torch.
#pragma once

#include <string>

#include "core/runtime.hpp"

namespace stagehand::entry {

// Throws c10::OutOfMemoryError, which torch turns into torch.OutOfMemoryError, by looking its
// constructor up in the libc10 already in the process. Where there is none (no torch, or a torch
// that names it otherwise): std::runtime_error with the same text.
[[noreturn]] void throw_out_of_memory(const std::string& message);

// The one place that turns a status of the core into an exception: `bytes` is what was asked for.
[[noreturn]] void raise_status(core::Runtime& runtime, core::Status status, core::Bytes bytes);

}  // namespace stagehand::entry
