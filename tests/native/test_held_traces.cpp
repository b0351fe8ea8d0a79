// Recorded training steps (trace.hpp), replayed where torch's own allocator cuts the blocks.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "native/first_steps.hpp"
#include "native/heap_replay.hpp"
#include "native/held_replay.hpp"
#include "native/lora_replay.hpp"
#include "native/optimizer_sizes.hpp"
#include "native/varying_steps.hpp"

namespace stagehand::core::test {
namespace {

// The U-Net's of tests/gpu: its larger weights, and its batch.
constexpr std::array<Bytes, 11> kWeights{2304_KiB, 2304_KiB, 2304_KiB, 1152_KiB, 1152_KiB, 576_KiB,
                                         576_KiB,  576_KiB,  576_KiB,  576_KiB,  576_KiB};
constexpr Bytes kBatch = 12_MiB;

// A training as tests/gpu/trainer.py does it: a batch, forward inside the budget, backward, and
// after the first step the optimizer's two moments of each weight.
class Training {
 public:
  Training() { make_weights(); }

  HeldRig& rig() { return replay_.rig(); }

  // Returns the bytes by which torch went over `high`.
  Bytes step(Bytes high, Bytes low) {
    replay_.drop_rest();
    const std::array<Storage*, 2> batch{replay_.make(kBatch), replay_.make(kBatch)};
    const Bytes before = rig().counters().overshoot_bytes;
    replay_.step(high, low);
    for (Storage* one : batch) {
      rig().torch.drop(one);
    }
    if (++steps_ == 1) {
      make_weights();
      make_weights();
    }
    return rig().counters().overshoot_bytes - before;
  }

  void end() {
    replay_.drop_rest();
    for (Storage* one : weights_) {
      rig().torch.drop(one);
    }
    stagehand_sim_drain();
    rig().verify_empty();
  }

 private:
  void make_weights() {
    for (const Bytes bytes : kWeights) {
      weights_.push_back(replay_.make(bytes));
    }
  }

  HeldReplay replay_{"unet.txt", false};
  int steps_ = 0;
  std::vector<Storage*> weights_;
};

// 40 % of its activation memory, with requests of a fifth of that and 730 MiB live between them:
// near what torch's cache can be held to. Decision 11 says how often steps still go over at other
// budgets there.
void expect_planned_steps_below_high(bool tells) {
  Training training;
  training.rig().torch.tells = tells;
  const Bytes high = 1856_MiB;
  const Bytes low = high - 450_MiB;
  CHECK_EQ(training.step(high, low) == 0, tells);  // it learns the requests' sizes else
  for (int i = 0; i < 12; ++i) {
    CHECK_EQ(training.step(high, low), 0);
    CHECK_EQ(training.rig().runtime->plan_state(), PlanState::following);
  }
  training.end();
}

TEST("U-Net: blocks that stay break up torch's cache, and no planned step goes over high") {
  expect_planned_steps_below_high(true);
}

TEST("U-Net: likewise where torch does not tell how much a request asks for") {
  expect_planned_steps_below_high(false);
}

// Expandable segments -----------------------------------------------------------------------------

std::uint64_t mapping_calls() {
  std::uint64_t all = 0;
  for (const char* symbol : {"cuMemMap", "cuMemSetAccess", "cuMemUnmap"}) {
    all += stagehand_sim_call_count(symbol);
  }
  return all;
}

// Three steps without pressure, and 24 at each share of the activations: after so many no page is
// mapped or unmapped, and none but the first goes over.
void expect_nothing_mapped(const std::vector<Event>& events, const std::vector<double>& shares,
                           int learning) {
  constexpr int kSteps = 24;
  for (const double share : shares) {
    Machine machine = replay_machine();
    machine.host_limit = 40_GiB;
    HeldReplay replay(events, true, machine);
    std::vector<Storage*> others;
    for (Bytes at = 0; at < kOthers; at += 32_MiB) {
      others.push_back(replay.make(32_MiB));
    }
    Counters counters;
    for (int i = 0; i < 3; ++i) {
      counters = replay.whole_step(60_GiB, 59_GiB);
    }
    const auto activations = static_cast<double>(counters.occupied_peak - kOthers);
    const Bytes high = kOthers + static_cast<Bytes>(share * activations);
    const Bytes low = high - static_cast<Bytes>(activations / 10);
    Bytes over = 0;
    for (int i = 0; i < kSteps; ++i) {
      const std::uint64_t calls = mapping_calls();
      counters = replay.whole_step(high, low);
      CHECK(i == 0 || counters.overshoot_bytes == over);
      over = counters.overshoot_bytes;
      CHECK(i < learning || mapping_calls() == calls);
    }
    replay.drop_rest();
    for (Storage* one : others) {
      replay.rig().torch.drop(one);
    }
    stagehand_sim_drain();
    replay.rig().verify_empty();
  }
}

// Few tensors, each up to a third of what the budget leaves beside live memory: blocks of torch's
// own break up the last stretch that would have held the next one.
TEST("3-D U-Net: holes are made before their requests come, and a learned native step maps none") {
  expect_nothing_mapped(without_small(read_trace("unet3d.txt")), {0.9, 0.85, 0.8, 0.75}, 16);
}

// Steps at a share of the activations, of one without a budget: in turn, once the plan has settled.
class SettledUNet {
 public:
  explicit SettledUNet(double share) {
    replay_.whole_step(60_GiB, 59_GiB);
    plain_ns_ = timed(60_GiB, 59_GiB);
    const auto activations = static_cast<double>(replay_.rig().counters().occupied_peak);
    high_ = static_cast<Bytes>(share * activations);
    low_ = high_ - static_cast<Bytes>(activations / 10);
    steps(24);
  }
  ~SettledUNet() {
    replay_.drop_rest();
    replay_.rig().verify_empty();
  }
  SettledUNet(const SettledUNet&) = delete;
  SettledUNet& operator=(const SettledUNet&) = delete;

