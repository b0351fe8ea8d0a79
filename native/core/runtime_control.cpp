// Opening a device, its settings, and what it tells about itself.
#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/runtime.hpp"

namespace stagehand::core {

Runtime* Runtime::open(const driver::Table& table, int device, std::string* error) {
  const auto fail = [&](const char* what, driver::Result result) -> Runtime* {
    const char* name = nullptr;
    table.get_error_name(result, &name);
    *error = std::string(what) + " failed with " + (name != nullptr ? name : "an unknown error") +
             " (" + std::to_string(result) + ") on device " + std::to_string(device);
    return nullptr;
  };
  driver::Context context = nullptr;
  driver::Result result = table.primary_ctx_retain(&context, device);
  if (result != driver::kSuccess) {
    return fail("cuDevicePrimaryCtxRetain", result);
  }
  const driver::ContextGuard guard(table, context);
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  result = table.mem_get_info(&free_bytes, &total_bytes);
  if (result != driver::kSuccess) {
    return fail("cuMemGetInfo", result);
  }
  driver::AllocationProp prop;
  prop.location.id = device;
  std::size_t granularity = 0;
  result = table.allocation_granularity(&granularity, &prop, 0);
  if (result != driver::kSuccess) {
    return fail("cuMemGetAllocationGranularity", result);
  }
  std::array<driver::Stream, 4> lanes{};  // two streams each
  for (driver::Stream& lane : lanes) {
    result = table.stream_create(&lane, driver::kStreamNonBlocking, 0);
    if (result != driver::kSuccess) {
      return fail("cuStreamCreateWithPriority", result);
    }
  }
  auto* runtime =
      new Runtime(table, device, context, total_bytes, std::max<Bytes>(granularity, 2_MiB));
  runtime->mover_ = new Mover(table, runtime->clocks_, lanes);
  return runtime;
}

Runtime::Runtime(const driver::Table& table, int device, driver::Context context,
                 Bytes device_bytes, Bytes granularity)
    : table_(table),
      device_(device),
      context_(context),
      device_bytes_(device_bytes),
      granularity_(granularity),
      clocks_(table),
      heap_(table, device, device_bytes, granularity, clocks_, counters_),
      pinned_(counters_),
      stalls_(table, counters_) {
  process_limit_ = device_bytes;
  budget_ = {device_bytes, device_bytes, device_bytes, false};
}

void Runtime::set_budget(const Budget& budget) {
  const Departing departing(*this);
  Bytes target = 0;
  {
    Lock lock(mutex_);
    budget_ = budget;
    budget_.limit = std::min(budget.limit, process_limit_);
    budget_.armed = true;
    pool_open_ = true;
    const Bytes occupied = held_ != nullptr ? cache_->usage().allocated : counters_.occupied;
    plan_.begin_step(budget.high, occupied - std::min(occupied, counters_.retained));
    prefetch_reserve_ = std::min(prefetch_reserve_, budget_.low);
    pool_serial_ = serial_;
    target = ceiling();  // what the step is known to need again stays
    if (held_ != nullptr) {
      cache_->set_mark(budget.high);
      cache_->take_largest_request();  // of what ran between two steps
      cache_->begin_step();
      want_limit(budget.limit);
      release_failed_ = false;
      if (held_->side().triggers == 0) {
        cache_->forget_kept();
      }
      refresh();
      over_at_entry_ = counters_.overshoot_bytes;
      const bool spare = segments_ != nullptr && segments_->has_free_piece();
      const bool anew = std::exchange(start_anew_, false);
      if ((counters_.mapped <= target && !anew) || (cache_->releasable() == 0 && !spare)) {
        return;
      }
    } else if (counters_.mapped <= target || !heap_.has_free_piece()) {
      return;
    }
  }
  trim(target);
}

void Runtime::clear_budget() {
  const Departing departing(*this);
  Lock lock(mutex_);
  pool_open_ = false;
  disarm_if_idle();
}

// Disarmed, `high` is still where growth looks for free memory elsewhere first, so that what runs
// between two pools (the optimizer) does not map more than it must; going over it is no overshoot.
void Runtime::disarm_if_idle() {
  if (ledger_.size() == 0 && !pool_open_) {
    budget_.armed = false;
    budget_.limit = process_limit_;
    if (held_ != nullptr) {
      cache_->set_mark(kUnlimited);
      want_limit(device_bytes_);
    }
  }
}

void Runtime::set_limit(Bytes limit) {
  Lock lock(mutex_);
  process_limit_ = std::min(limit, device_bytes_);
  budget_.limit = budget_.armed ? std::min(budget_.limit, process_limit_) : process_limit_;
}

void Runtime::set_debug(DebugModes modes) {
  Lock lock(mutex_);
  debug_ = modes;
}

// Waits, without the lock, until the GPU has passed all that was queued before the call, and each
// clock has an event that tells so. False during a capture, which such a wait would break. Of
// torch's captures nobody tells: there only the streams we know are waited for, one by one, and not
// the context, in which another may be captured.
bool Runtime::wait_for_gpu(Lock& lock) {
  const driver::ContextGuard guard(table_, context_);
  if (held_ == nullptr && clocks_.captures() > 0) {
    return false;
  }
  std::vector<driver::Stream> streams;
  for (std::uint32_t i = 0; i < clocks_.size(); ++i) {
    int capturing = driver::kCaptureNone;
    Tick tick;
    streams.push_back(clocks_.at(i).stream());
    if (table_.stream_is_capturing(streams.back(), &capturing) != driver::kSuccess ||
        capturing != driver::kCaptureNone || clocks_.at(i).record(&tick) != Status::ok) {
      return false;
    }
  }
  ++counters_.host_waits;
  lock.unlock();
  RankedMutex::expect_none_held();
  const auto idle = [&](driver::Stream stream) {
    return table_.stream_synchronize(stream) == driver::kSuccess;
  };
  const bool all = held_ != nullptr ? std::all_of(streams.begin(), streams.end(), idle)
                                    : table_.ctx_synchronize() == driver::kSuccess;
  lock.lock();
  return all;
}

Bytes Runtime::trim(Bytes target) {
  if (held_ != nullptr) {
    return trim_torch();
  }
  Lock lock(mutex_);
  return wait_for_gpu(lock) ? heap_.trim(target) : 0;
}

void Runtime::release_graph(std::uint64_t graph) {
  Lock lock(mutex_);
  released_graphs_.push_back(graph);
  // The graph may still run, on a stream we have never seen. Where waiting is not allowed now, the
  // memory stays the graph's until the next one is released.
  if (wait_for_gpu(lock)) {
    for (const std::uint64_t released : released_graphs_) {
      heap_.release_graph(released);
    }
    released_graphs_.clear();
  }
}

void Runtime::capture(int change) {
  Lock lock(mutex_);
  clocks_.capture(change);
}

Status Runtime::add_peer(int device) {
  Lock lock(mutex_);
  const driver::ContextGuard guard(table_, context_);
  const Status status = heap_.add_peer(device);
  return status != Status::ok || segments_ == nullptr ? status : segments_->add_peer(device);
}

Counters Runtime::counters() {
  Lock lock(mutex_);
  const driver::ContextGuard guard(table_, context_);
  stalls_.collect();
  refresh();
  return counters_;
}

Budget Runtime::budget() {
  Lock lock(mutex_);
  return budget_;
}

void Runtime::reset_peaks() {
  Lock lock(mutex_);
  if (cache_ != nullptr) {
    cache_->reset_peaks();
  }
  refresh();
  counters_.reset_peaks();
}

std::string Runtime::report(Bytes bytes) {
  Lock lock(mutex_);
  Bytes in_use = 0;
  Bytes aliased = 0;
  Bytes evictable_bytes = 0;
  for (const Record* r = ledger_.oldest(); r != nullptr; r = r->newer) {
    if (r->block == nullptr) {
      continue;
    }
    if (r->block->owned_by_torch) {
      in_use += r->block->size;
    } else if (r->block->aliases > 0) {
      aliased += r->block->size;
    } else {
      evictable_bytes += r->block->size;
    }
  }
  std::size_t driver_free = 0;
  std::size_t driver_total = 0;
  const driver::ContextGuard guard(table_, context_);
  table_.mem_get_info(&driver_free, &driver_total);
  const auto mib = [](Bytes value) { return static_cast<double>(value) / (1 << 20); };
  char text[768];
  std::snprintf(
      text, sizeof(text),
      "asked for %.2f MiB on device %d; mapped %.2f MiB, occupied %.2f MiB (retained %.2f MiB), "
      "evicted %.2f MiB; high %.2f MiB, limit %.2f MiB; the driver has %.2f MiB free. Of the saved "
      "activations still on the GPU, "
      "%.2f MiB are in use by torch, %.2f MiB by backward, and %.2f MiB could not be moved to the "
      "host (pinned %.2f MiB, in use %.2f MiB)",
      mib(bytes), device_, mib(counters_.mapped), mib(counters_.occupied), mib(counters_.retained),
      mib(counters_.evicted), mib(budget_.high), mib(budget_.limit), mib(driver_free), mib(in_use),
      mib(aliased), mib(evictable_bytes), mib(counters_.pinned_bytes),
      mib(counters_.pinned_used_bytes));
  return text;
}

std::string Runtime::invariants_broken() {
  Lock lock(mutex_);
  const char* blocks = held_ != nullptr ? held_->broken() : heap_.broken();
  if (blocks == nullptr && segments_ != nullptr) {
    blocks = segments_->broken();
  }
  if (blocks != nullptr) {
    return blocks;
  }
  if (const char* broken = pinned_.broken(); broken != nullptr) {
    return broken;
  }
  Bytes handles = 0;
  Bytes evicted = 0;
  std::size_t records = 0;
  for (const Record* r = ledger_.oldest(); r != nullptr; r = r->newer) {
    ++records;
    handles += r->handles;
    if (!r->alive || (r->handles == 0 && !r->copying)) {
      return "a record without handles is in the ledger";
    }
    if (r->block == nullptr) {
      evicted += r->bytes();
      if (!r->clean()) {
        return "O3: an evicted record has no host copy";
      }
    } else if (r->block->record != r) {
      return "O1: a record and its block do not name each other";
    }
  }
  if (records != ledger_.size() || handles != counters_.handles || records != counters_.records) {
    return "ledger counts differ from the counters";
  }
  return evicted == counters_.evicted ? "" : "evicted bytes differ from the counters";
}

}  // namespace stagehand::core
