// Steps in which what was dropped is made again, where torch's own allocator cuts the blocks.
#include <array>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "native/first_steps.hpp"
#include "native/lora_replay.hpp"
#include "native/trace_recipes.hpp"
#include "native/varying_steps.hpp"

namespace stagehand::core::test {
namespace {

// Of each layer three records: what it is given, what a product makes, and what gelu makes of that.
// Backward asks for them in the reverse order, and for so many bytes beside each.
LoraModel layers_with_gelu(const std::array<Bytes, 3>& requests) {
  constexpr std::size_t kLayers = 16;
  constexpr std::array<Bytes, 3> kRecords{32_MiB, 64_MiB, 64_MiB};
  constexpr std::array<std::uint64_t, 3> kForwardUs{800, 800, 300};
  constexpr std::array<std::uint64_t, 3> kBackwardUs{1600, 600, 1600};
  LoraModel model;
  std::uint64_t block = 0;
  std::uint64_t us = 0;
  std::uint64_t host_us = 0;
  std::vector<std::uint64_t> records;
  const auto add = [&](char kind, std::uint64_t a, std::uint64_t b) {
    model.events.push_back({kind, a, b, 0, 0});
  };
  const auto compute = [&](std::uint64_t takes) {
    us += takes;
    host_us += 100;
    add('t', us, host_us);
  };
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    const std::uint64_t first = block + 1;
    for (std::size_t i = 0; i < kRecords.size(); ++i) {
      add('a', ++block, kRecords[i]);
      add('s', block, block);
      records.push_back(block);
      compute(kForwardUs[i]);
    }
    add('f', first, 0);
    add('f', first + 1, 0);
    add('a', block + 1, kRecords[0]);
    compute(kForwardUs[0]);
    add('f', block++, 0);
    add('f', block, 0);
  }
  for (std::size_t i = records.size(); i-- > 0;) {
    const std::uint64_t record = records[i];
    add('u', record, record);
    add('a', ++block, requests[i % requests.size()]);
    compute(kBackwardUs[i % requests.size()]);
    add('f', block, 0);
    add('d', record, 0);
    add('h', record, 0);
  }
  return model;
}

// It went over in steps 5 to 8, while plans took turns: what is asked for to make another one again
// is not asked for where it was before, and what torch would want next was taken for less.
TEST("while plans are tried, what recipes ask for does not make a request unexpected") {
  constexpr std::size_t kTried = 20;
  const std::array<std::array<Bytes, 3>, 2> kinds{
      {{32_MiB, 64_MiB, 96_MiB}, {96_MiB, 16_MiB, 128_MiB}}};
  for (const std::array<Bytes, 3>& requests : kinds) {
    for (const Bytes high : {800_MiB, 900_MiB}) {
      LoraReplay<HeldTensors, NoWeights> replay(layers_with_gelu(requests), high,
                                                lora_machine(on_one_link));
      for (std::size_t step = 0; step < kTried; ++step) {
        const Bytes over = replay.step().over;
        CHECK(step < 3 || over == 0);
      }
    }
  }
}

// The 3-D U-Net of the recorded step: what relu makes in place of each batch normalization, which
// is saved twice in a row, can be made again of the record before it.
LoraModel unet_with_recipes(double ns_per_byte) {
  LoraModel model{.events = without_small(read_trace("unet3d.txt")), .expandable = true};
  struct Record {
    std::uint64_t number = 0;
    Bytes bytes = 0;
  };
  const std::map<std::uint64_t, Bytes> blocks = block_bytes(model.events);
  Record before;
  Record last;
  for (const Event& event : model.events) {
    if (event.kind != 's') {
      continue;
    }
    if (event.a != last.number) {
      before = std::exchange(last, {event.a, blocks.at(event.b)});
    } else if (before.bytes == last.bytes) {
      const auto ns = static_cast<std::uint64_t>(ns_per_byte * static_cast<double>(last.bytes));
      model.recipes[last.number] = {before.number, 1 + ns};
    }
  }
  return model;
}

struct Unet : LoraReplay<HeldTensors, NoWeights> {
  explicit Unet(double share) : Unet(share, model()) {}
  Unet(double share, const LoraModel& model) : LoraReplay(model, high(share), lora_machine()) {}

