// A stress program: typed instructions drawn from a seed. Operands are raw numbers that pick among
// what exists when the instruction runs, so any part of a program is a program too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/types.hpp"

namespace stagehand::fuzz {

// Steps is a few training steps of equal sizes, which a plan can learn; the others are one call.
// clang-format off
#define STAGEHAND_FUZZ_OPS(X)                                                                     \
  X(Allocate) X(Free) X(Save) X(Unpack) X(DropAlias) X(DropHandle) X(RecordStream) X(Write)       \
  X(Kernel) X(Keep) X(SetBudget) X(ClearBudget) X(SetLimit) X(Trim) X(SetDebug) X(Pinned)         \
  X(Fault) X(Finish) X(Steps)
// clang-format on

enum class Op : std::uint8_t {
#define STAGEHAND_FUZZ_NAME(name) name,
  STAGEHAND_FUZZ_OPS(STAGEHAND_FUZZ_NAME)
#undef STAGEHAND_FUZZ_NAME
};

struct Instruction {
  Op op = Op::Finish;
  std::uint32_t pick = 0;    // which tensor, handle or alias
  std::uint32_t stream = 0;  // which stream
  core::Bytes bytes = 0;     // a size, or a share of the device in 1/1024
  std::uint64_t more = 0;    // what else is drawn
};

struct Shape {
  core::Bytes memory = 0;  // of the device: sizes go from one byte to half of it
  bool faults = false;
};

std::vector<Instruction> generate(std::uint64_t seed, std::size_t length, const Shape& shape);
std::string print(const Instruction& instruction);

}  // namespace stagehand::fuzz
