// The recorded LoRA steps as models: their lines, and how large each block's weights are.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "native/trace.hpp"

namespace stagehand::core::test {

// A block goes forward, or comes back in backward; times as recorded, without any budget.
struct BlockUse {
  std::size_t block = 0;
  double begin_us = 0;
  double us = 0;
};

// A recorded step of benchmarks/weights.py (benchmarks/record_trace.py), whose lines of kind e are
// blocks: 0 entered, 1 left, 2 entered by backward.
struct LoraModel {
  static constexpr std::size_t kBlocks = 12;
  static constexpr Bytes kBlock = 402'718'720;
  struct Recipe {
    std::uint64_t of = 0;  // a record
    std::uint64_t ns = 0;
  };

  std::vector<Event> events;
  std::vector<Bytes> groups = std::vector<Bytes>(kBlocks, kBlock);
  std::map<std::uint64_t, Recipe> recipes{};  // of records; empty: what gelu makes
  bool expandable = false;                    // torch's segments
  // What the last of forward makes, and the program keeps until the next step's is there.
  Bytes kept = 0;

  double plain_us() const {
    const auto last = std::find_if(events.rbegin(), events.rend(),
                                   [](const Event& event) { return event.kind == 't'; });
    return static_cast<double>(last->a);
  }
  std::vector<BlockUse> uses() const {
    std::vector<BlockUse> found;
    double now = 0;
    const auto end = [&] {
      if (!found.empty() && found.back().us == 0) {
        found.back().us = now - found.back().begin_us;
      }
    };
    for (const Event& event : events) {
      now = event.kind == 't' ? static_cast<double>(event.a) : now;
      if (event.kind == 'e') {
        end();
        if (event.b != 1) {
          found.push_back({event.a, now, 0});
        }
      }
    }
    end();
    return found;
  }
};

inline LoraModel equal_blocks(const std::string& trace) { return {read_trace(trace)}; }

// Moves the times of a step's lines of kind t, told in order: the stretch before each takes so many
// times as long.
inline auto stretching() {
  return [us = 0.0, before = std::uint64_t{0}](Event& event, double factor) mutable {
    us += factor * static_cast<double>(event.a - std::exchange(before, event.a));
    event.a = static_cast<std::uint64_t>(std::llround(us));
  };
}

// Made of a recorded one, not recorded: backward takes as long as torch's deterministic algorithms
// make it take on an H200, and flash attention's has an accumulator for each of the five parts that
// 132 multiprocessors give 32 heads. benchmarks/weights.py runs so.
inline LoraModel deterministic_blocks(const std::string& trace) {
  constexpr double kSlower = 1.75;
  constexpr Bytes kParts = 5;
  constexpr Bytes kAccumulator = 135'266'560;
  LoraModel model{read_trace(trace)};
  double factor = 1;
  auto stretch = stretching();
  for (Event& event : model.events) {
    if (event.kind == 'a' && event.b == kAccumulator) {
      event.b *= kParts;
    } else if (event.kind == 'e' && event.b == 2) {
      factor = kSlower;
    } else if (event.kind == 't') {
      stretch(event, factor);
    }
  }
  return model;
}

// Not recorded: 48 blocks of 393 M parameters under checkpoints, as benchmarks/weights.py runs them
// on an H200. Each saves what it was given, and computes beside 220 MB.
inline LoraModel checkpointed_blocks() {
  constexpr std::size_t kBlocks = 48;
  constexpr Bytes kGiven = 8'000'000;
  constexpr Bytes kTemporary = 220'000'000;
  constexpr std::uint64_t kForwardUs = 1740;
  constexpr std::uint64_t kBackwardUs = 4390;
  constexpr std::uint64_t kHostUs = 300;
  LoraModel model;
  model.groups.assign(kBlocks, 786'472'960);
  std::uint64_t us = 0;
  std::uint64_t host_us = 0;
  std::uint64_t last = kBlocks;  // number of a block of memory
  const auto add = [&](char kind, std::uint64_t a, std::uint64_t b) {
    model.events.push_back({kind, a, b, 0, 0});
  };
  const auto compute = [&](std::uint64_t takes) {
    add('a', ++last, kTemporary);
    us += takes;
    host_us += kHostUs;
    add('t', us, host_us);
    add('f', last, 0);
  };
  for (std::size_t block = 0; block < kBlocks; ++block) {
    add('e', block, 0);
    add('a', block, kGiven);
    add('s', block, block);
    compute(kForwardUs);
    add('f', block, 0);
    add('e', block, 1);
  }
  for (std::size_t block = kBlocks; block-- > 0;) {
    add('e', block, 2);
    add('u', block, block);
    compute(kBackwardUs);
    add('d', block, 0);
    add('h', block, 0);
  }
  return model;
}

// Made of a recorded one, not recorded: as much weight and as much computing in all, but each third
// block has three times the weights of the others and takes a third of their time, as where a model
// has blocks of several kinds. What each saves stays.
inline LoraModel unequal_blocks(const std::string& trace) {
  constexpr double kTimes = 3;
  constexpr double kLarge = LoraModel::kBlocks / 3.0;
  constexpr double kSmall = LoraModel::kBlocks - kLarge;
  LoraModel model{read_trace(trace)};
  const auto large = [](std::size_t block) { return block % 3 == 1; };
  const double bytes = LoraModel::kBlock * LoraModel::kBlocks / (kSmall + kTimes * kLarge);
  const double slower = LoraModel::kBlocks / (kSmall + kLarge / kTimes);
  for (std::size_t block = 0; block < LoraModel::kBlocks; ++block) {
    model.groups[block] = static_cast<Bytes>(bytes * (large(block) ? kTimes : 1)) / 512 * 512;
  }
  double factor = 1;
  auto stretch = stretching();
  for (Event& event : model.events) {
    if (event.kind == 'e') {
      factor = event.b == 1 ? 1 : slower / (large(event.a) ? kTimes : 1);
    } else if (event.kind == 't') {
      stretch(event, factor);
    }
  }
  return model;
}

}  // namespace stagehand::core::test
