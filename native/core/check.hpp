// Assertions, and the switches that break a rule on purpose.
//
// STAGEHAND_CHECKS: 0 none (release), 1 those that cost a compare. A failed check prints and
// aborts: it exists in builds for tests only, so it never ends a user's process. What a release
// build must survive is a Status, not a check.
#pragma once

#include <cstdio>
#include <cstdlib>

#ifndef STAGEHAND_CHECKS
#define STAGEHAND_CHECKS 0
#endif

namespace stagehand::core {

[[noreturn]] inline void check_failed(const char* what, const char* file, int line) {
  std::fprintf(stderr, "stagehand check failed: %s at %s:%d\n", what, file, line);
  std::abort();
}

#if STAGEHAND_CHECKS
#define SH_CHECK(condition) \
  ((condition) ? (void)0 : ::stagehand::core::check_failed(#condition, __FILE__, __LINE__))
#else
#define SH_CHECK(condition) ((void)0)
#endif

// The stream-order rules of docs/invariants.md. Tests break one at a time and expect the simulator
// to notice; release builds compile every question to `true`.
enum class Rule { none, S1, S2, S3, S4, S5, S6, W2, W4, W7 };

#ifdef STAGEHAND_TESTING
inline bool pinned_is_touched = true;   // set before any other thread runs
inline Rule planted_rule = Rule::none;  // set before any other thread runs
// Where set, no thread pins ahead: a test does, and who waits for pinned memory calls this.
inline void (*pin_by_hand)() = nullptr;
inline bool holds(Rule rule) { return planted_rule != rule; }
#else
constexpr bool holds(Rule) { return true; }
#endif

}  // namespace stagehand::core
