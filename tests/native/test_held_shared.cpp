// Where torch's own allocator cuts the blocks, the tensor that unpack makes is over the storage
// that the engine holds. autograd adds to a gradient in place where a storage has one reference
// only: so ours has to be there until the last handle is gone, and not after that.
#include "native/held_rig.hpp"

namespace stagehand::core::test {
namespace {

constexpr int kShared = 2;  // the engine's reference and the tensor's
constexpr int kAlone = 1;

TEST(
    "a tensor made over a live, a retained or a restored storage shares it until the last handle") {
  for (const bool evicted : {false, true}) {
    HeldRig rig;
    const driver::Stream s = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const HeldTensor users = rig.make(kHeldBlock, s);
    const SavedTensor one = rig.save(users);
    const SavedTensor two = rig.save(users);
    const HeldTensor beside_the_users = rig.unpack(one, s);
    CHECK_EQ(users.storage->references, kShared + 1);
    rig.drop(beside_the_users);
    rig.drop(users);
    rig.look(s);
    if (evicted) {
      rig.evict_all(s);
      CHECK(!rig.resident(one));
    }
    const HeldTensor made = rig.unpack(one, s);
    CHECK_EQ(made.storage->references, kShared);
    rig.drop_handle(one);
    CHECK_EQ(made.storage->references, kShared);  // the other handle's node has not run
    rig.drop_handle(two);
    CHECK_EQ(made.storage->references, kAlone);
    rig.drop(made);
    rig.verify_empty();
  }
}

TEST("a tensor made over a prefetched storage shares it until the last handle") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  std::vector<SavedTensor> saved = rig.retain_many(4, kHeldBlock, s);
  rig.evict_all(s);
  rig.back(saved.back(), s);
  saved.pop_back();
  CHECK(rig.runtime->counters().prefetches > 0);
  for (; !saved.empty(); saved.pop_back()) {
    const HeldTensor made = rig.unpack(saved.back(), s);
    CHECK_EQ(made.storage->references, kShared);
    rig.drop_handle(saved.back());
    CHECK_EQ(made.storage->references, kAlone);
    rig.drop(made);
  }
  rig.verify_empty();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
