// Counts the host memory that this program has allocated with `new` and not deleted, but for what
// the simulated driver and the test itself took, and lets an allocation fail. Include it in one
// file of a program: it replaces the global operators.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "driver/driver.hpp"

namespace stagehand::core::test {

inline std::atomic<std::int64_t> g_counted_bytes{0};
inline thread_local int t_uncounted = 0;  // how deep in what is not counted
inline thread_local int t_fail_at = 0;    // 1: the next that is counted fails; 0: none

// What is allocated meanwhile on this thread is not the engine's.
class Uncounted {
 public:
  Uncounted() { ++t_uncounted; }
  ~Uncounted() { --t_uncounted; }
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
};

// Puts every function of the table behind Uncounted.
namespace uncounted {
inline driver::Table g_real;
template <auto Member, typename Function>
struct Call;
template <auto Member, typename... Parameters>
struct Call<Member, driver::Result (*)(Parameters...)> {
  static driver::Result call(Parameters... parameters) {
    const Uncounted uncounted;
    return (g_real.*Member)(parameters...);
  }
};
inline void wrap(driver::Table& table) {
  using driver::Table;
  g_real = table;
#define STAGEHAND_WRAP(name, ...)                                 \
  if (table.name != nullptr) {                                    \
    table.name = Call<&Table::name, decltype(Table::name)>::call; \
  }
  STAGEHAND_DRIVER_FUNCTIONS(STAGEHAND_WRAP)
  STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(STAGEHAND_WRAP)
#undef STAGEHAND_WRAP
}
}  // namespace uncounted

// In front of every allocation: its bytes, or 0 where it is not counted.
inline constexpr std::size_t kHeapHeader = 16;

}  // namespace stagehand::core::test

void* operator new(std::size_t bytes) {
  using namespace stagehand::core::test;
  const bool counted = t_uncounted == 0;
  if (counted && t_fail_at > 0 && --t_fail_at == 0) {
    throw std::bad_alloc();
  }
  auto* memory = static_cast<std::size_t*>(std::malloc(bytes + kHeapHeader));
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  memory[0] = counted ? bytes : 0;
  g_counted_bytes += static_cast<std::int64_t>(memory[0]);
  return reinterpret_cast<char*>(memory) + kHeapHeader;
}
// std::stable_sort's, which gives it back to the one below.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept {
  using namespace stagehand::core::test;
  if (memory != nullptr) {
    auto* begin = reinterpret_cast<std::size_t*>(static_cast<char*>(memory) - kHeapHeader);
    g_counted_bytes -= static_cast<std::int64_t>(begin[0]);
    std::free(begin);
  }
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }
