// LoRA on a frozen model, replayed in virtual time, in either store: blocks whose weights
// come and go, beside what each saves. Copies and pinning are only charged for.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/requests.hpp"
#include "core/step_shape.hpp"
#include "native/held_rig.hpp"
#include "native/lora_model.hpp"
#include "native/one_link.hpp"

namespace stagehand::core::test {

struct LoraStep {
  double ms = 0;
  std::uint64_t loads = 0;
  Bytes in = 0;       // to the GPU, of both kinds;
  Bytes weights = 0;  // of those
  Bytes out = 0;
  Bytes over = 0;          // `high`, at most
  std::uint64_t late = 0;  // records that came back when they were asked for
  std::uint64_t reruns = 0;
};

// In torch's cache, which cannot move memory, where things came to lie in the first steps decides
// by up to a tenth, in AdamW's steps by half, what all later ones take. One budget tells little
// then: the median of five side by side is what holds.
template <class Tensors>
std::vector<Bytes> budgets_beside(Bytes high) {
  constexpr Bytes kApart = 100'000'000;
  if (Tensors::kMoves) {
    return {high};
  }
  return {high - 2 * kApart, high - kApart, high, high + kApart, high + 2 * kApart};
}

template <class Tensors>
double median_beside(Bytes high, const std::function<double(Bytes)>& measure) {
  std::vector<double> found;
  for (const Bytes at : budgets_beside<Tensors>(high)) {
    found.push_back(measure(at));
  }
  return median(found);
}

// So many steps after the first ones; none goes over `high` by more than `over`.
template <class Replay>
std::vector<LoraStep> settled_steps(Replay& replay, int first, int count, Bytes over = 0) {
  for (int i = 0; i < first; ++i) {
    replay.step();
  }
  std::vector<LoraStep> steps;
  for (int i = 0; i < count; ++i) {
    steps.push_back(replay.step());
    CHECK(steps.back().over <= over);
  }
  return steps;
}

// What the middle one of them took, of plain.
template <class Replay>
double settled_of_plain(Replay& replay, const std::vector<LoraStep>& steps, double more_ms = 0) {
  std::vector<double> ms;
  for (const LoraStep& step : steps) {
    ms.push_back(step.ms);
  }
  return median(ms) / (replay.plain_ms() + more_ms);
}

// What can be made again beside being moved.
struct Recomputes {
  bool nodes = true;           // what gelu makes
  std::size_t per_region = 0;  // blocks that are one region; 0: there are none
};

// `patch`: charge_copies, whose copies share no link, or on_one_link.
inline Machine lora_machine(void (*patch)(driver::Table&) = charge_copies) {
  Machine with = trace_machine();
  with.host_limit = 32_GiB;
  with.classes = {{8_MiB, 32_MiB, 64_MiB, 256_MiB}, {64, 64, 256, 64}};
  with.patch = patch;
  return with;
}

// What a step does with tensors, and what of that is the same in both stores.
template <class Rig, class SavedAs>
struct StoreTensors {
  struct Record {
    SavedAs saved;
    std::uint64_t ns = 0;          // of its recipe; 0: none
    std::shared_ptr<Record> from;  // what that reads
    std::uint64_t number = 0;      // in the trace
  };
  using Held = std::shared_ptr<Record>;
  Rig rig;
  std::vector<Plan::ToProve> proofs;
  std::function<void(std::uint64_t)> run_again;  // the region of that record

  explicit StoreTensors(const Machine& machine) : rig(machine) {}

  void begin_step() {
    for (const Plan::ToProve& proof : std::exchange(proofs, {})) {
      rig.runtime->proved(proof, true);
    }
  }
  static core::Made recipe(Address first, Bytes bytes, const Held& from, std::uint64_t ns) {
    core::Made made{first, ns != 0 ? bytes : 0, ns != 0 ? 0U : 1U};  // to be proven, as torch's are
    if (ns != 0) {
      made.of[0] = from->saved.record;
      made.any_size = true;
    }
    return made;
  }
};

// On the process allocator,
struct HeapTensors : StoreTensors<CoreRig, Saved> {
  static constexpr bool kMoves = true;  // memory, to where a request needs it
  using Made = Address;
  using StoreTensors::StoreTensors;

