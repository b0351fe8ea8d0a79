// Each kind of hazard, planted once, is found under every seed; the program put right has none.
#include "sim/api.hpp"
#include "sim/rig.hpp"

namespace stagehand::sim::test {

namespace {

stagehand_sim_range whole(driver::DevicePtr address) { return {address, kBytes}; }

}  // namespace

TEST("a copy out that does not wait for the kernel that writes is a race") {
  planted(STAGEHAND_SIM_DEVICE_RACE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto compute = rig.stream();
    const auto lane = rig.stream();
    const stagehand_sim_range write = whole(block);
    stagehand_sim_kernel(compute, 1000, nullptr, 0, &write, 1, nullptr, nullptr);
    if (!broken) {
      rig.order(compute, lane);
    }
    rig.d2h(rig.slab(), block, kBytes, lane);
  });
}

TEST("reuse of a block that does not wait for its copy out is a race") {
  planted(STAGEHAND_SIM_DEVICE_RACE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto compute = rig.stream();
    const auto lane = rig.stream();
    stagehand_sim_fill(compute, block, kBytes, 1);
    rig.order(compute, lane);
    rig.d2h(rig.slab(), block, kBytes, lane);
    if (!broken) {
      rig.order(lane, compute);
    }
    stagehand_sim_fill(compute, block + 100, 50, 2);
  });
}

TEST("a consumer that does not wait for the restore is a race") {
  planted(STAGEHAND_SIM_DEVICE_RACE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto compute = rig.stream();
    const auto lane = rig.stream();
    rig.h2d(block, rig.slab(), kBytes, lane);
    if (!broken) {
      rig.order(lane, compute);
    }
    const stagehand_sim_range read = whole(block);
    stagehand_sim_kernel(compute, 1000, &read, 1, nullptr, 0, nullptr, nullptr);
  });
}

TEST("two unordered writes through two addresses of one handle are a race") {
  planted(STAGEHAND_SIM_DEVICE_RACE, [](Rig& rig, bool broken) {
    const auto handle = rig.physical(kGranule);
    const auto first = rig.reserve(kGranule);
    const auto second = rig.reserve(kGranule);
    rig.map(first, kGranule, handle);
    rig.map(second, kGranule, handle);
    const auto one = rig.stream();
    const auto two = rig.stream();
    CHECK_EQ(rig.driver.memset_d8_async(first, 1, 4096, one), 0);
    if (!broken) {
      rig.order(one, two);
    }
    CHECK_EQ(rig.driver.memset_d8_async(second + 4000, 2, 4096, two), 0);
  });
}

TEST("a writer that waits for one of two readers races with the other") {
  planted(STAGEHAND_SIM_DEVICE_RACE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto compute = rig.stream();
    const auto first = rig.stream();
    const auto second = rig.stream();
    rig.d2h(rig.slab(), block, kBytes, first);
    rig.d2h(rig.slab(), block, kBytes, second);
    rig.order(second, compute);
    if (!broken) {
      rig.order(first, compute);
    }
    stagehand_sim_fill(compute, block, kBytes, 1);
  });
}

TEST("an ordered write to the middle of a block hides no race at its ends") {
  for (const std::size_t offset : {std::size_t{0}, kBytes - 64}) {
    planted(STAGEHAND_SIM_DEVICE_RACE, [offset](Rig& rig, bool broken) {
      const auto block = rig.block();
      const auto one = rig.stream();
      const auto two = rig.stream();
      const auto three = rig.stream();
      stagehand_sim_fill(one, block, kBytes, 1);
      rig.order(one, two);
      stagehand_sim_fill(two, block + 4096, 4096, 2);
      if (!broken) {
        rig.order(two, three);
      }
      rig.d2h(rig.slab(), block + offset, 64, three);
    });
  }
}

TEST("a race is found even where one stream has long run dry") {
  planted(STAGEHAND_SIM_DEVICE_RACE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto one = rig.stream();
    const auto two = rig.stream();
    stagehand_sim_fill(one, block, kBytes, 1);
    while (stagehand_sim_step(1) > 0) {  // complete, but nobody has asked
    }
    if (!broken) {
      CHECK_EQ(rig.driver.stream_synchronize(one), 0);
    }
    stagehand_sim_fill(two, block, kBytes, 2);
  });
}

