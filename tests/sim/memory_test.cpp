// Memory of the simulated GPU: aliases, poison, capacity, faults.
#include <csetjmp>
#include <csignal>
#include <cstring>

#include "sim/api.hpp"
#include "sim/rig.hpp"

namespace stagehand::sim::test {

namespace {

unsigned char* host(driver::DevicePtr address) { return reinterpret_cast<unsigned char*>(address); }

RigSettings poisoned() {
  RigSettings with;
  with.flags = 0;
  return with;
}

}  // namespace

TEST("the host sees one handle at two addresses") {
  Rig rig(1);
  const auto handle = rig.physical(2 * kGranule);
  const auto first = rig.reserve(2 * kGranule);
  const auto second = rig.reserve(2 * kGranule);
  rig.map(first, 2 * kGranule, handle);
  rig.map(second, 2 * kGranule, handle);
  host(first)[kGranule + 5] = 42;
  CHECK_EQ(host(second)[kGranule + 5], 42);
}

TEST("fresh memory reads as a number that is not a number") {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    Rig rig(seed, poisoned());
    const auto block = rig.block();
    for (const std::size_t offset : {std::size_t{0}, kGranule / 2 + 8, kGranule - 8}) {
      float single = 0;
      double twice = 0;
      std::memcpy(&single, host(block) + offset, sizeof single);
      std::memcpy(&twice, host(block) + offset, sizeof twice);
      CHECK(single != single);
      CHECK(twice != twice);
    }
  }
}

TEST("memory given back and created again does not show what was in it") {
  Rig rig(3, poisoned());
  for (int round = 0; round < 4; ++round) {
    const auto handle = rig.physical(kGranule);
    const auto address = rig.reserve(kGranule);
    rig.map(address, kGranule, handle);
    CHECK_EQ(host(address)[1], 0xFF);
    CHECK(host(address)[0] != 0x11);
    std::memset(host(address), 0x11, kGranule);
    CHECK_EQ(rig.driver.mem_unmap(address, kGranule), 0);
    CHECK_EQ(rig.driver.mem_release(handle), 0);
  }
}

TEST("a second mapping of a handle keeps its bytes") {
  Rig rig(3, poisoned());
  const auto handle = rig.physical(kGranule);
  const auto first = rig.reserve(kGranule);
  rig.map(first, kGranule, handle);
  host(first)[7] = 9;
  const auto second = rig.reserve(kGranule);
  rig.map(second, kGranule, handle);
  CHECK_EQ(host(second)[7], 9);
}

TEST("a device full of holes still gives all that is free to one handle") {
  Rig rig(4);
  std::vector<driver::PhysicalHandle> handles;
  for (int i = 0; i < 64; ++i) {
    handles.push_back(rig.physical(kGranule));
  }
  const driver::AllocationProp prop;
  driver::PhysicalHandle more = 0;
  CHECK_EQ(rig.driver.mem_create(&more, kGranule, &prop, 0), driver::kOutOfMemory);
  CHECK_EQ(stagehand_sim_physical_bytes(0), 64 * kGranule);
  for (std::size_t i = 0; i < 64; i += 2) {
    CHECK_EQ(rig.driver.mem_release(handles[i]), 0);
  }
  const auto block = rig.block(32 * kGranule);
  for (std::size_t i = 0; i < 32; ++i) {
    host(block)[i * kGranule] = static_cast<unsigned char>(i);
  }
  unsigned char* const slab = rig.slab(32 * kGranule);
  const auto stream = rig.stream();
  rig.d2h(slab, block, 32 * kGranule, stream);
  CHECK_EQ(rig.driver.stream_synchronize(stream), 0);
  for (std::size_t i = 0; i < 32; ++i) {
    CHECK_EQ(slab[i * kGranule], i);
  }
  CHECK_NO_HAZARD();
}

TEST("released memory counts as used until it is unmapped") {
  Rig rig(5);
  const auto handle = rig.physical(kGranule);
  const auto address = rig.reserve(kGranule);
  rig.map(address, kGranule, handle);
  CHECK_EQ(rig.driver.mem_release(handle), 0);
  CHECK_EQ(stagehand_sim_physical_bytes(0), kGranule);
  CHECK_EQ(stagehand_sim_mapped_bytes(0), kGranule);
  CHECK_EQ(rig.driver.mem_unmap(address, kGranule), 0);
  CHECK_EQ(stagehand_sim_physical_bytes(0), 0);
  CHECK_EQ(stagehand_sim_mapped_bytes(0), 0);
  CHECK_NO_HAZARD();
}

TEST("mappings do not overlap, exceed their handle or leave the reservation") {
  Rig rig(6);
  const auto handle = rig.physical(2 * kGranule);
  const auto address = rig.reserve(2 * kGranule);
  CHECK(rig.driver.mem_map(address, 4 * kGranule, 0, handle, 0) != 0);
  CHECK(rig.driver.mem_map(address + kGranule, 2 * kGranule, 0, handle, 0) != 0);
  CHECK(rig.driver.mem_map(address, kGranule, kGranule, handle, 0) != 0);
  CHECK(rig.driver.mem_map(address + 4096, kGranule, 0, handle, 0) != 0);
  rig.map(address, 2 * kGranule, handle);
  CHECK(rig.driver.mem_map(address + kGranule, kGranule, 0, rig.physical(kGranule), 0) != 0);
  CHECK(rig.driver.mem_unmap(address, kGranule) != 0);
  host(address)[2 * kGranule - 1] = 1;
}

