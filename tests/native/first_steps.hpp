// Recorded steps from the first one on, in either store, with pinned memory made by hand in virtual
// time (hand_pinner.hpp).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "native/hand_pinner.hpp"
#include "native/held_rig.hpp"
#include "native/plain_saves.hpp"
#include "native/trace.hpp"

namespace stagehand::core::test {

inline Machine first_machine() {
  Machine with = trace_machine();
  with.ahead = true;
  with.host_limit = 48_GiB;
  with.first = 4_GiB;
  return with;
}

// The process allocator's: what is told of tensors is their address.
class HeapSide {
 public:
  using Tensor = Address;
  using Kept = Saved;
  using Alias = Block*;

  CoreRig rig{first_machine()};

  Tensor make(Bytes bytes, driver::Stream stream) { return rig.allocate(bytes, stream); }
  void drop(Tensor tensor) { CHECK(rig.runtime->free(tensor)); }
  Kept save(Tensor tensor, const Event& event, driver::Stream) {
    const Saved saved = rig.runtime->save(tensor, tensor + event.first, tensor + event.last);
    CHECK_EQ(saved.refusal, Refusal::none);
    return saved;
  }
  void drop_handle(const Kept& kept) { rig.runtime->drop_handle(kept.record); }
  Alias unpack(const Kept& kept, driver::Stream stream) {
    const Unpacked again = rig.runtime->unpack(kept.record, kept.offset, stream);
    CHECK_EQ(again.status, Status::ok);
    return again.block;
  }
  void drop_alias(Alias alias) { rig.runtime->drop_alias(alias); }
};

// torch's own allocator's.
class HeldSide {
 public:
  using Tensor = Storage*;
  using Kept = SavedTensor;
  using Alias = Storage*;

  HeldRig rig{first_machine()};

  HeldSide() { rig.torch.expandable = true; }

  Tensor make(Bytes bytes, driver::Stream stream) {
    Storage* storage = rig.torch.make(bytes, stream);
    CHECK(storage != nullptr);
    return storage;
  }
  void drop(Tensor tensor) { rig.torch.drop(tensor); }
  Kept save(Tensor tensor, const Event& event, driver::Stream stream) {
    return rig.save({tensor, event.last - event.first, stream, 0, event.first});
  }
  void drop_handle(const Kept& kept) { rig.drop_handle(kept); }
  Alias unpack(const Kept& kept, driver::Stream stream) {
    const Unpacked again = rig.runtime->unpack(kept.record, kept.offset, stream);
    CHECK_EQ(again.status, Status::ok);
    return rig.view(again, kept, stream).storage;
  }
  void drop_alias(Alias alias) { rig.torch.drop(alias); }
};

// What a step did.
struct Done {
  std::uint64_t ns = 0;
  Bytes over = 0;  // mapped above `high` at most
  Bytes evicted = 0;
  Bytes pinned = 0;  // at its end
  std::uint64_t host_waits = 0;
  std::uint64_t misses = 0;
  std::uint64_t lates = 0;
  std::uint64_t events_made = 0;
};

template <typename Side>
class FirstSteps {
 public:
  explicit FirstSteps(const std::string& name) : FirstSteps(read_trace(name)) {}
  explicit FirstSteps(std::vector<Event> events) : events_(std::move(events)) {
    CHECK(!events_.empty());
    pinner_.work_for(*side_.rig.runtime);
    for (Bytes at = 0; at < 2_GiB; at += 32_MiB) {
      weights_.push_back(side_.make(32_MiB, stream_));
    }
    start_ = side_.rig.counters().occupied;
  }
  ~FirstSteps() {
    drop_rest();
    for (const typename Side::Tensor& weight : weights_) {
      side_.drop(weight);
    }
    pinner_.finish();
  }

  // What the next steps do, from here on.
  void follow(std::vector<Event> events) { events_ = std::move(events); }

