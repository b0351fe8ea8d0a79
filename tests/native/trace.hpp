// A recorded training step (traces/, written by benchmarks/record_trace.py on an H200), to be
// replayed in virtual time: copies and pinning are only charged for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "native/core_rig.hpp"

namespace stagehand::core::test {

inline constexpr Bytes kBytesPerS = 54'000'000'000;  // one direction of the H200's link

template <class T>
T median(std::vector<T> all) {
  std::nth_element(all.begin(), all.begin() + all.size() / 2, all.end());
  return all[all.size() / 2];
}

// A line of a trace: record_trace.py says what it means.
struct Event {
  char kind = 0;
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  std::uint64_t first = 0;  // of an allocation its stream, 0 for the compute stream
  std::uint64_t last = 0;
};

inline std::vector<Event> read_trace(const std::string& name) {
  const std::string file = __FILE__;
  std::ifstream lines(file.substr(0, file.rfind('/')) + "/traces/" + name);
  std::vector<Event> events;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    Event event;
    words >> event.kind >> event.a >> event.b >> event.first >> event.last;
    events.push_back(event);
  }
  return events;
}

// So many times as large; what is small is the same for any size.
inline Bytes times(Bytes bytes, double by) {
  const auto whole = static_cast<Bytes>(static_cast<double>(bytes) * by);
  return bytes < 1_KiB ? bytes : round_up(whole, kBlockUnit);
}

// Such a step over so many times as much data: all of it is larger, and takes longer.
inline std::vector<Event> times_as_large(std::vector<Event> events, double by) {
  const auto time = [by](std::uint64_t us) {
    return static_cast<std::uint64_t>(static_cast<double>(us) * by);
  };
  for (Event& event : events) {
    if (event.kind == 'a') {
      event.b = times(event.b, by);
    } else if (event.kind == 's') {
      event.first = times(event.first, by);
      event.last = times(event.last, by);
    } else if (event.kind == 't') {
      event.a = time(event.a);
      event.b = time(event.b);
    }
  }
  return events;
}

// How large each block is, by its number.
inline std::map<std::uint64_t, Bytes> block_bytes(const std::vector<Event>& events) {
  std::map<std::uint64_t, Bytes> bytes;
  for (const Event& event : events) {
    if (event.kind == 'a') {
      bytes[event.a] = event.b;
    }
  }
  return bytes;
}

// Without the records of small tensors, which a pool passes through (Books::ignore): a step has
// fewer places then. Their memory is freed as if nobody had saved them.
inline std::vector<Event> without_small(const std::vector<Event>& events) {
  std::map<std::uint64_t, bool> small;  // records
  std::set<std::uint64_t> aliases;      // of those
  std::vector<Event> rest;
  for (const Event& event : events) {
    if (event.kind == 's') {
      small.try_emplace(event.a, event.last - event.first < kSmallCopy);
    }
    const bool of_record = event.kind == 's' || event.kind == 'h' || event.kind == 'u';
    const bool goes =
        of_record ? small.at(event.a) : event.kind == 'd' && aliases.count(event.a) != 0;
    if (goes && event.kind == 'u') {
      aliases.insert(event.b);
    }
    if (!goes) {
      rest.push_back(event);
    }
  }
  return rest;
}

// The streams that allocations name; all but the compute stream are made as they come.
class TraceStreams {
 public:
  explicit TraceStreams(driver::Stream compute) : streams_{compute} {}
  driver::Stream of(const Event& event, auto& rig) {
    while (streams_.size() <= event.first) {
      streams_.push_back(rig.stream());
    }
    return streams_[event.first];
  }

 private:
  std::vector<driver::Stream> streams_;
};

using Busy = driver::Result (*)(driver::Stream stream, std::uint64_t ns);

inline driver::Result simulated_busy(driver::Stream stream, std::uint64_t ns) {
  return stagehand_sim_kernel(stream, ns, nullptr, 0, nullptr, 0, nullptr, nullptr);
}

// What keeps the newest machine's streams busy.
inline Busy& busy() {
  static Busy now = simulated_busy;
  return now;
}

inline driver::Result keep_busy(driver::Stream stream, std::uint64_t ns) {
  return busy()(stream, ns);
}

inline std::uint64_t copy_ns(std::size_t bytes) {
  return 6000 + bytes * 1'000'000'000 / kBytesPerS;
}

inline driver::Result charge_copy(std::size_t bytes, driver::Stream stream) {
  return keep_busy(stream, copy_ns(bytes));
}

// A driver whose copies and pinning are charged for, and not made.
inline void charge_copies(driver::Table& table) {
  busy() = simulated_busy;
  table.memcpy_dtoh_async = [](void*, driver::DevicePtr, std::size_t bytes, driver::Stream to) {
    return charge_copy(bytes, to);
  };
  table.memcpy_htod_async = [](driver::DevicePtr, const void*, std::size_t bytes,
                               driver::Stream to) { return charge_copy(bytes, to); };
  table.memcpy_batch_async = nullptr;
  table.host_register = [](void*, std::size_t, unsigned) { return driver::kSuccess; };
  table.host_unregister = [](void*) { return driver::kSuccess; };
}

inline Machine trace_machine() {
  pinned_is_touched = false;  // no byte of it is ever used
  Machine with;
  with.memory = 64_GiB;
  with.classes = {{1_MiB, 4_MiB, 16_MiB, 64_MiB, 256_MiB}, {512, 2, 2, 2, 2}};
  with.host_limit = 6_GiB;
  with.patch = charge_copies;
  return with;
}

// How long work takes that never takes the same time twice: a kernel up to `by` more or less, of
// the host's work five times that.
class Unsteady {
 public:
  explicit Unsteady(double by = 0, std::uint64_t seed = 1) : by_(by), random_(seed) {}
  std::uint64_t kernel_ns(std::uint64_t ns) { return other(ns, by_); }
  std::uint64_t host_ns(std::uint64_t ns) { return other(ns, 5 * by_); }

 private:
  std::uint64_t other(std::uint64_t ns, double by) {
    if (by_ == 0) {
      return ns;
    }
    constexpr std::uint64_t kParts = 10'000;  // the same on every machine, as distributions are not
    const double part = 2.0 * static_cast<double>(random_() % (kParts + 1)) / kParts - 1;
    return static_cast<std::uint64_t>(static_cast<double>(ns) * std::max(0.0, 1 + by * part));
  }

  double by_;
  std::mt19937_64 random_;
};

// Plays a step's lines in order; those of kind t are the GPU's and the host's work until then.
inline void replay(const std::vector<Event>& events, driver::Stream stream, auto play,
                   Unsteady& times) {
  std::uint64_t gpu_us = 0;
  std::uint64_t host_us = 0;
  for (const Event& event : events) {
    if (event.kind != 't') {
      play(event);
      continue;
    }
    keep_busy(stream, times.kernel_ns((event.a - gpu_us) * 1000));
    stagehand_sim_advance_ns(times.host_ns((event.b - host_us) * 1000));
    gpu_us = event.a;
    host_us = event.b;
  }
}

inline void replay(const std::vector<Event>& events, driver::Stream stream, auto play) {
  Unsteady steady;
  replay(events, stream, play, steady);
}

}  // namespace stagehand::core::test