TEST("a call made to fail returns that result and changes nothing") {
  Rig rig(7);
  const driver::AllocationProp prop;
  driver::PhysicalHandle handle = 0;
  CHECK_EQ(stagehand_sim_fail("cuMemCreate", 2, 2, driver::kOutOfMemory), 0);
  CHECK_EQ(rig.driver.mem_create(&handle, kGranule, &prop, 0), 0);
  const auto first = handle;
  CHECK_EQ(rig.driver.mem_create(&handle, kGranule, &prop, 0), driver::kOutOfMemory);
  CHECK_EQ(rig.driver.mem_create(&handle, kGranule, &prop, 0), driver::kOutOfMemory);
  CHECK_EQ(handle, first);
  CHECK_EQ(stagehand_sim_physical_bytes(0), kGranule);
  CHECK_EQ(rig.driver.mem_create(&handle, kGranule, &prop, 0), 0);
  CHECK_EQ(stagehand_sim_call_count("cuMemCreate"), 4);
}

TEST("a failed copy queues nothing") {
  Rig rig(8);
  const auto block = rig.block();
  unsigned char* const slab = rig.slab();
  CHECK_EQ(stagehand_sim_fail("cuMemcpyDtoHAsync_v2", 1, 1, 719), 0);
  CHECK_EQ(rig.driver.memcpy_dtoh_async(slab, block, 64, rig.stream()), 719);
  CHECK_EQ(stagehand_sim_queued(), 0);
}

TEST("a fault can be taken back, and needs a symbol that exists") {
  Rig rig(9);
  CHECK_EQ(stagehand_sim_fail("cuMemGetInfo", 1, 5, 999), 0);
  CHECK_EQ(stagehand_sim_fail("cuMemGetInfo", 1, 0, 999), 0);
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  CHECK_EQ(rig.driver.mem_get_info(&free_bytes, &total), 0);
  CHECK_EQ(total, 64 * kGranule);
  CHECK_EQ(stagehand_sim_fail("cuMemGetInformation", 1, 1, 999), 1);
}

TEST("devices have their own memory, streams and context") {
  RigSettings with;
  with.devices = 2;
  Rig rig(10, with);
  driver::Context second = nullptr;
  CHECK_EQ(rig.driver.primary_ctx_retain(&second, 1), 0);
  driver::AllocationProp prop;
  prop.location.id = 1;
  driver::PhysicalHandle handle = 0;
  CHECK_EQ(rig.driver.mem_create(&handle, kGranule, &prop, 0), 0);
  CHECK_EQ(stagehand_sim_physical_bytes(0), 0);
  CHECK_EQ(stagehand_sim_physical_bytes(1), kGranule);
  driver::Event event = nullptr;
  {
    const driver::ContextGuard guard(rig.driver, second);
    CHECK_EQ(rig.driver.event_create(&event, 0), 0);
  }
  CHECK(rig.driver.event_record(event, rig.stream()) != 0);
}

TEST("a driver can be told to be old, or to have no virtual memory, until the reset") {
  Rig rig(12);
  int value = 0;
  stagehand_sim_set_driver_version(11040);
  CHECK_EQ(cuDriverGetVersion(&value), 0);
  CHECK_EQ(value, 11040);
  stagehand_sim_set_attribute(102, 0);
  CHECK_EQ(cuDeviceGetAttribute(&value, 102, 0), 0);
  CHECK_EQ(value, 0);
  stagehand_sim_reset();
  CHECK_EQ(cuDeviceGetAttribute(&value, 102, 0), 0);
  CHECK_EQ(value, 1);
}

TEST("cuMemAlloc gives memory and cuMemFree waits for the device") {
  Rig rig(13);
  driver::DevicePtr address = 0;
  CHECK_EQ(cuMemAlloc(&address, 1000), 0);
  CHECK_EQ(stagehand_sim_physical_bytes(0), kGranule);
  CHECK_EQ(rig.driver.memset_d8_async(address, 1, 1000, rig.stream()), 0);
  CHECK_EQ(cuMemFree(address), 0);
  CHECK_EQ(stagehand_sim_host_waits(), 1);
  CHECK_EQ(stagehand_sim_physical_bytes(0), 0);
  CHECK_NO_HAZARD();
  CHECK(cuMemFree(address) != 0);
  CHECK_ONE_HAZARD(STAGEHAND_SIM_DOUBLE_FREE);
}

TEST("after a reset the machine is as new") {
  Rig rig(11);
  rig.block();
  stagehand_sim_fail("cuMemCreate", 1, 9, 2);
  const auto stream = rig.stream();
  stagehand_sim_reset();
  CHECK_EQ(stagehand_sim_physical_bytes(0), 0);
  CHECK_EQ(stagehand_sim_call_count("cuMemCreate"), 0);
  CHECK(rig.driver.stream_synchronize(stream) != 0);
  driver::Context current = rig.context;
  CHECK_EQ(rig.driver.ctx_get_current(&current), 0);
  CHECK(current == nullptr);
}

}  // namespace stagehand::sim::test
