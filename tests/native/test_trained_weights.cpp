// Weight groups that are written to, as an optimizer does: a dirty one leaves by a copy out, which
// all that comes later is behind (rule W4), under any schedule; broken on purpose, it is found.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "native/weights_rig.hpp"

namespace stagehand::core::test {
namespace {

const std::uint64_t kSeeds = stagehand::test::seeds(100);

// A step whose weights are other ones afterwards.
void train(CoreRig& rig, Model& model, driver::Stream s, Bytes saves) {
  std::vector<Held> saved;
  for (std::size_t i = 0; i < model.ids.size(); ++i) {
    rig.check(model.enter(i, s), s);
    saved.push_back(rig.retain(saves, s));
    model.leave(i);
  }
  for (std::size_t i = model.ids.size(); i-- > 0;) {
    rig.check(model.enter(i, s, UseKind::backward), s);
    rig.back(saved[i], s);
    model.leave(i);
  }
  rig.runtime->clear_budget();
  for (std::size_t i = 0; i < model.ids.size(); ++i) {
    model.step(i, s);
  }
}

// What a reader of the host finds.
void check_host(CoreRig& rig, Model& model, std::size_t i, Bytes bytes = kGroup) {
  CHECK_EQ(rig.runtime->weights_to_host(model.ids[i]), Status::ok);
  stagehand_sim_host_access(model.host(i), bytes, 0);
  std::vector<std::byte> wanted(bytes);
  stagehand_sim_pattern(wanted.data(), bytes, model.seeds[i], 0);
  CHECK_EQ(std::memcmp(wanted.data(), model.host(i), bytes), 0);
}

TEST("W4: what an optimizer wrote comes back in every budget, and is on the host when asked for") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const Bytes high : {20_MiB, 10_MiB, 8_MiB}) {
      Machine with = kMachine;
      with.seed = seed;
      CoreRig rig(with);
      rig.runtime->reset_peaks();
      {
        Model model(rig, 6);
        const driver::Stream s = rig.stream();
        for (int step = 0; step < 4; ++step) {
          rig.budget(high, high);
          train(rig, model, s, 1_MiB);
        }
        const Counters counters = rig.counters();
        CHECK_EQ(counters.overshoot_bytes, 0);
        CHECK(counters.mapped_peak <= high);
        CHECK_EQ(counters.weights_written_bytes > 0, high < 18_MiB);
        for (std::size_t i = 0; i < 6; ++i) {
          check_host(rig, model, i);
        }
      }
      rig.verify_empty();
    }
  }
}

// Forwards that leave blocks out, backwards in which some step, sampling, steps of all in any
// order, reads of the host, and all given up: with another budget in each round, or none meanwhile.
void any_program(CoreRig& rig, Model& model, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto once_in = [&](std::uint64_t times) { return random() % times == 0; };
  const driver::Stream s = rig.stream();
  std::vector<std::size_t> order(model.ids.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (int round = 0; round < 8; ++round) {
    const Bytes highs[] = {8_MiB, 9_MiB, 12_MiB, 16_MiB, 40_MiB};
    const Bytes high = highs[random() % std::size(highs)];
    rig.budget(high, high - high / 10);
    std::vector<std::pair<std::size_t, Held>> saved;
    for (std::size_t i = 0; i < model.ids.size(); ++i) {
      if (once_in(6)) {
        continue;
      }
      rig.check(model.enter(i, s), s);
      saved.emplace_back(i, rig.retain(1_MiB, s));
      model.leave(i);
    }
    const bool steps_in_backward = once_in(4);
    for (; !saved.empty(); saved.pop_back()) {
      const auto& [i, held] = saved.back();
      const Tensor tensor = model.enter(i, s, UseKind::backward);
      rig.check(tensor, s);
      rig.back(held, s);
      if (steps_in_backward) {
        model.write(i, tensor, s);
      }
      model.leave(i);
      if (once_in(12)) {
        model.step(random() % model.ids.size(), s);
      }
    }
    if (once_in(3)) {
      rig.runtime->clear_budget();
    }
    if (!once_in(4)) {
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t i : order) {
        model.step(i, s);
      }
    }
    for (std::size_t i = 0; once_in(2) && i < model.ids.size(); ++i) {
      model.run(i, s, UseKind::sampling);
    }
    if (once_in(3)) {
      check_host(rig, model, random() % model.ids.size());
    }
    if (once_in(6)) {
      rig.runtime->drop_weights();
    }
  }
  for (std::size_t i = 0; i < model.ids.size(); ++i) {
    check_host(rig, model, i);
  }
}

