// What a program keeps from forward to backward, as checkpoints do with what they are given, is
// served from blocks of a stream of its own: it lay between what leaves.
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "core/walls.hpp"
#include "native/first_steps.hpp"
#include "native/lora_replay.hpp"
#include "native/trace_recipes.hpp"

namespace stagehand::core::test {
namespace {

int g_places[3];  // what streams are told apart by
driver::Stream stream(int number) { return &g_places[number]; }

std::vector<Walls::One> walls(std::initializer_list<std::uint32_t> numbers, int on = 0) {
  std::vector<Walls::One> all;
  for (const std::uint32_t number : numbers) {
    all.push_back({stream(on), number, 4_MiB});
  }
  return all;
}

void step(Walls& of, const std::vector<Walls::One>& there, Bytes most = 1_GiB) {
  of.begin_step(most);
  of.end_saving(there, most);
}

// Which of the next step's requests on that stream are wanted apart.
std::vector<std::uint32_t> wanted(Walls& of, int on = 0, Bytes most = 1_GiB) {
  of.begin_step(most);
  std::vector<std::uint32_t> found;
  for (std::uint32_t i = 1; i <= 64; ++i) {
    if (of.wants(stream(on))) {
      found.push_back(i);
    }
    CHECK_EQ(of.served(stream(on)), i);
  }
  return found;
}

TEST("what was a wall in two steps in a row is one in the next, by its number on its stream") {
  Walls of;
  step(of, walls({9, 3, 21, 15, 27}));
  CHECK(wanted(of).empty());
  of.end_saving(walls({3, 9, 15, 20, 21, 27}), 1_GiB);
  CHECK((wanted(of) == std::vector<std::uint32_t>{3, 9, 15, 21, 27}));
  CHECK(wanted(of, 1).empty());
  CHECK((of.streams() == std::vector{stream(0)}));
}

TEST("what is no wall any more is none in the step after that") {
  Walls of;
  step(of, walls({3, 9, 15, 21, 27}));
  step(of, walls({3, 9, 15, 21, 27}));
  step(of, walls({3, 9, 15, 21}));
  CHECK((wanted(of) == std::vector<std::uint32_t>{3, 9, 15, 21}));
  of.end_saving({}, 1_GiB);
  CHECK(wanted(of).empty());
  CHECK_EQ(of.room(), 0);
}

TEST("a few walls, and such as take too much, stay where they are") {
  Walls of;
  step(of, walls({3, 9, 15}));
  step(of, walls({3, 9, 15}));
  CHECK(wanted(of).empty());
  of.end_saving(walls({3, 9, 15, 21}), 1_GiB);
  step(of, walls({3, 9, 15, 21}), 15_MiB);
  CHECK(wanted(of).empty());
  CHECK_EQ(of.room(), 0);
}

TEST("room is kept for all walls, the most that they took in the last steps, no more than may be") {
  Walls of;
  step(of, walls({3, 9, 15, 21}));
  step(of, walls({3, 9, 15, 21}));
  CHECK_EQ(of.room(), 16_MiB);
  std::vector<Walls::One> less = walls({3, 9, 15, 21});
  for (Walls::One& one : less) {
    one.bytes = 1_MiB;
  }
  step(of, less);
  CHECK_EQ(of.room(), 15_MiB);          // a 16th is forgotten
  CHECK(wanted(of, 0, 8_MiB).empty());  // another budget
  CHECK_EQ(of.room(), 0);
  of.end_saving(less, 8_MiB);
  CHECK_EQ(of.room(), 8_MiB);
  CHECK_EQ(wanted(of, 0, 8_MiB).size(), 4u);
}

TEST("nothing is wanted once backward has begun, nor counted") {
  Walls of;
  step(of, walls({1, 2, 3, 4}));
  step(of, walls({1, 2, 3, 4}));
  CHECK(!of.wants(stream(0)));
  CHECK_EQ(of.served(stream(0)), 0u);
  of.begin_step(1_GiB);
  CHECK(of.wants(stream(0)));
  of.end_saving(walls({1, 2, 3, 4}), 1_GiB);
  CHECK(!of.wants(stream(0)));
}

TEST("after many steps without a backward, as evaluations are, no room is kept any more") {
  Walls of;
  step(of, walls({1, 2, 3, 4}));
  step(of, walls({1, 2, 3, 4}));
  for (int i = 0; i < 8; ++i) {
    of.begin_step(1_GiB);
    CHECK_EQ(of.room(), 16_MiB);
  }
  of.begin_step(1_GiB);
  of.begin_step(1_GiB);
  CHECK_EQ(of.room(), 0);
  of.end_saving(walls({1, 2, 3, 4}), 1_GiB);  // the same as in the last one that had a backward
  CHECK_EQ(of.room(), 16_MiB);
}

// --- Recorded steps

// A recorded Llama whose blocks are regions, each of which keeps what it was given until its
// backward is done. All of it is so many times as large.
LoraModel in_regions(double by, bool expandable) {
  constexpr const char* kTrace = "llama.txt";
  constexpr Bytes kGiven = 16_MiB;
  constexpr std::uint64_t kFirstGiven = 1'000'000;  // number of a block of memory
  const std::vector<Region> regions = blocks_of(kTrace);
  const std::vector<Event> events = times_as_large(read_trace(kTrace), by);
  std::map<std::uint64_t, std::size_t> region_of;  // of a record
  std::vector<std::size_t> last(regions.size());   // lines of their last records' ends
  std::size_t at = 0;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const Event& event = events[i];
    at += at < regions.size() && i == regions[at].end ? 1 : 0;
    if (event.kind == 's' && at < regions.size() && i >= regions[at].begin) {
      region_of.emplace(event.a, at);
    } else if (event.kind == 'h') {
      if (const auto found = region_of.find(event.a); found != region_of.end()) {
        last[found->second] = i;
      }
    }
  }
  LoraModel model;
  model.expandable = expandable;
  at = 0;
  for (std::size_t i = 0; i < events.size(); ++i) {
    if (at < regions.size() && i == regions[at].begin) {
      model.events.push_back({'e', at, 0, 0, 0});
      model.events.push_back({'a', kFirstGiven + at, times(kGiven, by), 0, 0});
    }
    model.events.push_back(events[i]);
    if (at < regions.size() && i + 1 == regions[at].end) {
      model.events.push_back({'e', at++, 1, 0, 0});
    }
    for (std::size_t region = 0; region < regions.size(); ++region) {
      if (last[region] == i) {
        model.events.push_back({'f', kFirstGiven + region, 0, 0, 0});
      }
    }
  }
  return model;
}

struct Seen {
  int over = 0;      // steps
  double waits = 0;  // for the GPU, a step
};

// After the first ones, waits after some more. `varies`: each is of another size, in this order.
Seen seen_in(double share, bool expandable, bool varies, unsigned order = 5) {
  constexpr int kFirst = 4;
  constexpr int kSettled = 16;
  constexpr int kSteps = 40;
  const auto use = measured<HeldSide>("llama.txt");
  const Bytes high = LoraReplay<HeldTensors, NoWeights>::others() +
                     static_cast<Bytes>(share * static_cast<double>(use.peak - use.start));
  LoraReplay<HeldTensors, NoWeights> replay(in_regions(1, expandable), high,
                                            lora_machine(on_one_link), Recomputes{false, 1});
  std::minstd_rand random(order);
  std::uniform_real_distribution<double> sizes(0.5, 1.0);
  Seen seen;
  std::uint64_t before = 0;
  for (int i = 0; i < kSteps; ++i) {
    if (varies && i > 0) {
      replay.follow(in_regions(std::round(sizes(random) * 256) / 256, expandable));
    }
    before = i == kSettled ? replay.counters().host_waits : before;
    const LoraStep step = replay.step();
    seen.over += i >= kFirst && step.over > 0 ? 1 : 0;
  }
  seen.waits = static_cast<double>(replay.counters().host_waits - before) / (kSteps - kSettled);
  return seen;
}

// Where they lie between what leaves, 12 and 2 steps go over, at 50 and 75 %. Where the one segment
// that they lie in at first is not tried again without them, 0.8 waits at 50 %.
TEST("steps of regions that keep what they are given stay below high, whatever their sizes") {
  for (const double share : {0.5, 0.75}) {
    const Seen seen = seen_in(share, false, true);
    CHECK_EQ(seen.over, 0);
    CHECK_EQ(seen.waits, 0);
  }
}

// Where they lie between what leaves, 2.5 and 1.5 waits. In which order sizes come decides much: of
// eight orders 0.06 where only a part leaves of what a call has to make again, 0.08 where of a call
// that leaves whole only one record counts as free.
TEST("in expandable segments such steps give no memory back, for which the GPU is waited for") {
  constexpr unsigned kOrders = 8;
  for (const double share : {0.5, 0.75}) {
    double waits = 0;
    for (unsigned order = 1; order <= kOrders; ++order) {
      waits += seen_in(share, true, true, order).waits / kOrders;
    }
    CHECK(waits < 0.04);
  }
}

// 4 and 2 steps go over likewise.
TEST("steps of one size of such regions stay below high") {
  CHECK_EQ(seen_in(0.5, false, false).over, 0);
  CHECK_EQ(seen_in(0.75, false, false).over, 0);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
