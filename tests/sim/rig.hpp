// A fresh simulated GPU for one test, with its context current, and short names for what tests do.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "native/test.hpp"
#include "sim/control.hpp"

namespace stagehand::sim::test {

inline constexpr std::size_t kGranule = std::size_t{2} << 20;
inline constexpr std::size_t kBytes = 16384;  // of a copy, where the size does not matter
inline constexpr std::uint64_t kSeeds = 200;

struct RigSettings {
  std::uint64_t memory_bytes = 64 * kGranule;
  int devices = 1;
  std::uint64_t bytes_per_s = 1'000'000'000;  // one byte a nanosecond
  unsigned flags = STAGEHAND_SIM_NO_POISON;   // for speed: tests that look at poison ask for it
};

class Rig {
 public:
  explicit Rig(std::uint64_t seed, const RigSettings& with = {}) {
    CHECK_EQ(stagehand_sim_configure(with.memory_bytes, with.devices, seed, with.bytes_per_s,
                                     with.bytes_per_s, with.flags),
             0);
    driver = table();
    driver.primary_ctx_retain(&context, 0);
    driver.ctx_push_current(context);
  }
  ~Rig() {
    stagehand_sim_drain();
    for (const auto& [host, bytes] : slabs_) {
      driver.host_unregister(host);
      std::free(host);
    }
    driver::Context popped = nullptr;
    driver.ctx_pop_current(&popped);
  }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  driver::Stream stream() {
    driver::Stream made = nullptr;
    CHECK_EQ(driver.stream_create(&made, driver::kStreamNonBlocking, 0), 0);
    return made;
  }
  driver::Event event(unsigned flags = 0) {
    driver::Event made = nullptr;
    CHECK_EQ(driver.event_create(&made, flags), 0);
    return made;
  }
  driver::Event record(driver::Stream on) {
    const driver::Event made = event();
    CHECK_EQ(driver.event_record(made, on), 0);
    return made;
  }
  // `later` waits for all that `earlier` has queued so far.
  void order(driver::Stream earlier, driver::Stream later) {
    CHECK_EQ(driver.stream_wait_event(later, record(earlier), 0), 0);
  }
  driver::PhysicalHandle physical(std::size_t bytes) {
    const driver::AllocationProp prop;
    driver::PhysicalHandle handle = 0;
    CHECK_EQ(driver.mem_create(&handle, bytes, &prop, 0), 0);
    return handle;
  }
  driver::DevicePtr reserve(std::size_t bytes) {
    driver::DevicePtr address = 0;
    CHECK_EQ(driver.address_reserve(&address, bytes, 0, 0, 0), 0);
    return address;
  }
  void map(driver::DevicePtr address, std::size_t bytes, driver::PhysicalHandle handle) {
    const driver::AccessDesc access;
    CHECK_EQ(driver.mem_map(address, bytes, 0, handle, 0), 0);
    CHECK_EQ(driver.mem_set_access(address, bytes, &access, 1), 0);
  }
  // Mapped, accessible device memory.
  driver::DevicePtr block(std::size_t bytes = kGranule) {
    const driver::DevicePtr address = reserve(bytes);
    map(address, bytes, physical(bytes));
    return address;
  }
  // Pinned host memory.
  unsigned char* slab(std::size_t bytes = kBytes) {
    auto* const host = static_cast<unsigned char*>(std::calloc(bytes, 1));
    CHECK_EQ(driver.host_register(host, bytes, 0), 0);
    slabs_.push_back({host, bytes});
    return host;
  }
  void d2h(unsigned char* host, driver::DevicePtr from, std::size_t bytes, driver::Stream on) {
    CHECK_EQ(driver.memcpy_dtoh_async(host, from, bytes, on), 0);
  }
  void h2d(driver::DevicePtr to, const unsigned char* host, std::size_t bytes, driver::Stream on) {
    CHECK_EQ(driver.memcpy_htod_async(to, host, bytes, on), 0);
  }

  driver::Table driver;
  driver::Context context = nullptr;

 private:
  struct Pinned {
    void* host;
    std::size_t bytes;
  };
  std::vector<Pinned> slabs_;
};

inline std::string hazard_text(std::uint64_t index) {
  std::string text(stagehand_sim_hazard_text(index, nullptr, 0) + 1, '\0');
  text.resize(stagehand_sim_hazard_text(index, text.data(), text.size()));
  return text;
}

// The program has this one hazard and no other, under every seed.
#define CHECK_ONE_HAZARD(kind)                             \
  do {                                                     \
    CHECK_EQ(stagehand_sim_hazards(kind), 1);              \
    CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_ALL), 1); \
    CHECK_EQ(stagehand_sim_hazard_kind(0), kind);          \
    stagehand_sim_clear_hazards();                         \
  } while (false)

#define CHECK_NO_HAZARD()                                  \
  do {                                                     \
    CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_ALL), 0); \
    CHECK_EQ(::stagehand::sim::test::hazard_text(0), "");  \
  } while (false)

// Runs body(rig, broken) for every seed, broken and put right.
template <typename Body>
void planted(int kind, Body body) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool broken : {true, false}) {
      Rig rig(seed);
      body(rig, broken);
      stagehand_sim_step(seed % 7);
      if (broken) {
        CHECK_ONE_HAZARD(kind);
      } else {
        CHECK_NO_HAZARD();
      }
    }
  }
}

}  // namespace stagehand::sim::test