TEST("a slab refilled behind a copy that still reads it is a race") {
  planted(STAGEHAND_SIM_HOST_RACE, [](Rig& rig, bool broken) {
    const auto restored = rig.block();
    const auto evicted = rig.block();
    unsigned char* const slab = rig.slab();
    const auto in = rig.stream();
    const auto out = rig.stream();
    rig.h2d(restored, slab, kBytes, in);
    if (!broken) {
      rig.order(in, out);
    }
    rig.d2h(slab, evicted, kBytes, out);
  });
}

TEST("a restore that does not wait for its own write-back is a race") {
  planted(STAGEHAND_SIM_HOST_RACE, [](Rig& rig, bool broken) {
    const auto from = rig.block();
    const auto to = rig.block();
    unsigned char* const slab = rig.slab();
    const auto out = rig.stream();
    const auto in = rig.stream();
    rig.d2h(slab, from, kBytes, out);
    if (!broken) {
      rig.order(out, in);
    }
    rig.h2d(to, slab, kBytes, in);
  });
}

TEST("the host that reads a slab before its copy is known to be complete is a race") {
  planted(STAGEHAND_SIM_HOST_RACE, [](Rig& rig, bool broken) {
    unsigned char* const slab = rig.slab();
    const auto out = rig.stream();
    rig.d2h(slab, rig.block(), kBytes, out);
    const auto done = rig.record(out);
    if (!broken) {
      while (rig.driver.event_query(done) == driver::kNotReady) {
      }
    }
    stagehand_sim_host_access(slab + 10, 1, 0);
  });
}

TEST("the host that writes device memory under a queued copy is a race") {
  planted(STAGEHAND_SIM_DEVICE_RACE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto out = rig.stream();
    rig.d2h(rig.slab(), block, kBytes, out);
    if (!broken) {
      CHECK_EQ(rig.driver.event_synchronize(rig.record(out)), 0);
    }
    stagehand_sim_host_access(reinterpret_cast<void*>(block), 64, 1);
  });
}

TEST("releasing a handle twice is a double free") {
  planted(STAGEHAND_SIM_DOUBLE_FREE, [](Rig& rig, bool broken) {
    const auto handle = rig.physical(kGranule);
    CHECK_EQ(rig.driver.mem_release(handle), 0);
    if (broken) {
      CHECK(rig.driver.mem_release(handle) != 0);
    }
  });
}

TEST("unmapping twice is a double free") {
  planted(STAGEHAND_SIM_DOUBLE_FREE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    CHECK_EQ(rig.driver.mem_unmap(block, kGranule), 0);
    if (broken) {
      CHECK(rig.driver.mem_unmap(block, kGranule) != 0);
    }
  });
}

TEST("giving addresses back twice is a double free") {
  planted(STAGEHAND_SIM_DOUBLE_FREE, [](Rig& rig, bool broken) {
    const auto address = rig.reserve(kGranule);
    CHECK_EQ(rig.driver.address_free(address, kGranule), 0);
    if (broken) {
      CHECK(rig.driver.address_free(address, kGranule) != 0);
    }
  });
}

TEST("unregistering host memory twice is a double free") {
  planted(STAGEHAND_SIM_DOUBLE_FREE, [](Rig& rig, bool broken) {
    static unsigned char host[4096];
    CHECK_EQ(rig.driver.host_register(host, sizeof host, 0), 0);
    CHECK_EQ(rig.driver.host_unregister(host), 0);
    if (broken) {
      CHECK(rig.driver.host_unregister(host) != 0);
    }
  });
}

TEST("unmapping under a queued copy is a free in use") {
  planted(STAGEHAND_SIM_FREE_IN_USE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto lane = rig.stream();
    rig.d2h(rig.slab(), block, kBytes, lane);
    const auto done = rig.record(lane);
    if (broken) {
      while (stagehand_sim_step(1) > 0) {  // complete by luck is no excuse
      }
    } else {
      CHECK_EQ(rig.driver.event_synchronize(done), 0);
    }
    CHECK_EQ(rig.driver.mem_unmap(block, kGranule), 0);
  });
}

