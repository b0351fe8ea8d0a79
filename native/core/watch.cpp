#include "core/watch.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace stagehand::core {

namespace {

constexpr double kFifth = 0.2;
constexpr Bytes kTells = 64 << 20;  // fewer bytes do not tell what a lane carries

double rate(Bytes bytes, std::uint64_t ns) {
  return bytes >= kTells && ns > 0 ? static_cast<double>(bytes) / static_cast<double>(ns) : 0;
}

bool apart(double a, double b) {
  return a > 0 && b > 0 && std::abs(a - b) > kFifth * std::min(a, b);
}

}  // namespace

bool Watch::differ(const Costs& a, const Costs& b) {
  return apart(a.compute_ns, b.compute_ns) || apart(a.out, b.out) || apart(a.in, b.in);
}

bool Watch::moved(const StepTimes& times, std::uint64_t spent_ns, std::uint32_t step) {
  const Costs now{times.points.empty() ? 0 : static_cast<double>(times.points.back().ns),
                  rate(times.out_bytes, times.out_ns), rate(times.in_bytes, times.in_ns)};
  const bool first = ++looks_ == 1;  // of a new plan
  if (first) {
    then_ = now;
  }
  const double spends = static_cast<double>(times.all_ns) - now.compute_ns;
  const bool compares = !first || at_once_ < kAtOnce;
  const bool dearer = compares && spends > static_cast<double>(spent_ns) + kFifth * now.compute_ns;
  const bool differs = differ(now, then_) || dearer;
  next_ = step + (differs ? 1 : every_);
  if (!std::exchange(once_, differs) || !differs) {
    return false;
  }
  at_once_ += looks_ == 2 ? 1 : 0;
  looks_ = 0;
  once_ = false;
  every_ = std::min(2 * every_, kRarest);
  next_ = 0;
  return true;
}

}  // namespace stagehand::core
