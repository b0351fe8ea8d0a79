#include "entry/twins.hpp"

#include <limits>
#include <utility>

#include "entry/registry.hpp"
#include "entry/torch_api.hpp"

namespace stagehand::entry {

namespace {

// Of those that stay, so many of the newest and of the older are looked at in one sweep: a few
// hundred nanoseconds each. What backward just used is among the newest, whatever is held longer.
constexpr int kNewest = 8;
constexpr int kOlder = 4;

}  // namespace

SharedStorage::SharedStorage(nb::object memory)
    : memory_(std::move(memory)), address_(TorchApi::get().storage_of(memory_.ptr())) {}

SharedStorage::SharedStorage(SharedStorage&& other) noexcept
    : storage_(std::exchange(other.storage_, nullptr)),
      memory_(std::move(other.memory_)),
      address_(std::move(other.address_)) {}

SharedStorage::~SharedStorage() {
  if (storage_ != nullptr) {
    TorchApi::tensors()->drop(storage_);
  }
}

bool SharedStorage::alone() const {
  return storage_ != nullptr ? TorchApi::tensors()->use_count(storage_) == 1
                             : TorchApi::get().storage_use_count(address_.ptr()) == 1;
}

Twins& Twins::get() {
  static auto* leaked = new Twins;  // tensors of the last steps may outlive the interpreter
  return *leaked;
}

std::uint64_t Twins::keep(SharedStorage storage, core::Runtime& runtime, const core::Block* block) {
  twins_.emplace(++last_, Twin{std::move(storage), &runtime, block});
  return last_;
}

// Of none where ours is the storage's only reference, or where nobody else needs the bytes.
bool Twins::of_use(const Twin& twin) {
  return twin.runtime->shared(twin.block) && !twin.storage.alone();
}

// Dropping one may run whatever Python code is waiting, and so change the list.
bool Twins::release(Place place) {
  if (of_use(place->second)) {
    return false;
  }
  const auto dropped = twins_.extract(place);
  return true;
}

void Twins::look_at(std::uint64_t number) {
  if (number == 0 || Registry::get().forked()) {
    return;
  }
  if (const auto found = twins_.find(number); found != twins_.end()) {
    const nb::error_scope callers;
    release(found);
  }
}

void Twins::sweep() {
  if (twins_.empty() || Registry::get().forked()) {
    return;
  }
  const nb::error_scope callers;
  std::uint64_t at = std::numeric_limits<std::uint64_t>::max();
  for (int stay = 0; stay < kNewest;) {
    auto place = twins_.lower_bound(at);
    if (place == twins_.begin()) {
      return;  // all were looked at
    }
    at = (--place)->first;
    stay += release(place) ? 0 : 1;
  }
  for (int stay = 0; stay < kOlder && !twins_.empty(); ++stay) {
    auto place = twins_.upper_bound(turn_);
    if (place == twins_.end()) {
      place = twins_.begin();
    }
    turn_ = place->first;
    release(place);
  }
}

void Twins::sweep_all() {
  if (Registry::get().forked()) {
    return;
  }
  const nb::error_scope callers;
  // From the newest: of two over one block, the older may be of use only because of the newer.
  for (auto place = twins_.end(); place != twins_.begin();) {
    const std::uint64_t at = (--place)->first;
    release(place);
    place = twins_.lower_bound(at);
  }
}

}  // namespace stagehand::entry