TEST("memory taken from queued work is one hazard, not one more for each new user") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Rig rig(seed);
    const auto handle = rig.physical(kGranule);
    const auto address = rig.reserve(kGranule);
    rig.map(address, kGranule, handle);
    rig.d2h(rig.slab(), address, kBytes, rig.stream());
    CHECK_EQ(rig.driver.mem_unmap(address, kGranule), 0);
    CHECK_EQ(rig.driver.mem_release(handle), 0);
    rig.map(address, kGranule, rig.physical(kGranule));
    stagehand_sim_fill(rig.stream(), address, kBytes, 1);
    CHECK_ONE_HAZARD(STAGEHAND_SIM_FREE_IN_USE);
  }
}

TEST("unmapping one address while only its alias is in use is fine") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Rig rig(seed);
    const auto handle = rig.physical(kGranule);
    const auto used = rig.reserve(kGranule);
    const auto alias = rig.reserve(kGranule);
    rig.map(used, kGranule, handle);
    rig.map(alias, kGranule, handle);
    rig.d2h(rig.slab(), used, kBytes, rig.stream());
    CHECK_EQ(rig.driver.mem_unmap(alias, kGranule), 0);
    CHECK_EQ(rig.driver.address_free(alias, kGranule), 0);
    CHECK_EQ(rig.driver.mem_release(handle), 0);
    CHECK_NO_HAZARD();
  }
}

TEST("giving addresses back while memory is mapped there is a free in use") {
  planted(STAGEHAND_SIM_FREE_IN_USE, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    if (broken) {
      CHECK(rig.driver.address_free(block, kGranule) != 0);
    }
    CHECK_EQ(rig.driver.mem_unmap(block, kGranule), 0);
    CHECK_EQ(rig.driver.address_free(block, kGranule), 0);
  });
}

TEST("cuMemFree takes memory from another device's queued work, whatever waits for that") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool broken : {true, false}) {
      RigSettings with;
      with.devices = 2;
      Rig rig(seed, with);
      driver::DevicePtr address = 0;
      CHECK_EQ(cuMemAlloc(&address, kBytes), 0);
      driver::Context other = nullptr;
      CHECK_EQ(rig.driver.primary_ctx_retain(&other, 1), 0);
      driver::Event written = nullptr;
      {
        const driver::ContextGuard guard(rig.driver, other);
        const driver::Stream writer = rig.stream();
        CHECK_EQ(stagehand_sim_fill(writer, address, kBytes, 1), 0);
        CHECK_EQ(rig.driver.event_create(&written, 0), 0);
        CHECK_EQ(rig.driver.event_record(written, writer), 0);
      }
      CHECK_EQ(rig.driver.stream_wait_event(rig.stream(), written, 0), 0);
      if (!broken) {
        const driver::ContextGuard guard(rig.driver, other);
        CHECK_EQ(rig.driver.ctx_synchronize(), 0);
      }
      CHECK_EQ(cuMemFree(address), 0);
      if (broken) {
        CHECK_ONE_HAZARD(STAGEHAND_SIM_FREE_IN_USE);
      } else {
        CHECK_NO_HAZARD();
      }
    }
  }
}

TEST("unregistering a slab under a queued copy is a free in use") {
  planted(STAGEHAND_SIM_FREE_IN_USE, [](Rig& rig, bool broken) {
    static unsigned char host[4096];
    CHECK_EQ(rig.driver.host_register(host, sizeof host, 0), 0);
    const auto lane = rig.stream();
    rig.d2h(host, rig.block(), sizeof host, lane);
    if (!broken) {
      CHECK_EQ(rig.driver.stream_synchronize(lane), 0);
    }
    CHECK_EQ(rig.driver.host_unregister(host), 0);
  });
}

