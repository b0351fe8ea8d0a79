// Driver calls that fail: a table around another one, in which the nth call of a symbol from now
// returns an error and does nothing. Only whoever has this table is hit, so a fault never ends a
// program's own work.
#pragma once

#include <array>
#include <cstdint>

#include "driver/driver.hpp"

namespace stagehand::fuzz {

struct Fault {
  std::uint64_t in = 0;  // the call that fails first, 1 being the next; 0: none
  std::uint64_t times = 0;
  driver::Result result = 0;
};

struct FaultPlan {
  std::array<Fault, driver::kFunctionCount> faults{};
  std::array<std::uint64_t, driver::kFunctionCount> calls{};  // since the last clear

  // What this call returns instead of being made; 0: it is made.
  driver::Result due(std::size_t symbol) {
    ++calls[symbol];
    Fault& fault = faults[symbol];
    if (fault.in == 0 || --fault.in > 0) {
      return driver::kSuccess;
    }
    fault.in = --fault.times > 0 ? 1 : 0;
    return fault.result;
  }
};

inline FaultPlan& fault_plan() {
  static FaultPlan plan;
  return plan;
}

template <std::size_t kSymbol, class Function>
struct Faulty;
template <std::size_t kSymbol, class... Arguments>
struct Faulty<kSymbol, driver::Result (*)(Arguments...)> {
  static inline driver::Result (*real)(Arguments...) = nullptr;
  static driver::Result call(Arguments... arguments) {
    const driver::Result result = fault_plan().due(kSymbol);
    return result != driver::kSuccess ? result : real(arguments...);
  }
  static driver::Result (*around(driver::Result (*function)(Arguments...)))(Arguments...) {
    real = function;
    return function != nullptr ? &call : nullptr;
  }
};

enum class Symbol : std::size_t {
#define STAGEHAND_FUZZ_SYMBOL(name, symbol, parameters) name,
#define STAGEHAND_FUZZ_OPTIONAL(name, symbol, parameters, version) name,
  STAGEHAND_DRIVER_FUNCTIONS(STAGEHAND_FUZZ_SYMBOL)
      STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(STAGEHAND_FUZZ_OPTIONAL)
#undef STAGEHAND_FUZZ_SYMBOL
#undef STAGEHAND_FUZZ_OPTIONAL
};

inline driver::Table faulty(driver::Table table) {
#define STAGEHAND_FUZZ_AROUND(name, symbol, parameters) \
  table.name =                                          \
      Faulty<static_cast<std::size_t>(Symbol::name), decltype(table.name)>::around(table.name);
#define STAGEHAND_FUZZ_AROUND_OPTIONAL(name, symbol, parameters, version) \
  STAGEHAND_FUZZ_AROUND(name, symbol, parameters)
  STAGEHAND_DRIVER_FUNCTIONS(STAGEHAND_FUZZ_AROUND)
  STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(STAGEHAND_FUZZ_AROUND_OPTIONAL)
#undef STAGEHAND_FUZZ_AROUND
#undef STAGEHAND_FUZZ_AROUND_OPTIONAL
  return table;
}

}  // namespace stagehand::fuzz