  double steps(int count) {
    std::vector<double> took;
    for (int i = 0; i < count; ++i) {
      took.push_back(timed(high_, low_) / plain_ns_);
    }
    return median(took);
  }
  void empty_cache() {
    replay_.drop_rest();
    replay_.rig().torch.release_cached();
  }

 private:
  double timed(Bytes high, Bytes low) {
    const std::uint64_t began = stagehand_sim_clock_ns();
    replay_.whole_step(high, low);
    return static_cast<double>(stagehand_sim_clock_ns() - began);
  }

  HeldReplay replay_{without_small(read_trace("unet3d.txt")), true, replay_machine()};
  double plain_ns_ = 0;
  Bytes high_ = 0;
  Bytes low_ = 0;
};

// Where bytes alone decide who of those leaves first, 1.46.
TEST("3-D U-Net: what comes back at once leaves last, and no hole that is set aside costs more") {
  double took = 0;
  const auto shares = {0.65, 0.675, 0.7, 0.725, 0.75, 0.775, 0.8, 0.85, 0.9};
  for (const double share : shares) {
    took += SettledUNet(share).steps(8);
  }
  CHECK(took / static_cast<double>(shares.size()) <= 1.4);
}

// Mapped a request at a time it took 1.08 of that from there on.
TEST("3-D U-Net: what the program gives back between steps is mapped again in one piece") {
  SettledUNet unet(0.8);
  const double before = unet.steps(4);
  unet.empty_cache();
  unet.steps(4);
  CHECK(unet.steps(4) <= 1.01 * before);
}

// Each layer saves 3.4 GB and has 4.1 GB of workspace before: room was made for that twice, of two
// layers' where one would do. 2.36 and 2.21 at the first two.
TEST("LSTM: what came at its place makes no room there once more") {
  for (const auto& [share, most] :
       {std::pair{0.72, 1.7}, {0.74, 1.7}, {0.8, 1.5}, {0.83, 1.5}, {0.86, 1.5}}) {
    FirstSteps<HeldSide> training(without_small(read_trace("lstm.txt")));
    training.measure();
    training.set_share(share);
    for (int i = 0; i < 12; ++i) {
      training.step();
    }
    std::vector<double> took;
    for (int i = 0; i < 8; ++i) {
      took.push_back(static_cast<double>(training.step().ns));
    }
    CHECK(median(took) <= most * static_cast<double>(training.unbudgeted().ns));
  }
}

// What a miss is for is not known then but by the plan: 970, 122, 57 MB where that said nothing
// once the largest request at a place had come.
TEST("where torch does not tell its requests, steps that are known stay inside the budget") {
  for (const char* trace : {"llama.txt", "pipeline.txt", "fsdp2.txt"}) {
    for (const double share : {0.9, 0.7, 0.5}) {
      FirstSteps<HeldSide> training(without_small(read_trace(trace)));
      training.does_not_tell();
      training.measure();
      training.set_share(share);
      for (int i = 0; i < 20; ++i) {
        const Bytes over = training.step().over;
        CHECK(i < 12 || over == 0);
      }
    }
  }
}

TEST("U-Net: a learned native step maps nothing") {
  expect_nothing_mapped(read_trace("unet.txt"), {0.85, 0.75, 0.5}, 4);
}

// Gradients are reduced on a stream whose memory lies idle in forward. torch gives pages back of
// every stream or of none.
TEST("FSDP2: each stream has the pages it had at most, and a learned native step maps nothing") {
  expect_nothing_mapped(read_trace("fsdp2.txt"), {0.92, 0.88, 0.87, 0.85, 0.8, 0.75, 0.6, 0.5}, 4);
}

// First steps -------------------------------------------------------------------------------------

TEST("told for what, no step goes over high: the first one of a training neither") {
  for (const char* trace :
       {"gpt_8k.txt", "llama.txt", "vit.txt", "fsdp2.txt", "pipeline.txt", "unet.txt"}) {
    const auto [start, peak] = measured<HeldSide>(trace);
    const auto activations = static_cast<double>(peak - start);
    for (const double share : {0.75, 0.5}) {
      FirstSteps<HeldSide> training(trace);
      const Bytes high = start + static_cast<Bytes>(share * activations);
      training.set(high, high - static_cast<Bytes>(activations / 10));
      for (int i = 0; i < 4; ++i) {
        CHECK_EQ(training.step().over, 0);
      }
    }
  }
}

// Whose sizes change from step to step.
TEST("told for what, steps of experts keep to high, and from the twelfth on they map nothing") {
  FirstSteps<HeldSide> training(experts_step(0, 0.3));
  training.measure();
  training.set_share(0.75);
  for (std::uint64_t i = 1; i < 24; ++i) {
    training.follow(experts_step(i, 0.3, true));
    const std::uint64_t calls = mapping_calls();
    CHECK_EQ(training.step().over, 0);
    CHECK(i < 12 || mapping_calls() == calls);
  }
}

// One segment -------------------------------------------------------------------------------------

// A recorded step where torch has no expandable segments, and what it makes of so much of the
// activations.
struct Segments : LoraReplay<HeldTensors, NoWeights> {
  // `more`: of `high`, for what else is there.
  Segments(const std::string& trace, double share, Bytes more = 0)
      : LoraReplay({read_trace(trace)}, high_of(trace, share) + more, lora_machine(on_one_link)) {}