  // Nothing is short: how much is needed at once, and what a step takes.
  void measure() {
    side_.rig.budget(64_GiB, 60_GiB);
    free_ = step();
    peak_ = side_.rig.counters().occupied_peak;
  }
  // As where the pool is made well before the first step, and a step without it came in between.
  void warm_up() {
    finish_pinning();
    plain_ = true;
    step();
    drop_rest();
    plain_ = false;
  }
  // torch, as where the trigger library does not know its release.
  void does_not_tell() { side_.rig.torch.tells = false; }
  // As where the pool is made well before the first step, which is the process's first.
  void finish_pinning() { pinner_.finish(); }
  void set(Bytes high, Bytes low) { high_ = high, low_ = low; }
  // A share of the activations that were measured, with a tenth of them between the watermarks.
  void set_share(double share) {
    const Bytes activations = peak_ - start_;
    const Bytes high = start_ + static_cast<Bytes>(share * static_cast<double>(activations));
    set(high, high - activations / 10);
  }
  Bytes start() const { return start_; }
  Bytes peak() const { return peak_; }
  Done unbudgeted() const { return free_; }
  Counters counters() { return side_.rig.counters(); }

  Done step() {
    drop_rest();
    stagehand_sim_drain();
    if (high_ > 0) {
      side_.rig.budget(high_, low_);
    }
    side_.rig.runtime->reset_peaks();
    const std::uint64_t events = stagehand_sim_call_count("cuEventCreate");
    const Counters before = counters();
    const std::uint64_t began = stagehand_sim_clock_ns();
    replay(events_, stream_, [this](const Event& event) {
      pinner_.run();
      if (plain_) {
        plain_saves_.play(event, [this](const Event& one) { play(one); });
      } else {
        play(event);
      }
    });
    stagehand_sim_drain();
    side_.rig.runtime->clear_budget();
    const Counters after = counters();
    Done done;
    done.ns = stagehand_sim_clock_ns() - began;
    done.over = high_ == 0 ? 0 : after.mapped_peak - std::min(after.mapped_peak, high_);
    done.evicted = after.evicted_bytes - before.evicted_bytes;
    done.pinned = after.pinned_bytes;
    done.host_waits = after.host_waits - before.host_waits;
    done.misses = after.pool_misses - before.pool_misses;
    done.events_made = stagehand_sim_call_count("cuEventCreate") - events;
    done.lates = after.prefetch_lates - before.prefetch_lates;
    return done;
  }
  void verify() {
    drop_rest();
    side_.rig.verify();
  }

 private:
  void play(const Event& event) {
    switch (event.kind) {
      case 'a':
        tensors_[event.a] = side_.make(event.b, streams_.of(event, side_.rig));
        break;
      case 'f':
        side_.drop(tensors_.at(event.a));
        tensors_.erase(event.a);
        break;
      case 's': {
        const typename Side::Kept kept = side_.save(tensors_.at(event.b), event, stream_);
        if (!records_.emplace(event.a, kept).second) {
          side_.drop_handle(kept);  // the trace counts one for all
        }
        break;
      }
      case 'h':
        side_.drop_handle(records_.at(event.a));
        records_.erase(event.a);
        break;
      case 'u':
        aliases_[event.b] = side_.unpack(records_.at(event.a), stream_);
        break;
      case 'd':
        side_.drop_alias(aliases_.at(event.a));
        aliases_.erase(event.a);
        break;
      case 'w':
        CHECK_EQ(sim::table().stream_synchronize(stream_), driver::kSuccess);
        break;
      default:
        CHECK(false);
    }
  }
  // Gradients, which the next step drops first.
  void drop_rest() {
    for (const auto& [id, tensor] : tensors_) {
      side_.drop(tensor);
    }
    tensors_.clear();
  }

  HandPinner pinner_;
  Side side_;
  std::vector<Event> events_;
  driver::Stream stream_ = side_.rig.stream();
  TraceStreams streams_{stream_};
  std::vector<typename Side::Tensor> weights_;
  Bytes start_ = 0;
  Bytes peak_ = 0;
  Bytes high_ = 0;
  Bytes low_ = 0;
  Done free_;
  bool plain_ = false;
  PlainSaves plain_saves_;
  std::map<std::uint64_t, typename Side::Tensor> tensors_;
  std::map<std::uint64_t, typename Side::Kept> records_;
  std::map<std::uint64_t, typename Side::Alias> aliases_;
};

// What is in use before a step, and at most in one that nothing is short in.
struct Use {
  Bytes start;
  Bytes peak;
};
template <typename Side>
Use measured(const std::string& trace) {
  FirstSteps<Side> plain(trace);
  plain.measure();
  return {plain.start(), plain.peak()};
}

}  // namespace stagehand::core::test
