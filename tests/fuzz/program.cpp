#include "fuzz/program.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

namespace stagehand::fuzz {

namespace {

using core::Bytes;
using core::operator""_MiB;

// How often each instruction comes, in each phase of a program: as a forward, as a backward, and as
// whatever lies between.
struct Weight {
  Op op;
  std::array<unsigned, 3> in_phase;
};

constexpr Weight kWeights[] = {
    {Op::Allocate, {40, 10, 25}},  {Op::Free, {26, 8, 16}},     {Op::Save, {32, 2, 10}},
    {Op::Unpack, {1, 30, 8}},      {Op::DropAlias, {1, 24, 7}}, {Op::DropHandle, {1, 16, 4}},
    {Op::RecordStream, {3, 1, 5}}, {Op::Write, {4, 1, 6}},      {Op::Rewrite, {1, 0, 1}},
    {Op::Check, {4, 4, 4}},        {Op::Keep, {1, 0, 1}},       {Op::EnterPool, {1, 1, 3}},
    {Op::LeavePool, {0, 2, 1}},    {Op::SetLimit, {0, 0, 1}},   {Op::LaneLimits, {0, 0, 1}},
    {Op::Trim, {0, 1, 2}},         {Op::SetDebug, {0, 0, 2}},   {Op::Pinned, {0, 0, 2}},
    {Op::BeginCapture, {1, 0, 2}}, {Op::EndCapture, {4, 2, 4}}, {Op::ReleaseGraph, {0, 1, 2}},
    {Op::Progress, {3, 3, 3}},     {Op::Fault, {1, 1, 1}},      {Op::Finish, {0, 1, 1}},
};

class Generator {
 public:
  Generator(const Setup& setup, std::size_t length)
      : setup_(setup), length_(length), random_(setup.seed * 0x9E3779B97F4A7C15ull + setup.torch) {
    // Each program has its own bounds, so that some are all small blocks and some nearly fill the
    // device with a few.
    largest_ = setup.torch != 0 ? setup.high / 2 : setup.memory / 2 >> random_() % 7;
  }

  std::vector<Instruction> run() {
    while (code_.size() < length_) {
      add(Op::EnterPool, {.bytes = 1023});
      draw(3) == 0 ? wander() : train();
      if (draw(2) == 0) {
        add(Op::Settle, {});
      }
    }
    return std::move(code_);
  }

 private:
  std::uint64_t draw(std::uint64_t below) { return random_() % below; }
  void add(Op op, Instruction in) {
    in.op = op;
    code_.push_back(in);
  }

  Op draw_op(std::size_t phase) {
    unsigned total = 0;
    for (const Weight& each : kWeights) {
      total += each.in_phase[phase];
    }
    auto left = static_cast<unsigned>(draw(total));
    const Weight* chosen = kWeights;
    while (left >= chosen->in_phase[phase]) {
      left -= chosen->in_phase[phase];
      ++chosen;
    }
    return chosen->op;
  }

  // Log-uniform, so that every size has its share; some that repeat often; some that are large.
  Bytes draw_size(Bytes largest) {
    constexpr Bytes kUsual[] = {512, 4096, 1_MiB, 2_MiB, 6_MiB};
    switch (draw(4)) {
      case 0:
        return std::min(largest, kUsual[draw(std::size(kUsual))]);
      case 1:
        return largest / 8 + draw(largest - largest / 8) + 1;
      default: {
        const double share = static_cast<double>(random_() >> 11) * 0x1.0p-53;
        return 1 + static_cast<Bytes>(std::pow(static_cast<double>(largest), share));
      }
    }
  }

  void anything(std::size_t phase) {
    const Op op = draw_op(phase);
    const bool wanted =
        (op != Op::Fault || setup_.faults != 0) && (op != Op::BeginCapture || setup_.captures != 0);
    if (wanted) {
      add(op, {.pick = draw(64),
               .stream = draw(16),
               .bytes = op == Op::Allocate ? draw_size(largest_) : 1 + draw(1024),
               .more = draw(1 << 16)});
    }
  }

  // Whatever comes, in phases that lean one way.
  void wander() {
    std::size_t phase = 0;
    std::uint64_t left = 0;
    for (std::uint64_t count = 60 + draw(200); count > 0; --count) {
      if (left-- == 0) {
        phase = draw(3);
        left = 5 + draw(30);
      }
      anything(phase);
    }
  }

  struct Layer {
    Bytes bytes;
    std::uint64_t stream;
    std::uint64_t saves;  // how often it is saved
    bool stays;           // torch keeps the tensor a while
    std::uint64_t more;
  };

