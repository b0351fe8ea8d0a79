// Opening a device, its settings, and what it tells about itself.
#include <algorithm>
#include <utility>

#include "core/report.hpp"
#include "core/runtime.hpp"

namespace stagehand::core {

namespace {

// 0 where nothing was measured.
Bytes per_second(double bytes_per_ns) {
  return bytes_per_ns == LaneRates::kUnknown ? 0 : static_cast<Bytes>(bytes_per_ns * 1e9);
}

}  // namespace

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
  LaneStreams lanes{};
  for (driver::Stream& lane : lanes) {
    result = table.stream_create(&lane, driver::kStreamNonBlocking, 0);
    if (result != driver::kSuccess) {
      for (const driver::Stream made : lanes) {
        if (made != nullptr) {
          table.stream_destroy(made);
        }
      }
      return fail("cuStreamCreateWithPriority", result);
    }
  }
  return new Runtime(table, device, context, total_bytes, std::max<Bytes>(granularity, 2_MiB),
                     lanes);
}

Runtime::Runtime(const driver::Table& table, int device, driver::Context context,
                 Bytes device_bytes, Bytes granularity, const LaneStreams& lanes)
    : d_(table, device, context, device_bytes, granularity, lanes), heap_(d_) {
  const Entry entry(d_.gate);  // its parts have called the driver: the next entry begins anew
  d_.store = &heap_;
  d_.gate.when_unlocked(
      [](void* who, Due& due) {
        for (const Due::HostMemory& one : due.host_memory) {
          unmap_host(one.host, one.bytes);
        }
        if (auto* runtime = static_cast<Runtime*>(who); runtime->uses_torch()) {
          runtime->torch_->settle_due(due);
        }
      },
      this);
}

// Budgets -----------------------------------------------------------------------------------------

void Runtime::set_budget(const Budget& budget) {
  Entry entry(d_.gate);
  d_.clocks.events.fill();
  d_.departures.flush();
  d_.clocks.timeline.note(Timeline::What::entered, 0, 0, d_.counters);
  d_.books.arm(budget);
  d_.weights.fit(entry, d_.budget.high);
  const Bytes occupied = d_.store->in_use();
  d_.plan.begin_step(budget.high, d_.live_of(occupied, d_.counters.retained));
  d_.clocks.steps.tell(d_.plan);  // another plan begins with a heap of its own, now
  wants_regions_.store(d_.plan.wants_regions(), std::memory_order_relaxed);
  look_for_recipes();
  d_.departures.begin_step(occupied);
  d_.host.begin_step();
  d_.stalls.collect();
  link_bound_.note(d_.transfers.bytes_back(), d_.weights.counts().loaded_bytes,
                   d_.counters.stall_ns);
  limit_lanes();
  pool_serial_ = d_.books.serial();
  const Bytes target = d_.ceiling();  // what the step is known to need again stays
  if (d_.store->begin_step(target)) {
    d_.store->trim(entry, target);
  }
}

void Runtime::clear_budget() {
  Entry entry(d_.gate);
  d_.departures.no_more_saves(false);
  d_.clocks.timeline.note(Timeline::What::left, 0, 0, d_.counters);
  if (d_.plan.moment() == 0 && !quiet_) {
    d_.host.end_empty_step();
  }
  d_.books.pool_left();
}

void Runtime::set_limit(Bytes limit) {
  Entry entry(d_.gate);
  d_.books.set_process_limit(limit);
}

void Runtime::set_alarm(const Alarm& alarm) {
  Entry entry(d_.gate);
  d_.store->set_alarm(alarm);
  quiet_ = alarm.tells();
}

Runtime::Calm Runtime::read_alarm() {
  Entry entry(d_.gate);
  d_.store->look();
  const Counters& counters = d_.counters;
  return {d_.store->rang(), d_.store->in_use(),
          counters.gone_bytes() + counters.overshoot_bytes + counters.out_of_memory,
          d_.clocks.timeline.on()};
}

Bytes Runtime::available() {
  Entry entry(d_.gate);
  d_.store->look();
  std::size_t driver_free = 0;
  std::size_t total = 0;
  if (d_.gate->mem_get_info(&driver_free, &total) != driver::kSuccess) {
    return 0;
  }
  return driver_free + d_.counters.mapped - std::min(d_.counters.mapped, d_.store->in_use());
}

void Runtime::set_debug(DebugModes modes) {
  Entry entry(d_.gate);
  d_.debug = modes;
}

void Runtime::set_ranks(bool ranks) {
  Entry entry(d_.gate);
  d_.plan.set_ranks(ranks);
  limit_lanes();
}