  Made make(Bytes bytes, driver::Stream on) { return rig.allocate(bytes, on); }
  void drop(Made made) { CHECK(rig.runtime->free(made)); }
  Held save(Made made, Bytes bytes, driver::Stream, const Held& from, std::uint64_t ns,
            Inside inside) {
    const Saved saved =
        rig.runtime->save(made, made, made + bytes, false, recipe(made, bytes, from, ns), inside);
    CHECK_EQ(saved.refusal, Refusal::none);
    return std::make_shared<Record>(Record{saved, ns, from});
  }
  // Its bytes are made on the stream, and are its own from here on.
  void give(const Record& record, driver::Stream on) {
    const RecordId id = record.saved.record;
    const Address made = rig.allocate(rig.runtime->bytes_of(id), on);
    CHECK(rig.runtime->refill(id, made, on));
    CHECK(rig.runtime->free(made));
  }
  Block* unpack(const Record& record, driver::Stream on, bool by_recipe = false) {
    Runtime& runtime = *rig.runtime;
    Unpacked found = runtime.unpack(record.saved.record, record.saved.offset, on, by_recipe);
    if (found.status == Status::recompute && record.ns == 0) {
      run_again(record.number);
      found = runtime.unpack(record.saved.record, record.saved.offset, on, by_recipe);
    } else if (found.status == Status::recompute) {
      const Address made = again(record, on);
      runtime.made(record.saved.record, on);
      CHECK(runtime.refill(record.saved.record, made, on));
      CHECK(runtime.free(made));
      found = runtime.unpack(record.saved.record, record.saved.offset, on, by_recipe);
    }
    CHECK_EQ(found.status, Status::ok);
    if (found.proof.trace != 0) {
      const Address made = again(record, on);
      runtime.made(record.saved.record, on);
      CHECK(runtime.free(made));
      proofs.push_back(found.proof);
    }
    return found.block;
  }
  Address again(const Record& record, driver::Stream on) {
    Block* input = unpack(*record.from, on, true);
    rig.runtime->making(record.saved.record, on);
    const Address made = rig.allocate(rig.runtime->bytes_of(record.saved.record), on);
    CHECK_EQ(keep_busy(on, record.ns), driver::kSuccess);
    rig.runtime->drop_alias(input);
    return made;
  }
  using Alias = Block*;
  Alias alias(const Held& held, driver::Stream on) { return unpack(*held, on); }
  void unalias(Alias alias) { rig.runtime->drop_alias(alias); }
  void end(const Held& held) { rig.runtime->drop_handle(held->saved.record); }
};

// and where torch's own cuts the blocks.
struct HeldTensors : StoreTensors<HeldRig, SavedTensor> {
  static constexpr bool kMoves = false;
  using Made = HeldTensor;
  using Alias = HeldTensor;
  using StoreTensors::StoreTensors;

  Made make(Bytes bytes, driver::Stream on) { return {rig.torch.make(bytes, on), bytes, on, 0}; }
  void drop(const Made& made) { rig.drop(made); }
  Held save(const Made& made, Bytes bytes, driver::Stream on, const Held& from, std::uint64_t ns,
            Inside inside) {
    const Address first = made.address();
    FakeTorch::hold(made.storage);
    rig.note_usage();
    const Saved saved = rig.runtime->save_held(held_of(made), on, first, first, first + bytes,
                                               false, recipe(first, bytes, from, ns), inside);
    CHECK_EQ(saved.refusal, Refusal::none);
    if (!saved.took_reference) {
      rig.torch.drop(made.storage);
    }
    rig.runtime->drop_orphans();
    return std::make_shared<Record>(
        Record{{saved.record, saved.offset, bytes, 0, saved.refusal}, ns, from});
  }
  void give(const Record& record, driver::Stream on) {
    const Made made = make(rig.runtime->bytes_of(record.saved.record), on);
    refill(record.saved.record, made, on);
  }
  Alias alias(const Held& held, driver::Stream on) { return unpack(*held, on); }
  void unalias(const Alias& tensor) { rig.drop(tensor); }
  void end(const Held& held) { rig.drop_handle(held->saved); }

