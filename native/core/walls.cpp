#include "core/walls.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

namespace stagehand::core {

namespace {
bool before(const Walls::One& a, const Walls::One& b) {
  return a.stream != b.stream ? std::less<>()(a.stream, b.stream) : a.nth < b.nth;
}
}  // namespace

void Walls::begin_step(Bytes most) {
  unanswered_ = saving_ ? unanswered_ + 1 : 0;
  if (unanswered_ > kUnanswered) {
    wanted_.clear();
    bytes_ = 0;
  }
  counted_ = 0;
  saving_ = true;
  fits_ = bytes_ <= most;
}

std::size_t Walls::place_of(driver::Stream stream) const {
  std::size_t i = 0;
  while (i < counted_ && counts_[i].first != stream) {
    ++i;
  }
  return i;
}

std::uint32_t Walls::served(driver::Stream stream) {
  const std::size_t i = place_of(stream);
  if (!saving_ || i == kStreams) {
    return 0;
  }
  if (i == counted_) {
    counts_[counted_++] = {stream, 0};
  }
  return ++counts_[i].second;
}

bool Walls::wants(driver::Stream stream) const {
  const std::size_t i = place_of(stream);
  const std::uint32_t count = i < counted_ ? counts_[i].second : 0;
  return looks() &&
         std::binary_search(wanted_.begin(), wanted_.end(), One{stream, count + 1, 0}, before);
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
  bytes_ = wanted_.empty() ? 0 : std::max(bytes, std::min(most, bytes_ - bytes_ / kForgets));
  fits_ = true;
  streams_.clear();
  for (const One& one : wanted_) {
    if (streams_.empty() || streams_.back() != one.stream) {
      streams_.push_back(one.stream);
    }
  }
}

}  // namespace stagehand::core