TEST("W4: in any program and any budget each use finds what was written last") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Machine with = kMachine;
    with.seed = seed;
    CoreRig rig(with);
    {
      Model model(rig, 6);
      any_program(rig, model, seed);
      rig.verify();
    }
    rig.verify_empty();
  }
}

TEST("a step writes each group back once, the host waits for nothing, and clean groups are free") {
  CoreRig rig(kMachine);
  Model model(rig, 8);
  const driver::Stream s = rig.stream();
  const auto pass = [&] {
    for (std::size_t i = 0; i < 8; ++i) {
      model.run(i, s);
    }
    for (std::size_t i = 8; i-- > 0;) {
      model.run(i, s, UseKind::backward);
    }
  };
  rig.budget(10_MiB, 10_MiB);
  for (int step = 0; step < 3; ++step) {
    pass();
    for (std::size_t i = 0; i < 8; ++i) {
      model.step(i, s);
    }
  }
  const Bytes waits = rig.counters().host_waits;
  const Bytes written = model.counts().counts.written_bytes;
  pass();
  pass();
  const Bytes of_pass = model.counts().counts.written_bytes - written;
  CHECK(of_pass <= 5 * kGroup);  // what was still at home
  for (std::size_t i = 0; i < 8; ++i) {
    model.step(i, s);
  }
  pass();
  CHECK(model.counts().counts.written_bytes - written <= of_pass + 8 * kGroup);
  CHECK_EQ(rig.counters().host_waits, waits);
  rig.verify();
}

TEST(
    "of groups that are needed as late the clean one leaves first, and the dirty one is copied "
    "out") {
  std::byte host[2];
  Block block;
  Standing standing;
  for (std::byte& one : host) {
    standing.at(standing.add(1, &one)).block = &block;
  }
  CHECK_EQ(standing.written_next(~Bytes{0}), kNoGroup);
  standing.at(0).dirty = 1;
  CHECK_EQ(standing.farthest(), 1u);
  CHECK_EQ(standing.written_next(~Bytes{0}), 0u);
  standing.refuse(standing.at(1));
  CHECK_EQ(standing.farthest(), 0u);
  standing.forgive();
  CHECK_EQ(standing.farthest(), 1u);
  standing.at(0).holds = 1;
  CHECK_EQ(standing.written_next(~Bytes{0}), kNoGroup);
}

TEST("only what was written goes back") {
  CoreRig rig(kMachine);
  Model model(rig, 1);
  const driver::Stream s = rig.stream();
  Tensor tensor = model.enter(0, s);
  tensor.bytes = kGroup / 4;
  tensor.seed = model.seeds[0];  // the same bytes again: the rest of the group has its own
  rig.fill(tensor, s);
  CHECK_EQ(rig.runtime->wrote_weights(model.ids[0], tensor.bytes, s), Status::ok);
  model.leave(0);
  rig.runtime->drop_weights();
  CHECK_EQ(model.counts().counts.written_bytes, kGroup / 4);
  model.run(0, s);
  rig.verify();
}

TEST("nobody writes to a group that is away") {
  CoreRig rig(kMachine);
  Model model(rig, 1);
  const driver::Stream s = rig.stream();
  CHECK_EQ(rig.runtime->wrote_weights(model.ids[0], kGroup, s), Status::stale);
  CHECK_EQ(rig.runtime->weights_to_host(model.ids[0]), Status::ok);
  model.run(0, s);
  rig.verify();
}

TEST("W4: a copy out that the driver refuses leaves the group at home, and is made the next time") {
  for (const char* call : {"cuMemcpyDtoHAsync", "cuEventRecord", "cuStreamWaitEvent"}) {
    for (std::uint64_t nth = 1; nth <= 4; ++nth) {
      CoreRig rig(kMachine);
      Model model(rig, 3);
      const driver::Stream s = rig.stream();
      const driver::Stream other = rig.stream();
      model.step(0, s);
      model.step(1, other);
      stagehand_sim_fail(call, nth, 100, 2);
      rig.runtime->drop_weights();
      const Status status = rig.runtime->weights_to_host(model.ids[0]);
      CHECK_EQ(rig.runtime->invariants_broken(), "");
      stagehand_sim_fail(call, 1, 0, 0);
      if (nth == 1) {
        CHECK(status != Status::ok || call != std::string("cuMemcpyDtoHAsync"));
      }
      rig.order(s, other);
      rig.order(other, s);
      model.run(0, s);
      model.run(1, s);
      rig.runtime->drop_weights();
      CHECK_EQ(model.counts().home, 0);
      model.run(0, other);
      model.step(1, other);
      check_host(rig, model, 0);
      check_host(rig, model, 1);
      rig.verify();
    }
  }
}

