// The extension module stagehand_alloc._native, as stagehand_alloc/_native.pyi types it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>

#include "entry/gil.hpp"
#include "entry/handle_object.hpp"
#include "entry/hook_stack.hpp"
#include "entry/regions.hpp"
#include "entry/registry.hpp"
#include "entry/shapes.hpp"
#include "entry/torch_api.hpp"
#include "entry/torch_entry.hpp"
#include "entry/torch_side.hpp"
#include "entry/weights.hpp"
#include "entry/without_gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace stagehand::entry {

namespace {

void install_driver(const std::vector<std::uintptr_t>& addresses) {
  if (!Registry::get().install_driver(addresses)) {
    throw std::runtime_error("stagehand_alloc: the driver table is filled already");
  }
}

nb::dict entry_point_dict() {
  nb::dict found;
  for (const auto& [name, address] : entry_points()) {
    found[name.c_str()] = address;
  }
  return found;
}

void set_budget(int device, core::Bytes high, core::Bytes low, core::Bytes limit) {
  core::Runtime& runtime = opened(device);
  const GilReleased unlocked;  // may wait for the GPU to give memory back
  runtime.set_budget({high, low, limit, true});
}

// With the GIL, on Python's main thread, between two of its instructions.
int wake(void* device) {
  try {
    nb::module_::import_("stagehand_alloc._step.quiet")
        .attr("wake")(static_cast<int>(reinterpret_cast<std::intptr_t>(device)));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) {  // Ctrl-C, or what a signal's handler ends the run with
      error.restore();
      return -1;
    }
    error.discard_as_unraisable("stagehand_alloc: a quiet step");
  } catch (const std::exception&) {  // the next step is followed
  }
  return 0;
}

// Any thread, with or without the GIL, under locks of torch's and of the engine's.
bool ring(int device) noexcept {
  return Py_IsInitialized() == 0 ||
         Py_AddPendingCall(&wake, reinterpret_cast<void*>(std::intptr_t{device})) == 0;
}

void set_alarm(int device, core::Bytes mark, bool wakes) {
  without_gil(device, [&](core::Runtime& runtime) {
    runtime.set_alarm({mark, wakes ? &ring : nullptr, device});
  });
}

std::tuple<bool, core::Bytes, core::Bytes, bool> read_alarm(int device) {
  return without_gil(device, [](core::Runtime& runtime) {
    const core::Runtime::Calm found = runtime.read_alarm();
    return std::tuple(found.rang, found.in_use, found.pressed, found.shown);
  });
}

core::Bytes available(int device) {
  return without_gil(device, [](core::Runtime& runtime) { return runtime.available(); });
}

bool wants_regions(int device) {
  const core::Runtime* runtime = Registry::get().find(device);
  return runtime == nullptr || runtime->wants_regions();
}

void clear_budget(int device) {
  if (core::Runtime* runtime = Registry::get().find(device); runtime != nullptr) {
    runtime->clear_budget();
    settle(*runtime);
  }
}

bool configure_pinned(const std::vector<core::Bytes>& classes,
                      const std::vector<std::uint32_t>& counts, core::Bytes host_limit, bool ahead,
                      bool with_weights, const std::vector<int>& numa_nodes,
                      core::Bytes first_share) {
  const GilReleased unlocked;
  return Registry::get().configure_pinned(
      {{classes, counts}, host_limit, ahead, with_weights, numa_nodes, first_share});
}

core::Bytes release_pinned(int device, core::Bytes keep) {
  return without_gil(device, [&](core::Runtime& runtime) { return runtime.release_pinned(keep); });
}

nb::list pinned_demand(int device) {
  nb::list found;
  for (const core::Demand::Peak& peak :
       without_gil(device, [](core::Runtime& runtime) { return runtime.pinned_demand(); })) {
    found.append(nb::make_tuple(peak.bytes, peak.count));
  }
  return found;
}

