// One Runtime on a fresh simulated GPU, and short names for what tests of the core do with it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/runtime.hpp"
#include "native/test.hpp"
#include "sim/control.hpp"

namespace stagehand::core::test {

struct Machine {
  std::uint64_t seed = 1;
  Bytes memory = 256_MiB;
  int devices = 1;
  Bytes bytes_per_s = 0;                     // of the lanes; 0: the simulator's default
  unsigned flags = STAGEHAND_SIM_NO_POISON;  // for speed
  SizeClasses classes{{1_MiB}, {8}};         // large records take several slabs
  Bytes host_limit = 63_MiB;  // the first growth takes it all; from 64 MiB on it is slow
  bool ahead = false;         // a thread pins ahead: what it has pinned when is up to the scheduler
  Bytes first = 0;            // PinnedOptions::first
  std::function<void(driver::Table&)> patch = [](driver::Table&) {};  // the driver, before its use
};

// A tensor of torch's: a whole block, filled with pattern(seed) on its stream.
struct Tensor {
  Address address = 0;
  Bytes bytes = 0;
  driver::Stream stream = nullptr;
  std::uint64_t seed = 0;
};

// What autograd holds of a saved tensor.
struct Held {
  Tensor tensor;
  RecordId record;
  Bytes offset = 0;
};

inline std::string hazard_text(std::uint64_t index) {
  std::string text(stagehand_sim_hazard_text(index, nullptr, 0) + 1, '\0');
  text.resize(stagehand_sim_hazard_text(index, text.data(), text.size()));
  return text;
}

// What another thread does while the core waits without its lock, drawn into one thread: called
// once, at the next call of that driver function.
struct Interludes {
  std::function<void()> ctx_synchronize;
  std::function<void()> host_register;
  std::function<void()> stream_synchronize;
};

inline Interludes& interludes() {
  static Interludes all;
  return all;
}

// Where the last copy to the host went.
inline std::atomic<unsigned char*>& last_host_copy() {
  static std::atomic<unsigned char*> host = nullptr;
  return host;
}

// The simulated driver with the interludes in it.
inline driver::Table hooked_table() {
  static driver::Table real;
  real = sim::table();
  driver::Table table = real;
  const auto once = [](std::function<void()>& interlude) {
    if (interlude) {
      std::exchange(interlude, nullptr)();
    }
  };
  static const auto play = once;
  table.ctx_synchronize = [] {
    const driver::Result result = real.ctx_synchronize();
    play(interludes().ctx_synchronize);  // after all has passed, before the lock is back
    return result;
  };
  table.memcpy_dtoh_async = [](void* host, driver::DevicePtr device, std::size_t bytes,
                               driver::Stream stream) {
    last_host_copy() = static_cast<unsigned char*>(host);
    return real.memcpy_dtoh_async(host, device, bytes, stream);
  };
  table.stream_synchronize = [](driver::Stream stream) {
    play(interludes().stream_synchronize);
    return real.stream_synchronize(stream);
  };
  table.host_register = [](void* host, std::size_t bytes, unsigned flags) {
    play(interludes().host_register);
    return real.host_register(host, bytes, flags);
  };
  return table;
}

// Bytes of device memory opened for a device, by its number; counted by a Machine's patch.
inline std::map<int, Bytes>& opened_bytes() {
  static std::map<int, Bytes> bytes;
  return bytes;
}

inline void count_opened(driver::Table& table) {
  static decltype(table.mem_set_access) real;
  real = table.mem_set_access;
  opened_bytes().clear();
  table.mem_set_access = [](driver::DevicePtr address, std::size_t bytes,
                            const driver::AccessDesc* access, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      opened_bytes()[access[i].location.id] += bytes;
    }
    return real(address, bytes, access, count);
  };
}

class CoreRig {
 public:
  explicit CoreRig(const Machine& with = {}) {
    CHECK_EQ(stagehand_sim_configure(with.memory, with.devices, with.seed, with.bytes_per_s,
                                     with.bytes_per_s, with.flags),
             0);
    interludes() = {};
    driver = *kept(new driver::Table(hooked_table()));
    with.patch(driver);
    driver.primary_ctx_retain(&context_, 0);
    driver.ctx_push_current(context_);
    for (int device = 0; device < with.devices; ++device) {
      std::string error;
      Runtime* const opened = Runtime::open(*kept(new driver::Table(driver)), device, &error);
      CHECK_EQ(error, "");
      opened->configure_pinned(with.classes, with.host_limit, {with.ahead, -1, with.first});
      runtimes.push_back(kept(opened));
    }
    runtime = runtimes.front();
  }
  ~CoreRig() {
    stagehand_sim_drain();
    for (Runtime* const each : runtimes) {  // gives its pinned memory back, where it is idle
      each->configure_pinned({{4_KiB}, {1}}, 0);
    }
    driver::Context popped = nullptr;
    driver.ctx_pop_current(&popped);
  }
  CoreRig(const CoreRig&) = delete;
  CoreRig& operator=(const CoreRig&) = delete;

