#include "core/kept_gradients.hpp"

#include <algorithm>

namespace stagehand::core {

void KeptGradients::begin_step(const std::vector<Left>& left) {
  end_backward();
  for (const auto& [address, request] : left) {
    left_.insert_or_assign(address, request);
  }
}

// What was left, and is there after a forward, stays.
void KeptGradients::begin_backward(Bytes most) {
  for (const auto& [address, request] : left_) {
    const auto [known, fresh] = known_.try_emplace(request);
    known_bytes_ += fresh ? request.bytes : 0;
    known->second.missing = 0;
    keep(address, known);
  }
  left_.clear();
  served_.clear();
  counts_ = true;
  const bool begins = there_bytes_ < known_bytes_ - there_bytes_;
  if (begins) {
    begin_cycle();
  }
  few_ = known_bytes_ <= most;
  wanted_ = begins && few_;
}

// What stays all through a cycle is none either.
void KeptGradients::begin_cycle() {
  sizes_ = 0;
  streams_.clear();
  for (auto known = known_.begin(); known != known_.end();) {
    const auto next = std::next(known);
    if (known->second.at != 0 || ++known->second.missing > kMissing) {
      drop(known);
    } else {
      const driver::Stream stream = known->first.stream;
      sizes_ |= size_bit(known->first.bytes);
      if (streams_.empty() || streams_.back() != stream) {  // they are in this order
        streams_.push_back(stream);
      }
    }
    known = next;
  }
}

void KeptGradients::keep(Address address, Known::iterator known) {
  if (known->second.at == address) {
    return;
  }
  forget(known->second.at);  // of a cycle before: this one has its name now
  forget(address);
  known->second.at = address;
  there_.insert_or_assign(address, known->first);
  there_bytes_ += known->first.bytes;
}

void KeptGradients::drop(Known::iterator known) {
  forget(known->second.at);
  known_bytes_ -= known->first.bytes;
  known_.erase(known);
}

std::uint32_t KeptGradients::served(Address address, Bytes bytes, driver::Stream stream) {
  if (!counts_ || (served_.size() >= kSizes && !served_.contains({stream, bytes}))) {
    return 0;
  }
  const std::uint32_t nth = ++served_[{stream, bytes}];
  if (const auto known = known_.find({stream, bytes, nth}); wanted_ && known != known_.end()) {
    keep(address, known);
  }
  return nth;
}

void KeptGradients::let_go(Address address) {
  left_.erase(address);
  if (const Bytes bytes = forget(address); bytes > 0 && pending_.emplace(address, bytes).second) {
    pending_bytes_ += bytes;
  }
}

void KeptGradients::freed(Address address) {
  if (there_.empty() && left_.empty() && pending_.empty()) {
    return;
  }
  let_go(address);
  if (const auto pending = pending_.find(address); pending != pending_.end()) {
    pending_bytes_ -= pending->second;
    pending_.erase(pending);
  }
}

Bytes KeptGradients::forget(Address address) {
  const auto there = there_.find(address);
  if (there == there_.end()) {
    return 0;
  }
  const Bytes bytes = there->second.bytes;
  if (const auto known = known_.find(there->second); known != known_.end()) {
    known->second.at = 0;
  }
  there_bytes_ -= bytes;
  there_.erase(there);
  return bytes;
}

bool KeptGradients::wants(Bytes bytes, driver::Stream stream) const {
  if (!wanted_) {
    return false;
  }
  const auto served = served_.find({stream, bytes});
  const std::uint32_t nth = served != served_.end() ? served->second + 1 : 1;
  const auto known = known_.find({stream, bytes, nth});
  return known != known_.end() && known->second.at == 0;
}

}  // namespace stagehand::core
