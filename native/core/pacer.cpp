#include "core/pacer.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/background.hpp"

namespace stagehand::core {

namespace {
constexpr std::size_t kPage = 4096;
constexpr auto kTurn = std::chrono::microseconds(100);
}  // namespace

bool Pacer::prepare() {
  Lock lock(mutex_);
  if (word_ != nullptr) {
    return true;
  }
  lock.unlock();
  void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    return false;
  }
  madvise(page, kPage, MADV_DONTFORK);
  const bool ready =
      table_.host_register(page, kPage, driver::kHostRegisterPortable) == driver::kSuccess;
  lock.lock();
  if (ready && word_ == nullptr && start_background([this] { run(); })) {
    word_ = static_cast<std::uint64_t*>(page);
    return true;
  }
  const bool done = word_ != nullptr;  // another thread was first
  lock.unlock();
  if (!ready || table_.host_unregister(page) == driver::kSuccess) {
    munmap(page, kPage);
  }
  return done;
}

void Pacer::grant(Bytes total) {
  granted_ = total;
  if (word_ != nullptr) {
    std::atomic_ref<std::uint64_t>(*word_).store(total, std::memory_order_release);
  }
}

void Pacer::set_rate(Bytes per_second) {
  const Lock lock(mutex_);
  rate_ = per_second;
  if (per_second == 0) {
    grant(queued_);
  }
  changed_.notify_one();
}

Status Pacer::admit(driver::Stream stream, Bytes bytes) {
  Lock lock(mutex_);
  if (rate_ == 0) {
    return Status::ok;
  }
  queued_ += bytes;  // granted too where the wait cannot be queued: harmless
  const Bytes due = queued_;
  const auto word = reinterpret_cast<driver::DevicePtr>(word_);
  changed_.notify_one();
  lock.unlock();  // a full queue of the driver's makes the call wait for the word to be raised
  return table_.stream_wait_value64(stream, word, due, driver::kWaitValueGeq) == driver::kSuccess
             ? Status::ok
             : Status::driver_failed;
}

void Pacer::run() {
  using Clock = std::chrono::steady_clock;
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return granted_ < queued_; });
    auto last = Clock::now();
    double owed = 0;  // of a byte: a low rate adds up too
    while (granted_ < queued_) {
      lock.unlock();
      std::this_thread::sleep_for(kTurn);
      lock.lock();
      const auto now = Clock::now();
      const double seconds = std::chrono::duration<double>(now - last).count();
      last = now;
      owed += static_cast<double>(rate_.load()) * seconds;
      const auto more = static_cast<Bytes>(owed);
      owed -= static_cast<double>(more);
      grant(std::min(queued_, granted_ + more));
    }
  }
}

}  // namespace stagehand::core
