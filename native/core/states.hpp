// The states of a block, a record and a host copy, and which may follow which. Each state has one
// writer: `move_to`, which checks the table. docs/states.md is made from the tables
// (tools/states.py); a test holds the two together.
#pragma once

#include <array>
#include <cstdint>

#include "core/check.hpp"

namespace stagehand::core {

// clang-format off
#define STAGEHAND_BLOCK_STATES(X)                                                                  \
  X(hole,     "address only, nothing mapped")                                                      \
  X(former,   "still mapped, but its physical memory serves elsewhere")                            \
  X(free,     "mapped, reusable by its own stream at once")                                        \
  X(evicting, "mapped, reusable behind its fence: a copy or another stream may still name it")     \
  X(live,     "torch, or a tensor made again over it, can reach it")                               \
  X(retained, "torch has dropped it, a record still needs it: only we hold it")

#define STAGEHAND_BLOCK_MOVES(X)                                                                   \
  X(hole,     free,     "memory was mapped there")                                                 \
  X(hole,     evicting, "memory that queued work still names was mapped there")                    \
  X(free,     live,     "handed out")                                                              \
  X(free,     hole,     "given back to the driver")                                                \
  X(free,     former,   "its memory moved elsewhere")                                              \
  X(evicting, free,     "its fence is settled")                                                    \
  X(evicting, live,     "handed out behind its fence")                                             \
  X(evicting, former,   "its memory moved elsewhere, behind its fence")                            \
  X(former,   free,     "its memory moved back")                                                   \
  X(former,   evicting, "its memory moved back, and queued work still names it")                   \
  X(former,   hole,     "its last use is past, and it was unmapped")                               \
  X(live,     retained, "its last owner left, a record needs it")                                  \
  X(live,     free,     "its last owner left, nobody needs it")                                    \
  X(live,     evicting, "the same, and a copy or another stream still names it")                   \
  X(retained, live,     "asked for by backward, or saved again")                                   \
  X(retained, free,     "its record left it or ended")                                             \
  X(retained, evicting, "the same, and a copy still names it")

#define STAGEHAND_RECORD_STATES(X)                                                                 \
  X(device,  "its bytes are in a block; evicting it is free where it has a host copy")             \
  X(away,    "its bytes are in a host copy only; unpack brings them back")                         \
  X(dropped, "it has neither; its recipe makes its bytes again")

#define STAGEHAND_RECORD_MOVES(X)                                                                  \
  X(device,  away,    "evicted")                                                                   \
  X(away,    device,  "restored or prefetched")                                                    \
  X(device,  dropped, "its recipe is cheaper than its copy")                                       \
  X(dropped, device,  "made again")

#define STAGEHAND_COPY_STATES(X)                                                                   \
  X(none,   "no host memory")                                                                      \
  X(staged, "host memory is taken, and the copy waits for others to go with it")                   \
  X(queued, "the copy is queued or done: ordered by its tick")                                     \
  X(sealed, "with checksums: it has arrived, and its checksum is taken")

#define STAGEHAND_COPY_MOVES(X)                                                                    \
  X(none,   staged, "it is to be copied out")                                                      \
  X(none,   queued, "copied through pageable memory, which the caller waited for")                 \
  X(staged, queued, "its batch was queued")                                                        \
  X(staged, none,   "in use again, or the driver refused")                                         \
  X(queued, none,   "its record ended or was saved again")                                         \
  X(queued, sealed, "its checksum was taken")                                                      \
  X(sealed, none,   "its record ended or was saved again")
// clang-format on

#define STAGEHAND_STATE(name, what) name,
enum class BlockState : std::uint8_t { STAGEHAND_BLOCK_STATES(STAGEHAND_STATE) };
enum class RecordState : std::uint8_t { STAGEHAND_RECORD_STATES(STAGEHAND_STATE) };
enum class CopyState : std::uint8_t { STAGEHAND_COPY_STATES(STAGEHAND_STATE) };
#undef STAGEHAND_STATE

template <class State>
struct Move {
  State from;
  State to;
};

template <class State, std::size_t N>
constexpr bool among(const std::array<Move<State>, N>& moves, State from, State to) {
  for (const Move<State>& move : moves) {
    if (move.from == from && move.to == to) {
      return true;
    }
  }
  return false;
}

#define STAGEHAND_MOVE(before, after, why) Move{State::before, State::after},
constexpr bool may_follow(BlockState from, BlockState to) {
  using State = BlockState;
  constexpr std::array moves{STAGEHAND_BLOCK_MOVES(STAGEHAND_MOVE)};
  return among(moves, from, to);
}
constexpr bool may_follow(RecordState from, RecordState to) {
  using State = RecordState;
  constexpr std::array moves{STAGEHAND_RECORD_MOVES(STAGEHAND_MOVE)};
  return among(moves, from, to);
}
constexpr bool may_follow(CopyState from, CopyState to) {
  using State = CopyState;
  constexpr std::array moves{STAGEHAND_COPY_MOVES(STAGEHAND_MOVE)};
  return among(moves, from, to);
}
#undef STAGEHAND_MOVE

// A state that only `move_to` changes.
template <class State>
class Stated {
 public:
  constexpr explicit Stated(State first) : now_(first) {}
  constexpr operator State() const { return now_; }
  void move_to(State next) {
    SH_CHECK(may_follow(now_, next));
    now_ = next;
  }

 private:
  State now_;
};

constexpr bool is_mapped(BlockState state) {
  return state != BlockState::hole && state != BlockState::former;
}
constexpr bool is_idle(BlockState state) {
  return state == BlockState::free || state == BlockState::evicting;
}

}  // namespace stagehand::core
