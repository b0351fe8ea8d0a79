#include "sim/control.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "sim/execute.hpp"
#include "sim/gpu.hpp"

using stagehand::sim::Function;
using stagehand::sim::Gpu;
using stagehand::sim::Op;
using stagehand::sim::OpKind;
using stagehand::sim::Result;
using stagehand::sim::Settings;
using stagehand::sim::StreamState;
using stagehand::sim::Touch;

namespace {

// Runs body(machine) under the mutex. Controls work without cuInit and are not counted.
template <typename Body>
auto control(Body body) {
  const std::lock_guard<std::mutex> lock(stagehand::sim::gpu_mutex());
  stagehand::sim::gpu().scheduler.look_at_values();
  return body(stagehand::sim::gpu());
}

Result submit(void* handle, Op op, const std::vector<Touch>& touches) {
  std::unique_lock<std::mutex> lock(stagehand::sim::gpu_mutex());
  return stagehand::sim::queue_and_settle(lock, [&](Gpu& machine) {
    StreamState* stream = nullptr;
    const Result found = machine.find_stream(handle, "a kernel", &stream);
    return found != stagehand::sim::kSuccess ? found
                                             : machine.submit(*stream, std::move(op), touches);
  });
}

Op pattern_op(OpKind kind, uint64_t bytes, uint64_t seed) {
  Op op;
  op.kind = kind;
  op.bytes = bytes;
  op.seed = seed;
  return op;
}

}  // namespace

int stagehand_sim_configure(uint64_t memory_bytes, int devices, uint64_t seed,
                            uint64_t d2h_bytes_per_s, uint64_t h2d_bytes_per_s, unsigned flags) {
  if (memory_bytes < stagehand::sim::kGranularity || devices < 1 || devices > 64) {
    return 1;
  }
  return control([&](Gpu&) {
    stagehand::sim::replace_gpu(
        {memory_bytes, devices, seed, d2h_bytes_per_s, h2d_bytes_per_s, flags});
    return stagehand::sim::gpu().memory.usable() ? 0 : 1;
  });
}

void stagehand_sim_reset() {
  control([](Gpu& machine) { stagehand::sim::replace_gpu(Settings(machine.settings)); });
}

void stagehand_sim_progress(double probability) {
  control([&](Gpu& machine) { machine.scheduler.set_progress(probability); });
}

void stagehand_sim_seed(uint64_t seed) {
  stagehand_sim_drain();
  control([&](Gpu& machine) { machine.scheduler.reseed(seed); });
}

int stagehand_sim_kernel(void* stream, uint64_t duration_ns, const stagehand_sim_range* reads,
                         size_t read_count, const stagehand_sim_range* writes, size_t write_count,
                         stagehand_sim_callback callback, void* user) {
  Op op;
  op.duration_ns = duration_ns;
  op.callback = callback;
  op.user = user;
  std::vector<Touch> touches;
  for (size_t i = 0; i < read_count; ++i) {
    touches.push_back({{reads[i].address, reads[i].bytes}, false});
  }
  for (size_t i = 0; i < write_count; ++i) {
    touches.push_back({{writes[i].address, writes[i].bytes}, true});
  }
  return submit(stream, std::move(op), touches);
}

int stagehand_sim_fill(void* stream, uint64_t address, uint64_t bytes, uint64_t seed) {
  return submit(stream, pattern_op(OpKind::kFill, bytes, seed), {{{address, bytes}, true}});
}

int stagehand_sim_check(void* stream, uint64_t address, uint64_t bytes, uint64_t seed) {
  return submit(stream, pattern_op(OpKind::kCheck, bytes, seed), {{{address, bytes}, false}});
}

uint64_t stagehand_sim_mismatches() {
  return control([](Gpu& machine) { return machine.scheduler.mismatches(); });
}

void stagehand_sim_pattern(void* out, uint64_t bytes, uint64_t seed, uint64_t offset) {
  stagehand::sim::write_pattern(static_cast<unsigned char*>(out), bytes, seed, offset);
}