 private:
  static HeldStorage held_of(const Made& made) {
    return {made.storage, made.storage, made.storage->address, made.storage->bytes};
  }
  void refill(RecordId id, const Made& made, driver::Stream on) {
    bool took = false;
    FakeTorch::hold(made.storage);
    CHECK(rig.runtime->refill_held(id, held_of(made), on, &took));
    if (!took) {
      rig.torch.drop(made.storage);
    }
    rig.drop(made);
  }
  Alias unpack(const Record& record, driver::Stream on, bool by_recipe = false) {
    const MakesAgain makes_again;
    Runtime& runtime = *rig.runtime;
    const RecordId id = record.saved.record;
    rig.note_usage();
    Unpacked found = runtime.unpack(id, record.saved.offset, on, by_recipe);
    if (found.status == Status::recompute && record.ns == 0) {
      run_again(record.number);
      found = runtime.unpack(id, record.saved.offset, on, by_recipe);
    } else if (found.status == Status::recompute) {
      refill(id, again(record, on), on);
      found = runtime.unpack(id, record.saved.offset, on, by_recipe);
    }
    CHECK_EQ(found.status, Status::ok);
    if (found.proof.trace != 0) {
      rig.drop(again(record, on));
      proofs.push_back(found.proof);
    }
    return rig.view(found, record.saved, on);
  }
  Made again(const Record& record, driver::Stream on) {
    const RecordId id = record.saved.record;
    const Alias input = unpack(*record.from, on, true);
    rig.runtime->making(id, on);
    const Made made = make(rig.runtime->bytes_of(id), on);
    CHECK_EQ(keep_busy(on, record.ns), driver::kSuccess);
    rig.drop(input);
    rig.runtime->made(id, on);
    return made;
  }
};

// The blocks' weights as the engine's groups, which decides.
template <class Tensors>
class EngineWeights {
 public:
  EngineWeights(Tensors& tensors, driver::Stream stream, const LoraModel& model)
      : runtime_(*tensors.rig.runtime),
        stream_(stream),
        host_(std::make_unique_for_overwrite<std::byte[]>(
            *std::max_element(model.groups.begin(), model.groups.end()))) {
    for (const Bytes bytes : model.groups) {
      groups_.push_back(runtime_.add_weights(bytes, host_.get()));
    }
    runtime_.presume_weights(groups_);
  }
  ~EngineWeights() {
    for (const GroupId group : groups_) {
      runtime_.remove_weights(group);
    }
  }
  EngineWeights(const EngineWeights&) = delete;
  EngineWeights& operator=(const EngineWeights&) = delete;

  Weights::Counts counts() { return runtime_.weight_counts().counts; }
  void forward(std::size_t block) { enter(groups_[block], UseKind::forward); }
  void sample(std::size_t block) { enter(groups_[block], UseKind::sampling); }
  void left(std::size_t block) { runtime_.leave_weights(groups_[block]); }
  // The one before it is over, as the gradient of what it was given tells.
  void backward(std::size_t block) {
    ended();
    window_.push_back(groups_[block]);
    enter(groups_[block], UseKind::backward);
  }
  void ended() {
    for (const GroupId group : std::exchange(window_, {})) {
      runtime_.leave_weights(group);
    }
  }
  void start(std::size_t) { CHECK(false); }
  // A region's re-run enters it: backward holds the two groups that it needed last.
  void again(std::size_t block) {
    const GroupId group = groups_[block];
    if (std::find(window_.begin(), window_.end(), group) != window_.end()) {
      return;
    }
    if (window_.size() == 2) {
      runtime_.leave_weights(window_.front());  // first: its memory may be what makes room
      window_.erase(window_.begin());
    }
    window_.push_back(group);
    enter(group, UseKind::backward);
  }
  // As the hooks do at each tensor.
  void more() {
    if (runtime_.lacks_weights()) {
      runtime_.more_weights(stream_);
    }
  }

 protected:
  void enter(GroupId group, UseKind kind) {
    Address address = 0;
    CHECK_EQ(runtime_.enter_weights(group, kind, stream_, &address), Status::ok);
  }

  Runtime& runtime_;
  const driver::Stream stream_;
  const std::unique_ptr<std::byte[]> host_;  // never read: copies are only charged for
  std::vector<GroupId> groups_;

 private:
  std::vector<GroupId> window_;
};

// The same where all is trained: each block's backward makes its gradients, and after the last one
// AdamW steps block by block, with state that is twice a block's weights.
template <class Tensors>
class TrainedWeights : public EngineWeights<Tensors> {
  using Base = EngineWeights<Tensors>;
  using Base::groups_;
  using Base::runtime_;
  using Base::stream_;

 public:
  static constexpr std::uint64_t kStepNs = 1'000'000;  // of one block, measured on an H200

