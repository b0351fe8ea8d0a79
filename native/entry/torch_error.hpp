// Raising torch.OutOfMemoryError without linking torch.
#pragma once

#include <string>

#include "core/runtime.hpp"

namespace stagehand::entry {

// Throws c10::OutOfMemoryError, which torch turns into torch.OutOfMemoryError, by looking its
// constructor up in the libc10 already in the process. Where there is none (no torch, or a torch
// that names it otherwise): std::runtime_error with the same text.
[[noreturn]] void throw_out_of_memory(const std::string& message);

// What a failed status of the core means to the user, in two lines: what happened, what to do.
// `bytes` is what was asked for.
std::string explain(core::Runtime& runtime, core::Status status, core::Bytes bytes);
// Throws it: torch.OutOfMemoryError where memory is short, else RuntimeError.
[[noreturn]] void raise_status(core::Runtime& runtime, core::Status status, core::Bytes bytes);

}  // namespace stagehand::entry