TEST("a copy that names memory not mapped is refused and reported") {
  planted(STAGEHAND_SIM_UNMAPPED, [](Rig& rig, bool broken) {
    const auto address = rig.reserve(2 * kGranule);
    rig.map(address, kGranule, rig.physical(kGranule));
    const auto lane = rig.stream();
    unsigned char* const slab = rig.slab();
    const std::size_t over = broken ? 1 : 0;
    CHECK_EQ(rig.driver.memcpy_dtoh_async(slab, address + kGranule - 64, 64 + over, lane) != 0,
             broken);
  });
}

TEST("a copy that names mapped memory without access is refused and reported") {
  planted(STAGEHAND_SIM_UNMAPPED, [](Rig& rig, bool broken) {
    const auto address = rig.reserve(kGranule);
    CHECK_EQ(rig.driver.mem_map(address, kGranule, 0, rig.physical(kGranule), 0), 0);
    driver::AccessDesc access;
    access.flags = broken ? 1 : 3;  // read only
    CHECK_EQ(rig.driver.mem_set_access(address, kGranule, &access, 1), 0);
    CHECK_EQ(rig.driver.memset_d8_async(address, 0, 64, rig.stream()) != 0, broken);
  });
}

TEST("an event used after it was destroyed is reported") {
  planted(STAGEHAND_SIM_DESTROYED, [](Rig& rig, bool broken) {
    const auto event = rig.record(rig.stream());
    const auto other = rig.stream();
    CHECK_EQ(rig.driver.event_destroy(event), 0);
    if (broken) {
      CHECK(rig.driver.stream_wait_event(other, event, 0) != 0);
    }
  });
}

TEST("a stream used after it was destroyed is reported") {
  planted(STAGEHAND_SIM_DESTROYED, [](Rig& rig, bool broken) {
    const auto block = rig.block();
    const auto stream = rig.stream();
    CHECK_EQ(rig.driver.stream_destroy(stream), 0);
    if (broken) {
      CHECK(rig.driver.memset_d8_async(block, 0, 64, stream) != 0);
    }
  });
}

TEST("an event query while a stream is captured is reported unless the mode is relaxed") {
  planted(STAGEHAND_SIM_CAPTURE, [](Rig& rig, bool broken) {
    const auto captured = rig.stream();
    const auto event = rig.record(rig.stream());
    CHECK_EQ(stagehand_sim_capture(captured, 1), 0);
    int mode = driver::kCaptureModeRelaxed;
    if (!broken) {
      CHECK_EQ(rig.driver.thread_exchange_capture_mode(&mode), 0);
    }
    int status = 0;
    CHECK_EQ(rig.driver.stream_is_capturing(captured, &status), 0);
    CHECK_EQ(status, 1);
    const auto result = rig.driver.event_query(event);
    CHECK_EQ(result == 900, broken);
    if (!broken) {
      CHECK_EQ(rig.driver.thread_exchange_capture_mode(&mode), 0);
    }
    CHECK_EQ(stagehand_sim_capture(captured, 0), 0);
  });
}

TEST("a lane drawn into a capture by a wait is reported") {
  planted(STAGEHAND_SIM_CAPTURE, [](Rig& rig, bool broken) {
    const auto captured = rig.stream();
    const auto lane = rig.stream();
    CHECK_EQ(stagehand_sim_capture(captured, broken ? 1 : 0), 0);
    const auto event = rig.record(captured);
    CHECK_EQ(rig.driver.stream_wait_event(lane, event, 0) != 0, broken);
    CHECK_EQ(stagehand_sim_capture(captured, 0), 0);
  });
}

TEST("a hazard is one line that names both operations and the bytes") {
  Rig rig(0);
  const auto block = rig.block();
  stagehand_sim_fill(rig.stream(), block, kBytes, 1);
  rig.d2h(rig.slab(), block + 4096, 100, rig.stream());
  const std::string text = hazard_text(0);
  CHECK_EQ(text,
           "race: d2h copy #2 on stream 2 reads device 0 physical bytes 0x1000+100 that fill "
           "kernel #1 on stream 1 writes, and nothing orders them");
}

}  // namespace stagehand::sim::test
