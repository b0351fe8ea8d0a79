// LoRA on a frozen model, replayed on the process allocator in virtual time: blocks whose weights
// come and go, beside what each saves. Copies and pinning are only charged for.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "native/trace.hpp"

namespace stagehand::core::test {

// Of benchmarks/weights.py on an H200: a GPT of width 4096 and 12 layers in bf16.
struct Lora {
  std::size_t blocks = 12;
  Bytes group = 384_MiB;
  std::vector<Bytes> saves;      // of a block, in order
  Bytes gradient = 256_MiB;      // the largest of backward's own tensors
  std::uint64_t forward_ns = 0;  // of a block on the GPU
  std::uint64_t backward_ns = 0;
  std::uint64_t host_ns = 1'000'000;  // of a block, in either

  Bytes weights() const { return blocks * group; }
  Bytes saved() const {
    Bytes all = 0;
    for (const Bytes one : saves) {
      all += one;
    }
    return blocks * all;
  }
};

// A sequence of 8192 tokens, and of 1024.
inline Lora long_lora() {
  return {.saves = {64_MiB, 64_MiB, 192_MiB, 64_MiB, 64_MiB, 64_MiB, 256_MiB, 256_MiB},
          .forward_ns = 7'000'000,
          .backward_ns = 13'500'000};
}
inline Lora short_lora() {
  return {.saves = {8_MiB, 8_MiB, 24_MiB, 8_MiB, 8_MiB, 8_MiB, 32_MiB, 32_MiB},
          .gradient = 32_MiB,
          .forward_ns = 1'000'000,
          .backward_ns = 1'900'000};
}

struct LoraStep {
  double ms = 0;
  double loads = 0;
  double late = 0;
  Bytes in = 0;   // to the GPU, of both kinds
  Bytes out = 0;  // of records
  Bytes over = 0;
};

class LoraReplay {
 public:
  LoraReplay(const Lora& model, Bytes high)
      : rig_(machine()), model_(model), high_(high), host_(model.group) {
    for (std::size_t i = 0; i < model.blocks; ++i) {
      groups_.push_back(rig_.runtime->add_weights(model.group, host_.data()));
    }
    rig_.runtime->presume_weights(groups_);
  }
  ~LoraReplay() {
    for (const GroupId group : groups_) {
      rig_.runtime->remove_weights(group);
    }
  }
  LoraReplay(const LoraReplay&) = delete;
  LoraReplay& operator=(const LoraReplay&) = delete;

  // The least that a step can take, and the bytes that must come: what has no room beside one block
  // comes once for backward, and weights that have none come for forward too.
  double bound_ms() const {
    const double link = static_cast<double>(kBytesPerS) / 1e3;
    const double count = static_cast<double>(model_.blocks);
    const auto all = [&](std::uint64_t ns) { return count * static_cast<double>(ns) / 1e6; };
    const double out = above(static_cast<double>(model_.saved()) - room());
    return std::max({all(model_.forward_ns), for_forward() / link, out / link}) +
           std::max(all(model_.backward_ns), for_backward() / link);
  }
  double bound_bytes() const { return for_forward() + for_backward(); }

  LoraStep step() {
    rig_.budget(high_, high_ - high_ / 16);
    const Counters before = rig_.counters();
    const Weights::Counts loads = rig_.runtime->weight_counts().counts;
    const std::uint64_t began = stagehand_sim_clock_ns();
    for (std::size_t i = 0; i < model_.blocks; ++i) {
      forward(i);
    }
    for (std::size_t i = model_.blocks; i-- > 0;) {
      backward(i);
    }
    end_window();
    CHECK_EQ(sim::table().stream_synchronize(stream_), driver::kSuccess);
    const Counters after = rig_.counters();
    const Weights::Counts now = rig_.runtime->weight_counts().counts;
    LoraStep done;
    done.ms = static_cast<double>(stagehand_sim_clock_ns() - began) / 1e6;
    done.loads = static_cast<double>(now.loads - loads.loads);
    done.late = static_cast<double>(now.late - loads.late);
    done.in = after.restored_bytes - before.restored_bytes + now.loaded_bytes - loads.loaded_bytes;
    done.out = after.d2h_bytes - before.d2h_bytes;
    done.over = after.overshoot_bytes - before.overshoot_bytes;
    return done;
  }

 private:
  static double above(double bytes) { return std::max(0.0, bytes); }
  double room() const { return static_cast<double>(high_ - model_.group - 2 * model_.gradient); }
  double for_forward() const { return above(static_cast<double>(model_.weights()) - room()); }
  double for_backward() const {
    return above(static_cast<double>(model_.weights() + model_.saved()) - room());
  }
  static Machine machine() {
    Machine with = trace_machine();
    with.host_limit = 32_GiB;
    with.classes = {{8_MiB, 32_MiB, 64_MiB, 256_MiB}, {64, 64, 256, 64}};
    return with;
  }
  void enter(std::size_t i, UseKind kind) {
    Address address = 0;
    CHECK_EQ(rig_.runtime->enter_weights(groups_[i], kind, stream_, &address), Status::ok);
  }
  // As the hooks do at each of its tensors.
  void more() {
    if (rig_.runtime->lacks_weights()) {
      rig_.runtime->more_weights(stream_);
    }
  }
  void work(std::uint64_t gpu_ns, std::uint64_t host_ns) {
    keep_busy(stream_, gpu_ns);
    stagehand_sim_advance_ns(host_ns);
  }
  void forward(std::size_t i) {
    Runtime& runtime = *rig_.runtime;
    enter(i, UseKind::forward);
    const std::uint64_t parts = model_.saves.size();
    for (const Bytes bytes : model_.saves) {
      const Address made = rig_.allocate(bytes, stream_);
      work(model_.forward_ns / parts, model_.host_ns / parts);
      const Saved saved = runtime.save(made, made, made + bytes, false, {}, {});
      CHECK_EQ(saved.refusal, Refusal::none);
      records_.push_back(saved);
      CHECK(runtime.free(made));
      more();
    }
    runtime.leave_weights(groups_[i]);
  }
  // Its window holds the block before it, too.
  void backward(std::size_t i) {
    Runtime& runtime = *rig_.runtime;
    if (window_.size() == 2) {
      runtime.leave_weights(groups_[window_.front()]);
      window_.erase(window_.begin());
    }
    enter(i, UseKind::backward);
    window_.push_back(i);
    const std::uint64_t parts = model_.saves.size();
    for (std::size_t k = 0; k < parts; ++k) {
      const Address gradient = rig_.allocate(model_.gradient, stream_);
      const Saved saved = records_.back();
      records_.pop_back();
      const Unpacked found = runtime.unpack(saved.record, saved.offset, stream_);
      CHECK_EQ(found.status, Status::ok);
      work(model_.backward_ns / parts, model_.host_ns / parts);
      runtime.drop_alias(found.block);
      runtime.drop_handle(saved.record);
      CHECK(runtime.free(gradient));
      more();
    }
  }
  void end_window() {
    for (const std::size_t i : window_) {
      rig_.runtime->leave_weights(groups_[i]);
    }
    window_.clear();
  }

  CoreRig rig_;
  const Lora model_;
  const Bytes high_;
  std::vector<std::byte> host_;
  driver::Stream stream_ = rig_.stream();
  std::vector<GroupId> groups_;
  std::vector<Saved> records_;
  std::vector<std::size_t> window_;
};

}  // namespace stagehand::core::test
