// Weight groups from several threads at once: forwards that share a model, and others' requests.
// Under the thread sanitizer too.
#include <atomic>
#include <thread>
#include <vector>

#include "native/core_rig.hpp"

namespace stagehand::core::test {
namespace {

constexpr int kGroups = 6;
constexpr Bytes kGroup = 1_MiB;

TEST("threads that enter groups, ask for memory, and end groups, each see their bytes") {
  CoreRig rig({.memory = 64_MiB, .classes = {{1_MiB}, {8}}, .host_limit = 16_MiB});
  std::vector<std::byte> host(kGroups * kGroup);
  CHECK(rig.runtime->pin(host.data(), host.size()));
  std::vector<GroupId> ids;
  const driver::Stream first = rig.stream();
  for (int i = 0; i < kGroups; ++i) {
    const Tensor tensor{rig.allocate(kGroup, first), kGroup, first,
                        900 + static_cast<std::uint64_t>(i)};
    rig.fill(tensor, first);
    const Copy copy{tensor.address, host.data() + static_cast<Bytes>(i) * kGroup, kGroup};
    CHECK(rig.runtime->read_out({&copy, 1}, {&first, 1}));
    rig.drop(tensor);
    ids.push_back(rig.runtime->add_weights(kGroup, copy.host));
  }
  rig.runtime->presume_weights(ids);
  rig.runtime->trim(0);
  rig.budget(6_MiB, 6_MiB);
  std::atomic<int> failed{0};
  std::vector<driver::Stream> streams;
  for (int i = 0; i < 4; ++i) {
    streams.push_back(rig.stream());
  }
  const auto forward = [&](driver::Stream s) {
    for (int pass = 0; pass < 12; ++pass) {
      for (std::size_t i = 0; i < kGroups; ++i) {
        Address address = 0;
        const bool entered =
            rig.runtime->enter_weights(ids[i], UseKind::sampling, s, &address) == Status::ok;
        failed += entered ? 0 : 1;
        if (entered) {
          failed += stagehand_sim_check(s, address, kGroup, 900 + i) == 0 ? 0 : 1;
          rig.runtime->leave_weights(ids[i]);
        }
      }
    }
  };
  std::vector<std::thread> threads;
  threads.emplace_back(forward, streams[0]);
  threads.emplace_back(forward, streams[1]);
  threads.emplace_back([&] {
    for (int i = 0; i < 100; ++i) {
      Address address = 0;
      if (rig.runtime->allocate(kGroup, streams[2], 0, &address) == Status::ok) {
        rig.runtime->free(address);
      }
      if (i % 10 == 0) {
        rig.runtime->drop_weights();
      }
    }
  });
  threads.emplace_back([&] {  // a model that comes and goes beside them
    for (int pass = 0; pass < 24; ++pass) {
      const GroupId id = rig.runtime->add_weights(kGroup, host.data());
      rig.runtime->presume_weights({&id, 1});
      Address address = 0;
      if (rig.runtime->enter_weights(id, UseKind::sampling, streams[3], &address) == Status::ok) {
        failed += stagehand_sim_check(streams[3], address, kGroup, 900) == 0 ? 0 : 1;
        rig.runtime->leave_weights(id);
      } else {
        ++failed;
      }
      rig.runtime->remove_weights(id);
    }
  });
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(failed, 0);
  for (const GroupId id : ids) {
    rig.runtime->remove_weights(id);
  }
  rig.driver.host_unregister(host.data());
  rig.verify_empty();
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