// (step, best, late, again: ns; settled; by region and op: both, records, bytes that stay, leave,
// are dropped, ns)
nb::tuple plan(int device) {
  const core::Plan::Shown shown =
      without_gil(device, [](core::Runtime& runtime) { return runtime.plan_shown(); });
  nb::list ops;
  for (const core::Plan::ByOp& one : shown.ops) {
    ops.append(nb::make_tuple(one.region != nullptr ? one.region : "",
                              one.op != nullptr ? op_name(one.op) : std::string(), one.records,
                              one.stays, one.leaves, one.drops, one.again_ns));
  }
  return nb::make_tuple(shown.step_ns, shown.best_ns, shown.forecast.late_ns,
                        shown.forecast.again_ns, shown.settled, ops);
}

nb::dict dict_of(const core::Reading& reading) {
  const auto& [counters, budget, plan_state] = reading;
  nb::dict found;
#define STAGEHAND_ENTRY(name) found[#name] = counters.name;
  STAGEHAND_COUNTERS(STAGEHAND_ENTRY)
#undef STAGEHAND_ENTRY
  found["live"] = counters.occupied - counters.retained;
  const bool follows =
      plan_state == core::PlanState::following || plan_state == core::PlanState::declined;
  found["plan_follows"] = follows ? 1 : 0;
  found["plan_state"] = static_cast<int>(plan_state);
  found["high"] = budget.high;
  found["low"] = budget.low;
  found["limit"] = budget.limit;
  return found;
}

nb::dict stats(int device) {
  return dict_of(without_gil(device, [](core::Runtime& runtime) { return runtime.read(); }));
}

nb::dict end_step(int device) {
  return dict_of(without_gil(device, [](core::Runtime& runtime) { return runtime.read_step(); }));
}

core::Bytes records(int device) {
  return without_gil(device, [](core::Runtime& runtime) { return runtime.records(); });
}

void reset_peaks(int device) {
  without_gil(device, [](core::Runtime& runtime) { runtime.reset_peaks(); });
}

void empty_cache() {
  const GilReleased unlocked;
  Registry::get().each([](core::Runtime& runtime) { runtime.trim(0); });
}

std::string check_invariants(int device) {
  return without_gil(device, [](core::Runtime& runtime) { return runtime.invariants_broken(); });
}

// 0 is no limit; rates in bytes per second.
bool set_lane_limits(int device, std::uint32_t inflight_d2h, std::uint32_t inflight_h2d,
                     core::Bytes rate_d2h, core::Bytes rate_h2d, core::Bytes piece) {
  core::Runtime& runtime = opened(device);
  const GilReleased unlocked;  // pins a page the first time there is a rate
  return runtime.set_lane_limits({inflight_d2h, inflight_h2d, rate_d2h, rate_h2d, piece});
}

nb::tuple lane_limits(int device) {
  const core::LaneLimits limits =
      without_gil(device, [](core::Runtime& runtime) { return runtime.lane_limits(); });
  return nb::make_tuple(limits.inflight_d2h, limits.inflight_h2d, limits.rate_d2h, limits.rate_h2d,
                        limits.piece);
}

// From here on the device's saved tensors are torch's own storages.
void enter_torch(int device) {
  Registry& registry = Registry::get();
  const core::TorchSide* side = registry.torch_side();
  if (side == nullptr) {
    throw std::runtime_error("stagehand_alloc: torch's allocator was not reached yet");
  }
  core::Runtime& runtime = opened(device);
  if (!runtime.uses_torch()) {
    runtime.use_torch(*side, registry.torch_cache(device));
  }
}

bool set_torch_pool(int device, std::uint64_t first, std::uint64_t second) {
  core::Runtime& runtime = opened(device);
  const bool enters = first != 0 || second != 0;
  const driver::Stream stream = enters ? current_stream({dlpack::kCuda, device}) : nullptr;
  const GilReleased unlocked;
  // With those in use since, without memory of ours.
  if (enters && !Registry::get().connect_peers(device)) {
    return false;
  }
  runtime.set_torch_pool({first, second}, stream);
  return true;
}

bool outgrown(int device, std::uint64_t first, std::uint64_t second, core::Bytes high) {
  core::Runtime& runtime = opened(device);
  const GilReleased unlocked;
  return runtime.uses_torch() && runtime.outgrown({first, second}, high);
}

