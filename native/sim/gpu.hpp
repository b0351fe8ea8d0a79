// The simulated machine: everything above put together, behind one mutex.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sim/faults.hpp"
#include "sim/hazards.hpp"
#include "sim/memory.hpp"
#include "sim/scheduler.hpp"

namespace stagehand::sim {

struct Settings {
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
  int devices = 1;
  std::uint64_t seed = 0;
  std::uint64_t d2h_bytes_per_s = 0;
  std::uint64_t h2d_bytes_per_s = 0;
  unsigned flags = 0;
};

// Device or host bytes that an operation reads or writes, as the program names them.
struct Touch {
  Range range;
  bool write = false;
};

// An operation and the bytes it touches.
struct Work {
  Op op;
  std::vector<Touch> touches;
};

struct Gpu {
  explicit Gpu(const Settings& with);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  Settings settings;
  HazardLog log;
  History history{log};
  Faults faults;
  Scheduler scheduler;
  Memory memory;
  std::unordered_map<Event, EventState> events;
  std::unordered_map<void*, std::uint64_t> host_allocations;
  std::uint64_t events_made = 0;
  std::uint64_t host_waits = 0;
  std::uint64_t generation = 0;  // of the machine: contexts current before a reset are not now
  bool initialized = false;
  int captures = 0;
  int driver_version;
  std::unordered_map<int, int> attributes;  // told, instead of what driver_device.cpp knows

  // The stream behind a handle; null is the default stream of the current context's device. A
  // destroyed one is a hazard.
  Result find_stream(Stream handle, const char* use, StreamState** stream);
  Result find_event(Event handle, const char* use, EventState** event);
  // Queues an operation that touches these bytes; hazards are found here.
  Result submit(StreamState& stream, Op op, std::vector<Touch> touches);
  // Queues operations that nothing orders among themselves: all of them, or none.
  Result submit_batch(StreamState& stream, std::vector<Work> batch);
  // The host touches bytes now.
  void host_touch(const Range& range, bool write);
  // A call that may not be made while a stream is captured, unless the thread's mode is relaxed.
  Result unsafe_in_capture(const char* symbol);
  // The result of a call that waits.
  Result waited(Finish finish) {
    host_waits += finish == Finish::kWaited ? 1 : 0;
    return finish == Finish::kHeld ? kHeld : kSuccess;
  }
  Result drain();

 private:
  bool resolve(const Touch& touch, std::vector<Piece>* pieces);
};

// Runs body(gpu) for one call of the driver: under the mutex, counted, unless it is to fail.
std::mutex& gpu_mutex();
Gpu& gpu();                              // under the mutex
void replace_gpu(const Settings& with);  // under the mutex
bool forked();                           // in a child, where nothing works

// Runs body(gpu) again and again while it returns kHeld. The mutex is let go in between: another
// thread may have calls to make before it raises the value. Gives up after half a minute.
template <typename Body>
Result until_not_held(std::unique_lock<std::mutex>& lock, Body body) {
  constexpr auto kPause = std::chrono::microseconds(20);
  constexpr auto kPatience = std::chrono::seconds(30);
  gpu().scheduler.look_at_values();
  Result result = body(gpu());
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (result == kHeld) {
    if (std::chrono::steady_clock::now() > until) {
      return kLaunchTimeout;
    }
    lock.unlock();
    std::this_thread::sleep_for(kPause);
    lock.lock();
    gpu().scheduler.look_at_values();
    result = body(gpu());
  }
  return result;
}

// body(gpu), and then what it queued host-synchronously.
template <typename Body>
Result queue_and_settle(std::unique_lock<std::mutex>& lock, Body body) {
  const Result result = until_not_held(lock, body);
  if (const StreamState* owed = gpu().scheduler.take_owed(); owed != nullptr) {
    // A default stream: it lives as long as the machine does.
    const int device = owed->device;
    const std::uint64_t generation = gpu().generation;
    const Result settled = until_not_held(lock, [&](Gpu& machine) {
      return machine.generation != generation ||
                     machine.scheduler.finish(*machine.scheduler.default_stream(device)) !=
                         Finish::kHeld
                 ? kSuccess
                 : kHeld;
    });
    return result != kSuccess ? result : settled;
  }
  return result;
}

template <typename Body>
Result driver_call(Function function, Body body) {
  if (forked()) {
    return kNotInitialized;
  }
  std::unique_lock<std::mutex> lock(gpu_mutex());
  Gpu& machine = gpu();
  if (const Result result = machine.faults.enter(function); result != kSuccess) {
    return result;
  }
  const bool needs_init = function != Function::cuInit && function != Function::cuDriverGetVersion;
  if (needs_init && !machine.initialized) {
    return kNotInitialized;
  }
  return queue_and_settle(lock, body);
}

// The calling thread's contexts and capture mode.
struct ThreadState {
  std::uint64_t generation = 0;
  std::array<Context, 64> contexts{};
  std::size_t depth = 0;
  int capture_mode = 0;
  Context current() const { return depth == 0 ? nullptr : contexts[depth - 1]; }
};
ThreadState& thread_state(const Gpu& machine);
Context context_of(Device device);
// The device of a context, or -1.
int device_of(const Gpu& machine, Context context);
// The device of the current context, or -1.
int current_device(const Gpu& machine);

}  // namespace stagehand::sim
