// A fuzz program: a machine and typed instructions, drawn from a seed or read from a text. Operands
// are raw numbers that pick among what exists when the instruction runs, 0 being the newest, so any
// part of a program is a program too, and so is one with smaller numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/types.hpp"

namespace stagehand::fuzz {

// clang-format off
#define STAGEHAND_FUZZ_OPS(X)                                                                     \
  X(Allocate) X(Free) X(Save) X(Unpack) X(DropAlias) X(DropHandle) X(RecordStream) X(Write)       \
  X(Rewrite) X(Check) X(Keep) X(EnterPool) X(LeavePool) X(SetLimit) X(LaneLimits) X(Trim)         \
  X(SetDebug) X(Pinned) X(BeginCapture) X(EndCapture) X(ReleaseGraph) X(Progress) X(Fault)        \
  X(Finish) X(Settle)
// Bytes: `memory` of each device, `high` of the pools; the others are counts, or 0 and 1.
// `check_every` so many instructions the invariants are looked at.
#define STAGEHAND_FUZZ_SETTINGS(X)                                                                \
  X(seed) X(torch) X(memory) X(high) X(devices) X(contexts) X(triggers) X(expandable) X(mem_pool) \
  X(captures) X(faults) X(old_driver) X(check_every)
// clang-format on

enum class Op : std::uint8_t {
#define STAGEHAND_FUZZ_NAME(name) name,
  STAGEHAND_FUZZ_OPS(STAGEHAND_FUZZ_NAME)
#undef STAGEHAND_FUZZ_NAME
};

struct Instruction {
  Op op = Op::Finish;
  std::uint64_t pick = 0;    // which tensor, handle, alias or graph, from the newest on
  std::uint64_t stream = 0;  // which stream; of a fault: how often
  core::Bytes bytes = 0;     // a size, a share of `high` or of the device in 1/1024, a count
  std::uint64_t more = 0;    // what else is drawn

  friend bool operator==(const Instruction&, const Instruction&) = default;
};

// The machine a program runs on.
struct Setup {
#define STAGEHAND_FUZZ_FIELD(name) std::uint64_t name = 0;
  STAGEHAND_FUZZ_SETTINGS(STAGEHAND_FUZZ_FIELD)
#undef STAGEHAND_FUZZ_FIELD
};

struct Program {
  Setup setup;
  std::vector<Instruction> code;
};

// Every seed has its own machine. `torch`: with torch's own allocator, else the process allocator.
Setup setup_of(std::uint64_t seed, bool torch);
std::vector<Instruction> generate(const Setup& setup, std::size_t length);

std::string print(const Instruction& instruction);
std::string print(const Program& program);
// False: `text` is no program; `*error` says which line.
bool parse(const std::string& text, Program* program, std::string* error);

}  // namespace stagehand::fuzz
