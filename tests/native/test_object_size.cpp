// The room that an error of torch's takes is found out, not guessed (entry/object_size.hpp).
#include <array>
#include <cstdint>
#include <new>
#include <string>

#include "entry/object_size.hpp"
#include "native/test.hpp"

namespace stagehand::entry {
namespace {

template <class T>
std::size_t measured() {
  return bytes_written([](void* where) { new (where) T{}; },
                       [](void* where) { static_cast<T*>(where)->~T(); });
}

struct Small {
  std::uint64_t value = 0xA5A5A5A5A5A5A5A5;  // what the first trial is filled with
};

struct Large {
  std::array<char, 200> text{};
  std::string message = "a text too long to be kept inside of the string object itself";
  std::array<std::uint64_t, 500> more{};
};

TEST("an object's size is found where its constructor alone is known") {
  CHECK_EQ(measured<Small>(), sizeof(Small));
  CHECK_EQ(measured<Large>(), sizeof(Large));
}

TEST("an object that fills the whole trial is measured whole") {
  using Largest = std::array<char, std::size_t{64} << 10>;
  CHECK_EQ(measured<Largest>(), sizeof(Largest));
}

}  // namespace
}  // namespace stagehand::entry

STAGEHAND_TEST_MAIN()
