// Programs on the simulated GPU, each in a process of its own: one that crashes or hangs is an
// outcome like any other, and what a runtime leaks at its end (rule T3) is gone with it.
#pragma once

#include <array>
#include <string>

#include "core/counters.hpp"
#include "driver/driver.hpp"
#include "fuzz/program.hpp"

namespace stagehand::fuzz {

struct Outcome {
  std::string broken;                                         // empty: all was right
  std::uint64_t operations = 0;                               // calls of the allocator
  core::Counters counters;                                    // of device 0 at the end
  std::array<std::uint64_t, driver::kFunctionCount> calls{};  // of the driver, after the opening
};

// `trace`: each instruction is printed as it runs.
Outcome run_apart(const Program& program, bool trace = false);

}  // namespace stagehand::fuzz
