#include "native/contract.hpp"

#include <utility>

#include "native/contract_suite.hpp"

namespace stagehand::contract {

namespace {

std::vector<Promise> all_promises() {
  std::vector<Promise> all = memory_promises();
  for (const auto& more : {order_promises(), transfer_promises()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

}  // namespace

std::vector<std::string> promises() {
  std::vector<std::string> texts;
  for (const Promise& promise : all_promises()) {
    texts.emplace_back(promise.text);
  }
  return texts;
}

std::vector<std::string> run_contract(const driver::Table& table) {
  Suite suite{table, nullptr, 0, "setting up", {}};
  const driver::AllocationProp prop;
  if (!OK(suite, primary_ctx_retain, &suite.context, 0) ||
      !OK(suite, allocation_granularity, &suite.granule, &prop, 0)) {
    return suite.broken;
  }
  if (!suite.expect(suite.granule >= kPage && (suite.granule & (suite.granule - 1)) == 0,
                    "the granularity is not a power of two")) {
    return suite.broken;
  }
  // Pushed even where it is current, so that promises may pop it.
  OK(suite, ctx_push_current, suite.context);
  for (const Promise& promise : all_promises()) {
    suite.promise = promise.text;
    promise.check(suite);
  }
  Context popped = nullptr;
  OK(suite, ctx_pop_current, &popped);
  return std::move(suite.broken);
}

}  // namespace stagehand::contract
