// The order in which weight groups are used, and what leaves and comes by it: pure.
#include <vector>

#include "core/standing.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {
namespace {

constexpr auto kForward = UseKind::forward;
constexpr auto kBackward = UseKind::backward;
constexpr auto kSampling = UseKind::sampling;

std::vector<GroupId> first(std::size_t count, GroupId from = 0) {
  std::vector<GroupId> ids;
  for (GroupId id = from; id < from + count; ++id) {
    ids.push_back(id);
  }
  return ids;
}

// The groups that are expected next.
std::vector<GroupId> next(const UseOrder& order, std::size_t count) {
  std::vector<GroupId> ids;
  for (const Use& use : order.upcoming()) {
    if (ids.size() < count) {
      ids.push_back(use.group);
    }
  }
  return ids;
}

void step(UseOrder& order, const std::vector<GroupId>& groups) {
  for (const GroupId id : groups) {
    order.used({id, kForward});
  }
  for (auto id = groups.rbegin(); id != groups.rend(); ++id) {
    order.used({*id, kBackward});
  }
}

TEST(
    "before anything is known, forward is expected in the order given and backward in its "
    "reverse") {
  UseOrder order;
  order.presume(first(3));
  CHECK(order.used({0, kForward}));
  CHECK(next(order, 5) == (std::vector<GroupId>{1, 2, 2, 1, 0}));
  CHECK_EQ(order.distance(1), 1);
  CHECK_EQ(order.distance(0), 5);  // its backward
  CHECK_EQ(order.backward_distance(1), 4);
  order.used({1, kForward});
  order.used({2, kForward});
  order.used({2, kBackward});
  CHECK_EQ(order.distance(2), 5);  // the next step's forward: farthest of all
  CHECK_EQ(order.distance(0), 2);
}

TEST("a use that goes on is none") {
  UseOrder order;
  order.presume(first(3));
  CHECK(order.used({1, kForward}));
  CHECK(!order.used({1, kForward}));
  CHECK(order.used({1, kBackward}));
}

TEST("another order is learned in a step") {
  UseOrder order;
  order.presume(first(4));
  step(order, {3, 1, 0, 2});
  order.used({3, kForward});
  CHECK(next(order, 7) == (std::vector<GroupId>{1, 0, 2, 2, 0, 1, 3}));
}

TEST("a group that is used twice in a forward: what came before says which of the two it is") {
  UseOrder order;
  order.presume(first(2));
  for (int i = 0; i < 2; ++i) {
    step(order, {0, 1, 0, 1});
  }
  order.used({0, kForward});
  order.used({1, kForward});
  CHECK(next(order, 2) == (std::vector<GroupId>{0, 1}));
  order.used({0, kForward});
  order.used({1, kForward});
  CHECK(next(order, 2) == (std::vector<GroupId>{1, 0}));  // backward
}

TEST("sampling goes on as sampling went on, and training as training") {
  UseOrder order;
  order.presume(first(3));
  for (int i = 0; i < 2; ++i) {
    step(order, first(3));
    for (int sample = 0; sample < 2; ++sample) {
      for (const GroupId id : first(3)) {
        order.used({id, kSampling});
      }
    }
  }
  step(order, first(3));
  for (const GroupId id : first(3)) {
    order.used({id, kSampling});
  }
  CHECK(next(order, 2) == (std::vector<GroupId>{0, 1}));
}

TEST("a group that is gone is expected no more") {
  UseOrder order;
  order.presume(first(3));
  order.used({0, kForward});
  order.forget(1);
  CHECK(next(order, 1) == (std::vector<GroupId>{2}));
  CHECK_EQ(order.distance(1), UseOrder::kNever);
}

TEST("of a long past only the newest part is remembered") {
  UseOrder order;
  order.presume(first(3));
  for (int i = 0; i < 2000; ++i) {
    step(order, first(3));
  }
  CHECK(order.upcoming().size() <= 16);
}

// Which group leaves, and which comes ----------------------------------------------------------

struct Model {
  Standing standing;
  std::vector<std::byte> host{16};
  std::vector<Block> blocks;

