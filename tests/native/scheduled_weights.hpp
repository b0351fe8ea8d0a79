// The blocks' weights as somebody else's scheduler moves them (weight_schedulers.hpp): to the
// engine they are live memory. Copies go on a stream of their own, behind what was queued when they
// begin.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "native/lora_replay.hpp"
#include "native/weight_schedulers.hpp"

namespace stagehand::core::test {

template <class Tensors>
class ScheduledWeights {
 public:
  ScheduledWeights(Tensors& tensors, driver::Stream stream, const LoraModel& model,
                   const std::vector<bool>& stays)
      : tensors_(tensors), stream_(stream), sizes_(model.groups), stays_(stays) {
    for (const BlockUse& use : model.uses()) {
      uses_.push_back({use.block});
    }
    homes_.resize(sizes_.size());
    rest_ = tensors_.rig.runtime->add_weights(sizeof(byte_), &byte_);
    for (std::size_t block = 0; block < sizes_.size(); ++block) {
      if (stays_[block]) {
        load(block);
      }
    }
  }
  ~ScheduledWeights() {
    for (Home& home : homes_) {
      if (home.there != nullptr) {
        leave(home);
      }
    }
    tensors_.rig.runtime->remove_weights(rest_);
  }
  ScheduledWeights(const ScheduledWeights&) = delete;
  ScheduledWeights& operator=(const ScheduledWeights&) = delete;

  Weights::Counts counts() const { return counts_; }
  void forward(std::size_t) { enter(); }
  void left(std::size_t) { end(); }
  // One backward is over where the next begins: they know that of their graph, as hooks do not.
  void backward(std::size_t) {
    if (uses_[used_ - 1].goes_on) {
      end();
    }
    enter();
  }
  void again(std::size_t) { CHECK(false); }  // there are no regions
  void ended() {
    end();
    used_ = 0;
  }
  void start(std::size_t use) {
    Use& one = uses_[use % uses_.size()];
    if (!std::exchange(one.started, true) && homes_[one.block].wanted++ == 0 &&
        !stays_[one.block]) {
      load(one.block);
    }
  }
  void more() {}

 private:
  static constexpr Bytes kPiece = 16_MiB;  // so that other copies get between

  struct Use {
    std::size_t block = 0;
    bool started = false;  // its copy has
    bool goes_on = false;
  };
  struct Home {
    std::unique_ptr<typename Tensors::Made> there;  // null: away
    int wanted = 0;                                 // by uses that have started and not ended
    driver::Event arrived = nullptr;
  };

  void enter() {
    start(used_);
    Use& use = uses_[used_++];
    use.goes_on = true;
    CHECK_EQ(tensors_.rig.driver.stream_wait_event(stream_, homes_[use.block].arrived, 0), 0);
  }
  void end() {
    Use& use = uses_[used_ - 1];
    use.started = use.goes_on = false;
    Home& home = homes_[use.block];
    if (--home.wanted == 0 && !stays_[use.block]) {
      leave(home);
    }
  }
  // Into memory of the compute stream: from the copies' own, as theirs, it takes longer.
  void load(std::size_t block) {
    Home& home = homes_[block];
    const driver::Table& driver = tensors_.rig.driver;
    home.there = std::make_unique<typename Tensors::Made>(tensors_.make(sizes_[block], stream_));
    tensors_.rig.order(stream_, lane_);
    for (Bytes at = 0; at < sizes_[block]; at += kPiece) {
      CHECK_EQ(driver.memcpy_htod_async(0, nullptr, std::min(kPiece, sizes_[block] - at), lane_),
               driver::kSuccess);
    }
    CHECK_EQ(driver.event_create(&home.arrived, driver::kEventDisableTiming), 0);
    CHECK_EQ(driver.event_record(home.arrived, lane_), 0);
    ++counts_.loads;
    counts_.loaded_bytes += sizes_[block];
  }
  void leave(Home& home) {
    tensors_.drop(*home.there);
    home.there = nullptr;
    CHECK_EQ(tensors_.rig.driver.event_destroy(home.arrived), 0);
  }

  Tensors& tensors_;
  const driver::Stream stream_;
  const driver::Stream lane_ = tensors_.rig.stream();
  const std::vector<Bytes> sizes_;
  const std::vector<bool> stays_;
  std::vector<Use> uses_;
  std::vector<Home> homes_;
  std::size_t used_ = 0;  // of the step
  Weights::Counts counts_;
  // One that never comes, so that what the engine does in a process whose weights come and go is
  // the same for all schedulers.
  std::byte byte_{};
  GroupId rest_{};
};

}  // namespace stagehand::core::test
