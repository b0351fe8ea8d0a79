#include "entry/registry.hpp"

#include <nanobind/nanobind.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "entry/gil.hpp"

namespace stagehand::entry {

namespace {
// Several processes may share the machine, each with a limit of what is available.
constexpr core::Bytes kFirstOfLimit = 8;
}  // namespace

Registry& Registry::get() {
  static Registry* leaked = [] {
    auto* made = new Registry;
    pthread_atfork(nullptr, nullptr, [] { Registry::get().forked_.store(true); });
    return made;
  }();
  return *leaked;
}

bool Registry::install_driver(const std::vector<std::uintptr_t>& addresses) {
  driver::Table table;
  if (addresses.size() != driver::kFunctionCount) {
    return false;
  }
  static_assert(sizeof(std::uintptr_t) == sizeof(void*));
  std::memcpy(static_cast<void*>(&table), addresses.data(), sizeof(table));
  core::Lock lock(mutex_);
  if (driver_installed()) {
    return std::memcmp(&table, &table_, sizeof(table)) == 0;
  }
  table_ = table;
  return true;
}

core::Runtime* Registry::find(int device) const {
  return device >= 0 && device < kMaxDevices && !forked()
             ? runtimes_[device].load(std::memory_order_acquire)
             : nullptr;
}

core::Runtime* Registry::open(int device, std::string* error) {
  if (core::Runtime* runtime = find(device); runtime != nullptr) {
    return runtime;
  }
  if (device < 0 || device >= kMaxDevices || !driver_installed()) {
    *error = driver_installed() ? "no such device" : "the CUDA driver was not loaded";
    return nullptr;
  }
  core::Lock lock(mutex_);
  core::Runtime* runtime = find(device);
  if (runtime == nullptr) {
    runtime = core::Runtime::open(table_, device, error);
    if (runtime != nullptr) {
      if (pinned_set_) {
        configure_pinned(*runtime, device, pinned_);
      }
      runtimes_[device].store(runtime, std::memory_order_release);
      connect(device);
    }
  }
  return runtime;
}

bool Registry::connect_peers(int device) {
  core::Lock lock(mutex_);
  return connect(device);
}

bool Registry::connect(int device) {
  bool all = true;
  for (int other = 0; other < kMaxDevices; ++other) {
    unsigned flags = 0;
    int active = 0;
    const driver::Result result = table_.primary_ctx_state(other, &flags, &active);
    if (result == driver::kInvalidDevice) {
      break;  // that was the last one
    }
    if (result == driver::kSuccess && other != device && active != 0) {
      all &= let_reach(other, device) && let_reach(device, other);
    }
  }
  return all;
}

bool Registry::let_reach(int from, int device) {
  int can = 0;
  core::Runtime* runtime = find(device);
  return runtime == nullptr || table_.can_access_peer(&can, from, device) != driver::kSuccess ||
         can == 0 || runtime->add_peer(from) == core::Status::ok;
}

bool Registry::configure_pinned(core::Runtime& runtime, int device,
                                const PinnedSettings& settings) {
  const auto at = static_cast<std::size_t>(device);
  const int node = at < settings.numa_nodes.size() ? settings.numa_nodes[at] : -1;
  const core::Bytes first = settings.first_share == 0
                                ? 0
                                : std::min(runtime.device_bytes() / settings.first_share,
                                           settings.host_limit / kFirstOfLimit);
  return runtime.configure_pinned(settings.classes, settings.host_limit,
                                  {settings.ahead, node, first, settings.with_weights});
}

bool Registry::configure_pinned(const PinnedSettings& settings) {
  {
    core::Lock lock(mutex_);
    pinned_ = settings;
    pinned_set_ = true;
  }
  bool all = true;
  for (int device = 0; device < kMaxDevices; ++device) {
    if (core::Runtime* runtime = find(device); runtime != nullptr) {
      all &= configure_pinned(*runtime, device, settings);
    }
  }
  return all;
}

void Registry::count_capture(int device, int change) {
  open_graphs_.fetch_add(change);
  if (core::Runtime* runtime = find(device); runtime != nullptr) {
    runtime->capture(change);
  }
}

Registry::Graph* Registry::find_graph(int device, GraphPoolId id) {
  for (Graph& graph : graphs_) {
    if (graph.device == device && graph.id == id) {
      return &graph;
    }
  }
  return nullptr;
}

void Registry::set_torch_side(const core::TorchSide* side) {
  torch_side_.store(side, std::memory_order_release);
}

void Registry::begin_graph(int device, GraphPoolId id, StreamFilter filter) {
  core::Lock lock(mutex_);
  Graph* graph = find_graph(device, id);
  if (graph == nullptr) {
    graph = &graphs_.emplace_back(Graph{device, id, ++last_graph_, 0, false, {}});
  }
  ++graph->uses;
  graph->filter = std::move(filter);
  if (!graph->open) {
    graph->open = true;
    count_capture(device, 1);
  }
}

void Registry::end_graph(int device, GraphPoolId id) {
  core::Lock lock(mutex_);
  if (Graph* graph = find_graph(device, id); graph != nullptr && graph->open) {
    graph->open = false;
    graph->filter = nullptr;
    count_capture(device, -1);
  }
}

void Registry::release_graph(int device, GraphPoolId id) {
  core::Lock lock(mutex_);
  Graph* graph = find_graph(device, id);
  if (graph == nullptr || --graph->uses > 0) {
    return;
  }
  const std::uint64_t number = graph->number;
  if (graph->open) {
    count_capture(device, -1);
  }
  graphs_.erase(graphs_.begin() + (graph - graphs_.data()));
  lock.unlock();
  if (core::Runtime* runtime = find(device); runtime != nullptr) {
    runtime->release_graph(number);  // waits for the GPU
  }
}

std::uint64_t Registry::graph_of(int device, driver::Stream stream) {
  if (!capturing()) {
    return 0;
  }
  core::Lock lock(mutex_);
  for (const Graph& graph : graphs_) {
    if (graph.open && graph.device == device && graph.filter && graph.filter(stream)) {
      return graph.number;
    }
  }
  return 0;
}

core::Runtime& opened(int device) {
  std::string error;
  core::Runtime* runtime = nullptr;
  {
    const GilReleased unlocked;
    runtime = Registry::get().open(device, &error);
  }
  if (runtime == nullptr) {
    throw std::runtime_error("stagehand_alloc: device " + std::to_string(device) + ": " + error);
  }
  return *runtime;
}

}  // namespace stagehand::entry
