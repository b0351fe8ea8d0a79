#include "core/walls.hpp"

#include <algorithm>
#include <functional>
#include <iterator>

namespace stagehand::core {

namespace {
bool before(const Walls::One& a, const Walls::One& b) {
  return a.stream != b.stream ? std::less<>()(a.stream, b.stream) : a.nth < b.nth;
}
}  // namespace

void Walls::begin_step() {
  counts_.clear();
  there_ = 0;  // what the step before has left is no more than a few
  saving_ = true;
}

std::uint32_t Walls::count(driver::Stream stream) const {
  const auto found = std::find_if(counts_.begin(), counts_.end(),
                                  [&](const auto& one) { return one.first == stream; });
  return found != counts_.end() ? found->second : 0;
}

std::uint32_t Walls::served(driver::Stream stream) {
  for (auto& [of, count] : counts_) {
    if (of == stream) {
      return ++count;
    }
  }
  counts_.emplace_back(stream, 1);
  return 1;
}

bool Walls::wants(driver::Stream stream, std::uint32_t nth) const {
  return looks() && std::binary_search(wanted_.begin(), wanted_.end(), One{stream, nth, 0}, before);
}

void Walls::end_saving(std::vector<One> there, Bytes most) {
  constexpr Bytes kForgets = 16;  // a part of it each step
  if (!std::exchange(saving_, false)) {
    return;
  }
  std::sort(there.begin(), there.end(), before);
  wanted_.clear();
  std::set_intersection(there.begin(), there.end(), last_.begin(), last_.end(),
                        std::back_inserter(wanted_), before);
  last_ = std::move(there);
  Bytes bytes = 0;
  for (const One& one : wanted_) {
    bytes += one.bytes;
  }
  if (wanted_.size() < kFew || bytes > most) {
    wanted_.clear();
  }
  bytes_ = wanted_.empty() ? 0 : std::max(bytes, bytes_ - bytes_ / kForgets);
  streams_.clear();
  for (const One& one : wanted_) {
    if (streams_.empty() || streams_.back() != one.stream) {
      streams_.push_back(one.stream);
    }
  }
}

}  // namespace stagehand::core