TEST("any order of uses, writes, saves and readers of the host is right, under any schedule") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Machine with = kMachine;
    with.seed = seed;
    CoreRig rig(with);
    std::uint64_t state = seed * 2654435761u + 17;
    const auto random = [&](std::uint64_t below) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      return (state >> 33) % below;
    };
    {
      Model model(rig, 6, 1_MiB);
      const std::vector<driver::Stream> streams{rig.stream(), rig.stream()};
      driver::Stream last = streams[0];
      rig.budget(9_MiB, 8_MiB);
      std::vector<Held> saved;
      for (int i = 0; i < 150; ++i) {
        const driver::Stream s = streams[random(2)];
        if (s != last) {  // as torch asks of who writes on one stream and reads on another
          rig.order(last, s);
          last = s;
        }
        switch (random(7)) {
          case 0:
          case 1:
            model.run(random(6), s, static_cast<UseKind>(random(3)));
            break;
          case 2:
          case 3:
            model.step(random(6), s);
            break;
          case 4:
            saved.push_back(rig.retain(512_KiB * (1 + random(4)), streams[0]));
            break;
          case 5:
            if (!saved.empty()) {
              rig.order(streams[0], s);
              rig.back(saved.back(), s);
              saved.pop_back();
            }
            break;
          default:
            if (random(3) == 0) {
              check_host(rig, model, random(6), 1_MiB);
            } else if (random(3) == 0) {
              rig.runtime->drop_weights();
            }
        }
        CHECK_EQ(rig.runtime->invariants_broken(), "");
      }
      rig.order(last, streams[0]);
      rig.back_all(saved, streams[0]);
    }
    rig.verify_empty();
  }
}

// Seeds under which a scenario shows wrong bytes or a hazard with the rule broken; none where kept.
template <typename Scenario>
void prove(Rule rule, Scenario scenario) {
  std::uint64_t found = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Machine with = kMachine;
    with.seed = seed;
    {
      CoreRig rig(with);
      scenario(rig);
      rig.verify();
    }
    CoreRig rig(with);
    const Planted planted(rule);
    scenario(rig);
    stagehand_sim_drain();
    const bool seen =
        stagehand_sim_hazards(STAGEHAND_SIM_ALL) > 0 || stagehand_sim_mismatches() > 0;
    found += seen ? 1 : 0;
  }
  CHECK(found >= kSeeds * 9 / 10);
}

TEST("W4: a group that leaves dirty without its copy out is found") {
  prove(Rule::W4, [](CoreRig& rig) {
    Model model(rig, 1);
    const driver::Stream s = rig.stream();
    model.step(0, s);
    rig.runtime->drop_weights();
    model.run(0, s);
  });
  CoreRig rig(kMachine);
  Model model(rig, 1);
  const driver::Stream s = rig.stream();
  model.step(0, s);
  const Planted planted(Rule::W4);
  rig.runtime->drop_weights();
  CHECK_EQ(rig.runtime->invariants_broken(),
           "W4: what was written to a weight group is neither at home nor on the host");
}

TEST("W4: a copy in that does not wait for the copy out of the same bytes is found") {
  prove(Rule::S4, [](CoreRig& rig) {
    Model model(rig, 1);
    const driver::Stream s = rig.stream();
    model.step(0, s);
    rig.runtime->drop_weights();
    const Tensor other = rig.make(2 * kGroup, s);  // its memory is another's by then
    model.run(0, s);
    rig.drop(other);
  });
}

TEST("W4: a write that does not wait for the copy out of what it overwrites is found") {
  prove(Rule::S4, [](CoreRig& rig) {
    Model model(rig, 6);
    const driver::Stream s = rig.stream();
    rig.budget(8_MiB, 8_MiB);
    model.run(2, s);
    model.step(1, s);
    model.run(3, s);  // 1 is written back meanwhile
    model.step(1, s);
    CHECK_EQ(model.counts().counts.written_bytes, kGroup);
    rig.runtime->drop_weights();
    model.run(1, s);
  });
}

TEST("W4: a copy out is behind the write, on whichever stream that was") {
  prove(Rule::S1, [](CoreRig& rig) {
    Model model(rig, 1);
    const driver::Stream s = rig.stream();
    const driver::Stream side = rig.stream();
    model.run(0, s);
    rig.order(s, side);
    model.step(0, side);
    rig.runtime->drop_weights();
    rig.order(side, s);
    model.run(0, s);
  });
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
