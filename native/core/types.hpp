// The core's vocabulary. Sizes are bytes unless a name says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace stagehand::core {

using Bytes = std::uint64_t;
using Address = std::uint64_t;
using Seq = std::uint64_t;  // a position in one stream's queue; see stream_clock.hpp

inline constexpr Bytes operator""_KiB(unsigned long long n) { return n << 10; }
inline constexpr Bytes operator""_MiB(unsigned long long n) { return n << 20; }
inline constexpr Bytes operator""_GiB(unsigned long long n) { return n << 30; }

inline constexpr Bytes kBlockUnit = 512;     // every block starts and ends on this
inline constexpr Bytes kSmallLimit = 1_MiB;  // up to here a block comes from a small arena
inline constexpr Bytes kUnlimited = std::numeric_limits<Bytes>::max();

inline constexpr Bytes kLargestPiece = 32_MiB;  // physical memory comes in pieces up to this

constexpr Bytes round_up(Bytes value, Bytes unit) { return (value + unit - 1) / unit * unit; }

// What a call of the core can end with. The core never throws: one place in entry/ raises.
enum class Status {
  ok,
  out_of_memory,  // no room under the limit, or the driver refused; nothing changed
  driver_failed,  // a driver call failed for another reason than memory
  stale,          // the record named is gone (its generation passed)
  corrupted,      // a host copy differs from what was written to it
  captured,       // a CUDA graph is being captured, which would read where the bytes are now
  recompute,      // the record was dropped: it is to be made again, and given by refill
};

// A record of the ledger. The generation makes an id of a dead record harmless (rule O2).
struct RecordId {
  std::uint32_t index = 0;
  std::uint32_t generation = 0;
};

// What a recipe makes again: a tensor that begins where its storage does.
struct Made {
  Address first = 0;
  Bytes bytes = 0;         // 0: there is no recipe
  std::uint32_t kind = 0;  // of those of one kind the time is that of their bytes
  bool exact = false;      // the same bytes whenever it runs; else that is to be proven
  bool sought = true;      // else nobody looked for one
  // What a proof rests on beside the place in the step: settings, and the inputs' sizes. Of others
  // it says nothing.
  std::uint32_t rests_on = 0;
  // Elementwise, of inputs that lie as its output does: then sizes are not part of `rests_on`.
  bool any_size = false;
  // Its inputs, as far as they are records: where one was dropped, that is made again first.
  static constexpr std::size_t kInputs = 3;
  RecordId of[kInputs] = {};  // of generation 0: none
};

// Of a save: the call that it is in, 0 for none, and whether that made what is saved; and what did,
// for people.
struct Origin {
  std::uint64_t call = 0;
  bool made = false;
  const char* op = nullptr;      // one text for each, which stays
  const char* region = nullptr;  // likewise
};

// The call of a region that something is saved in, which can be made again by running the region
// once more: where it was allocated since the call began.
struct Inside {
  std::uint64_t call = 0;    // its number; 0: none
  std::uint64_t since = 0;   // Runtime::serial() when it began
  const char* op = nullptr;  // Origin's
  const char* region = nullptr;
};

}  // namespace stagehand::core