void set_debug(bool evict_everything, bool poison, bool checksums) {
  Recipe::trust(evict_everything);
  Registry::get().each(
      [&](core::Runtime& runtime) { runtime.set_debug({evict_everything, poison, checksums}); });
}

void forget_steps(int device) {
  core::Runtime& runtime = opened(device);
  const GilReleased unlocked;
  runtime.forget_steps();
}

void set_checksums(int device, bool on) {
  core::Runtime& runtime = opened(device);
  const GilReleased unlocked;
  runtime.set_checksums(on);
}

bool keep(int device, std::uintptr_t address) {
  return without_gil(device, [&](core::Runtime& runtime) { return runtime.keep(address); });
}

// For the cycle collector: a predicate often belongs to whoever holds the pool.
PyType_Slot hooks_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(+[](PyObject* self, visitproc visit, void* arg) {
       Py_VISIT(Py_TYPE(self));
       return nb::inst_ready(self) ? nb::inst_ptr<Hooks>(self)->visit(visit, arg) : 0;
     })},
    {Py_tp_clear, reinterpret_cast<void*>(+[](PyObject* self) {
       nb::inst_ptr<Hooks>(self)->clear();
       return 0;
     })},
    {0, nullptr},
};

}  // namespace

NB_MODULE(_native, module) {
  // Handles live in autograd graphs, which the interpreter may leave behind at exit.
  nb::set_leak_warnings(false);
  GilReleased::watch_the_end();

  module.def("driver_symbols", [] {
    return std::vector<std::string>(std::begin(driver::kSymbols), std::end(driver::kSymbols));
  });
  module.def("optional_driver_symbols", [] {
    std::map<std::string, int> versions;
    for (const driver::OptionalSymbol& optional : driver::kOptionalSymbols) {
      versions.emplace(optional.symbol, optional.version);
    }
    return versions;
  });
  module.def("install_driver", &install_driver, "addresses"_a);
  module.def("entry_points", &entry_point_dict);
  module.def("open_device", [](int device) { opened(device); }, "device"_a);
  module.def(
      "device_open", [](int device) { return Registry::get().find(device) != nullptr; },
      "device"_a);
  module.def("set_budget", &set_budget, "device"_a, "high"_a, "low"_a, "limit"_a);
  module.def("set_alarm", &set_alarm, "device"_a, "mark"_a, "wakes"_a);
  module.def("read_alarm", &read_alarm, "device"_a);
  module.def("available", &available, "device"_a);
  module.def("count_hooks", &count_hooks);
  module.def("put_hooks", &put_hooks, "pack"_a, "unpack"_a, "above"_a);
  module.def("wants_regions", &wants_regions, "device"_a);
  module.def("clear_budget", &clear_budget, "device"_a);
  module.def("configure_pinned", &configure_pinned, "classes"_a, "counts"_a, "host_limit"_a,
             "ahead"_a = false, "with_weights"_a = false, "numa_nodes"_a = std::vector<int>(),
             "first_share"_a = 0);
  module.def("release_pinned", &release_pinned, "device"_a, "keep"_a);
  module.def("plan", &plan, "device"_a);
  module.def("pinned_demand", &pinned_demand, "device"_a);
  module.def("stats", &stats, "device"_a);
  module.def("end_step", &end_step, "device"_a);
  module.def("records", &records, "device"_a);
  module.def("reset_peaks", &reset_peaks, "device"_a);
  module.def("empty_cache", &empty_cache);
  module.def("check_invariants", &check_invariants, "device"_a);
  module.def("set_lane_limits", &set_lane_limits, "device"_a, "inflight_d2h"_a, "inflight_h2d"_a,
             "rate_d2h"_a, "rate_h2d"_a, "piece"_a = core::LaneLimits{}.piece);
  module.def("lane_limits", &lane_limits, "device"_a);
  module.def(
      "use_tensor_side",
      [](std::uintptr_t table) {
        return TorchApi::use_tensors(reinterpret_cast<const core::TensorSide*>(table));
      },
      "table"_a);
  module.def(
      "proved",
      [](int device, std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, bool, bool> what,
         bool same) {
        const auto [trace, index, rests_on, again, other_size] = what;
        opened(device).proved({trace, index, rests_on, again, other_size}, same);
      },
      "device"_a, "what"_a, "same"_a);
  module.def(
      "use_recipe_side",
      [](std::uintptr_t table) {
        return Recipe::use(reinterpret_cast<const core::RecipeSide*>(table));
      },
      "table"_a);
  module.def("use_torch_side", &use_torch_side, "table"_a, "device"_a);
  module.def("use_python_side", &use_python_side);
  module.def(
      "await_optimizer",
      [](int device, bool due) {
        without_gil(device, [due](core::Runtime& runtime) { runtime.await_optimizer(due); });
      },
      "device"_a, "due"_a);
  module.def(
      "optimizer_makes",
      [](int device, std::uintptr_t stream) {
        without_gil(device, [stream](core::Runtime& runtime) {
          runtime.optimizer_makes(reinterpret_cast<driver::Stream>(stream));
        });
      },
      "device"_a, "stream"_a);
  module.def(
      "optimizer_made",
      [](int device) {
        without_gil(device, [](core::Runtime& runtime) { runtime.optimizer_made(); });
      },
      "device"_a);
  module.def(
      "optimizer_steps",
      [](int device) {
        without_gil(device, [](core::Runtime& runtime) { runtime.optimizer_steps(); });
      },
      "device"_a);
  module.def("enter_torch", &enter_torch, "device"_a);
  module.def("can_route", &can_route);
  module.def("set_torch_pool", &set_torch_pool, "device"_a, "first"_a, "second"_a);
  module.def("outgrown", &outgrown, "device"_a, "first"_a, "second"_a, "high"_a);
  module.def("keep_mem_pool", &keep_mem_pool, "device"_a, "first"_a, "second"_a);
  module.def("let_mem_pool_go", &let_mem_pool_go, "device"_a, "first"_a, "second"_a);
  module.def("set_debug", &set_debug, "evict_everything"_a, "poison"_a, "checksums"_a = false);
  module.def("forget_steps", &forget_steps, "device"_a);
  module.def("set_checksums", &set_checksums, "device"_a, "on"_a);
  module.def("keep", &keep, "device"_a, "address"_a);
  bind_shapes(module);
  bind_weights(module);

  HandleObject::bind(module);
  nb::class_<Hooks>(module, "Hooks", nb::type_slots(hooks_slots))
      .def(nb::init<int, nb::object, nb::object, nb::object>(), "device"_a, "modified"_a,
           "keep"_a = nb::none(), "proof"_a = nb::none())
      .def("begin_step", &Hooks::begin_step, "recompute"_a = false, "sharded"_a = false,
           "ranks"_a = false, "late"_a = false)
      .def_static("end_step", &Hooks::end_step)
      .def(
          "pack",
          [](Hooks& self, nb::handle tensor) {
            nb::object handle = HandleObject::make();
            self.pack(tensor, HandleObject::in(handle.ptr()));
            return handle;
          },
          "tensor"_a)
      .def(
          "unpack",
          [](Hooks& self, nb::handle handle) { return self.unpack(HandleObject::checked(handle)); },
          "handle"_a)
      .def("passed_through", &Hooks::passed_through);
  nb::class_<Call>(module, "Call", nb::is_weak_referenceable())
      .def(nb::init<int, const std::string&>(), "device"_a, "region"_a = "")
      .def("collect", [](nb::handle_t<Call> call) { Call::collect(call); })
      .def(
          "begin",
          [](nb::handle_t<Call> call, nb::object sentinel) {
            Call::begin(call, std::move(sentinel));
          },
          "sentinel"_a)
      .def("end", &Call::end)
      .def("capture", &Call::capture);
  nb::class_<Capture>(module, "Capture")
      .def("pack", &Capture::pack, "tensor"_a)
      .def("unpack", &Capture::unpack, "packed"_a)
      .def("done", &Capture::done);
}

}  // namespace stagehand::entry