  // Steps that ask for the same, which a plan can follow, and that now and then are disturbed, are
  // of two micro-batches whose backwards come in either order, or only evaluate.
  void train() {
    std::vector<Layer> layers(3 + draw(14));
    const std::uint64_t usual = draw(2);  // the default stream, or one that was made
    for (Layer& layer : layers) {
      layer = {draw_size(std::min(largest_, setup_.high / 3)), draw(6) == 0 ? draw(16) : usual,
               draw(6) == 0 ? 2u : 1u, draw(5) == 0, draw(1 << 16)};
    }
    const std::uint64_t disturbance = draw(3) == 0 ? 0 : 4 + draw(30);
    const std::uint64_t share = 256 + draw(768);
    for (std::uint64_t step = 2 + draw(4); step > 0; --step) {
      add(Op::EnterPool, {.bytes = share, .more = draw(8) == 0 ? draw(1 << 16) : 0});
      if (draw(8) == 0) {
        evaluate(layers);
      }
      const bool twice = draw(6) == 0;
      const bool older_first = draw(2) == 0;
      std::uint64_t handles = forward(layers, disturbance);
      const std::uint64_t second = twice ? forward(layers, disturbance) : 0;
      add(Op::LeavePool, {});
      if (second > 0 && older_first) {
        backward(handles, second, disturbance);
        handles = 0;
      }
      backward(second, 0, disturbance);
      backward(handles, 0, disturbance);
    }
  }

  std::uint64_t forward(const std::vector<Layer>& layers, std::uint64_t disturbance) {
    std::uint64_t handles = 0;
    for (const Layer& layer : layers) {
      add(Op::Allocate, {.stream = layer.stream, .bytes = layer.bytes, .more = layer.more});
      for (std::uint64_t i = 0; i < layer.saves; ++i, ++handles) {
        add(Op::Save, {.more = layer.more + i});
      }
      if (!layer.stays) {
        add(Op::Free, {});
      }
      disturb(disturbance, 0);
    }
    return handles;
  }
  // `newer` handles are left alone. Now and then it is given up half-way.
  void backward(std::uint64_t handles, std::uint64_t newer, std::uint64_t disturbance) {
    const std::uint64_t given_up = draw(8) == 0 ? draw(handles + 1) : 0;
    for (; handles > 0; --handles) {
      if (handles > given_up) {
        add(Op::Unpack, {.pick = newer, .stream = 1, .more = draw(8) == 0 ? 0u : 1u});
        add(Op::DropAlias, {.more = draw(1 << 16)});
      }
      add(Op::DropHandle, {.pick = newer, .more = draw(1 << 16)});
      disturb(disturbance, 1);
    }
  }
  void evaluate(const std::vector<Layer>& layers) {
    for (const Layer& layer : layers) {
      add(Op::Allocate, {.stream = layer.stream, .bytes = layer.bytes, .more = layer.more});
      add(Op::Free, {});
    }
  }
  void disturb(std::uint64_t one_in, std::size_t phase) {
    if (one_in != 0 && draw(one_in) == 0) {
      anything(draw(2) == 0 ? 2 : phase);
    }
  }

  const Setup setup_;
  const std::size_t length_;
  std::mt19937_64 random_;
  Bytes largest_ = 0;
  std::vector<Instruction> code_;
};

}  // namespace

Setup setup_of(std::uint64_t seed, bool torch) {
  constexpr Bytes kMemory[] = {32_MiB, 64_MiB, 256_MiB, 512_MiB};
  constexpr Bytes kHigh[] = {24_MiB, 44_MiB, 64_MiB, 88_MiB};
  Setup setup;
  setup.seed = seed;
  setup.torch = torch ? 1 : 0;
  setup.memory = torch ? (seed % 6 == 5 ? 64_MiB : 512_MiB) : kMemory[seed % 4];
  setup.high = torch ? kHigh[seed % 4] : setup.memory >> seed % 3;
  setup.devices = 1 + seed / 4 % 2;
  setup.contexts = seed / 2 % 2;
  setup.triggers = seed % 7 != 6;
  setup.expandable = seed % 3 == 1;
  setup.mem_pool = setup.triggers != 0 && seed % 5 == 4;
  setup.captures = seed / 3 % 3 == 1;
  setup.faults = seed % 3 == 0;
  setup.old_driver = seed % 11 == 10;
  setup.check_every = 16;
  return setup;
}

std::vector<Instruction> generate(const Setup& setup, std::size_t length) {
  return Generator(setup, length).run();
}

}  // namespace stagehand::fuzz
