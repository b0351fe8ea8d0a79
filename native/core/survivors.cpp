#include "core/survivors.hpp"

#include <algorithm>

namespace stagehand::core {

std::uint32_t Survivors::served(Bytes bytes) {
  if ((sizes_ & size_bit(bytes)) == 0) {
    return 0;
  }
  std::uint32_t nth = 0;
  for (Counted& one : counted_) {
    nth = one.last.bytes == bytes ? ++one.served : nth;
  }
  return nth;
}

driver::Stream Survivors::place(Bytes bytes, driver::Stream stream) const {
  const bool next = std::any_of(counted_.begin(), counted_.end(), [&](const Counted& one) {
    return one.last.bytes == bytes && one.last.stream == stream && one.last.nth == one.served + 1;
  });
  return next ? apart_of(stream).value_or(stream) : stream;
}

void Survivors::begin_step(const std::vector<One>& there, Bytes most) {
  serve_few();  // the optimizer's step has raised
  for (Counted& one : counted_) {
    one.served = 0;
    ++one.missing;
  }
  if (there.size() > kFew) {
    counted_.clear();
  } else {
    std::for_each(there.begin(), there.end(), [this](const One& one) { note(one); });
  }
  std::erase_if(counted_, [](const Counted& one) { return one.missing > kMissing; });
  Bytes all = 0;
  sizes_ = 0;
  for (const Counted& one : counted_) {
    all += one.last.bytes;
    sizes_ |= size_bit(one.last.bytes);
  }
  if (counted_.size() > kFew || all > most) {
    counted_.clear();
    sizes_ = 0;
  }
}

// The same request's of before, else another one of its size.
void Survivors::note(One one) {
  one.stream = asked_on(one.stream);
  const auto find = [&](bool same) {
    return std::find_if(counted_.begin(), counted_.end(), [&](const Counted& of) {
      return of.missing > 0 && of.last.bytes == one.bytes && of.last.stream == one.stream &&
             (!same || of.last.nth == one.nth);
    });
  };
  auto of = find(true);
  of = of != counted_.end() ? of : find(false);
  if (of == counted_.end()) {
    counted_.push_back({one});
  } else {
    *of = {one};
  }
}

std::optional<driver::Stream> Survivors::apart_of(driver::Stream stream) const {
  const auto found = std::find_if(apart_.begin(), apart_.end(),
                                  [&](const auto& one) { return one.first == stream; });
  return found != apart_.end() ? std::optional(found->second) : std::nullopt;
}

bool Survivors::is_apart(driver::Stream stream) const { return asked_on(stream) != stream; }

driver::Stream Survivors::asked_on(driver::Stream stream) const {
  const auto found = std::find_if(apart_.begin(), apart_.end(),
                                  [&](const auto& one) { return one.second == stream; });
  return found != apart_.end() ? found->first : stream;
}

std::optional<driver::Stream> Survivors::lacks() const {
  if (all_of_.has_value() && !apart_of(all_of_->stream).has_value()) {
    return all_of_->stream;
  }
  const auto found = std::find_if(counted_.begin(), counted_.end(), [&](const Counted& one) {
    return one.last.nth > 0 && !apart_of(one.last.stream).has_value();
  });
  return found != counted_.end() ? std::optional(found->last.stream) : std::nullopt;
}

}  // namespace stagehand::core
