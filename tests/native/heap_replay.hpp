// A recorded step, replayed on the process allocator in virtual time, with mapping charged.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "native/trace.hpp"

namespace stagehand::core::test {

inline constexpr Bytes kOthers = 2_GiB;  // parameters and the like

// Of the host, for mapping.
inline std::uint64_t& mapping_ns() {
  static std::uint64_t all = 0;
  return all;
}

inline void charge_host(std::uint64_t ns) {
  stagehand_sim_advance_ns(ns);
  mapping_ns() += ns;
}

// What the host pays for mapping, measured on an H200: it holds nothing up while the host is ahead.
inline void charge_mapping(driver::Table& table) {
  static driver::Table real;
  static std::uint64_t mapped = 0;  // pieces since access was set last
  real = table;
  table.mem_create = [](driver::PhysicalHandle* handle, std::size_t bytes,
                        const driver::AllocationProp* prop, unsigned long long flags) {
    charge_host(8'000);
    return real.mem_create(handle, bytes, prop, flags);
  };
  table.mem_map = [](driver::DevicePtr address, std::size_t bytes, std::size_t offset,
                     driver::PhysicalHandle handle, unsigned long long flags) {
    charge_host(1'000);
    ++mapped;
    return real.mem_map(address, bytes, offset, handle, flags);
  };
  table.mem_set_access = [](driver::DevicePtr address, std::size_t bytes,
                            const driver::AccessDesc* access, std::size_t count) {
    charge_host(10'000 + 23'000 * std::exchange(mapped, 0));
    return real.mem_set_access(address, bytes, access, count);
  };
  table.mem_unmap = [](driver::DevicePtr address, std::size_t bytes) {
    charge_host(16'000);
    return real.mem_unmap(address, bytes);
  };
}

inline Machine replay_machine() {
  Machine with = trace_machine();
  with.patch = [](driver::Table& table) {
    charge_copies(table);
    charge_mapping(table);
  };
  return with;
}

// How a record of a trace can be made again, and how long that takes.
struct Known {
  std::vector<std::uint64_t> inputs;
  std::uint64_t ns = 0;
  bool exact = true;  // else it is to be proven; it comes back bit by bit
  bool any_size = false;
};

// A region that records are saved in, as a step computes it: its first save and its last one, as
// lines of the trace.
struct Region {
  std::size_t begin = 0;
  std::size_t end = 0;
};

// What one replayed step did.
struct Step {
  Counters gained;
  Bytes mapped_peak = 0;
  Bytes occupied_peak = 0;
  std::uint64_t map_calls = 0;
  std::uint64_t map_ns = 0;  // of the host
  std::uint64_t ns = 0;
  std::uint64_t reruns = 0;
};

class Replay {
 public:
  explicit Replay(const std::string& name) : Replay(read_trace(name)) {}
  explicit Replay(std::vector<Event> events, const Machine& machine = replay_machine())
      : rig_(machine), events_(std::move(events)) {
    CHECK(!events_.empty());
    for (Bytes at = 0; at < kOthers; at += 32_MiB) {
      rig_.allocate(32_MiB, stream_);
    }
    start_ = rig_.counters().occupied;
    step();
    peak_ = rig_.counters().occupied_peak;
    step();
    unbudgeted_ns_ = step().ns;
  }

  Counters counters() { return rig_.counters(); }
  // What the next steps do, from here on.
  void follow(const std::string& name) { follow(read_trace(name)); }
  void follow(std::vector<Event> events) { events_ = std::move(events); }
  // From here on these can be made again.
  void make_again(std::map<std::uint64_t, Known> recipes) { recipes_ = std::move(recipes); }
  // From here on these run again where what they saved was dropped.
  void run_again(const std::vector<Region>& regions) {
    std::uint64_t gpu_us = 0;
    std::size_t at = 0;
    calls_.assign(regions.size(), {});
    call_of_.assign(events_.size(), 0);
    begins_.assign(events_.size(), 0);
    for (std::size_t i = 0; i < regions.size(); ++i) {
      begins_[regions[i].begin] = i + 1;
    }
    for (std::size_t i = 0; i < events_.size(); ++i) {
      const Event& event = events_[i];
      gpu_us = event.kind == 't' ? event.a : gpu_us;
      at += at < regions.size() && i >= regions[at].end ? 1 : 0;
      if (event.kind == 's' && at < regions.size() && i >= regions[at].begin) {
        call_of_[i] = at + 1;
        Call& call = calls_[at];
        call.region = regions[at];
        call.begin_us = call.saved_us.empty() ? gpu_us : call.begin_us;
        call.saved_us.emplace(event.a, gpu_us);
      }
    }
  }
  // From here on no two steps take the same times.
  void unsteady(double by, std::uint64_t seed) { times_ = Unsteady(by, seed); }
  StepShape shape() { return rig_.runtime->step_shape(); }
  PlanState plan_state() { return rig_.runtime->plan_state(); }
  Bytes peak() const { return peak_; }
  std::uint64_t unbudgeted_ns() const { return unbudgeted_ns_; }

  // A budget of this share of the activations; returns its high watermark.
  Bytes set_share(double share) {
    const auto activations = static_cast<double>(peak_ - start_);
    const Bytes high = start_ + static_cast<Bytes>(share * activations);
    high_ = high;
    return high;
  }

  // torch.cuda.empty_cache() between two steps.
  void empty_cache() {
    rig_.runtime->clear_budget();
    drop_rest();
    stagehand_sim_drain();
    rig_.runtime->trim(0);
  }

  void verify() {
    drop_rest();
    rig_.verify();
  }

  Step step() {
    drop_rest();
    stagehand_sim_drain();
    if (high_ > 0) {
      rig_.budget(high_, high_ - 1_GiB);  // the pool is entered
    }
    for (const Plan::ToProve& proof : std::exchange(proofs_, {})) {
      rig_.runtime->proved(proof, true);
    }
    rig_.runtime->reset_peaks();
    const Counters before = rig_.counters();
    const std::uint64_t mapping = mapping_ns();
    const std::uint64_t began = stagehand_sim_clock_ns();
    ++steps_;
    replay(events_, stream_, [this](const Event& event) { play(event); }, times_);
    stagehand_sim_drain();
    const Counters after = rig_.counters();
    Step done;
    done.gained.evicted_bytes = after.evicted_bytes - before.evicted_bytes;
    done.gained.overshoot_bytes = after.overshoot_bytes - before.overshoot_bytes;
    done.gained.pageable_copies = after.pageable_copies - before.pageable_copies;
    done.gained.prefetch_lates = after.prefetch_lates - before.prefetch_lates;
    done.gained.dropped_bytes = after.dropped_bytes - before.dropped_bytes;
    done.gained.recomputes = after.recomputes - before.recomputes;
    done.gained.restored_bytes = after.restored_bytes - before.restored_bytes;
    done.reruns = after.reruns - before.reruns;
    done.gained.gathers = after.gathers - before.gathers;
    done.map_calls = after.map_calls - before.map_calls;
    done.map_ns = mapping_ns() - mapping;
    done.occupied_peak = after.occupied_peak;
    done.mapped_peak = after.mapped_peak;
    done.ns = stagehand_sim_clock_ns() - began;
    return done;
  }

 private:
  void play(const Event& event) {
    Runtime& runtime = *rig_.runtime;
    const std::ptrdiff_t line = &event - events_.data();
    if (const std::size_t number = at(begins_, line); number != 0) {
      calls_[number - 1].since = runtime.serial();
    }
    switch (event.kind) {
      case 'a':
        blocks_[event.a] = rig_.allocate(event.b, streams_.of(event, rig_));
        break;
      case 'f':
        CHECK(runtime.free(blocks_.at(event.a)));
        blocks_.erase(event.a);
        break;
      case 's': {
        const Address base = blocks_.at(event.b);
        const auto known = recipes_.find(event.a);
        const bool can = known != recipes_.end();
        const bool exact = can && known->second.exact;
        Made made{base, can ? event.last : 0, exact ? 0U : 1U, exact};
        made.any_size = can && known->second.any_size;
        for (std::size_t i = 0; can && i < known->second.inputs.size(); ++i) {
          made.of[i] = records_.at(known->second.inputs[i]).record;
        }
        const Saved saved =
            runtime.save(base, base + event.first, base + event.last, false, made, inside(line));
        CHECK_EQ(saved.refusal, Refusal::none);
        if (!records_.emplace(event.a, saved).second) {
          runtime.drop_handle(saved.record);  // the trace counts one for all
        }
        break;
      }
      case 'h':
        runtime.drop_handle(records_.at(event.a).record);
        records_.erase(event.a);
        break;
      case 'u': {
        aliases_[event.b] = unpack(event.a);
        break;
      }
      case 'd':
        runtime.drop_alias(aliases_.at(event.a));
        aliases_.erase(event.a);
        break;
      case 'w':
        CHECK_EQ(sim::table().stream_synchronize(stream_), driver::kSuccess);
        break;
      default:
        CHECK(false);
    }
  }

  // As the unpack hook does.
  Block* unpack(std::uint64_t record, bool by_recipe = false) {
    Runtime& runtime = *rig_.runtime;
    const Saved& saved = records_.at(record);
    Unpacked found = runtime.unpack(saved.record, saved.offset, stream_, by_recipe);
    if (found.status == Status::recompute) {
      if (const Call* call = by_call(record); call != nullptr) {
        run_again(*call);
      } else {
        const Address made = make(record);
        runtime.made(saved.record, stream_);
        CHECK(runtime.refill(saved.record, made, stream_));
        CHECK(runtime.free(made));
      }
      found = runtime.unpack(saved.record, saved.offset, stream_, by_recipe);
    }
    CHECK_EQ(found.status, Status::ok);
    if (found.proof.trace != 0) {
      const Address made = make(record);
      runtime.made(saved.record, stream_);
      CHECK(runtime.free(made));
      proofs_.push_back(found.proof);
    }
    return found.block;
  }

  struct Call {
    Region region;
    std::uint64_t begin_us = 0;
    std::map<std::uint64_t, std::uint64_t> saved_us;  // by the record, at its first save
    std::uint64_t since = 0;                          // when it began in this step
  };

  static std::size_t at(const std::vector<std::size_t>& of_lines, std::ptrdiff_t line) {
    return of_lines.empty() ? 0 : of_lines[static_cast<std::size_t>(line)];
  }
  Inside inside(std::ptrdiff_t line) const {
    const std::size_t number = at(call_of_, line);
    return number != 0 ? Inside{steps_ * calls_.size() + number, calls_[number - 1].since}
                       : Inside{};
  }

  // Whether it can be made by its recipe now, and those of its inputs.
  bool by_recipe(std::uint64_t record) const {
    const auto known = recipes_.find(record);
    return known != recipes_.end() && rig_.runtime->by_node(records_.at(record).record) &&
           std::all_of(known->second.inputs.begin(), known->second.inputs.end(), [&](auto input) {
             return !rig_.runtime->dropped(records_.at(input).record) || by_recipe(input);
           });
  }

  // The region that makes a dropped record; null where its recipe does.
  const Call* by_call(std::uint64_t record) const {
    if (by_recipe(record)) {
      return nullptr;
    }
    const auto found = std::find_if(calls_.begin(), calls_.end(), [&](const Call& call) {
      return call.saved_us.contains(record);
    });
    return found != calls_.end() ? &*found : nullptr;
  }

  // As far as the last of what was dropped.
  void run_again(const Call& call) {
    Runtime& runtime = *rig_.runtime;
    std::map<std::uint64_t, RecordId> missing;
    std::pair<std::uint64_t, RecordId> last;
    for (const auto& [record, us] : call.saved_us) {
      if (const auto found = records_.find(record);
          found != records_.end() && runtime.dropped(found->second.record)) {
        missing.emplace(record, found->second.record);
        last = us >= last.first ? std::pair(us, found->second.record) : last;
      }
    }
    runtime.note_rerun();
    runtime.making(last.second, stream_);
    runtime.rerun_begins();
    // All that the function takes, as far as that; what it has saved it lets go of soon.
    std::uint64_t at_us = call.begin_us;
    std::map<std::uint64_t, Address> there;
    std::deque<std::uint64_t> saved;
    const auto free = [&](std::uint64_t block) {
      if (const auto found = there.find(block); found != there.end()) {
        CHECK(runtime.free(found->second));
        there.erase(found);
      }
    };
    for (std::size_t i = call.region.begin; i < call.region.end && !missing.empty(); ++i) {
      const Event& event = events_[i];
      if (event.kind == 't' && event.a > at_us) {
        CHECK_EQ(keep_busy(stream_, 1000 * (event.a - at_us)), driver::kSuccess);
        at_us = event.a;
      } else if (event.kind == 'a') {
        there[event.a] = rig_.allocate(event.b, stream_);
      } else if (event.kind == 'f') {
        free(event.a);
      } else if (event.kind == 's') {
        const auto found = missing.find(event.a);
        const auto block = there.find(event.b);
        if (found != missing.end() && block != there.end()) {
          CHECK(runtime.refill(found->second, block->second, stream_));
          missing.erase(found);
        }
        saved.push_back(event.b);
        if (saved.size() > 3) {
          free(saved.front());
          saved.pop_front();
        }
      }
    }
    CHECK(missing.empty());
    for (const auto& [block, address] : there) {
      CHECK(runtime.free(address));
    }
    runtime.rerun_ends();
    runtime.made(last.second, stream_, true);
  }

  Address make(std::uint64_t record) {
    Runtime& runtime = *rig_.runtime;
    const RecordId id = records_.at(record).record;
    const Known& known = recipes_.at(record);
    std::vector<Block*> inputs;
    for (const std::uint64_t input : known.inputs) {
      inputs.push_back(unpack(input, true));
    }
    runtime.making(id, stream_);
    const Address made = rig_.allocate(runtime.bytes_of(id), stream_);
    CHECK_EQ(keep_busy(stream_, known.ns), driver::kSuccess);
    for (Block* input : inputs) {
      runtime.drop_alias(input);
    }
    return made;
  }

  // Gradients, which the next step drops first.
  void drop_rest() {
    for (const auto& [id, address] : blocks_) {
      rig_.runtime->free(address);
    }
    blocks_.clear();
  }

  CoreRig rig_;
  std::vector<Event> events_;
  driver::Stream stream_ = rig_.stream();
  TraceStreams streams_{stream_};
  Bytes start_ = 0;
  Bytes peak_ = 0;
  Bytes high_ = 0;  // 0 before there is a budget
  Unsteady times_;
  std::uint64_t unbudgeted_ns_ = 0;
  std::map<std::uint64_t, Address> blocks_;
  std::map<std::uint64_t, Known> recipes_;
  std::vector<Call> calls_;
  std::vector<std::size_t> call_of_;  // of each line of the trace, from 1 on; 0: none
  std::vector<std::size_t> begins_;   // at this line, likewise
  std::uint64_t steps_ = 0;
  std::vector<Plan::ToProve> proofs_;  // of the step before
  std::map<std::uint64_t, Saved> records_;
  std::map<std::uint64_t, Block*> aliases_;
};

}  // namespace stagehand::core::test
