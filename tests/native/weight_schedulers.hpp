// MagiCompiler's three schedulers, for a step of training: which blocks' weights stay, and where in
// the step each copy in begins. Pure, from what was measured of the step: they know all of it.
//
// Theirs are for inference, where each module is used once. Here a step is a row of uses, each
// block twice; what stays does so for the whole step, and what does not leaves behind each of its
// uses, unless the next one's copy has begun by then. They take a ratio of weights to keep; here it
// is a number of blocks, to be tried.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "native/lora_model.hpp"

namespace stagehand::core::test {

struct Schedule {
  std::vector<bool> stays;  // by block
  LoraModel model;          // with lines "w USE" where a copy begins
};

// What they plan by.
class Measured {
 public:
  explicit Measured(const LoraModel& model) : model_(model), uses_(model.uses()) {}

  const LoraModel& model() const { return model_; }
  std::size_t count() const { return uses_.size(); }
  std::size_t block(std::size_t use) const { return uses_[use % count()].block; }
  // The uses of later steps too.
  double begins(std::size_t use) const {
    return static_cast<double>(use / count()) * model_.plain_us() + uses_[use % count()].begin_us;
  }
  // With their safety factor, and their margin.
  double copy_us(std::size_t use) const {
    constexpr double kSafe = 0.9;
    constexpr double kMarginUs = 100;
    return static_cast<double>(model_.groups[block(use)]) * 1e6 / (kSafe * kBytesPerS) + kMarginUs;
  }
  double computes_us(std::size_t block) const {
    double us = 0;
    for (const BlockUse& use : uses_) {
      us += use.block == block ? use.us : 0;
    }
    return us;
  }
  // Of those uses whose copies are needed: not of what stays, or is there still.
  std::vector<std::size_t> copied(const std::vector<bool>& stays, std::size_t steps) const {
    std::vector<std::size_t> found;
    for (std::size_t use = 1; use < steps * count(); ++use) {
      if (!stays[block(use)] && block(use) != block(use - 1)) {
        found.push_back(use);
      }
    }
    return found;
  }

 private:
  const LoraModel& model_;
  std::vector<BlockUse> uses_;
};

// A copy begins at a time of the step as measured; those of a use of the next step too.
struct CopyStart {
  double us = 0;
  std::size_t use = 0;
};

// Puts them into the step: behind all that had happened by then.
inline LoraModel with_starts(const LoraModel& model, std::vector<CopyStart> starts) {
  std::sort(starts.begin(), starts.end(), [](const CopyStart& a, const CopyStart& b) {
    return std::pair(a.us, a.use) < std::pair(b.us, b.use);
  });
  std::vector<Event> events;
  Event before{'t'};
  auto next = starts.begin();
  for (const Event& event : model.events) {
    for (; event.kind == 't' && next != starts.end() && next->us < static_cast<double>(event.a);
         ++next) {
      const auto us = std::max(before.a, static_cast<std::uint64_t>(next->us));
      const std::uint64_t host =
          before.b + (event.b - before.b) * (us - before.a) / (event.a - before.a);
      events.push_back({'t', us, host});
      events.push_back({'w', next->use});
    }
    before = event.kind == 't' ? event : before;
    events.push_back(event);
  }
  return {events, model.groups};
}

// A fixed window: with each use the copies of the next few begin.
inline std::vector<CopyStart> window(const Measured& step, std::size_t ahead) {
  std::vector<CopyStart> starts;
  for (std::size_t use = 0; use < step.count(); ++use) {
    for (std::size_t i = 1; i <= ahead; ++i) {
      starts.push_back({step.begins(use), use + i});
    }
  }
  return starts;
}

// BaseScheduler: a window, and nothing stays.
inline Schedule base(const LoraModel& model, std::size_t ahead) {
  return {std::vector<bool>(model.groups.size()),
          with_starts(model, window(Measured(model), ahead))};
}

// CostEffectiveScheduler: a window; those that compute least for their bytes stay.
inline Schedule cost_effective(const LoraModel& model, std::size_t keep, std::size_t ahead) {
  const Measured step(model);
  std::vector<std::pair<double, std::size_t>> by_ratio;
  for (std::size_t block = 0; block < model.groups.size(); ++block) {
    by_ratio.emplace_back(step.computes_us(block) / static_cast<double>(model.groups[block]),
                          block);
  }
  std::sort(by_ratio.begin(), by_ratio.end());
  std::vector<bool> stays(model.groups.size());
  for (std::size_t i = 0; i < keep; ++i) {
    stays[by_ratio[i].second] = true;
  }
  return {stays, with_starts(model, window(step, ahead))};
}

// HeuristicScheduler: those stay whose copies computing covers least, between the copied use before
// and theirs; and each copy begins as late as it can be there in time, one behind the other, but
// not before the use that is `ahead` copies earlier. (Theirs begins with all that is not covered
// and gives the best covered up until the rest fits.)
inline Schedule heuristic(const LoraModel& model, std::size_t keep, std::size_t ahead) {
  const Measured step(model);
  std::vector<bool> stays(model.groups.size());
  for (std::size_t i = 0; i < keep; ++i) {
    const std::vector<std::size_t> copied = step.copied(stays, 3);
    std::vector<double> covered(model.groups.size(), 1e9);
    for (std::size_t k = 1; k < copied.size(); ++k) {
      const double us = step.begins(copied[k]) - step.begins(copied[k - 1]);
      double& least = covered[step.block(copied[k])];
      least = std::min(least, us / step.copy_us(copied[k]));
    }
    const auto least = std::min_element(covered.begin(), covered.end()) - covered.begin();
    stays[static_cast<std::size_t>(least)] = true;
  }
  const std::vector<std::size_t> copied = step.copied(stays, 3);
  std::vector<CopyStart> starts;
  const double step_us = model.plain_us();
  double behind = step.begins(3 * step.count());
  for (std::size_t k = copied.size(); k-- > ahead;) {
    const double latest = std::min(behind, step.begins(copied[k])) - step.copy_us(copied[k]);
    behind = std::max(latest, step.begins(copied[k - ahead]));
    if (behind >= step_us && behind < 2 * step_us) {
      starts.push_back({behind - step_us, copied[k] - step.count()});
    }
  }
  for (std::size_t use = 0; use < step.count(); ++use) {
    if (step.block(use) == step.block(use + 1)) {
      starts.push_back({step.begins(use), use + 1});  // it does not leave in between
    }
  }
  return {stays, with_starts(model, starts)};
}

}  // namespace stagehand::core::test
