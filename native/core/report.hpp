// What a device tells about itself in words, for error texts.
#pragma once

#include <string>

#include "core/device.hpp"

namespace stagehand::core {

// Why a request of `bytes` failed, with the numbers. Walks the ledger.
std::string out_of_memory_report(Device& device, const Counters& counted, Bytes bytes);
// What became of a record so far; null where it is gone.
std::string record_history(const Record* record);

}  // namespace stagehand::core
