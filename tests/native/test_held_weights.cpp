// Weight groups where torch's own allocator cuts the blocks: modes "native" and "mempool".
#include <random>
#include <utility>
#include <vector>

#include "native/held_rig.hpp"

namespace stagehand::core::test {
namespace {

const std::uint64_t kSeeds = stagehand::test::seeds(40);
constexpr int kGroups = 6;
constexpr Bytes kGroup = 20_MiB;  // a segment of torch's each

class Model {
 public:
  explicit Model(HeldRig& rig) : rig_(rig), host_(kGroups * kGroup) {
    CHECK(rig.runtime->pin(host_.data(), host_.size()));
    const driver::Stream s = rig.stream();
    for (int i = 0; i < kGroups; ++i) {
      HeldTensor tensor{rig.torch.make(kGroup, s), kGroup, s, 900 + static_cast<std::uint64_t>(i)};
      rig.fill(tensor, s);
      const Copy copy{tensor.address(), host_.data() + static_cast<Bytes>(i) * kGroup, kGroup};
      CHECK(rig.runtime->read_out({&copy, 1}, {&s, 1}));
      rig.drop(tensor);
      ids_.push_back(rig.runtime->add_weights(kGroup, copy.host));
      seeds_.push_back(tensor.seed);
    }
    rig.runtime->presume_weights(ids_);
    rig.torch.release_cached();
  }
  ~Model() {
    for (const GroupId id : ids_) {
      rig_.runtime->remove_weights(id);
    }
    rig_.driver.host_unregister(host_.data());
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  void enter(std::size_t i, driver::Stream on, UseKind kind = UseKind::forward) {
    Address address = 0;
    CHECK_EQ(rig_.runtime->enter_weights(ids_[i], kind, on, &address), Status::ok);
    CHECK_EQ(stagehand_sim_check(on, address, kGroup, seeds_[i]), 0);
    address_ = address;
  }
  void leave(std::size_t i) { rig_.runtime->leave_weights(ids_[i]); }
  // An optimizer's step: other bytes from here on.
  void step(std::size_t i, driver::Stream on) {
    enter(i, on, UseKind::sampling);
    seeds_[i] += 1000;
    CHECK_EQ(stagehand_sim_fill(on, address_, kGroup, seeds_[i]), 0);
    CHECK_EQ(rig_.runtime->wrote_weights(ids_[i], kGroup, on), Status::ok);
    leave(i);
  }
  // A step in which each block saves so much.
  void train(driver::Stream s, Bytes saves) {
    std::vector<SavedTensor> saved;
    for (std::size_t i = 0; i < kGroups; ++i) {
      enter(i, s);
      saved.push_back(rig_.retain(saves, s));
      leave(i);
    }
    for (std::size_t i = kGroups; i-- > 0;) {
      enter(i, s, UseKind::backward);
      rig_.back(saved[i], s);
      leave(i);
    }
  }
  Runtime::WeightCounts counts() { return rig_.runtime->weight_counts(); }

 private:
  HeldRig& rig_;
  std::vector<std::byte> host_;
  std::vector<GroupId> ids_;
  std::vector<std::uint64_t> seeds_;  // of what their bytes are
  Address address_ = 0;               // of the group that was entered last
};

const Machine kMachine{.memory = 512_MiB, .classes = {{kHeldBlock}, {64}}, .host_limit = 512_MiB};

// Steps under `high` for every seed; after `learned` of them, whose sizes are known from then on,
// nothing is above it.
void stays_below(Bytes high, int steps, int learned, auto step, auto check) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Machine with = kMachine;
    with.seed = seed;
    HeldRig rig(with);
    {
      Model model(rig);
      const driver::Stream s = rig.stream();
      for (int i = 0; i < steps; ++i) {
        rig.budget(high, high - 20_MiB);
        step(rig, model, s, seed);
        rig.runtime->clear_budget();
        if (i + 1 == learned) {
          rig.runtime->reset_peaks();
        }
      }
      CHECK(rig.counters().mapped_peak <= high);
      check(rig, model);
    }
    rig.verify();
  }
}

TEST("W4: in torch's cache too each use finds what was written last, in any program and budget") {
  for (std::uint64_t seed = 0; seed < kSeeds / 4; ++seed) {
    std::mt19937_64 random(seed);
    const auto once_in = [&](std::uint64_t times) { return random() % times == 0; };
    Machine with = kMachine;
    with.seed = seed;
    HeldRig rig(with);
    {
      Model model(rig);
      const driver::Stream s = rig.stream();
      for (int round = 0; round < 6; ++round) {
        const Bytes high = (80 + 40 * (random() % 6)) * 1_MiB;
        rig.budget(high, high - 20_MiB);
        std::vector<std::pair<std::size_t, SavedTensor>> saved;
        for (std::size_t i = 0; i < kGroups; ++i) {
          if (!once_in(6)) {
            model.enter(i, s);
            saved.emplace_back(i, rig.retain(once_in(2) ? 20_MiB : 4_MiB, s));
            model.leave(i);
          }
        }
        for (; !saved.empty(); saved.pop_back()) {
          model.enter(saved.back().first, s, UseKind::backward);
          rig.back(saved.back().second, s);
          model.leave(saved.back().first);
          if (once_in(8)) {
            model.step(random() % kGroups, s);
          }
        }
        rig.runtime->clear_budget();
        for (std::size_t i = 0; round % 3 != 2 && i < kGroups; ++i) {
          model.step(i, s);
        }
      }
      rig.verify();
    }
    rig.verify();
  }
}

TEST("W10: torch's cache holds weights and records of more than the budget, and stays below it") {
  stays_below(
      160_MiB, 5, 2,
      [](HeldRig&, Model& model, driver::Stream s, std::uint64_t) { model.train(s, 20_MiB); },
      [](HeldRig&, Model& model) { CHECK(model.counts().counts.loads > kGroups); });
}

// Blocks that make and drop tensors of other sizes beside what they save, as an MLP does: holes of
// one size serve no request of another.
TEST("W10: requests of many sizes stay below the budget, whatever lies between the weights") {
  constexpr Bytes kSizes[] = {12_MiB, 36_MiB, 24_MiB, 4_MiB, 52_MiB};
  const auto train = [&](HeldRig& rig, Model& model, driver::Stream s, std::size_t size) {
    std::vector<SavedTensor> saved;
    for (std::size_t i = 0; i < kGroups; ++i) {
      model.enter(i, s);
      saved.push_back(rig.retain(kSizes[size++ % 5], s));
      const HeldTensor between = rig.make(kSizes[size++ % 5], s);
      saved.push_back(rig.retain(kSizes[size++ % 5], s));
      rig.drop(between);
      model.leave(i);
    }
    for (std::size_t i = kGroups; i-- > 0;) {
      model.enter(i, s, UseKind::backward);
      const HeldTensor gradient = rig.make(kSizes[size++ % 5], s);
      rig.back(saved[2 * i + 1], s);
      rig.back(saved[2 * i], s);
      rig.drop(gradient);
      model.leave(i);
    }
  };
  stays_below(200_MiB, 6, 3, train,
              [](HeldRig& rig, Model&) { CHECK_EQ(rig.runtime->invariants_broken(), ""); });
}

TEST(
    "W4: in torch's cache too what an optimizer wrote comes back, and without its copy it is "
    "found") {
  std::uint64_t found = 0;
  for (const Rule rule : {Rule::none, Rule::W4}) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      Machine with = kMachine;
      with.seed = seed;
      HeldRig rig(with);
      {
        Model model(rig);
        const driver::Stream s = rig.stream();
        planted_rule = rule;
        for (int i = 0; i < 3; ++i) {
          rig.budget(160_MiB, 140_MiB);
          model.train(s, 20_MiB);
          rig.runtime->clear_budget();
          for (std::size_t group = 0; group < kGroups; ++group) {
            model.step(group, s);
          }
          rig.runtime->drop_weights();
        }
        planted_rule = Rule::none;
      }
      if (rule == Rule::none) {
        rig.verify();
      }
      stagehand_sim_drain();
      const bool seen =
          stagehand_sim_hazards(STAGEHAND_SIM_ALL) > 0 || stagehand_sim_mismatches() > 0;
      found += seen && rule != Rule::none ? 1 : 0;
    }
  }
  CHECK_EQ(found, kSeeds);
}