void Runtime::forget_steps() {
  Entry entry(d_.gate);
  d_.plan.forget_all();
  d_.prefetcher.forget_steps();
}

void Runtime::set_checksums(bool on) {
  Entry entry(d_.gate);
  d_.debug.checksums = on;
}

// The caps on bytes per second need a pinned word, which takes the driver a moment: without the
// lock.
bool Runtime::set_lane_limits(const LaneLimits& limits) {
  Entry entry(d_.gate);
  Lane& out = d_.transfers.out();
  Lane& in = d_.transfers.in();
  {
    const Unlocked unlocked(entry);
    if ((limits.rate_d2h != 0 && !out.pacer().prepare()) ||
        (limits.rate_h2d != 0 && !in.pacer().prepare())) {
      return false;
    }
  }
  lane_limits_ = limits;
  limit_lanes();
  out.pacer().set_rate(limits.rate_d2h);
  in.pacer().set_rate(limits.rate_h2d);
  return true;
}

// Whoever has named a limit shares the link with somebody, as ranks do with each other.
void Runtime::limit_lanes() {
  const bool alone = !d_.plan.ranks() && lane_limits_ == LaneLimits{};
  d_.transfers.limit(lane_limits_, link_bound_.is() && alone);
}

LaneLimits Runtime::lane_limits() {
  Entry entry(d_.gate);
  return lane_limits_;
}

// Host memory -------------------------------------------------------------------------------------

// Slabs of other sizes go, once no record and no copy names one.
bool Runtime::configure_pinned(const SizeClasses& classes, Bytes host_limit,
                               PinnedOptions options) {
  if (classes.bytes.empty()) {
    return false;
  }
  Entry entry(d_.gate);
  std::vector<Chunk> chunks;
  if (!d_.host.has_classes(classes)) {
    {
      const Unlocked unlocked(entry);
      d_.host.hold(true);
    }
    const bool some = counted().pinned_bytes > 0;
    const bool idle = d_.host.idle() && (!some || d_.room.wait_for_gpu(entry)) && d_.host.idle() &&
                      d_.host.quiet(d_.clocks);
    if (idle) {
      chunks = d_.host.take_chunks();
    }
    d_.host.hold(false);
    if (!idle) {
      return false;
    }
  }
  d_.clocks.events.fill();  // before memory is pinned, beside which that takes long
  d_.host.configure(classes, host_limit, options);
  const Unlocked unlocked(entry);
  d_.host.unpin(chunks);
  return true;
}

Bytes Runtime::release_pinned(Bytes keep) {
  Entry entry(d_.gate);
  const std::vector<Chunk> chunks = d_.host.take_chunks_above(keep, d_.clocks);
  Bytes released = 0;
  for (const Chunk& chunk : chunks) {
    released += chunk.size;
  }
  const Unlocked unlocked(entry);
  d_.host.unpin(chunks);
  return released;
}

std::vector<Demand::Peak> Runtime::pinned_demand() { return d_.host.demand(); }

// Device memory -----------------------------------------------------------------------------------

Bytes Runtime::trim(Bytes target) {
  Entry entry(d_.gate);
  release_graphs(entry);
  return d_.store->trim(entry, target);
}

// The graph may still run, on a stream we have never seen. Where waiting is not allowed now, the
// memory stays the graph's until the next one is released, or memory is trimmed. Those that others
// release meanwhile are theirs: their last replay may be younger than this wait.
void Runtime::release_graph(std::uint64_t graph) {
  Entry entry(d_.gate);
  released_graphs_.push_back(graph);
  release_graphs(entry);
}

void Runtime::release_graphs(Entry& entry) {
  if (released_graphs_.empty()) {
    return;
  }
  const std::vector<std::uint64_t> mine = std::exchange(released_graphs_, {});
  if (!d_.room.wait_for_gpu(entry)) {
    released_graphs_.insert(released_graphs_.end(), mine.begin(), mine.end());
    return;
  }
  for (const std::uint64_t released : mine) {
    heap_.release_graph(released);
  }
}

void Runtime::capture(int change) {
  Entry entry(d_.gate);
  d_.clocks.capture(change);
  Gate::captures().fetch_add(change);
}

Status Runtime::add_peer(int device) {
  Entry entry(d_.gate);
  const Status status = heap_.add_peer(device);
  return status != Status::ok || torch_ == nullptr ? status : torch_->add_peer(device);
}

// Reports -----------------------------------------------------------------------------------------