  explicit Model(std::size_t count) : blocks(count) {
    for (std::size_t i = 0; i < count; ++i) {
      standing.add(1_MiB, host.data());
    }
    standing.order().presume(first(count));
  }
  void home(GroupId id, bool is = true) { standing.at(id).block = is ? &blocks[id] : nullptr; }
};

TEST("W3: what is held is no victim, and of the others the one that is needed last is") {
  Model model(4);
  for (GroupId id = 0; id < 4; ++id) {
    model.home(id);
    model.standing.used({id, kForward}, {}, 0);
  }
  CHECK_EQ(model.standing.farthest(), 0);  // of four backwards its is the last
  model.standing.at(0).holds = 1;
  CHECK_EQ(model.standing.farthest(), 1);
  model.standing.used({3, kBackward}, {}, 0);
  CHECK_EQ(model.standing.farthest(), 3);  // only the next step needs it
  CHECK_EQ(model.standing.broken() == nullptr, true);
}

TEST("the next groups that are away come: in forward all until the first backward") {
  Model model(5);
  bool far = true;
  model.home(0);
  model.standing.used({0, kForward}, {}, 0);
  CHECK_EQ(model.standing.next_ahead(0, &far), 1);
  CHECK(!far);
  model.home(1);
  model.home(2);
  CHECK_EQ(model.standing.next_ahead(0, &far), 3);
  CHECK(far);
}

TEST("in forward the next two come; in backward also what is needed before the records away") {
  Model model(5);
  for (GroupId id = 0; id < 5; ++id) {
    model.standing.used({id, kForward}, {}, 0);
  }
  bool far = true;
  model.home(4);
  CHECK_EQ(model.standing.next_ahead(2, &far), 3);
  CHECK(!far);
  model.home(3);
  CHECK_EQ(model.standing.next_ahead(UseOrder::kNever, &far), kNoGroup);  // memory fills up yet
  model.standing.used({4, UseKind::backward}, {}, 0);
  model.home(2);
  CHECK_EQ(model.standing.next_ahead(2, &far), kNoGroup);
  CHECK_EQ(model.standing.next_ahead(3, &far), 1);
  CHECK(far);
}

TEST("no more is copied out ahead than is to leave, the farthest first") {
  Model model(6);
  for (GroupId id = 0; id < 6; ++id) {
    model.home(id);
    model.standing.used({id, kForward}, {}, 0);
    model.standing.at(id).dirty = 1;
  }
  CHECK_EQ(model.standing.written_next(0), kNoGroup);
  CHECK_EQ(model.standing.written_next(2_MiB), 0);  // of six backwards its is the last
  model.standing.at(0).dirty = 0;
  CHECK_EQ(model.standing.written_next(1_MiB), kNoGroup);  // that one leaves for nothing
  CHECK_EQ(model.standing.written_next(2_MiB), 1);
  model.home(0, false);  // it has left, and makes no more room
  CHECK_EQ(model.standing.written_next(1_MiB), 1);
}

// Two blocks, and the state that an optimizer keeps of each: one use in a step.
struct Trained : Model {
  Trained() : Model(4) {
    for (int i = 0; i < 2; ++i) {
      forward();
      backward();
      standing.used({0, kSampling}, {}, 0);
      standing.used({2, kSampling}, {}, 0);
      standing.used({1, kSampling}, {}, 0);
      standing.used({3, kSampling}, {}, 0);
    }
    for (GroupId id = 0; id < 4; ++id) {
      home(id);
    }
  }
  void forward() {
    standing.used({0, kForward}, {}, 0);
    standing.used({1, kForward}, {}, 0);
  }
  void backward() {
    standing.used({1, kBackward}, {}, 0);
    standing.used({0, kBackward}, {}, 0);
  }
  void write(GroupId state) {
    standing.at(state).dirty = 0;
    standing.wrote_back(standing.at(state));
  }
};

TEST("an optimizer's step copies out the state that it has used, the first of it first") {
  Trained model;
  Standing& standing = model.standing;
  model.forward();
  model.backward();
  standing.at(2).dirty = standing.at(3).dirty = standing.at(0).dirty = 1;
  standing.used({0, kSampling}, {}, 0);
  CHECK_EQ(standing.stepped_next(4_MiB), kNoGroup);  // it will write to both
  standing.used({2, kSampling}, {}, 0);
  standing.used({1, kSampling}, {}, 0);
  CHECK(standing.stepped(2));
  CHECK(!standing.stepped(3));
  CHECK(!standing.stepped(0));  // the next forward uses that
  CHECK_EQ(standing.stepped_next(4_MiB), 2);
  CHECK_EQ(standing.stepped_next(0), kNoGroup);
  standing.used({3, kSampling}, {}, 0);
  CHECK_EQ(standing.stepped_next(4_MiB), 2);
  model.write(2);
  CHECK_EQ(standing.stepped_next(standing.at(2).bytes), kNoGroup);  // that is as much as leaves
  CHECK_EQ(standing.stepped_next(4_MiB), 3);
}

TEST("state leaves in forward as its copies out end, and a dirty one last, though used latest") {
  Trained model;
  Standing& standing = model.standing;
  model.write(2);
  model.write(3);
  model.forward();
  CHECK_EQ(standing.farthest(), 2);
  CHECK_EQ(standing.farthest_as_large(0), 3);
  standing.at(2).dirty = 1;
  CHECK_EQ(standing.farthest(), 3);
  model.write(2);
  CHECK_EQ(standing.farthest(), 3);  // the one copied out before
  standing.used({1, kBackward}, {}, 0);
  standing.at(2).dirty = standing.at(3).dirty = 0;
  CHECK_EQ(standing.farthest(), 3);  // from here on what is needed later
}

// As with DPO: between the policy's forward and its backward a frozen one runs without gradients.
TEST("what a forward without gradients needs next stays, and state that is needed later leaves") {
  Model model(6);  // two blocks of the policy, two of the other, two of state
  Standing& standing = model.standing;
  const auto uses = [&](UseKind kind, GroupId first, GroupId second) {
    standing.used({first, kind}, {}, 0);
    standing.used({second, kind}, {}, 0);
  };
  for (int i = 0; i < 2; ++i) {
    uses(kForward, 0, 1);
    uses(kSampling, 2, 3);
    uses(kBackward, 1, 0);
    uses(kSampling, 4, 5);
  }
  for (GroupId id = 0; id < 6; ++id) {
    model.home(id);
  }
  standing.at(4).dirty = standing.at(5).dirty = 1;
  uses(kForward, 0, 1);
  const GroupId order[] = {5, 4, 0, 1, 3, 2};
  for (const GroupId id : order) {
    CHECK_EQ(standing.farthest(), id);
    model.home(id, false);
    standing.at(id).dirty = 0;
  }
}

TEST("a backward's end keeps the weights that the optimizer's step uses first") {
  Trained model;
  Standing& standing = model.standing;
  model.forward();
  model.backward();
  standing.at(2).dirty = standing.at(3).dirty = 1;
  CHECK_EQ(standing.farthest(), 3);
}

TEST("what is saved is gone by the time that a later backward needs memory") {
  Model model(2);
  Standing& standing = model.standing;
  const auto uses = [&](UseKind kind, GroupId id, Bytes saved, Bytes live) {
    standing.used({id, kind}, {}, saved);
    standing.live_beside(live);
  };
  for (int step = 0; step < 2; ++step) {
    uses(kForward, 0, 0, 1);
    uses(kForward, 1, 10, 1);
    uses(kBackward, 1, 20, 1);
    uses(kBackward, 0, 10, 8);
    uses(kSampling, 0, 0, 5);
  }
  uses(kForward, 0, 0, 1);
  uses(kForward, 1, 10, 1);
  uses(kBackward, 1, 20, 1);
  CHECK_EQ(standing.live_until(0, 20), 21);  // now: in its backward only ten are left
  uses(kBackward, 0, 10, 8);
  CHECK_EQ(standing.live_until(1, 10), 18);
  CHECK_EQ(standing.live_until(1, 4), 12);  // no more than there are
  CHECK_EQ(standing.live_until(1, 0), 8);
}

TEST("a record is needed when the group is that it was saved in") {
  Model model(3);
  model.standing.used({0, kForward}, {1, 4}, 0);
  model.standing.used({1, kForward}, {1, 9}, 0);
  model.standing.used({2, kForward}, {1, 12}, 0);
  const auto needed = [&](Plan::Place place) { return model.standing.needed_in(place); };
  CHECK_EQ(needed({1, 13}), 1);
  CHECK_EQ(needed({1, 10}), 2);
  CHECK_EQ(needed({1, 5}), 3);
  CHECK_EQ(needed({1, 9}), 3);
  CHECK_EQ(needed({1, 2}), UseOrder::kNever);  // saved before any
  CHECK_EQ(needed({2, 0}), 1);                 // of the next step, saved in this group still
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
