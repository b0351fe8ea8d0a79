#include "core/giving_back.hpp"

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
  bool all = true;
  unsigned flags = 0;
  int active = 0;
  for (int other = 0; table_.primary_ctx_state(other, &flags, &active) == driver::kSuccess;
       ++other) {
    if (other != device && active != 0) {
      all &= wait_for(table_, other);
    }
  }
  return all;
}

}  // namespace stagehand::core
