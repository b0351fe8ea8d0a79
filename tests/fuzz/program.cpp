#include "fuzz/program.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>

namespace stagehand::fuzz {

namespace {

constexpr const char* kNames[] = {
#define STAGEHAND_FUZZ_NAME(name) #name,
    STAGEHAND_FUZZ_OPS(STAGEHAND_FUZZ_NAME)
#undef STAGEHAND_FUZZ_NAME
};

// How often each instruction comes, in each phase of a program: as a forward, as a backward, and as
// whatever lies between.
struct Weight {
  Op op;
  std::array<unsigned, 3> in_phase;
};

constexpr Weight kWeights[] = {
    {Op::Allocate, {40, 10, 25}},  {Op::Free, {26, 8, 16}},     {Op::Save, {32, 2, 10}},
    {Op::Unpack, {1, 30, 8}},      {Op::DropAlias, {1, 24, 7}}, {Op::DropHandle, {1, 16, 4}},
    {Op::RecordStream, {3, 1, 5}}, {Op::Write, {4, 1, 6}},      {Op::Kernel, {4, 4, 4}},
    {Op::Keep, {1, 0, 1}},         {Op::SetBudget, {1, 1, 3}},  {Op::ClearBudget, {0, 2, 1}},
    {Op::SetLimit, {0, 0, 1}},     {Op::Trim, {0, 1, 2}},       {Op::SetDebug, {0, 0, 2}},
    {Op::Pinned, {0, 0, 2}},       {Op::Fault, {2, 2, 2}},      {Op::Finish, {0, 1, 1}},
    {Op::Steps, {1, 0, 1}},
};

Op draw_op(std::mt19937_64& random, std::size_t phase) {
  unsigned total = 0;
  for (const Weight& each : kWeights) {
    total += each.in_phase[phase];
  }
  auto draw = static_cast<unsigned>(random() % total);
  const Weight* chosen = kWeights;
  while (draw >= chosen->in_phase[phase]) {
    draw -= chosen->in_phase[phase];
    ++chosen;
  }
  return chosen->op;
}

// Log-uniform, so that every size has its share; some that repeat often; some that are large.
core::Bytes draw_size(std::mt19937_64& random, core::Bytes largest) {
  constexpr core::Bytes kUsual[] = {512, 4096, std::uint64_t{1} << 20, std::uint64_t{2} << 20,
                                    std::uint64_t{6} << 20};
  switch (random() % 4) {
    case 0:
      return std::min(largest, kUsual[random() % std::size(kUsual)]);
    case 1:
      return largest / 8 + random() % (largest - largest / 8) + 1;
    default: {
      const double share = static_cast<double>(random() >> 11) * 0x1.0p-53;
      return 1 + static_cast<core::Bytes>(std::pow(static_cast<double>(largest), share));
    }
  }
}

}  // namespace

std::vector<Instruction> generate(std::uint64_t seed, std::size_t length, const Shape& shape) {
  std::mt19937_64 random(seed * 0x9E3779B97F4A7C15ull + 1);
  // Each program has its own bounds, so that some are all small blocks and some nearly fill the
  // device with a few.
  const core::Bytes largest = shape.memory / 2 >> random() % 7;
  std::vector<Instruction> program;
  std::size_t phase = 0;
  std::uint64_t left = 0;
  while (program.size() < length) {
    if (left-- == 0) {
      phase = random() % 3;
      left = 5 + random() % 30;
    }
    Instruction next;
    next.op = program.empty() ? Op::SetBudget : draw_op(random, phase);
    if (next.op == Op::Fault && !shape.faults) {
      continue;
    }
    next.pick = static_cast<std::uint32_t>(random());
    next.stream = static_cast<std::uint32_t>(random());
    next.bytes = next.op == Op::Allocate ? draw_size(random, largest) : 1 + random() % 1024;
    next.more = random();
    program.push_back(next);
  }
  return program;
}

std::string print(const Instruction& instruction) {
  const auto number = [](std::uint64_t value) { return std::to_string(value); };
  return std::string("{Op::") + kNames[static_cast<std::size_t>(instruction.op)] + ", " +
         number(instruction.pick) + "u, " + number(instruction.stream) + "u, " +
         number(instruction.bytes) + ", " + number(instruction.more) + "u}";
}

}  // namespace stagehand::fuzz
