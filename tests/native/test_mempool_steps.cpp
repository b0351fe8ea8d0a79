// Recorded steps (trace.hpp) with a MemPool around forward: what the process reserves, in all.
#include <map>
#include <string>
#include <vector>

#include "native/plain_saves.hpp"
#include "native/promise_rig.hpp"
#include "native/routed_torch.hpp"
#include "native/trace.hpp"

namespace stagehand::core::test {
namespace {

constexpr Bytes kNoPressure = 60_GiB;

Machine machine() {
  Machine with = trace_machine();
  with.host_limit = 48_GiB;
  return with;
}

class Training {
 public:
  explicit Training(const std::string& trace) : rig_(routed(), machine()), trace_(trace) {
    CHECK(!events_.empty());
    for (Bytes at = 0; at < 2_GiB; at += 32_MiB) {
      weights_.push_back(make(32_MiB));
    }
    start_ = torch().allocated();
  }
  ~Training() {
    drop_gradients();
    for (Storage* one : weights_) {
      torch().drop(one);
    }
    for (; number_ > 0; --number_) {
      torch().destroy_pool(pool());
    }
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  // As entry/bindings.cpp and _pool.py enter one.
  void step(Bytes high, Bytes low) {
    drop_gradients();
    stagehand_sim_drain();
    Runtime& runtime = *rig_.runtime;
    if (number_ == 0 || runtime.outgrown(pool(), high)) {
      if (number_ > 0) {
        torch().destroy_pool(pool());
      }
      ++number_;
      torch().use_segments(pool());
    }
    runtime.set_budget({high, low, kUnlimited, true});
    runtime.set_torch_pool(pool(), stream_);
    served_ = runtime.route()->here();
    inside_ = true;
    replay(events_, stream_, [this](const Event& event) { play(event); });
    runtime.route()->backward_ended();
    t_backward = false;
    stagehand_sim_drain();
    CHECK(!g_told.on);
    CHECK_EQ(g_told.kept, 0);
  }
  // Without us.
  void plain_step() {
    drop_gradients();
    replay(events_, stream_, [this](const Event& event) {
      plain_saves_.play(event, [this](const Event& one) { play(one); });
    });
  }
  void drop_gradients() {
    for (const auto& [id, storage] : tensors_) {
      torch().drop(storage);
    }
    tensors_.clear();
  }

  FakeTorch& torch() { return rig_.torch; }
  Counters counters() { return rig_.counters(); }
  Bytes start() const { return start_; }
  Bytes peak() const { return peak_; }
  bool served() const { return served_; }  // by the MemPool, in forward
  std::uint64_t pools() const { return number_; }
  Bytes in_pool() {
    Bytes bytes = 0;
    for (const auto& [id, storage] : tensors_) {
      const auto owner = rig_.cache.owner_of(storage->address);
      bytes += owner.has_value() && owner->pool != kDefaultPool ? storage->bytes : 0;
    }
    return bytes;
  }

 private:
  TorchPool pool() const { return {0, 4 + number_}; }
  Storage* make(Bytes bytes) { return make(bytes, stream_); }
  Storage* make(Bytes bytes, driver::Stream stream) {
    FakeTorch::use_pool(number_ > 0 && routed_here() ? g_told.pool : kDefaultPool);
    Storage* made = torch().make(bytes, stream);
    FakeTorch::use_pool(kDefaultPool);
    CHECK(made != nullptr);
    peak_ = std::max(peak_, torch().allocated());
    return made;
  }
  bool routed_here() { return rig_.runtime->route()->here(); }
  void play(const Event& event) {
    Runtime& runtime = *rig_.runtime;
    switch (event.kind) {
      case 'a':
        tensors_[event.a] = make(event.b, streams_.of(event, rig_));
        break;
      case 'f':
        torch().drop(tensors_.at(event.a));
        tensors_.erase(event.a);
        break;
      case 's': {
        const Saved saved = rig_.save(tensors_.at(event.b), stream_);
        if (!records_.emplace(event.a, saved.record).second) {
          runtime.drop_handle(saved.record);  // the trace counts one for all
        }
        break;
      }
      case 'h':
        runtime.drop_handle(records_.at(event.a));
        runtime.drop_orphans();
        records_.erase(event.a);
        break;
      case 'u': {
        begin_backward();
        const Unpacked again = runtime.unpack(records_.at(event.a), 0, stream_);
        CHECK_EQ(again.status, Status::ok);
        auto* storage = static_cast<Storage*>(again.storage);
        FakeTorch::hold(storage);
        runtime.drop_alias(again.block);
        aliases_[event.b] = storage;
        break;
      }
      case 'd':
        torch().drop(aliases_.at(event.a));
        aliases_.erase(event.a);
        break;
      default:
        CHECK(false);
    }
  }
  // Each node of a backward asks whether it is to join.
  void begin_backward() {
    Runtime& runtime = *rig_.runtime;
    if (std::exchange(inside_, false)) {
      runtime.set_torch_pool(kDefaultPool);
      runtime.clear_budget();
      t_backward = true;
    }
    if (runtime.route()->to_join()) {
      runtime.route()->join();
    }
  }

  SideRig rig_;
  const std::string trace_;
  const std::vector<Event> events_ = read_trace(trace_);
  driver::Stream stream_ = rig_.stream();
  TraceStreams streams_{stream_};
  std::uint64_t number_ = 0;  // of MemPools so far
  bool inside_ = false;
  bool served_ = false;
  Bytes start_ = 0;
  Bytes peak_ = 0;
  std::vector<Storage*> weights_;
  std::map<std::uint64_t, Storage*> tensors_;  // at the end of a step: gradients
  std::map<std::uint64_t, Storage*> aliases_;
  std::map<std::uint64_t, RecordId> records_;
  PlainSaves plain_saves_;
};

struct Plain {
  Bytes start = 0;
  Bytes peak = 0;
  Bytes reserved = 0;