Counters Runtime::counted() {
  Counters counters = d_.counters;
  d_.host.add_to(&counters);
  d_.transfers.add_to(&counters);
  counters.host_waits += d_.clocks.events.late();
  counters.d2h_rate = per_second(d_.plan.lane_rates().out);
  counters.h2d_rate = per_second(d_.plan.lane_rates().in);
  counters.weights_bytes = d_.weights.standing().bytes();
  counters.weights_loads = d_.weights.counts().loads;
  counters.weights_late = d_.weights.counts().late;
  counters.weights_loaded_bytes = d_.weights.counts().loaded_bytes;
  counters.weights_left = d_.weights.counts().dropped;
  counters.weights_written_bytes = d_.weights.counts().written_bytes;
  return counters;
}

Counters Runtime::counted_now() {
  d_.stalls.collect();
  d_.store->look();
  return counted();
}

Reading Runtime::reading(const Counters& counters) const {
  return {counters, d_.budget, d_.plan.state()};
}

Reading Runtime::read() {
  Entry entry(d_.gate);
  return reading(step_.of_run(counted_now()));
}

Reading Runtime::read_step() {
  Entry entry(d_.gate);
  const Counters now = counted_now();
  const Reading found = reading(step_.of_step(now));
  step_.begin_step(now);
  start_peaks();
  return found;
}

Bytes Runtime::records() {
  Entry entry(d_.gate);
  return d_.counters.records;
}

Budget Runtime::budget() {
  Entry entry(d_.gate);
  return d_.budget;
}

Plan::Shown Runtime::plan_shown() {
  const Entry entry(d_.gate);
  return d_.plan.shown();
}

StepShape Runtime::step_shape() {
  const Entry entry(d_.gate);
  const std::shared_ptr<const Trace> newest = d_.plan.newest();
  if (newest == nullptr) {
    return {};
  }
  StepShape shape = shape_of(*newest);
  const Standing& standing = d_.weights.standing();
  for (GroupId id = 0; id < standing.size(); ++id) {
    shape.dirty += standing.at(id).dirty;
  }
  return shape;
}

std::uint32_t Runtime::step_kind() {
  const Entry entry(d_.gate);
  const std::shared_ptr<const Trace> newest = d_.plan.newest();
  return newest != nullptr ? newest->id : 0;
}

bool Runtime::start_timeline() {
  const Entry entry(d_.gate);
  return d_.clocks.timeline.start(d_.transfers.out().clock().stream());
}

Timeline::Taken Runtime::stop_timeline() {
  const Entry entry(d_.gate);
  return d_.clocks.timeline.stop();
}

Contents Runtime::contents() {
  const Entry entry(d_.gate);
  d_.store->look();
  Contents found;
  for (const Record* one = d_.ledger.oldest(); one != nullptr; one = one->newer) {
    SeenRecord seen{one->order, one->bytes(), static_cast<std::uint8_t>(RecordState{one->state})};
    if (const Block* block = one->block; block != nullptr) {
      seen.address = block->address;
      seen.block_bytes = block->size;
      seen.retained = block->state == BlockState::retained;
    }
    d_.plan.name(one->place, &seen.op, &seen.region);
    found.records.push_back(seen);
  }
  for (const auto& arena : heap_.heap().arenas()) {
    SeenArena seen{
        arena->base, reinterpret_cast<std::uintptr_t>(arena->key.stream), arena->key.small, {}};
    for (const Block* block = arena->first; block != nullptr; block = block->next) {
      seen.blocks.push_back(
          {block->address, block->size, static_cast<std::uint8_t>(BlockState{block->state})});
    }
    found.arenas.push_back(std::move(seen));
  }
  return found;
}

PlanState Runtime::plan_state() {
  Entry entry(d_.gate);
  return d_.plan.state();
}

void Runtime::reset_peaks() {
  Entry entry(d_.gate);
  step_.reset_run(counted_now());
  start_peaks();
}

void Runtime::start_peaks() {
  d_.store->reset_peaks();
  d_.store->look();
  d_.counters.reset_peaks();
}

std::string Runtime::report(Bytes bytes) {
  Entry entry(d_.gate);
  return out_of_memory_report(d_, counted(), bytes);
}

std::string Runtime::history(RecordId id) {
  Entry entry(d_.gate);
  return record_history(d_.ledger.find(id));
}

std::string Runtime::invariants_broken() {
  Entry entry(d_.gate);
  for (const char* broken :
       {d_.store->broken(), d_.host.broken(), d_.books.broken(), d_.weights.broken()}) {
    if (broken != nullptr) {
      return broken;
    }
  }
  return "";
}

}  // namespace stagehand::core