  TrainedWeights(Tensors& tensors, driver::Stream stream, const LoraModel& model)
      : Base(tensors, stream, model), tensors_(tensors), sizes_(model.groups) {
    for (const Bytes bytes : sizes_) {
      states_.push_back(runtime_.add_weights(2 * bytes, this->host_.get()));
    }
  }
  ~TrainedWeights() {
    for (const GroupId state : states_) {
      runtime_.remove_weights(state);
    }
  }
  TrainedWeights(const TrainedWeights&) = delete;
  TrainedWeights& operator=(const TrainedWeights&) = delete;

  void backward(std::size_t block) {
    Base::backward(block);
    for (const Bytes twelfths : {3, 1, 4, 4}) {  // of attention's two matrices, and the MLP's
      gradients_.push_back(tensors_.make(sizes_[block] * twelfths / 12 / 512 * 512, stream_));
    }
  }
  void optimize() {
    for (std::size_t block = 0; block < sizes_.size(); ++block) {
      this->enter(groups_[block], UseKind::sampling);
      this->enter(states_[block], UseKind::sampling);
      CHECK_EQ(keep_busy(stream_, kStepNs), driver::kSuccess);
      written(states_[block], 2 * sizes_[block]);
      written(groups_[block], sizes_[block]);
    }
    for (const auto& gradient : std::exchange(gradients_, {})) {
      tensors_.drop(gradient);
    }
  }

 private:
  void written(GroupId group, Bytes bytes) {
    CHECK_EQ(runtime_.wrote_weights(group, bytes, stream_), Status::ok);
    runtime_.leave_weights(group);
  }

  Tensors& tensors_;
  const std::vector<Bytes> sizes_;
  std::vector<GroupId> states_;
  std::vector<typename Tensors::Made> gradients_;
};

// Of a step without any.
struct NoWeights {
  template <class Tensors>
  NoWeights(Tensors&, driver::Stream stream, const LoraModel&) : stream_(stream) {}
  static Weights::Counts counts() { return {}; }
  static void ended() {}
  static void again(std::size_t) {}
  static void more() {}
  static void forward(std::size_t) {}
  static void left(std::size_t) {}
  static void backward(std::size_t) {}
  void start(std::size_t) const {  // the host waits for the GPU
    CHECK_EQ(sim::table().stream_synchronize(stream_), driver::kSuccess);
  }

 private:
  driver::Stream stream_;
};

template <class Tensors, class BlockWeights = EngineWeights<Tensors>>
class LoraReplay {
 public:
  // `rest`: what else the weights go by.
  template <class... Rest>
  LoraReplay(const LoraModel& model, Bytes high, const Machine& machine, const Rest&... rest)
      : LoraReplay(model, high, machine, Recomputes{}, rest...) {}
  template <class... Rest>
  LoraReplay(const LoraModel& model, Bytes high, const Machine& machine, Recomputes what,
             const Rest&... rest)
      : tensors_(machine),
        high_(high),
        events_(model.events),
        sizes_(block_bytes(model.events)),
        recipes_(model.recipes),
        kept_bytes_(model.kept),
        plain_us_(model.plain_us()),
        weights_(tensors_, stream_, model, rest...) {
    if constexpr (requires { tensors_.rig.torch; }) {
      tensors_.rig.torch.expandable = model.expandable;
    }
    others_ = tensors_.make(kOthers, stream_);
    if (what.nodes && recipes_.empty()) {
      find_recipes();
    }
    per_region_ = what.per_region;
    find_regions();
    tensors_.run_again = [this](std::uint64_t record) { run_again(record); };
  }
  ~LoraReplay() {
    micro_step_ = 0;
    drop_rest();
    if (kept_.has_value()) {
      tensors_.drop(*kept_);
    }
    for (const auto& made : of_optimizer_) {
      tensors_.drop(made);
    }
    tensors_.drop(others_);
  }
  LoraReplay(const LoraReplay&) = delete;
  LoraReplay& operator=(const LoraReplay&) = delete;

