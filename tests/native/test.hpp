// The native tests' frame: a test is a promise and the code that holds it to account.
//
//   TEST("a freed block is reused by the same stream without an event") { CHECK_EQ(events, 0); }
//
// A check that fails is printed with its place, and the test goes on. STAGEHAND_TEST_MAIN() ends a
// file of tests. One program may have many such files:
//
//   native_tests                        every test
//   native_tests --file test_arena      those of one file; what ctest runs
//   native_tests [--file F] hazards     those whose promise contains the word
//
// The last line is "N passed, N failed".
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace stagehand::test {

struct Case {
  const char* file;
  const char* promise;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

// How many seeds a test tries: a third of `all`, and all of them in `make fuzz`.
inline std::uint64_t seeds(std::uint64_t all) {
  const char* asked = std::getenv("STAGEHAND_SEEDS");
  return asked != nullptr && std::string_view(asked) == "all" ? all : (all + 2) / 3;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Register {
  Register(const char* file, const char* promise, void (*body)()) {
    cases().push_back({file, promise, body});
  }
};

inline void fail(const char* file, int line, const std::string& text) {
  ++failures();
  std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
}

template <typename Value>
std::string shown(const Value& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<Value>) {
    out << static_cast<long long>(value);
  } else if constexpr (std::is_same_v<Value, unsigned char>) {
    out << static_cast<int>(value);
  } else {
    out << value;
  }
  return out.str();
}

template <typename Left, typename Right>
bool equal(const Left& left, const Right& right) {
  if constexpr (std::is_integral_v<Left> && std::is_integral_v<Right>) {
    // Literals are signed, sizes are not: compare values, not representations.
    return static_cast<__int128_t>(left) == static_cast<__int128_t>(right);
  } else {
    return left == right;
  }
}

template <typename Left, typename Right>
void check_equal(const char* file, int line, const char* text, const Left& left,
                 const Right& right) {
  if (!equal(left, right)) {
    fail(file, line, std::string(text) + " (" + shown(left) + " and " + shown(right) + ")");
  }
}

// "test_arena" of "/where/it/was/test_arena.cpp".
inline std::string_view stem(std::string_view path) {
  path.remove_prefix(path.rfind('/') == path.npos ? 0 : path.rfind('/') + 1);
  return path.substr(0, path.rfind('.'));
}

// True: it kept its promise.
inline bool run_one(const Case& test) {
  failures() = 0;
  try {
    test.body();
  } catch (const std::exception& error) {
    fail(test.promise, 0, std::string("threw: ") + error.what());
  } catch (...) {
    fail(test.promise, 0, "threw");
  }
  if (failures() > 0) {
    std::fprintf(stderr, "FAILED: %s\n", test.promise);
  }
  return failures() == 0;
}

// Empty: of every file, with any promise.
inline int run_all(std::string_view file, std::string_view word) {
  int passed = 0;
  int failed = 0;
  for (const Case& test : cases()) {
    const bool wanted = (file.empty() || stem(test.file) == file) &&
                        std::string_view(test.promise).find(word) != std::string_view::npos;
    if (wanted) {
      ++(run_one(test) ? passed : failed);
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

// Of a program with tests of its own main(): all whose promise contains the word, if there is one.
inline int run_all(const char* word) { return run_all("", word != nullptr ? word : ""); }

inline int run_arguments(int argc, char** argv) {
  const bool of_file = argc > 2 && std::strcmp(argv[1], "--file") == 0;
  const int next = of_file ? 3 : 1;
  return run_all(of_file ? argv[2] : "", argc > next ? argv[next] : "");
}

}  // namespace stagehand::test

#define STAGEHAND_TEST_JOIN_(a, b) a##b
#define STAGEHAND_TEST_JOIN(a, b) STAGEHAND_TEST_JOIN_(a, b)
#define STAGEHAND_TEST_AS(name, promise)                                                          \
  static void name();                                                                             \
  static const ::stagehand::test::Register STAGEHAND_TEST_JOIN(name, _registered)(__FILE__,       \
                                                                                  promise, name); \
  static void name()
#define TEST(promise) STAGEHAND_TEST_AS(STAGEHAND_TEST_JOIN(stagehand_test_, __LINE__), promise)

#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) {                                                          \
      ::stagehand::test::fail(__FILE__, __LINE__, "does not hold: " #condition); \
    }                                                                            \
  } while (false)

#define CHECK_EQ(left, right)                                                                    \
  ::stagehand::test::check_equal(__FILE__, __LINE__, "not equal: " #left " and " #right, (left), \
                                 (right))

#define CHECK_THROWS(expression)                                                   \
  do {                                                                             \
    bool stagehand_threw = false;                                                  \
    try {                                                                          \
      (void)(expression);                                                          \
    } catch (...) {                                                                \
      stagehand_threw = true;                                                      \
    }                                                                              \
    if (!stagehand_threw) {                                                        \
      ::stagehand::test::fail(__FILE__, __LINE__, "does not throw: " #expression); \
    }                                                                              \
  } while (false)

// Weak: a program of many files takes one of theirs.
#define STAGEHAND_TEST_MAIN()                             \
  __attribute__((weak)) int main(int argc, char** argv) { \
    return ::stagehand::test::run_arguments(argc, argv);  \
  }
