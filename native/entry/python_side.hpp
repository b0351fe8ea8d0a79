// What stands in for the trigger library where it cannot be built: torch through Python. Slower,
// and nothing tells when torch's cache runs out, so room is made at the next pack or unpack. All
// calls need the GIL.
#pragma once

#include "core/torch_side.hpp"

namespace stagehand::entry {

// Leaked; raises what importing torch raises.
const core::TorchSide& python_side();
// Reads how much torch's cache holds, now and then: once `bytes` saved or asked for since the last
// look are a share of the budget. A look takes torch about 40 us.
void note_usage(int device, core::Bytes bytes);

}  // namespace stagehand::entry