  Bytes high(double share) const {
    return start + static_cast<Bytes>(share * static_cast<double>(peak - start));
  }
  Bytes low(double share) const { return high(share) - std::min(1_GiB, (peak - start) / 10); }
};

Plain plain(const std::string& trace) {
  Training training(trace);
  training.plain_step();
  training.plain_step();
  return {training.start(), training.peak(), training.torch().reserved_peak()};
}

double ratio(Bytes one, Bytes two) { return static_cast<double>(one) / static_cast<double>(two); }

TEST("without pressure a MemPool serves nobody, and what is reserved is plain torch's") {
  for (const char* trace : {"gpt_8k.txt", "llama.txt", "vit.txt"}) {
    const Plain without = plain(trace);
    Training training(trace);
    for (int i = 0; i < 3; ++i) {
      training.step(kNoPressure, kNoPressure - 1_GiB);
    }
    CHECK(!training.served());
    CHECK_EQ(training.torch().reserved_peak(), without.reserved);
    CHECK_EQ(training.counters().evicted_bytes, 0);
  }
}

TEST(
    "three quarters of the activations: from the first step on all that is reserved is below 1.02 "
    "high") {
  for (const char* trace : {"gpt_8k.txt", "llama.txt", "vit.txt", "unet.txt"}) {
    const Plain without = plain(trace);
    const Bytes high = without.high(0.75);
    Training training(trace);
    training.step(high, without.low(0.75));
    const Bytes learning = training.counters().overshoot_bytes;
    for (int i = 0; i < 4; ++i) {
      training.step(high, without.low(0.75));
      CHECK(training.served());
    }
    CHECK(ratio(training.torch().reserved_peak(), high) <= 1.02);
    CHECK_EQ(training.counters().overshoot_bytes, learning);
    CHECK(training.counters().evicted_bytes > 0);
    CHECK_EQ(training.pools(), 1);
  }
}

TEST("the first step that is pressed is torch's own, which gives back all that is free after it") {
  const Plain without = plain("gpt_8k.txt");
  Training training("gpt_8k.txt");
  training.step(kNoPressure, kNoPressure - 1_GiB);
  const Bytes high = without.high(0.75);
  training.step(high, without.low(0.75));
  CHECK(!training.served());
  CHECK_EQ(training.in_pool(), 0);
  training.drop_gradients();
  CHECK(training.torch().reserved() < without.reserved * 2 / 3);
  training.step(high, without.low(0.75));
  CHECK(training.served());
  CHECK(training.in_pool() > 0);
}

TEST("a MemPool that came to be above a lower high gives way to another one") {
  const Plain without = plain("gpt_8k.txt");
  Training training("gpt_8k.txt");
  for (int i = 0; i < 2; ++i) {
    training.step(without.high(0.95), without.low(0.95));
  }
  CHECK(training.served());
  CHECK_EQ(training.pools(), 1);
  const Bytes high = without.high(0.75);
  training.step(high, without.low(0.75));
  CHECK_EQ(training.pools(), 2);
  const Bytes over = training.counters().overshoot_bytes;
  for (int i = 0; i < 3; ++i) {
    training.step(high, without.low(0.75));
  }
  CHECK(training.torch().reserved() <= high);
  CHECK_EQ(training.counters().overshoot_bytes, over);
}

// Gradients are reduced on a stream whose memory lies idle in forward: 3 GB at most.
TEST("FSDP2: a MemPool leaves room for what its other streams had in the step before") {
  for (const double share : {0.75, 0.5}) {
    const Plain without = plain("fsdp2.txt");
    const Bytes high = without.high(share);
    Training training("fsdp2.txt");
    for (int i = 0; i < 4; ++i) {
      training.step(high, without.low(share));
    }
    CHECK(training.served());
    CHECK(training.torch().reserved_peak() <= high);
    CHECK_EQ(training.counters().overshoot_bytes, 0);
    CHECK_EQ(training.pools(), 1);
  }
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