  // From here on so many steps are one of the optimizer's: the gradients that the first one leaves
  // stay until that, and in the others what is added to them is gone at once. Returns their bytes.
  Bytes accumulate(int steps) {
    micro_steps_ = steps;
    bool backward = false;
    for (const Event& event : events_) {
      backward = backward || event.kind == 'u';
      if (event.kind == 'a' && backward) {
        gradients_.insert(event.a);
      } else if (event.kind == 'f') {
        gradients_.erase(event.a);
      }
    }
    Bytes bytes = 0;
    for (const std::uint64_t block : gradients_) {
      bytes += sizes_.at(block);
    }
    return bytes;
  }
  // As recorded, without any budget.
  double plain_ms() const { return plain_us_ / 1e3; }
  auto& rig() { return tensors_.rig; }
  StepShape shape() { return rig_.runtime->step_shape(); }
  Counters counters() { return rig_.counters(); }
  void set_high(Bytes high) { high_ = high; }
  void set_ranks() { rig_.runtime->set_ranks(true); }
  // What the next steps do, from here on.
  void follow(const LoraModel& model) {
    events_ = model.events;
    sizes_ = block_bytes(events_);
    recipes_ = model.recipes;
    plain_us_ = model.plain_us();
    find_regions();
  }
  static constexpr Bytes others() { return kOthers; }
  // torch.cuda.empty_cache() between two steps.
  void empty_cache() {
    rig_.runtime->clear_budget();
    drop_rest();
    stagehand_sim_drain();
    if constexpr (requires { tensors_.rig.torch; }) {
      tensors_.rig.torch.release_cached();
    }
  }

  // So much on the trace's stream of that number, and no more.
  void take_between(std::uint64_t stream, Bytes bytes) {
    tensors_.drop(tensors_.make(bytes, streams_.of({'a', 0, bytes, stream, 0}, rig_)));
  }

  // An optimizer takes its first step, and keeps tensors of these sizes, for as long as this is
  // there. Whether all are served apart: in torch's cache only.
  bool optimizer_keeps(const std::vector<Bytes>& sizes) {
    rig_.runtime->clear_budget();
    rig_.runtime->optimizer_makes(stream_);
    bool apart = true;
    for (const Bytes bytes : sizes) {
      of_optimizer_.push_back(tensors_.make(bytes, rig().cache.place(bytes, stream_)));
      apart = apart && of_optimizer_.back().stream != stream_;
    }
    rig_.runtime->optimizer_made();
    return apart;
  }

  // What a step takes, of so many after the first ones, where nothing waits for a step but the one
  // after the next: the host is ahead of the GPU, as in most programs. In ms.
  // `before`: is told of each step by its number.
  double ahead_ms(int first, int count, const std::function<void(int)>& before = [](int) {}) {
    std::vector<driver::Event> ends;
    for (int i = 0; i < first + count; ++i) {
      before(i);
      if (ends.size() > 1) {
        CHECK_EQ(rig_.driver.event_synchronize(ends[ends.size() - 2]), driver::kSuccess);
      }
      drop_rest();
      begin_step();
      play_step();
      ends.push_back(nullptr);
      CHECK_EQ(rig_.driver.event_create(&ends.back(), 0), driver::kSuccess);
      CHECK_EQ(rig_.driver.event_record(ends.back(), stream_), driver::kSuccess);
    }
    CHECK_EQ(rig_.driver.stream_synchronize(stream_), driver::kSuccess);
    float ms = 0;
    const driver::Event began = ends[static_cast<std::size_t>(first) - 1];
    CHECK_EQ(rig_.driver.event_elapsed_time(&ms, began, ends.back()), driver::kSuccess);
    for (const driver::Event end : ends) {
      CHECK_EQ(rig_.driver.event_destroy(end), driver::kSuccess);
    }
    return ms / count;
  }

  LoraStep step() {
    drop_rest();
    stagehand_sim_drain();
    begin_step();
    const Counters before = rig_.counters();
    const Weights::Counts loads = weights_.counts();
    const std::uint64_t began = stagehand_sim_clock_ns();
    play_step();
    CHECK_EQ(rig_.driver.stream_synchronize(stream_), driver::kSuccess);
    const Counters after = rig_.counters();
    const Weights::Counts now = weights_.counts();
    LoraStep done;
    done.ms = static_cast<double>(stagehand_sim_clock_ns() - began) / 1e6;
    done.loads = now.loads - loads.loads;
    done.weights = now.loaded_bytes - loads.loaded_bytes;
    done.in = after.restored_bytes - before.restored_bytes + done.weights;
    done.out = after.evicted_bytes - before.evicted_bytes + now.written_bytes - loads.written_bytes;
    done.over = after.mapped_peak - std::min(after.mapped_peak, high_);
    done.late = after.prefetch_lates - before.prefetch_lates;
    done.reruns = after.reruns - before.reruns;
    micro_step_ = (micro_step_ + 1) % micro_steps_;
    return done;
  }