TEST("what fits is loaded once") {
  HeldRig rig(kMachine);
  {
    Model model(rig);
    const driver::Stream s = rig.stream();
    for (int step = 0; step < 3; ++step) {
      rig.budget(400_MiB, 360_MiB);
      model.train(s, 20_MiB);
      rig.runtime->clear_budget();
    }
    CHECK_EQ(model.counts().counts.loads, kGroups);
  }
  rig.verify_empty();
}

TEST("weights keep to high between two pools") {
  HeldRig rig(kMachine);
  {
    Model model(rig);
    const driver::Stream s = rig.stream();
    rig.budget(100_MiB, 90_MiB);
    rig.runtime->clear_budget();
    rig.runtime->reset_peaks();
    for (int pass = 0; pass < 3; ++pass) {
      for (std::size_t i = 0; i < kGroups; ++i) {
        model.enter(i, s, UseKind::sampling);
        model.leave(i);
      }
    }
    CHECK(rig.counters().mapped_peak <= 100_MiB);
  }
  rig.verify_empty();
}

TEST("W7: in torch's cache too a copy in is behind the last user, and who reads behind the copy") {
  for (const Rule rule : {Rule::W7, Rule::S3}) {
    std::uint64_t hazards = 0;
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      Machine with = kMachine;
      with.seed = seed;
      HeldRig rig(with);
      Model model(rig);
      const driver::Stream s = rig.stream();
      planted_rule = rule;
      rig.budget(44_MiB, 44_MiB);
      for (std::size_t i = 0; i < kGroups; ++i) {
        model.enter(i, s);
        model.leave(i);
      }
      planted_rule = Rule::none;
      stagehand_sim_drain();
      hazards += stagehand_sim_hazards(STAGEHAND_SIM_ALL) > 0 ? 1 : 0;
    }
    CHECK(hazards >= kSeeds * 9 / 10);
  }
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
