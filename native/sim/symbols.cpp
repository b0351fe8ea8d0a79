// Symbols by name: for cuGetProcAddress, for faults, and for native tests' table.
#include <algorithm>
#include <iterator>
#include <string_view>

#include "sim/api.hpp"
#include "sim/control.hpp"
#include "sim/gpu.hpp"

namespace stagehand::sim {

namespace {

struct Symbol {
  std::string_view name;
  void* address;
  int since;  // the driver version that brought it
};

constexpr int kAlways = 12000;

const Symbol kSymbolTable[] = {
#define STAGEHAND_SIM_SYMBOL(name, symbol, parameters) \
  {#symbol, reinterpret_cast<void*>(&sim::symbol), kAlways},
#define STAGEHAND_SIM_OPTIONAL_SYMBOL(name, symbol, parameters, version) \
  {#symbol, reinterpret_cast<void*>(&sim::symbol), version},
#define STAGEHAND_SIM_EXTRA_SYMBOL(symbol, parameters) \
  {#symbol, reinterpret_cast<void*>(&sim::symbol), kAlways},
    STAGEHAND_DRIVER_FUNCTIONS(STAGEHAND_SIM_SYMBOL)
        STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(STAGEHAND_SIM_OPTIONAL_SYMBOL)
            STAGEHAND_SIM_EXTRA_FUNCTIONS(STAGEHAND_SIM_EXTRA_SYMBOL)
#undef STAGEHAND_SIM_SYMBOL
#undef STAGEHAND_SIM_OPTIONAL_SYMBOL
#undef STAGEHAND_SIM_EXTRA_SYMBOL
};
static_assert(std::size(kSymbolTable) == kFunctions);

// "cuMemFree_v2" -> "cuMemFree"
std::string_view without_version(std::string_view name) {
  const std::size_t n = name.size();
  const bool versioned =
      n > 3 && name[n - 3] == '_' && name[n - 2] == 'v' && name[n - 1] >= '2' && name[n - 1] <= '9';
  return versioned ? name.substr(0, n - 3) : name;
}

// The machine's driver, or a program that asks for version `asked`, is older than the function.
bool too_old_for(Function function, int asked) {
  const int since = kSymbolTable[static_cast<std::size_t>(function)].since;
  if (since == kAlways || forked()) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(gpu_mutex());
  return asked < since || gpu().driver_version < since;
}

}  // namespace

const char* symbol_of(Function function) {
  return kSymbolTable[static_cast<std::size_t>(function)].name.data();
}

void* address_of(Function function) {
  return kSymbolTable[static_cast<std::size_t>(function)].address;
}

Function function_of(const char* symbol) {
  const std::string_view name = without_version(symbol);
  const auto* const it = std::find_if(std::begin(kSymbolTable), std::end(kSymbolTable),
                                      [&](const Symbol& entry) { return entry.name == name; });
  return static_cast<Function>(it - std::begin(kSymbolTable));
}

driver::Table table() {
  cuInit(0);
  driver::Table table;
#define STAGEHAND_SIM_FILL(name, symbol, parameters) table.name = &sim::symbol;
#define STAGEHAND_SIM_FILL_OPTIONAL(name, symbol, parameters, version) \
  table.name = too_old_for(Function::symbol, version) ? nullptr : &sim::symbol;
  STAGEHAND_DRIVER_FUNCTIONS(STAGEHAND_SIM_FILL)
  STAGEHAND_OPTIONAL_DRIVER_FUNCTIONS(STAGEHAND_SIM_FILL_OPTIONAL)
#undef STAGEHAND_SIM_FILL
#undef STAGEHAND_SIM_FILL_OPTIONAL
  return table;
}

}  // namespace stagehand::sim

using stagehand::sim::kInvalidValue;
using stagehand::sim::kNotFound;
using stagehand::sim::kSuccess;

// `flags` picks among default streams, `version` among forms of a function: there is one of each
// here, but a function is not found by who asks for a version without it.
// `status`: 0 found, 1 there is no such symbol.
STAGEHAND_SIM_API cuGetProcAddress_v2(const char* symbol, void** address, int version,
                                      std::uint64_t /*flags*/, int* status) {
  using stagehand::sim::Function;
  if (symbol == nullptr || address == nullptr) {
    return kInvalidValue;
  }
  *address = nullptr;
  const Function function = stagehand::sim::function_of(symbol);
  const std::string_view name = symbol;
  if (function != Function::kCount && !stagehand::sim::too_old_for(function, version)) {
    *address = stagehand::sim::address_of(function);
  } else if (name == "cuGetProcAddress" || name == "cuGetProcAddress_v2") {
    *address = reinterpret_cast<void*>(&cuGetProcAddress_v2);
  }
  if (status != nullptr) {
    *status = *address != nullptr ? 0 : 1;
  }
  return *address != nullptr ? kSuccess : kNotFound;
}

STAGEHAND_SIM_API cuGetProcAddress(const char* symbol, void** address, int version,
                                   std::uint64_t flags) {
  return cuGetProcAddress_v2(symbol, address, version, flags, nullptr);
}