  driver::Stream stream() {
    driver::Stream made = nullptr;
    CHECK_EQ(driver.stream_create(&made, driver::kStreamNonBlocking, 0), 0);
    return made;
  }
  // `later` waits for all that `earlier` has queued so far, as a program of torch's would say it.
  void order(driver::Stream earlier, driver::Stream later) {
    driver::Event event = nullptr;
    CHECK_EQ(driver.event_create(&event, driver::kEventDisableTiming), 0);
    CHECK_EQ(driver.event_record(event, earlier), 0);
    CHECK_EQ(driver.stream_wait_event(later, event, 0), 0);
    CHECK_EQ(driver.event_destroy(event), 0);
  }
  void budget(Bytes high, Bytes low, Bytes limit = kUnlimited) {
    runtime->set_budget({high, low, limit, true});
  }

  Address allocate(Bytes bytes, driver::Stream on, std::uint64_t graph = 0) {
    Address address = 0;
    const Status status = runtime->allocate(bytes, on, graph, &address);
    CHECK_EQ(status, Status::ok);
    return status == Status::ok ? address : 0;
  }
  Status try_allocate(Bytes bytes, driver::Stream on, std::uint64_t graph = 0) {
    Address address = 0;
    return runtime->allocate(bytes, on, graph, &address);
  }
  void fill(const Tensor& tensor, driver::Stream on) {
    CHECK_EQ(stagehand_sim_fill(on, tensor.address, tensor.bytes, tensor.seed), 0);
  }
  void check(const Tensor& tensor, driver::Stream on) {
    CHECK_EQ(stagehand_sim_check(on, tensor.address, tensor.bytes, tensor.seed), 0);
  }
  Tensor make(Bytes bytes, driver::Stream on) {
    Tensor tensor{allocate(bytes, on), bytes, on, ++tensors_};
    if (tensor.address != 0) {
      fill(tensor, on);
    }
    return tensor;
  }
  void drop(const Tensor& tensor) { CHECK(runtime->free(tensor.address)); }
  Held save(const Tensor& tensor) {
    const Saved saved =
        runtime->save(tensor.address, tensor.address, tensor.address + tensor.bytes);
    CHECK_EQ(saved.refusal, Refusal::none);
    return {tensor, saved.record, saved.offset};
  }
  // Forward's part: made, saved, and dropped by torch: retained.
  Held retain(Bytes bytes, driver::Stream on) {
    const Tensor tensor = make(bytes, on);
    const Held held = save(tensor);
    drop(tensor);
    return held;
  }
  std::vector<Held> retain_many(int count, Bytes bytes, driver::Stream on) {
    std::vector<Held> held;
    for (int i = 0; i < count; ++i) {
      held.push_back(retain(bytes, on));
    }
    return held;
  }
  // The tensor re-made for `consumer`, its contents checked there.
  Unpacked unpack(const Held& held, driver::Stream consumer) {
    const Unpacked again = runtime->unpack(held.record, held.offset, consumer);
    CHECK_EQ(again.status, Status::ok);
    if (again.status == Status::ok) {
      check({again.address, held.tensor.bytes, consumer, held.tensor.seed}, consumer);
    }
    return again;
  }
  // Backward's part: unpacked, read, and the saved variable dropped.
  void back(const Held& held, driver::Stream consumer) {
    const Unpacked again = unpack(held, consumer);
    if (again.block != nullptr) {
      runtime->drop_alias(again.block);
    }
    runtime->drop_handle(held.record);
  }
  // All of them, newest first; none is left.
  void back_all(std::vector<Held>& held, driver::Stream consumer) {
    for (; !held.empty(); held.pop_back()) {
      back(held.back(), consumer);
    }
  }
  bool resident(const Held& held) { return runtime->resident(held.record); }
  // Evicts all that is retained, at an allocation of nothing worth mentioning.
  void evict_all(driver::Stream on) {
    runtime->set_debug({true, false});
    runtime->free(allocate(512, on));
    runtime->set_debug({});
  }
  Counters counters() { return runtime->counters(); }

  // All work done: every byte was right, nothing raced, the books are whole.
  void verify() {
    stagehand_sim_drain();
    CHECK_EQ(stagehand_sim_mismatches(), 0);
    CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_ALL), 0);
    CHECK_EQ(hazard_text(0), "");
    for (Runtime* const each : runtimes) {
      CHECK_EQ(each->invariants_broken(), "");
    }
  }
  // The program has dropped everything: so has the core.
  void verify_empty() {
    verify();
    for (Runtime* const each : runtimes) {
      const Counters now = each->counters();
      CHECK_EQ(now.records, 0);
      CHECK_EQ(now.handles, 0);
      CHECK_EQ(now.aliases, 0);
      CHECK_EQ(now.occupied, 0);
      CHECK_EQ(now.retained, 0);
      CHECK_EQ(now.evicted, 0);
      CHECK_EQ(now.pinned_used_bytes, 0);
      CHECK_EQ(now.pageable_bytes, 0);
    }
  }

  driver::Table driver;
  Runtime* runtime = nullptr;  // of device 0
  std::vector<Runtime*> runtimes;

 private:
  // A Runtime is leaked on purpose (rule T3): kept reachable, so that leak checkers know.
  template <typename Kept>
  static Kept* kept(Kept* object) {
    static auto* const all = new std::vector<void*>;
    all->push_back(object);
    return object;
  }

  driver::Context context_ = nullptr;
  std::uint64_t tensors_ = 0;
};

}  // namespace stagehand::core::test