 private:
  static const LoraModel& model() {
    static const LoraModel all = unet_with_recipes(1.4e-3);
    return all;
  }
  static Bytes high(double share) {
    static const Use use = measured<HeldSide>("unet3d.txt");
    return others() + static_cast<Bytes>(share * static_cast<double>(use.peak - use.start));
  }
};

// Steps after so many, of plain, where the program empties the cache every 12 steps.
double unet_of_plain(double share, int after) {
  constexpr int kEmptied = 12;
  constexpr int kCounted = 12;
  Unet replay(share);
  for (int i = 0; i < after; ++i) {
    if (i % kEmptied == 0) {
      replay.empty_cache();
    }
    replay.step();
  }
  return settled_of_plain(replay, settled_steps(replay, 0, kCounted));
}

// 1.11 where it is dropped at once: whatever comes next takes its place, and breaks up what a
// larger request could have had.
TEST("3-D U-Net: what is dropped stays until its place is needed, where trials say so") {
  std::vector<double> took;
  for (const double share : {0.68, 0.7, 0.73, 0.74, 0.75}) {
    took.push_back(unet_of_plain(share, 76));
  }
  CHECK(median(took) <= 1.06);
}

// 1.45, 1.22: each emptied cache is broken up anew, and what is settled on in between may not fit.
TEST("3-D U-Net: plans are tried anew where a settled one costs far more than when it was tried") {
  CHECK(unet_of_plain(0.56, 256) <= 1.35);
  CHECK(unet_of_plain(0.785, 256) <= 1.1);
}

// The host is a step ahead, as in most programs. 1.10 where holes that other plans' steps lacked
// are set aside in this one's, 1.12 where requests that crowded those are minded, and 1.09 where
// the cache stays as they cut it.
TEST("3-D U-Net: once it is settled on, a plan takes what it took when it was tried") {
  const std::array<double, 8> shares = {0.64, 0.65, 0.66, 0.7, 0.72, 0.74, 0.76, 0.77};
  double sum = 0;
  for (const double share : shares) {
    Unet replay(share);
    sum += replay.ahead_ms(60, 12) / replay.plain_ms();
  }
  CHECK(sum / shares.size() <= 1.075);
}

// Each time by up to a tenth more or less, which is another one for each seed.
LoraModel with_other_times(LoraModel model, unsigned seed) {
  std::mt19937 random(seed);
  std::uint64_t before = 0;
  double us = 0;
  for (Event& event : model.events) {
    if (event.kind == 't') {
      const double part = static_cast<double>(random()) / static_cast<double>(random.max());
      us += (0.9 + 0.2 * part) * static_cast<double>(event.a - std::exchange(before, event.a));
      event.a = static_cast<std::uint64_t>(us);
    }
  }
  return model;
}

// Making again takes what it does on an H200. 1.10 where one that drops late is tried only if what
// is forecast explains less than half of what steps spend.
TEST("3-D U-Net: which plan trials end with does not hang on what a tenth of computing takes") {
  const std::array<double, 3> shares = {0.71, 0.73, 0.74};
  constexpr unsigned kSeeds = 4;
  const LoraModel recorded = unet_with_recipes(3.1e-3);
  double sum = 0;
  for (const double share : shares) {
    for (unsigned seed = 0; seed < kSeeds; ++seed) {
      Unet replay(share, with_other_times(recorded, seed));
      sum += replay.ahead_ms(60, 12) / replay.plain_ms();
    }
  }
  CHECK(sum / (shares.size() * kSeeds) <= 1.065);
}

// As the last test has it, with a loss whose memory is as large as the batch. 1.16 where it lies
// among what the next step saves.
TEST("3-D U-Net: a loss that is kept until the next one is there does not change what steps take") {
  LoraModel model = unet_with_recipes(3.1e-3);
  model.kept = 3'538'944;
  std::vector<double> took;
  for (const double share : {0.68, 0.71, 0.74}) {
    for (unsigned seed = 0; seed < 3; ++seed) {
      Unet replay(share, with_other_times(model, seed));
      took.push_back(replay.ahead_ms(60, 12) / replay.plain_ms());
    }
  }
  CHECK(median(took) <= 1.065);
}

// Those in which it took 1.13 to 1.48 where that was tried only as the best plan before it dropped.
TEST("3-D U-Net: what moves least is tried dropping late, whatever the best before it did") {
  LoraModel model = unet_with_recipes(3.1e-3);
  model.kept = 3'538'944;
  const std::vector<std::pair<double, std::vector<unsigned>>> runs = {
      {0.68, {0, 2, 5}}, {0.74, {3}}, {0.76, {1, 3, 7}}};
  for (const auto& [share, seeds] : runs) {
    for (const unsigned seed : seeds) {
      Unet replay(share, with_other_times(model, seed));
      CHECK(replay.ahead_ms(60, 12) <= 1.09 * replay.plain_ms());
    }
  }
}

// 1.44 where a page less is mapped then than when the plan was tried.
TEST("3-D U-Net: after the program has emptied the cache a settled plan takes what it took") {
  for (const double share : {0.73, 0.79}) {
    Unet replay(share);
    const double settled = replay.ahead_ms(76, 7);
    for (int turn = 0; turn < 3; ++turn) {
      replay.empty_cache();
      CHECK(replay.ahead_ms(1, 7) <= 1.04 * settled);
    }
  }
}

// FSDP2's recorded step, on a link that is slower by a fifth: gelu's outputs can be made again, and
// gradients are in memory of the stream that computes (integrations/fsdp2).
LoraModel fsdp2_with_recipes() {
  constexpr double kLink = 0.8;
  constexpr Bytes kLargest = 240_MiB;  // of each block what gelu is given, and then what it makes
  LoraModel model{.events = without_small(read_trace("fsdp2.txt")), .expandable = true};
  const std::map<std::uint64_t, Bytes> blocks = block_bytes(model.events);
  std::vector<std::uint64_t> largest;
  for (Event& event : model.events) {
    if (event.kind == 't') {
      event.a = static_cast<std::uint64_t>(kLink * static_cast<double>(event.a));
    } else if (event.kind == 'a' && event.first == 2) {
      event.first = 0;
    } else if (event.kind == 's' && blocks.at(event.b) == kLargest &&
               (largest.empty() || largest.back() != event.a)) {
      largest.push_back(event.a);
    }
  }
  for (std::size_t i = 0; i + 1 < largest.size(); i += 2) {
    model.recipes[largest[i + 1]] = {largest[i], 226'492};
  }
  return model;
}

template <class Replay>
Bytes peak_of(const LoraModel& model) {
  Replay plain(model, 96_GiB, lora_machine());
  plain.step();
  plain.step();
  return plain.counters().occupied_peak;
}

// 1.08, and 1.17 on two GPUs, where what moves least is tried dropping late alone: here
// each place that is dropped is as large as what is asked for next.
TEST("FSDP2: what moves least is tried dropping at once, too") {
  using Fsdp2 = LoraReplay<HeldTensors, NoWeights>;
  const LoraModel recorded = fsdp2_with_recipes();
  const auto activations = static_cast<double>(peak_of<Fsdp2>(recorded) - Fsdp2::others());
  const Bytes high = Fsdp2::others() + static_cast<Bytes>(0.79 * activations);
  for (const LoraModel& model :
       {recorded, with_other_times(recorded, 1), with_other_times(recorded, 3)}) {
    Fsdp2 replay(model, high, lora_machine());
    CHECK(replay.ahead_ms(104, 12) <= 1.04 * replay.plain_ms());
  }
}

// As steps without a pool have, whose gradients are reduced in memory of another stream. 1.17 where
// that passes for what steps in the pool need there.
TEST(
    "FSDP2: after steps outside of pools, that had more on another stream, steps take what they "
    "took") {
  using Fsdp2 = LoraReplay<HeldTensors, NoWeights>;
  const LoraModel recorded = fsdp2_with_recipes();
  const auto activations = static_cast<double>(peak_of<Fsdp2>(recorded) - Fsdp2::others());
  Fsdp2 replay(recorded, Fsdp2::others() + static_cast<Bytes>(0.8 * activations), lora_machine());
  replay.set_ranks();
  CHECK(replay.ahead_ms(24, 8) <= 1.03 * replay.plain_ms());
  for (int turn = 0; turn < 2; ++turn) {
    replay.empty_cache();
    replay.take_between(1, 3_GiB);
    replay.empty_cache();
    CHECK(replay.ahead_ms(4, 8) <= 1.03 * replay.plain_ms());
  }
}

// Each step takes so many times as long.
LoraModel held_up(LoraModel model, double times) {
  for (Event& event : model.events) {
    if (event.kind == 't') {
      event.a = static_cast<std::uint64_t>(times * static_cast<double>(event.a));
    }
  }
  return model;
}

// What is known to be made again, each of its first input.
LoraModel with_recipes(LoraModel model, const std::map<std::uint64_t, Known>& recipes) {
  for (const auto& [record, how] : recipes) {
    model.recipes[record] = {how.inputs.front(), how.ns};
  }
  return model;
}

// Ten small requests before that event, kept until the step ends: of a logger, or of looks at what
// is dropped.
LoraModel with_small_requests(LoraModel model, std::size_t before) {
  constexpr std::uint64_t kFirst = 1 << 30;  // of their blocks
  for (std::uint64_t block = kFirst; block < kFirst + 10; ++block) {
    const auto at = model.events.begin() + static_cast<std::ptrdiff_t>(before);
    model.events.insert(at, {'a', block, 400'000, 0, 0});
    model.events.push_back({'f', block, 0, 0, 0});
  }
  return model;
}

// 29 to 91 waits for the GPU in such a step, without expandable segments, where a small request
// made room for the large one that was to come next, too; two with.
TEST("ViT: small requests that no step made before give nothing back, and nothing waits for them") {
  using Vit = LoraReplay<HeldTensors, NoWeights>;
  LoraModel model = with_recipes({.events = read_trace("vit.txt")}, recipes_of("vit.txt"));
  const auto activations = static_cast<double>(peak_of<Vit>(model) - Vit::others());
  for (const bool expandable : {false, true}) {
    model.expandable = expandable;
    for (const std::size_t part : {10, 13, 14, 15}) {
      Vit replay(model, Vit::others() + static_cast<Bytes>(0.75 * activations), lora_machine());
      for (int i = 0; i < 30; ++i) {
        replay.step();
      }
      const Counters before = replay.counters();
      replay.follow(with_small_requests(model, part * model.events.size() / 32));
      CHECK_EQ(replay.step().over, 0);
      replay.step();
      CHECK_EQ(replay.counters().host_waits, before.host_waits);
    }
  }
}

// 1.06 on average, 1.19 at most, where each plan is tried as without ranks: in a step that the
// others hold up all copies have the time they need.
TEST("FSDP2: what a rank settles on does not hang on how the others' trials hold it up") {
  using Fsdp2 = LoraReplay<HeldTensors, NoWeights>;
  const LoraModel recorded = fsdp2_with_recipes();
  const auto activations = static_cast<double>(peak_of<Fsdp2>(recorded) - Fsdp2::others());
  // Of a rank on an H200: what each of its steps took, of plain, until it had tried all.
  constexpr std::array<double, 38> kOthers = {
      1.61, 2.03, 1.16, 1.76, 1.56, 1.15, 1.13, 1.09, 1.28, 1.07, 1.69, 1.26, 1.31,
      1.17, 1.15, 1.15, 1.14, 1.49, 1.10, 1.10, 1.19, 1.18, 1.13, 1.13, 1.08, 1.37,
      1.15, 1.15, 1.16, 1.36, 1.15, 1.16, 1.15, 1.41, 1.11, 1.11, 1.05, 1.40};
  for (const double share : {0.79, 0.8, 0.81}) {
    for (const int shift : {-3, 0, 2}) {
      Fsdp2 replay(recorded, Fsdp2::others() + static_cast<Bytes>(share * activations),
                   lora_machine());
      replay.set_ranks();
      const double plain = replay.plain_ms();
      const double took = replay.ahead_ms(64, 12, [&](int step) {
        const auto at = static_cast<std::size_t>(std::max(0, step + shift));
        replay.follow(at < kOthers.size() ? held_up(recorded, kOthers[at]) : recorded);
      });
      CHECK(took <= 1.03 * plain);
    }
  }
}

// Experts, of other sizes in each step, whose activations can be made again.
LoraModel experts_with_recipes(std::uint64_t number) {
  std::map<std::uint64_t, Known> known;
  std::vector<Event> events = experts_step(number, 0.04, false, &known);
  return with_recipes({.events = std::move(events), .expandable = true}, known);
}

// 1.25 where all moves, 1.23 where what is dropped stays until its place is needed: what comes next
// fills the holes, where else they are in between what stays.
TEST("experts: what comes again bit by bit is dropped at once in steps of other sizes") {
  using Experts = LoraReplay<HeldTensors, NoWeights>;
  constexpr std::uint64_t kLearning = 12;
  std::vector<double> took;
  for (const double share : {0.7, 0.75, 0.8}) {
    Experts replay(experts_with_recipes(0), 96_GiB, lora_machine());
    replay.step();
    const Bytes peak = replay.counters().occupied_peak;
    const auto activations = static_cast<double>(peak - Experts::others());
    replay.set_high(Experts::others() + static_cast<Bytes>(share * activations));
    for (std::uint64_t number = 1; number < 32; ++number) {
      replay.follow(experts_with_recipes(number));
      const LoraStep step = replay.step();
      CHECK_EQ(step.over, 0);
      if (number >= kLearning) {
        took.push_back(step.ms / replay.plain_ms());
      }
    }
  }
  CHECK(median(took) <= 1.035);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
