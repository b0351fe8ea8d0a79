// A recorded training step (trace.hpp), replayed where torch's own allocator cuts the blocks.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "native/held_rig.hpp"
#include "native/trace.hpp"

namespace stagehand::core::test {

class HeldReplay {
 public:
  HeldReplay(const std::string& name, bool expandable, const Machine& machine = trace_machine())
      : HeldReplay(read_trace(name), expandable, machine) {}
  HeldReplay(std::vector<Event> events, bool expandable, const Machine& machine)
      : rig_(machine), events_(std::move(events)) {
    CHECK(!events_.empty());
    rig_.torch.expandable = expandable;
  }

  HeldRig& rig() { return rig_; }

  Storage* make(Bytes bytes) { return make(bytes, stream_); }

  // Gradients, which the next step drops first.
  void drop_rest() {
    for (const auto& [id, storage] : rest_) {
      rig_.torch.drop(storage);
    }
    rest_.clear();
    stagehand_sim_drain();
  }

  // Forward inside the budget, and backward.
  void step(Bytes high, Bytes low) {
    rig_.budget(high, low);
    in_forward_ = true;
    replay(events_, stream_, [this](const Event& event) { play(event); });
  }

  // All of it, from gradients dropped until the GPU is done; what was counted by then.
  Counters whole_step(Bytes high, Bytes low) {
    drop_rest();
    step(high, low);
    stagehand_sim_drain();
    return rig_.counters();
  }

 private:
  Storage* make(Bytes bytes, driver::Stream stream) {
    Storage* storage = rig_.torch.make(bytes, stream);
    CHECK(storage != nullptr);
    return storage;
  }
  void play(const Event& event) {
    switch (event.kind) {
      case 'a':
        rest_[event.a] = make(event.b, streams_.of(event, rig_));
        break;
      case 'f':
        rig_.torch.drop(rest_.at(event.a));
        rest_.erase(event.a);
        break;
      case 's': {
        const SavedTensor saved =
            rig_.save({rest_.at(event.b), event.last - event.first, stream_, 0, event.first});
        if (!records_.emplace(event.a, saved).second) {
          rig_.drop_handle(saved);  // the trace counts one for all
        }
        break;
      }
      case 'h':
        rig_.drop_handle(records_.at(event.a));
        records_.erase(event.a);
        break;
      case 'u': {
        if (in_forward_) {
          in_forward_ = false;
          rig_.runtime->clear_budget();
        }
        const SavedTensor& saved = records_.at(event.a);
        const Unpacked again = rig_.runtime->unpack(saved.record, saved.offset, stream_);
        CHECK_EQ(again.status, Status::ok);
        aliases_[event.b] = rig_.view(again, saved, stream_).storage;
        break;
      }
      case 'd':
        rig_.torch.drop(aliases_.at(event.a));
        aliases_.erase(event.a);
        break;
      default:
        CHECK(false);
    }
  }

  HeldRig rig_;
  const std::vector<Event> events_;
  driver::Stream stream_ = rig_.stream();
  TraceStreams streams_{stream_};
  bool in_forward_ = false;
  std::map<std::uint64_t, Storage*> rest_;
  std::map<std::uint64_t, SavedTensor> records_;
  std::map<std::uint64_t, Storage*> aliases_;
};

}  // namespace stagehand::core::test
