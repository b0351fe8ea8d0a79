// Host bytes into fresh host memory, and whether they are there, by several threads: core/pinner.
#include <cstddef>
#include <cstring>
#include <vector>

#include "core/pinner.hpp"
#include "native/test.hpp"

namespace stagehand::core {
namespace {

// Bytes that are like no others near them, and never 0.
std::byte at(Bytes i) { return static_cast<std::byte>(((i * 2654435761u) >> 13) | 1); }

void check(const std::vector<Bytes>& sizes) {
  Bytes all = 0;
  for (const Bytes size : sizes) {
    all += round_up(size, 512);
  }
  std::byte* const host = map_host(round_up(all, 4_KiB), -1);
  std::vector<std::vector<std::byte>> sources;
  std::vector<HostMove> moves;
  Bytes offset = 0;
  for (const Bytes size : sizes) {
    std::vector<std::byte>& source = sources.emplace_back(size);
    for (Bytes i = 0; i < size; ++i) {
      source[i] = at(offset + i);
    }
    moves.push_back({host + offset, source.data(), size});
    offset += round_up(size, 512);
  }
  CHECK(!same_on_host(moves));
  copy_on_host(moves);
  CHECK(same_on_host(moves));
  for (std::vector<std::byte>& source : sources) {  // its last byte, which a thread alone may have
    source.back() ^= std::byte{1};
    CHECK(!same_on_host(moves));
    source.back() ^= std::byte{1};
  }
  offset = 0;
  for (const std::vector<std::byte>& source : sources) {
    CHECK_EQ(std::memcmp(host + offset, source.data(), source.size()), 0);
    for (Bytes i = source.size(); i < round_up(source.size(), 512); ++i) {
      CHECK(host[offset + i] == std::byte{0});  // between them nothing is written
    }
    offset += round_up(source.size(), 512);
  }
  unmap_host(host, round_up(all, 4_KiB));
}

TEST("host bytes arrive each at its place, few of them by one thread and many by several") {
  check({1});
  check({511, 513, 4096, 3});
  check({70_MiB + 5, 17, 1_MiB, 9});  // more than one thread's share, at odd borders
}

TEST("nothing to copy copies nothing, and is the same") {
  copy_on_host({});
  CHECK(same_on_host({}));
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
