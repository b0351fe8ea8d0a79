// What an operation does to bytes.
#pragma once

#include <cstdint>

#include "sim/scheduler.hpp"

namespace stagehand::sim {

// Byte `offset` of pattern(seed).
unsigned char pattern_byte(std::uint64_t seed, std::uint64_t offset);
void write_pattern(unsigned char* out, std::uint64_t bytes, std::uint64_t seed,
                   std::uint64_t offset);

// Runs the next piece of the operation; sets done_bytes and pieces_left. Returns the number of
// wrong bytes a check has found.
std::uint64_t execute_piece(Op& op, Random& random);

// How many pieces an operation of that many bytes is run in.
unsigned draw_pieces(std::uint64_t bytes, Random& random);

}  // namespace stagehand::sim