  FakeTorch& torch() { return rig().torch; }
  static Bytes high_of(const std::string& trace, double share) {
    const Use use = measured<HeldSide>(trace);
    return others() + static_cast<Bytes>(share * static_cast<double>(use.peak - use.start));
  }
};

// 1.63 and 1.84 where each request of the first step keeps a segment of its own.
TEST("without expandable segments torch has one from the second step on, and restores find room") {
  for (const auto& [trace, most] : {std::pair{"unet.txt", 1.35}, {"llama.txt", 1.6}}) {
    Segments replay(trace, 0.75);
    replay.step();
    const Bytes before = replay.torch().largest_segment();
    const double took = settled_of_plain(replay, settled_steps(replay, 3, 12));
    CHECK(took <= most);
    CHECK(replay.torch().largest_segment() > 3 * before);
  }
}

// What one stream has free in it serves no other: 1.66 for 1.48.
TEST("FSDP2, whose other streams take a good part: each request keeps a segment of its own") {
  Segments replay("fsdp2.txt", 0.75);
  settled_steps(replay, 4, 4);
  CHECK(replay.torch().largest_segment() < Segments::high_of("fsdp2.txt", 0.75) / 4);
}

constexpr Bytes kUncut = 768_MiB;

// Else all that is asked for would come on top of it.
TEST("where torch is told to cut no large block each request has a segment of its own") {
  for (const char* settings : {"max_split_size_mb:768", "roundup_power2_divisions:4"}) {
    CHECK_EQ(setenv("PYTORCH_ALLOC_CONF", settings, 1), 0);
    Segments replay("gpt_8k.txt", 0.6);
    settled_steps(replay, 0, 4);
    CHECK(replay.torch().largest_segment() < kUncut);
    CHECK_EQ(unsetenv("PYTORCH_ALLOC_CONF"), 0);
  }
  Segments replay("gpt_8k.txt", 0.6);
  settled_steps(replay, 0, 4);
  CHECK(replay.torch().largest_segment() > 4 * kUncut);
}

// What it makes would lie in the one segment, which then never goes back: Llama at 40 % whose state
// comes before the tenth step went over in 10 to 51 of 60 steps for 0 to 2.
TEST("before an optimizer has stepped, each request keeps a segment of its own") {
  Segments replay("gpt_8k.txt", 0.6);
  replay.rig().runtime->await_optimizer(true);
  settled_steps(replay, 0, 4);
  CHECK(replay.torch().largest_segment() < kUncut);
  replay.rig().runtime->await_optimizer(false);
  settled_steps(replay, 4, 2);
  CHECK(replay.torch().largest_segment() > 4 * kUncut);
}

// It would hold segments of the first step's for good, most of each free: 997 MiB over high.
TEST("what an optimizer keeps gets segments of its own, and no step after it goes over high") {
  constexpr Bytes kState = 720_MiB;
  Segments replay("llama.txt", 0.4, kState);
  replay.step();
  CHECK(replay.optimizer_keeps(optimizer_sizes(kState)));
  settled_steps(replay, 0, 24);
}

// torch maps 12 MiB for each.
TEST("what finds no room beside the rest lies among what is free, and torch reserves no more") {
  Segments replay("llama.txt", 0.5);
  replay.step();
  CHECK(!replay.optimizer_keeps(std::vector<Bytes>(400, 10_MiB + 512_KiB)));
  CHECK(replay.torch().reserved() <= Segments::high_of("llama.txt", 0.5));
}

// An optimizer of each parameter may step in its backward.
TEST("segments go back for optimizers once a step, and not while anything is saved") {
  Segments replay("llama.txt", 0.6);
  replay.step();
  HeldRig& rig = replay.rig();
  driver::Stream s = rig.stream();
  const HeldTensor tensor = rig.make(kHeldBlock, s);
  const SavedTensor saved = rig.save(tensor, s);
  const std::uint64_t before = replay.counters().host_waits;
  replay.optimizer_keeps({16_MiB});
  CHECK_EQ(replay.counters().host_waits, before);
  rig.drop_handle(saved);
  rig.drop(tensor);
  replay.optimizer_keeps({16_MiB});
  CHECK_EQ(replay.counters().host_waits, before + 1);
  replay.take_between(0, 2_GiB);
  replay.optimizer_keeps({16_MiB});
  CHECK_EQ(replay.counters().host_waits, before + 1);
}

// Whose gradients lie between what leaves: 3.8 of plain, and 1 to 3 GB over high in nearly all but
// the first of each cycle.
TEST("Llama with accumulated gradients: from the second cycle on no step goes over high") {
  for (const auto& [share, most] : {std::pair{0.75, 1.7}, {0.5, 3.0}}) {
    constexpr int kSteps = 4;
    constexpr Bytes kGradients = 1780_MiB;
    Segments replay("llama.txt", share, kGradients);
    replay.accumulate(kSteps);
    replay.rig().runtime->await_optimizer(true);
    settled_steps(replay, kSteps, 0);
    replay.optimizer_keeps({16_MiB});
    replay.rig().runtime->await_optimizer(false);
    CHECK(settled_of_plain(replay, settled_steps(replay, 0, 5 * kSteps)) <= most);
  }
}

TEST("where a step in one segment went over, each request has its own in the next ones") {
  Segments replay("gpt_8k.txt", 0.6);
  replay.torch().max_split = kUncut;  // as if torch was told so meanwhile
  settled_steps(replay, 0, 2, kUnlimited);
  settled_steps(replay, 1, 8);
  CHECK(replay.torch().largest_segment() < kUncut);
}

TEST("memory of one segment goes back for a lower high once all of it is free") {
  const Bytes lower = Segments::high_of("gpt_8k.txt", 0.6);
  Segments replay("gpt_8k.txt", 0.8);
  settled_steps(replay, 0, 4);
  replay.set_high(lower);
  replay.step();
  settled_steps(replay, 2, 8);
}

// Small blocks ------------------------------------------------------------------------------------

// A host-bound step of low-rank adapters: two tensors of 0.9 MB are saved in each block, and one of
// 8 KB between them. torch cuts all of them from its segments for small blocks.
std::vector<Event> adapters(std::uint64_t blocks) {
  constexpr Bytes kActivation = 256 * 1792 * 2;
  constexpr Bytes kLowRank = 256 * 16 * 2;
  std::vector<Event> events;
  std::uint64_t newest = 0;
  std::uint64_t records = 0;
  std::uint64_t aliases = 0;
  std::uint64_t us = 0;
  const auto work = [&](std::uint64_t more) {
    us += more;
    events.push_back({'t', us / 2, us});
  };
  const auto make = [&](Bytes bytes) {
    events.push_back({'a', ++newest, bytes});
    return newest;
  };
  const auto drop = [&](std::uint64_t block) { events.push_back({'f', block}); };
  const auto save = [&](std::uint64_t block, Bytes bytes) {
    events.push_back({'s', ++records, block, 0, bytes});
    return records;
  };
  const auto use = [&](std::uint64_t record) {
    events.push_back({'u', record, ++aliases});
    events.push_back({'d', aliases});
    events.push_back({'h', record});
  };
  std::uint64_t x = make(kActivation);
  for (std::uint64_t i = 0; i < blocks; ++i) {
    const std::uint64_t frozen = make(kActivation);
    const std::uint64_t low = make(kLowRank);
    save(x, kActivation);
    work(200);
    const std::uint64_t up = make(kActivation);
    save(low, kLowRank);
    drop(low);
    const std::uint64_t sum = make(kActivation);
    drop(frozen);
    drop(up);
    save(sum, kActivation);
    drop(sum);
    const std::uint64_t next = make(kActivation);
    drop(x);
    x = next;
    work(200);
  }
  drop(x);
  std::uint64_t gradient = make(kActivation);
  for (std::uint64_t record = records; record > 0; --record) {
    use(record);
    const std::uint64_t next = make(kActivation);
    drop(gradient);
    gradient = next;
    work(200);
  }
  drop(gradient);
  return events;
}

// In the first step and in the later ones, which follow what was learned. In those some leave at a
// miss whose copies go in one batch: one miss for each would take the host longer.
TEST("small blocks: what leaves is what must, and a tenth of the budget at most, a few at a miss") {
  for (const bool expandable : {true, false}) {
    for (const double share : {0.75, 0.5}) {
      HeldReplay replay(adapters(240), expandable, trace_machine());
      Counters before;
      for (int i = 0; i < 3; ++i) {
        before = replay.whole_step(60_GiB, 59_GiB);
      }
      const Bytes peak = before.occupied_peak;
      const auto high = static_cast<Bytes>(share * static_cast<double>(peak));
      for (int i = 0; i < 8; ++i) {
        const Counters now = replay.whole_step(high, high - high / 10);
        CHECK(now.evicted_bytes - before.evicted_bytes >= peak - high);
        CHECK(now.evicted_bytes - before.evicted_bytes <= peak - high + high / 10 + 16_MiB);
        CHECK_EQ(now.overshoot_bytes, 0);
        const auto left = [](const Counters& of) {
          return of.clean_evictions + of.dirty_evictions;
        };
        CHECK(i == 0 || 3 * (now.misses - before.misses) <= left(now) - left(before));
        before = now;
      }
      replay.drop_rest();
      stagehand_sim_drain();
      replay.rig().verify_empty();
    }
  }
}

// Those of the other stream are older, and a hole of theirs would not do.
TEST("small blocks: a request has one of its own stream leave") {
  constexpr Bytes kSmall = 768_KiB;
  HeldRig rig(Machine{.classes = {{1_MiB}, {96}}});
  const driver::Stream first = rig.stream();
  const driver::Stream second = rig.stream();
  Bytes over = 0;
  for (int i = 0; i < 8; ++i) {
    rig.budget(56_MiB, 48_MiB);
    std::vector<SavedTensor> saved = rig.retain_many(20, kSmall, first);
    for (const SavedTensor& one : rig.retain_many(60, kSmall, second)) {
      saved.push_back(one);
    }
    rig.runtime->clear_budget();
    for (auto one = saved.rbegin(); one != saved.rend(); ++one) {
      rig.back(*one, one - saved.rbegin() < 60 ? second : first);
    }
    stagehand_sim_drain();
    const Bytes now = rig.counters().overshoot_bytes;
    CHECK(i < 2 || now == over);
    over = now;
  }
  rig.verify_empty();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
