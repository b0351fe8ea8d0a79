#include "sim/gpu.hpp"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <type_traits>

namespace stagehand::sim {

namespace {

constexpr std::uint64_t kContextBase = 0x4000000000000000ull;
constexpr std::uint64_t kEventBase = 0x6000000000000000ull;
constexpr int kCaptureModeThreadLocal = 1;

std::atomic<bool> in_child{false};
std::atomic<std::uint64_t> generations{0};

// Leaked on purpose: callbacks may come during interpreter shutdown.
Gpu*& instance() {
  static Gpu* machine = [] {
    pthread_atfork(nullptr, nullptr, [] { in_child = true; });
    return new Gpu(Settings{});
  }();
  return machine;
}

Scheduler::Settings scheduler_settings(const Settings& with) {
  return {with.seed, with.d2h_bytes_per_s, with.h2d_bytes_per_s, with.devices,
          (with.flags & STAGEHAND_SIM_HOST_SYNCHRONOUS) != 0};
}

Memory::Settings memory_settings(const Settings& with) {
  return {with.memory_bytes, with.devices, with.seed, (with.flags & STAGEHAND_SIM_NO_POISON) == 0};
}

}  // namespace

Gpu::Gpu(const Settings& with)
    : settings(with),
      scheduler(scheduler_settings(with)),
      memory(memory_settings(with), log, history, scheduler.host()),
      generation(++generations),
      driver_version((with.flags & STAGEHAND_SIM_OLD_DRIVER) != 0 ? 12000 : 13000) {}

Gpu::~Gpu() {
  for (const auto& [host, bytes] : host_allocations) {
    munmap(host, bytes);
  }
}

std::mutex& gpu_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

Gpu& gpu() { return *instance(); }

void replace_gpu(const Settings& with) {
  const bool initialized = gpu().initialized;
  delete instance();
  instance() = new Gpu(with);
  instance()->initialized = initialized;
}

bool forked() { return in_child.load(std::memory_order_relaxed); }

ThreadState& thread_state(const Gpu& machine) {
  // Trivially destroyed: calls may come after a thread's other thread-locals are gone.
  static thread_local ThreadState state;
  static_assert(std::is_trivially_destructible_v<ThreadState>);
  if (state.generation != machine.generation) {
    state = ThreadState{};
    state.generation = machine.generation;
  }
  return state;
}

Context context_of(Device device) {
  return reinterpret_cast<Context>(kContextBase + ((static_cast<std::uint64_t>(device) + 1) << 4));
}

int device_of(const Gpu& machine, Context context) {
  for (int device = 0; device < machine.settings.devices; ++device) {
    if (context == context_of(device)) {
      return device;
    }
  }
  return -1;
}

int current_device(const Gpu& machine) {
  const ThreadState& state = thread_state(machine);
  return device_of(machine, state.current());
}

Result Gpu::find_stream(Stream handle, const char* use, StreamState** stream) {
  const auto value = reinterpret_cast<std::uint64_t>(handle);
  if (value <= 2) {  // null, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD
    const int device = current_device(*this);
    if (device < 0) {
      return kInvalidContext;
    }
    *stream = scheduler.default_stream(device);
    return kSuccess;
  }
  *stream = scheduler.find(handle);
  if (*stream != nullptr) {
    return kSuccess;
  }
  if (scheduler.was_destroyed(handle)) {
    log.add(STAGEHAND_SIM_DESTROYED, std::string("destroyed: ") + use + " of stream " +
                                         std::to_string((value >> 4) & 0xFFFFFFFF) +
                                         ", which was destroyed");
  }
  return kInvalidHandle;
}

Result Gpu::find_event(Event handle, const char* use, EventState** event) {
  const auto it = events.find(handle);
  if (it != events.end()) {
    *event = &it->second;
    return kSuccess;
  }
  const auto value = reinterpret_cast<std::uint64_t>(handle);
  if (value > kEventBase && value <= kEventBase + (events_made << 4)) {
    log.add(STAGEHAND_SIM_DESTROYED, std::string("destroyed: ") + use + " of event " +
                                         std::to_string((value - kEventBase) >> 4) +
                                         ", which was destroyed");
  }
  return kInvalidHandle;
}

bool Gpu::resolve(const Touch& touch, std::vector<Piece>* pieces) {
  const Range& range = touch.range;
  if (memory.is_device(range.address)) {
    return memory.resolve(range, touch.write ? kWrite : kRead, pieces);
  }
  pieces->push_back(
      {kHostSpace, range.address, range.bytes, reinterpret_cast<unsigned char*>(range.address)});
  return true;
}

Result Gpu::submit(StreamState& stream, Op op, std::vector<Touch> touches) {
  std::vector<Work> one;
  one.push_back({std::move(op), std::move(touches)});
  return submit_batch(stream, std::move(one));
}

Result Gpu::submit_batch(StreamState& stream, std::vector<Work> batch) {
  for (auto& [op, touches] : batch) {
    for (const Touch& touch : touches) {
      if (!resolve(touch, touch.write ? &op.to : &op.from)) {
        log.add(STAGEHAND_SIM_UNMAPPED, std::string("unmapped: ") + op_name(op.kind) +
                                            " on stream " + std::to_string(stream.slot) +
                                            (touch.write ? " writes " : " reads ") +
                                            range_text(touch.range) + ", which it may not touch");
        return kInvalidValue;
      }
    }
  }
  // Each of several comes after what was before the batch, and not after the others.
  VectorClock before = stream.clock;
  before.join(scheduler.host());
  for (auto& [op, touches] : batch) {
    op.access = scheduler.admit(stream, op.kind);
    const VectorClock& now = batch.size() > 1 ? before : stream.clock;
    for (const Touch& touch : touches) {
      memory.use(touch.range, op.access);
    }
    for (const Piece& piece : op.from) {
      history.touch(piece, false, op.access, now);
    }
    for (const Piece& piece : op.to) {
      history.touch(piece, true, op.access, now);
    }
  }
  history.sweep_if_large(scheduler.host());
  for (Work& work : batch) {
    scheduler.enqueue(stream, std::move(work.op));
  }
  return kSuccess;
}

void Gpu::host_touch(const Range& range, bool write) {
  std::vector<Piece> pieces;
  if (!resolve({range, write}, &pieces)) {
    log.add(STAGEHAND_SIM_UNMAPPED, std::string("unmapped: the host ") +
                                        (write ? "writes " : "reads ") + range_text(range) +
                                        ", which is not accessible");
    return;
  }
  for (const Piece& piece : pieces) {
    history.touch(piece, write, Access{}, scheduler.host());
  }
}

Result Gpu::unsafe_in_capture(const char* symbol) {
  if (captures == 0) {
    return kSuccess;
  }
  const int mode = thread_state(*this).capture_mode;
  if (mode == driver::kCaptureModeRelaxed ||
      (mode == kCaptureModeThreadLocal && !scheduler.captures_here())) {
    return kSuccess;
  }
  log.add(STAGEHAND_SIM_CAPTURE, std::string("capture: ") + symbol +
                                     " while a stream is captured and the thread's capture mode "
                                     "is not relaxed");
  return kCaptureUnsupported;
}

Result Gpu::drain() {
  Finish all = Finish::kWasDone;
  for (int device = 0; device < settings.devices; ++device) {
    all = std::max(all, scheduler.finish_device(device));
  }
  return all == Finish::kHeld ? kHeld : kSuccess;
}

}  // namespace stagehand::sim
