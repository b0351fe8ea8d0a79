#include "sim/execute.hpp"

#include <algorithm>
#include <cstring>

namespace stagehand::sim {

namespace {

// Most of what the simulator does is writing patterns and looking for them: a word costs an
// addition, a shift and an exclusive or, which compilers do several at a time.
constexpr std::uint64_t kStride = 0x9E3779B97F4A7C15ull;

std::uint64_t first_word(std::uint64_t seed) {
  std::uint64_t z = (seed + 1) * 0xD6E8FEB86659FD93ull;
  z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93ull;
  return z ^ (z >> 29);
}

std::uint64_t pattern_word(std::uint64_t first, std::uint64_t index) {
  const std::uint64_t z = first + index * kStride;
  return z ^ (z >> 32);
}

// Bytes from `offset` of a pattern on: those before its next whole word, words, those behind.
struct Parts {
  Parts(std::uint64_t bytes, std::uint64_t offset)
      : head(std::min(bytes, (8 - offset % 8) % 8)),
        words((bytes - head) / 8),
        tail(head + words * 8) {}
  std::uint64_t first(std::uint64_t seed, std::uint64_t offset) const {
    return first_word(seed) + (offset + head) / 8 * kStride;
  }

  const std::uint64_t head;
  const std::uint64_t words;
  const std::uint64_t tail;
};

// Calls body(data, bytes, offset) for the stretches of the pieces that hold bytes [at, at + bytes).
template <typename Body>
void for_stretches(const std::vector<Piece>& pieces, std::uint64_t at, std::uint64_t bytes,
                   Body body) {
  const std::uint64_t end = at + bytes;
  std::uint64_t begin = 0;
  for (const Piece& piece : pieces) {
    const std::uint64_t from = std::max(begin, at);
    const std::uint64_t to = std::min(begin + piece.bytes, end);
    if (from < to) {
      body(piece.data + (from - begin), to - from, from);
    }
    begin += piece.bytes;
  }
}

// Without sanitizers, which would look at each of millions of words and know nothing of the memory:
// most of it is the simulator's own mapping.
__attribute__((no_sanitize("address", "undefined"))) void write_words(unsigned char* out,
                                                                      std::uint64_t words,
                                                                      std::uint64_t z) {
  for (std::uint64_t i = 0; i < words; ++i, z += kStride) {
    const std::uint64_t word = z ^ (z >> 32);
    __builtin_memcpy(out + i * 8, &word, 8);
  }
}

void copy(const Op& op, std::uint64_t at, std::uint64_t bytes) {
  for_stretches(op.to, at, bytes, [&](unsigned char* to, std::uint64_t n, std::uint64_t offset) {
    if (!op.staged.empty()) {
      std::memcpy(to, op.staged.data() + offset, n);
      return;
    }
    for_stretches(op.from, offset, n,
                  [&](const unsigned char* from, std::uint64_t part, std::uint64_t from_offset) {
                    unsigned char* out = to + (from_offset - offset);
                    // Sanitizers take memmove a byte at a time.
                    if (out + part <= from || from + part <= out) {
                      std::memcpy(out, from, part);
                    } else {
                      std::memmove(out, from, part);
                    }
                  });
  });
}

// How many bytes of the words are not the pattern's. Without sanitizers, as `write_words`.
__attribute__((no_sanitize("address", "undefined"))) std::uint64_t wrong_in_words(
    const unsigned char* data, std::uint64_t words, std::uint64_t z) {
  constexpr std::uint64_t kOnes = 0x0101010101010101ull;
  constexpr std::uint64_t kMost = 255;  // words that a byte can count
  std::uint64_t wrong = 0;
  for (std::uint64_t done = 0; done < words; done += kMost) {
    const std::uint64_t end = std::min(words, done + kMost);
    std::uint64_t counts = 0;  // of each byte of a word
    for (std::uint64_t i = done; i < end; ++i, z += kStride) {
      std::uint64_t word;
      __builtin_memcpy(&word, data + i * 8, 8);
      std::uint64_t differ = word ^ z ^ (z >> 32);
      differ |= differ >> 4;  // into the last bit of each byte
      differ |= differ >> 2;
      differ |= differ >> 1;
      counts += differ & kOnes;
    }
    for (; counts != 0; counts >>= 8) {
      wrong += counts & 255;
    }
  }
  return wrong;
}

std::uint64_t count_wrong(const Op& op) {
  std::uint64_t wrong = 0;
  for_stretches(op.from, 0, op.bytes,
                [&](const unsigned char* data, std::uint64_t bytes, std::uint64_t offset) {
                  const auto look = [&](std::uint64_t i) {
                    wrong += data[i] != pattern_byte(op.seed, offset + i) ? 1 : 0;
                  };
                  const Parts parts(bytes, offset);
                  for (std::uint64_t i = 0; i < parts.head; ++i) {
                    look(i);
                  }
                  wrong +=
                      wrong_in_words(data + parts.head, parts.words, parts.first(op.seed, offset));
                  for (std::uint64_t i = parts.tail; i < bytes; ++i) {
                    look(i);
                  }
                });
  return wrong;
}

}  // namespace

unsigned char pattern_byte(std::uint64_t seed, std::uint64_t offset) {
  return static_cast<unsigned char>(pattern_word(first_word(seed), offset / 8) >> (offset % 8 * 8));
}

void write_pattern(unsigned char* out, std::uint64_t bytes, std::uint64_t seed,
                   std::uint64_t offset) {
  const Parts parts(bytes, offset);
  for (std::uint64_t i = 0; i < parts.head; ++i) {
    out[i] = pattern_byte(seed, offset + i);
  }
  write_words(out + parts.head, parts.words, parts.first(seed, offset));
  for (std::uint64_t i = parts.tail; i < bytes; ++i) {
    out[i] = pattern_byte(seed, offset + i);
  }
}

unsigned draw_pieces(std::uint64_t bytes, Random& random) {
  return bytes < 128 ? 1 : 1 + static_cast<unsigned>(random.below(4));
}

std::uint64_t execute_piece(Op& op, Random& random) {
  const std::uint64_t left = op.bytes - op.done_bytes;
  std::uint64_t bytes = left;
  if (op.pieces_left > 1) {
    // Cut where a cache line ends, anywhere in what is left.
    bytes = std::min(left, (1 + random.below(2 * left / op.pieces_left + 1)) / 64 * 64);
  }
  const std::uint64_t at = op.done_bytes;
  std::uint64_t wrong = 0;
  switch (op.kind) {
    case OpKind::kD2H:
    case OpKind::kH2D:
    case OpKind::kD2D:
      copy(op, at, bytes);
      break;
    case OpKind::kMemset:
      for_stretches(op.to, at, bytes, [&](unsigned char* data, std::uint64_t n, std::uint64_t) {
        std::memset(data, static_cast<int>(op.seed), n);
      });
      break;
    case OpKind::kFill:
      for_stretches(op.to, at, bytes,
                    [&](unsigned char* data, std::uint64_t n, std::uint64_t offset) {
                      write_pattern(data, n, op.seed, offset);
                    });
      break;
    case OpKind::kCheck:
      wrong = count_wrong(op);
      break;
    case OpKind::kKernel:
      if (op.callback != nullptr) {
        op.callback(op.user);
      }
      break;
    case OpKind::kRecord:
    case OpKind::kWait:
    case OpKind::kWaitValue:
      break;
  }
  op.done_bytes += bytes;
  --op.pieces_left;
  return wrong;
}

}  // namespace stagehand::sim
