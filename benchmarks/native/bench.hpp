// The engine's benchmark: a case measures one path at one size and prints a line of JSON for each
// number. benchmarks/engine.py runs it, one case a process.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

namespace stagehand::bench {

struct Case {
  const char* name;
  void (*run)(int n);
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)(int n)) { cases().push_back({name, run}); }
};

inline void print(const char* what, double value, const char* unit) {
  std::printf("{\"what\": \"%s\", \"value\": %.6g, \"unit\": \"%s\"}\n", what, value, unit);
}

class Stopwatch {
 public:
  double us() const {
    const auto passed = std::chrono::steady_clock::now() - began_;
    return std::chrono::duration<double, std::micro>(passed).count();
  }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

template <typename Body>
double time_us(Body body) {
  const Stopwatch watch;
  body();
  return watch.us();
}

inline double median(std::vector<double> of) {
  const auto middle = of.begin() + static_cast<std::ptrdiff_t>(of.size() / 2);
  std::nth_element(of.begin(), middle, of.end());
  return *middle;
}

}  // namespace stagehand::bench

#define BENCH(name)                                                                         \
  static void bench_##name(int n);                                                          \
  static const ::stagehand::bench::Register bench_##name##_registered(#name, bench_##name); \
  static void bench_##name([[maybe_unused]] int n)
