// CRC-32C (Castagnoli) of host memory, for DebugModes::checksums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.hpp"

namespace stagehand::core {

// Goes on from `crc`, 0 at the start: crc32c(crc32c(0, a), b) is that of a and b.
std::uint32_t crc32c(std::uint32_t crc, const std::byte* data, Bytes bytes);

}  // namespace stagehand::core