void stagehand_sim_host_access(const void* address, uint64_t bytes, int is_write) {
  control([&](Gpu& machine) {
    machine.host_touch({reinterpret_cast<uint64_t>(address), bytes}, is_write != 0);
  });
}

void stagehand_sim_take_from_others(uint64_t address, uint64_t bytes, int device) {
  control([&](Gpu& machine) { machine.memory.take_from_others({address, bytes}, device); });
}

void stagehand_sim_drain() {
  std::unique_lock<std::mutex> lock(stagehand::sim::gpu_mutex());
  stagehand::sim::until_not_held(lock, [](Gpu& machine) { return machine.drain(); });
}

uint64_t stagehand_sim_step(uint64_t steps) {
  return control([&](Gpu& machine) {
    uint64_t ran = 0;
    while (ran < steps && machine.scheduler.step()) {
      ++ran;
    }
    return ran;
  });
}

uint64_t stagehand_sim_queued() {
  return control([](Gpu& machine) { return machine.scheduler.queued(); });
}

uint64_t stagehand_sim_clock_ns() {
  return control([](Gpu& machine) { return machine.scheduler.host_ns(); });
}

void stagehand_sim_advance_ns(uint64_t nanoseconds) {
  control([&](Gpu& machine) { machine.scheduler.advance_ns(nanoseconds); });
}

uint64_t stagehand_sim_hazards(int kind) {
  if (kind < 0 || kind >= STAGEHAND_SIM_KINDS) {
    return 0;
  }
  return control([&](Gpu& machine) { return machine.log.count(kind); });
}

size_t stagehand_sim_hazard_text(uint64_t index, char* text, size_t size) {
  return control([&](Gpu& machine) -> size_t {
    const std::string* const found = machine.log.text(index);
    if (found == nullptr) {
      return 0;
    }
    if (text != nullptr && size > 0) {
      const size_t copied = std::min(size - 1, found->size());
      std::memcpy(text, found->data(), copied);
      text[copied] = '\0';
    }
    return found->size();
  });
}

int stagehand_sim_hazard_kind(uint64_t index) {
  return control([&](Gpu& machine) { return machine.log.kind(index); });
}

void stagehand_sim_clear_hazards() {
  control([](Gpu& machine) { machine.log.clear(); });
}

int stagehand_sim_fail(const char* symbol, uint64_t nth, uint64_t times, int result) {
  const Function function = stagehand::sim::function_of(symbol);
  if (function == Function::kCount || nth == 0) {
    return 1;
  }
  return control([&](Gpu& machine) {
    machine.faults.plan(function, nth, times, result);
    return 0;
  });
}

uint64_t stagehand_sim_call_count(const char* symbol) {
  const Function function = stagehand::sim::function_of(symbol);
  if (function == Function::kCount) {
    return 0;
  }
  return control([&](Gpu& machine) { return machine.faults.calls(function); });
}

uint64_t stagehand_sim_host_waits() {
  return control([](Gpu& machine) { return machine.host_waits; });
}

uint64_t stagehand_sim_physical_bytes(int device) {
  return control([&](Gpu& machine) -> uint64_t {
    const bool exists = device >= 0 && device < machine.settings.devices;
    return exists ? machine.memory.device(device).used() : 0;
  });
}

uint64_t stagehand_sim_mapped_bytes(int device) {
  return control([&](Gpu& machine) { return machine.memory.mapped_bytes(device); });
}

void stagehand_sim_set_driver_version(int version) {
  control([&](Gpu& machine) { machine.driver_version = version; });
}

void stagehand_sim_set_attribute(int attribute, int value) {
  control([&](Gpu& machine) { machine.attributes[attribute] = value; });
}

int stagehand_sim_capture(void* stream_handle, int on) {
  return control([&](Gpu& machine) {
    StreamState* stream = nullptr;
    const Result found = machine.find_stream(stream_handle, "a capture", &stream);
    if (found == stagehand::sim::kSuccess && stream->capturing != (on != 0)) {
      stream->capturing = on != 0;
      stream->capture_thread = std::this_thread::get_id();
      machine.captures += on != 0 ? 1 : -1;
    }
    return found;
  });
}
