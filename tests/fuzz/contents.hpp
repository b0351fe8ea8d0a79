// What fills blocks and looks at them again: pattern kernels on the simulator, memsets and copies
// on a real GPU. Everything is queued on a stream; nothing here waits but `finish`.
#pragma once

#include <cstdint>
#include <string>

#include "core/types.hpp"
#include "driver/driver.hpp"

namespace stagehand::fuzz {

class Contents {
 public:
  virtual ~Contents() = default;
  virtual void fill(driver::Stream stream, core::Address address, core::Bytes bytes,
                    std::uint64_t seed) = 0;
  virtual void check(driver::Stream stream, core::Address address, core::Bytes bytes,
                     std::uint64_t seed) = 0;
  // All work is done: empty, or what was wrong since the start.
  virtual std::string finish() = 0;
  // Cheap: empty, or what is known to be wrong by now.
  virtual std::string seen() { return ""; }
  // The device gets on by so many steps, where that can be said.
  virtual void progress(std::uint64_t /*steps*/) {}
  // The stream is captured into a graph from now on, or no longer. False: not possible here.
  virtual bool capture(driver::Stream /*stream*/, bool /*on*/) { return false; }
  // What the driver may take for itself while a program runs.
  virtual core::Bytes driver_slack() const { return 0; }
};

}  // namespace stagehand::fuzz
