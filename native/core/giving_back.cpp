#include "core/giving_back.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "core/background.hpp"
#include "core/ranked_mutex.hpp"

namespace stagehand::core {

namespace {

// All that is queued on the device is done. Its context is in use: it costs nothing to retain it.
bool wait_for(const driver::Table& table, int device) {
  driver::Context context = nullptr;
  if (table.primary_ctx_retain(&context, device) != driver::kSuccess ||
      table.ctx_push_current(context) != driver::kSuccess) {
    return false;
  }
  int mode = driver::kCaptureModeRelaxed;
  const bool relaxed = table.thread_exchange_capture_mode(&mode) == driver::kSuccess;
  const bool done = table.ctx_synchronize() == driver::kSuccess;
  if (relaxed) {
    table.thread_exchange_capture_mode(&mode);
  }
  table.ctx_pop_current(&context);
  return done;
}

// Longer than a busy device takes for what is queued on it. One whose work waits for this thread
// itself, as for a peer that it is to start, is never done.
constexpr auto kPatience = std::chrono::seconds(2);

// The same of several, for so long at most. Where one is not done by then, none is waited for any
// more until it is.
bool wait_patiently(const driver::Table& table, std::vector<int> devices) {
  struct Waiting {
    std::mutex mutex;
    std::condition_variable over;
    bool busy = false;
    bool all = false;  // of the last time, once that is over
  };
  static Waiting& it = *new Waiting;  // the thread may outlast everything else
  std::unique_lock lock(it.mutex);
  if (it.busy) {
    return false;
  }
  it.busy = start_background([&table, devices = std::move(devices)] {
    const bool all = std::all_of(devices.begin(), devices.end(),
                                 [&](int device) { return wait_for(table, device); });
    const std::lock_guard ended(it.mutex);
    it.all = all;
    it.busy = false;
    it.over.notify_all();
  });
  it.all = false;
  return it.busy && it.over.wait_for(lock, kPatience, [] { return !it.busy; }) && it.all;
}

}  // namespace

GivingBack*& GivingBack::here() {
  static thread_local GivingBack* giving = nullptr;
  return giving;
}

GivingBack::GivingBack(const driver::Table& table, int device)
    : table_(table), safe_(wait_for_others(device)) {
  here() = this;
}

void GivingBack::segment_goes(int device) {
  GivingBack* giving = here();
  if (giving == nullptr || device < 0 || device >= 64) {
    return;
  }
  const std::uint64_t bit = std::uint64_t{1} << device;
  if ((giving->waited_ & bit) == 0) {
    giving->waited_ |= bit;
    giving->wait_for_others(device);
  }
}

bool GivingBack::wait_for_others(int device) const {
  RankedMutex::expect_none_held();
  std::vector<int> others;
  unsigned flags = 0;
  int active = 0;
  for (int other = 0; table_.primary_ctx_state(other, &flags, &active) == driver::kSuccess;
       ++other) {
    if (other != device && active != 0) {
      others.push_back(other);
    }
  }
  return others.empty() || wait_patiently(table_, std::move(others));
}

}  // namespace stagehand::core
