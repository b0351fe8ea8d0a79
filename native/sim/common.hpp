// What every file of the simulated GPU shares: results, ranges, and the seeded random numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver/driver.hpp"

namespace stagehand::sim {

using driver::AccessDesc;
using driver::AllocationProp;
using driver::Context;
using driver::CopyAttributes;
using driver::Device;
using driver::DevicePtr;
using driver::Event;
using driver::PhysicalHandle;
using driver::Result;
using driver::Stream;

inline constexpr Result kSuccess = driver::kSuccess;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = driver::kOutOfMemory;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kInvalidDevice = driver::kInvalidDevice;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotFound = 500;
inline constexpr Result kNotReady = driver::kNotReady;
inline constexpr Result kHostMemoryAlreadyRegistered = 712;
inline constexpr Result kHostMemoryNotRegistered = 713;
inline constexpr Result kLaunchTimeout = 702;
inline constexpr Result kCaptureUnsupported = 900;
inline constexpr Result kCaptureIsolation = 905;
inline constexpr Result kCapturedEvent = 907;
inline constexpr Result kUnknown = 999;
// Never leaves the simulator: the call waits for a stream that a value of the host's holds back.
inline constexpr Result kHeld = -1;

inline constexpr std::uint64_t kGranularity = std::uint64_t{2} << 20;
inline constexpr int kHostSpace = -1;  // a Piece of host memory; devices are 0, 1, ...

// Bytes as the program names them: a device address or a host address.
struct Range {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t end() const { return address + bytes; }
};

// Bytes as they are: an offset into one device's physical memory, or a host address. Two addresses
// of one physical byte give the same piece, so aliases race like everything else.
struct Piece {
  int space = kHostSpace;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  unsigned char* data = nullptr;
};

// splitmix64: one word of state, so a seed is a whole schedule.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }
  bool chance(double probability) {
    return static_cast<double>(next() >> 11) * 0x1.0p-53 < probability;
  }

 private:
  std::uint64_t state_;
};

}  // namespace stagehand::sim
