#include "core/lane.hpp"

#include <algorithm>
#include <array>

#include "core/check.hpp"

namespace stagehand::core {

namespace {

constexpr Bytes kPacedPiece = 4_MiB;  // at least, and what a capped lane moves in 16 ms

}  // namespace

driver::Result Lane::copy_async(const driver::Table& driver, const Copy& copy,
                                driver::Stream stream) const {
  return way_ == Way::out ? driver.memcpy_dtoh_async(copy.host, copy.device, copy.bytes, stream)
                          : driver.memcpy_htod_async(copy.device, copy.host, copy.bytes, stream);
}

Status Lane::queue(std::span<const Copy> copies) {
  Status status = Status::ok;
  while (!copies.empty() && status == Status::ok) {
    std::size_t small = 0;
    while (small < copies.size() && small < kSmallTogether && copies[small].bytes < kSmallCopy) {
      ++small;
    }
    const bool together = small > 1 && gate_.table().memcpy_batch_async != nullptr;
    const std::size_t count = together ? small : 1;
    status = together ? queue_together(copies.first(count)) : queue_pieces(copies.front());
    copies = copies.subspan(count);
  }
  return status;
}

Status Lane::queue_pieces(const Copy& copy) {
  Bytes largest = piece_;
  if (pacer_.paced()) {
    largest = std::min(largest, std::max(kPacedPiece, pacer_.rate() / 64));
  }
  for (Bytes at = 0; at < copy.bytes; at += largest) {
    const Copy piece{copy.device + at, copy.host + at, std::min(largest, copy.bytes - at)};
    if (const Status status = admit(piece.bytes); status != Status::ok) {
      return status;
    }
    if (copy_async(*gate_.operator->(), piece, clock_.stream()) != driver::kSuccess) {
      return Status::driver_failed;
    }
    moved(piece.bytes);
  }
  return Status::ok;
}

Status Lane::queue_together(std::span<const Copy> copies) {
  SH_CHECK(copies.size() <= kSmallTogether);
  std::array<driver::DevicePtr, kSmallTogether> device{};
  std::array<driver::DevicePtr, kSmallTogether> host{};
  std::array<std::size_t, kSmallTogether> sizes{};
  Bytes bytes = 0;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    device[i] = copies[i].device;
    host[i] = reinterpret_cast<driver::DevicePtr>(copies[i].host);
    sizes[i] = copies[i].bytes;
    bytes += copies[i].bytes;
  }
  if (const Status status = admit(bytes); status != Status::ok) {
    return status;
  }
  const bool out = way_ == Way::out;
  driver::CopyAttributes attributes;
  std::size_t start = 0;
  if (gate_->memcpy_batch_async((out ? host : device).data(), (out ? device : host).data(),
                                sizes.data(), copies.size(), &attributes, &start, 1,
                                clock_.stream()) != driver::kSuccess) {
    return Status::driver_failed;
  }
  moved(bytes);
  return Status::ok;
}

Status Lane::admit(Bytes bytes) {
  return pacer_.paced() ? pacer_.admit(clock_.stream(), bytes) : Status::ok;
}

// Where hopping fails the lane stays where it is: in order, and less considerate.
void Lane::moved(Bytes bytes) {
  moved_.fetch_add(bytes, std::memory_order_relaxed);
  since_hop_ += bytes;
  if (since_hop_ >= piece_ && clock_.hop(&spare_) == Status::ok) {
    since_hop_ = 0;
  }
}

bool Lane::copy_now(driver::Stream stream, const Copy& copy) {
  const bool queued = copy_async(gate_.table(), copy, stream) == driver::kSuccess;
  moved_.fetch_add(queued ? copy.bytes : 0, std::memory_order_relaxed);
  return gate_.table().stream_synchronize(stream) == driver::kSuccess && queued;
}

void Lane::note(Tick tick) {
  if (inflight_ > 0) {
    under_way_.push_back(tick.seq);
    if (under_way_.size() > inflight_) {
      under_way_.pop_front();  // done before the others are
    }
  }
}

bool Lane::full() {
  if (inflight_ == 0) {
    under_way_.clear();
    return false;
  }
  return under_way_.size() >= inflight_ && !clock_.passed(under_way_.front());
}

}  // namespace stagehand::core
