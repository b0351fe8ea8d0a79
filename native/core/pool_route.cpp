#include "core/pool_route.hpp"

namespace stagehand::core {

void PoolRoute::enter(Pool pool) {
  const std::lock_guard lock(mutex_);
  inside_ = true;
  if (side_.route == nullptr) {
    thread_.store(std::this_thread::get_id());
    on_.store(true);
    return;
  }
  if (!kept_.load() || pool != pool_) {
    side_.watch_backwards();
    // A backward of an earlier pool goes on without: torch has one MemPool of ours at a time.
    inside_ = backward_ = false;
    end_if_idle();
    let_pool_go();
    pool_ = pool;
    kept_.store(side_.keep_pool(device_, pool_.data()));
  }
  inside_ = kept_.load() && side_.route(device_, pool_.data(), false);
  on_.store(inside_ || backward_);
}

void PoolRoute::leave() {
  const std::lock_guard lock(mutex_);
  thread_.store({});
  if (inside_ && side_.route != nullptr) {
    side_.leave_route(device_);
  }
  inside_ = false;
  end_if_idle();
}

void PoolRoute::join() {
  const std::lock_guard lock(mutex_);
  if (kept_.load() && side_.route(device_, pool_.data(), true)) {
    backward_ = true;
    on_.store(true);
  }
}

// Of several at once the first to end ends it for all: the next node of the others joins again.
void PoolRoute::backward_ended() {
  const std::lock_guard lock(mutex_);
  backward_ = false;
  end_if_idle();
}

void PoolRoute::settle() { backward_ended(); }

bool PoolRoute::to_join() const {
  return kept_.load(std::memory_order_relaxed) && side_.in_backward() && !side_.routed(device_);
}

// Inside a backward the last record's end is not the backward's: that is told.
bool PoolRoute::to_settle() const {
  return kept_.load(std::memory_order_relaxed) && !needed_.load(std::memory_order_acquire) &&
         !side_.in_backward();
}

bool PoolRoute::here() const {
  return side_.route != nullptr ? kept_.load(std::memory_order_relaxed) && side_.routed(device_)
                                : thread_.load() == std::this_thread::get_id();
}

void PoolRoute::end_if_idle() {
  if (inside_ || backward_) {
    return;
  }
  if (on_.exchange(false) && side_.route != nullptr && side_.end_route(device_)) {
    waits_.fetch_add(1, std::memory_order_relaxed);
  }
  if (!needed_.load(std::memory_order_acquire)) {
    let_pool_go();
  }
}

void PoolRoute::let_pool_go() {
  if (kept_.exchange(false)) {
    side_.let_pool_go(device_, pool_.data());
  }
}

}  // namespace stagehand::core