 private:
  static constexpr Bytes kOthers = 200_MiB;
  static constexpr std::uint64_t kGeluNs = 250'000;

  void begin_step() {
    ++steps_;
    tensors_.begin_step();
    rig_.budget(high_, high_ - high_ / 9);
    rig_.runtime->reset_peaks();
  }

  void play_step() {
    bool forward = kept_bytes_ > 0;
    replay(events_, stream_, [&](const Event& event) {
      if (event.kind == 'u' && std::exchange(forward, false)) {
        const typename Tensors::Made made = tensors_.make(kept_bytes_, stream_);
        if (kept_.has_value()) {
          tensors_.drop(*kept_);
        }
        kept_ = made;
      }
      play(event);
    });
    if (added_.has_value()) {
      tensors_.drop(*std::exchange(added_, {}));
    }
    weights_.ended();
    if constexpr (requires { weights_.optimize(); }) {
      weights_.optimize();
    }
  }

  // What gelu makes of the other one of its size: the two largest of each block.
  void find_recipes() {
    Bytes largest = 0;
    for (const Event& event : events_) {
      largest = std::max(largest, event.kind == 's' ? sizes_.at(event.b) : 0);
    }
    std::uint64_t last = 0;
    for (const Event& event : events_) {
      if (event.kind != 's' || sizes_.at(event.b) != largest || event.a == last) {
        continue;
      }
      if (last != 0) {
        recipes_[event.a] = {last, kGeluNs};
      }
      last = last != 0 ? 0 : event.a;
    }
  }

  // One run of a region: when it and its blocks begin, and what it asks for and saves, as recorded.
  struct Call {
    std::uint64_t begin_us = 0;
    std::size_t first = 0;  // block
    std::size_t begin = 0;  // line of the trace
    std::uint64_t since = 0;
  };

  void find_regions() {
    const std::size_t blocks = per_region_;
    calls_.clear();
    call_of_.clear();
    std::uint64_t us = 0;
    bool inside = false;
    for (std::size_t i = 0; i < events_.size() && blocks > 0; ++i) {
      const Event& event = events_[i];
      us = event.kind == 't' ? event.a : us;
      if (event.kind == 'e') {
        inside = event.b == 0 || (event.b == 1 && (event.a + 1) % blocks != 0);
        if (event.b == 0 && event.a % blocks == 0) {
          calls_.push_back({us, event.a, i, 0});
        }
      } else if (event.kind == 's' && inside) {
        call_of_.emplace(event.a, Place{calls_.size(), i});
      }
    }
  }

  // As far as the last of what was dropped. It asks for what forward did.
  void run_again(std::uint64_t asked) {
    Runtime& runtime = *rig_.runtime;
    const std::size_t number = call_of_.at(asked).call;
    const Call& call = calls_.at(number - 1);
    const auto dropped = [&](std::uint64_t record) {
      const auto found = records_.find(record);
      return found != records_.end() && runtime.dropped(found->second->saved.record);
    };
    std::size_t end = call.begin;
    RecordId id;
    std::map<std::uint64_t, std::uint64_t> made_for;  // blocks of the trace
    for (const auto& [record, place] : call_of_) {
      if (place.call == number && dropped(record)) {
        made_for[events_[place.line].b] = record;
        if (place.line >= end) {
          end = place.line + 1;
          id = records_.at(record)->saved.record;
        }
      }
    }
    CHECK(end > call.begin);
    runtime.note_rerun();
    runtime.making(id, stream_);
    runtime.rerun_begins();
    std::map<std::uint64_t, typename Tensors::Made> others;
    std::uint64_t before_us = call.begin_us;
    for (std::size_t i = call.begin; i < end; ++i) {
      const Event& event = events_[i];
      switch (event.kind) {
        case 'e':
          if (event.b == 0) {
            weights_.again(event.a);
          }
          break;
        case 't':
          CHECK_EQ(keep_busy(stream_, 1000 * (event.a - std::exchange(before_us, event.a))),
                   driver::kSuccess);
          break;
        case 'a':
          if (!made_for.contains(event.a)) {
            others.emplace(event.a, tensors_.make(event.b, streams_.of(event, rig_)));
          }
          break;
        case 'f':
          if (const auto other = others.find(event.a); other != others.end()) {
            tensors_.drop(other->second);
            others.erase(other);
          }
          break;
        case 's':
          if (const auto found = made_for.find(event.b);
              found != made_for.end() && found->second == event.a && dropped(event.a)) {
            tensors_.give(*records_.at(event.a), stream_);
          }
          break;
        default:
          break;
      }
    }
    for (const auto& [block, made] : others) {
      tensors_.drop(made);
    }
    runtime.rerun_ends();
    runtime.made(id, stream_, true);
  }

