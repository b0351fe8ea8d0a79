// The contract of native/driver/driver.hpp as a suite over any driver: the simulator, or a real
// GPU.
#pragma once

#include <string>
#include <vector>

#include "driver/driver.hpp"

namespace stagehand::contract {

// Runs every promise on device 0 and returns what was broken, "promise: what was seen" each; empty
// when the driver keeps the contract. Needs cuInit to have been called and about 64 MiB of device
// memory; leaves the device as it was. The calling thread's current context is kept.
std::vector<std::string> run_contract(const driver::Table& table);

// The promises, in the order they run.
std::vector<std::string> promises();

}  // namespace stagehand::contract
