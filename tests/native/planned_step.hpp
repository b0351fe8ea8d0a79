// Steps that go like the one before: 96 tensors of 1 MiB are saved, of which about 40 do not fit.
// Also what the engine asks of the driver in them, for promises and for benchmarks/native.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "native/held_rig.hpp"

namespace stagehand::core::test {

inline constexpr int kPlannedLayers = 96;
inline constexpr Bytes kPlannedHigh = 62_MiB;
inline constexpr Bytes kPlannedLow = 58_MiB;
inline constexpr Bytes kHeldSmall = 24_MiB;  // what torch has beside for segments of small blocks
inline constexpr Bytes kHeldLayer = 1_MiB + 512;  // the least that torch puts into large segments
inline const Machine kPlannedMachine{
    .memory = 1_GiB, .classes = {{1_MiB, 4_MiB}, {128, 8}}, .host_limit = 512_MiB};

inline void planned_step(CoreRig& rig, driver::Stream s) {
  rig.budget(kPlannedHigh, kPlannedLow);
  std::vector<Held> saved;
  for (int layer = 0; layer < kPlannedLayers; ++layer) {
    saved.push_back(rig.retain(1_MiB, s));
    rig.drop(rig.make(1_MiB, s));
  }
  rig.runtime->clear_budget();
  for (; !saved.empty(); saved.pop_back()) {
    const Unpacked again = rig.unpack(saved.back(), s);
    rig.drop(rig.make(1_MiB, s));
    rig.runtime->drop_alias(again.block);
    rig.runtime->drop_handle(saved.back().record);
  }
}

inline void planned_step(HeldRig& rig, driver::Stream s) {
  rig.budget(kPlannedHigh + kHeldSmall, kPlannedLow + kHeldSmall);
  std::vector<SavedTensor> saved;
  for (int layer = 0; layer < kPlannedLayers; ++layer) {
    saved.push_back(rig.retain(kHeldLayer, s));
    rig.drop(rig.make(kHeldLayer, s));
  }
  rig.runtime->clear_budget();
  for (; !saved.empty(); saved.pop_back()) {
    const HeldTensor again = rig.unpack(saved.back(), s);
    rig.drop(rig.make(kHeldLayer, s));
    rig.drop_handle(saved.back());
    rig.drop(again);
  }
}

// All that a copy costs beside the copy itself.
inline constexpr std::array kOrderingCalls{"cuEventRecord", "cuStreamWaitEvent", "cuEventQuery",
                                           "cuStreamIsCapturing"};

struct PlannedCalls {
  double evicted_a_step = 0;
  std::array<double, kOrderingCalls.size()> each{};  // a tensor that left and came back, by kind

  double sum() const {
    double all = 0;
    for (const double one : each) {
      all += one;
    }
    return all;
  }
};

// In steps that have been learned.
template <typename Rig>
PlannedCalls planned_calls(Rig& rig) {
  constexpr int kLearning = 5;
  constexpr int kSteps = 10;
  const driver::Stream s = rig.stream();
  const auto steps = [&](int count) {
    for (int i = 0; i < count; ++i) {
      planned_step(rig, s);
      stagehand_sim_drain();
    }
  };
  steps(kLearning);
  const Counters was = rig.counters();
  std::array<std::uint64_t, kOrderingCalls.size()> before{};
  for (std::size_t i = 0; i < before.size(); ++i) {
    before[i] = stagehand_sim_call_count(kOrderingCalls[i]);
  }
  steps(kSteps);
  const Counters now = rig.counters();
  const auto left = static_cast<double>(now.clean_evictions + now.dirty_evictions -
                                        was.clean_evictions - was.dirty_evictions);
  PlannedCalls found;
  found.evicted_a_step = left / kSteps;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const std::uint64_t made = stagehand_sim_call_count(kOrderingCalls[i]) - before[i];
    found.each[i] = static_cast<double>(made) / left;
  }
  return found;
}

}  // namespace stagehand::core::test