  Inside inside(std::uint64_t record) const {
    const auto found = call_of_.find(record);
    return found == call_of_.end() ? Inside{}
                                   : Inside{steps_ * calls_.size() + found->second.call,
                                            calls_[found->second.call - 1].since};
  }

  void play(const Event& event) {
    if (added_.has_value()) {
      tensors_.drop(*std::exchange(added_, {}));
    }
    switch (event.kind) {
      case 'a': {
        const auto made = tensors_.make(event.b, streams_.of(event, rig_));
        if (micro_step_ > 0 && gradients_.contains(event.a)) {
          added_ = made;
        } else {
          blocks_.emplace(event.a, made);
        }
        break;
      }
      case 'f':
        tensors_.drop(blocks_.at(event.a));
        blocks_.erase(event.a);
        break;
      case 's': {
        const auto recipe = recipes_.find(event.a);
        const bool can = recipe != recipes_.end();
        const auto from = can ? records_.at(recipe->second.of) : typename Tensors::Held{};
        const auto saved = tensors_.save(blocks_.at(event.b), sizes_.at(event.b), stream_, from,
                                         can ? recipe->second.ns : 0, inside(event.a));
        saved->number = event.a;
        if (!records_.emplace(event.a, saved).second) {
          tensors_.end(saved);  // the trace counts one for all
        }
        weights_.more();
        break;
      }
      case 'h':
        tensors_.end(records_.at(event.a));
        records_.erase(event.a);
        break;
      case 'u':
        aliases_.emplace(event.b, tensors_.alias(records_.at(event.a), stream_));
        weights_.more();
        break;
      case 'd':
        tensors_.unalias(aliases_.at(event.a));
        aliases_.erase(event.a);
        break;
      case 'e':
        for (Call& call : calls_) {
          call.since = event.b == 0 && call.first == event.a ? rig_.runtime->serial() : call.since;
        }
        event.b == 0   ? weights_.forward(event.a)
        : event.b == 1 ? weights_.left(event.a)
                       : weights_.backward(event.a);
        break;
      case 'w':
        weights_.start(event.a);
        break;
      default:
        CHECK(false);
    }
  }
  // Gradients, which the next step drops first once the optimizer has stepped.
  void drop_rest() {
    if (micro_step_ == 0) {
      rig_.runtime->optimizer_steps();
    }
    for (auto one = blocks_.begin(); one != blocks_.end();) {
      if (micro_step_ > 0 && gradients_.contains(one->first)) {
        ++one;
        continue;
      }
      tensors_.drop(one->second);
      one = blocks_.erase(one);
    }
  }

  Tensors tensors_;
  CoreRig& rig_ = tensors_.rig;
  Bytes high_;
  std::vector<Event> events_;
  std::map<std::uint64_t, Bytes> sizes_;  // of blocks
  std::map<std::uint64_t, LoraModel::Recipe> recipes_;
  Bytes kept_bytes_;
  std::optional<typename Tensors::Made> kept_{};
  double plain_us_;
  driver::Stream stream_ = rig_.stream();
  TraceStreams streams_{stream_};
  BlockWeights weights_;
  std::size_t per_region_ = 0;  // blocks; 0: there are no regions
  std::vector<Call> calls_;
  struct Place {
    std::size_t call = 0;  // from 1 on
    std::size_t line = 0;
  };
  std::map<std::uint64_t, Place> call_of_;  // of a record, at its first save
  std::uint64_t steps_ = 0;
  typename Tensors::Made others_{};
  std::vector<typename Tensors::Made> of_optimizer_;
  int micro_steps_ = 1;
  int micro_step_ = 0;
  std::set<std::uint64_t> gradients_;  // of blocks
  std::optional<typename Tensors::Made> added_{};
  std::map<std::uint64_t, typename Tensors::Made> blocks_;
  std::map<std::uint64_t, typename Tensors::Held> records_;
  std::map<std::uint64_t, typename Tensors::Alias> aliases_;
};

}  // namespace stagehand::core::test
