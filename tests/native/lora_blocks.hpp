// Steps of blocks with LoRA on their linear layers, request by request: made, not recorded. Forward
// without gradients, and training with a checkpoint around each block.
#pragma once

#include <vector>

#include "native/lora_replay.hpp"

namespace stagehand::core::test {

struct LoraBlocks {
  std::size_t count;
  Bytes group;  // a block's weights
  Bytes given;  // what a block gets and gives: a row of numbers for each token
  Bytes hidden;
  double forward_ms;  // of a block
  bool checkpointed;  // and trained; else without gradients
};

// benchmarks/weights.py: 8192 tokens, width 4096, 12 blocks.
inline LoraBlocks sampled_blocks() { return {12, LoraModel::kBlock, 64_MiB, 256_MiB, 7.6, false}; }

// The same program's 48 blocks of 393 M parameters: 768 tokens, width 5120.
inline LoraBlocks many_checkpointed_blocks() {
  return {48, 786'472'960, 7'864'320, 43'253'760, 1.8, true};
}

struct BlocksStep {
  double ms = 0;
  std::uint64_t loads = 0;
  std::uint64_t host_waits = 0;
};

template <class Tensors>
class BlocksReplay {
  using Made = typename Tensors::Made;
  using Held = typename Tensors::Held;
  using Kept = std::vector<Held>;

 public:
  BlocksReplay(const LoraBlocks& blocks, Bytes high)
      : is_(blocks),
        high_(high),
        tensors_(lora_machine(on_one_link)),
        stream_(tensors_.rig.stream()),
        weights_(tensors_, stream_, {{}, std::vector<Bytes>(blocks.count, blocks.group)}),
        others_(tensors_.make(kOthers, stream_)),
        batch_(tensors_.make(is_.given, stream_)) {}
  ~BlocksReplay() {
    tensors_.drop(batch_);
    tensors_.drop(others_);
  }
  BlocksReplay(const BlocksReplay&) = delete;
  BlocksReplay& operator=(const BlocksReplay&) = delete;

  auto& rig() { return tensors_.rig; }
  BlocksStep step() {
    rig().budget(high_, high_ - high_ / 9);
    rig().runtime->reset_peaks();
    const std::uint64_t waits = rig().counters().host_waits;
    const std::uint64_t loads = weights_.counts().loads;
    const std::uint64_t began = stagehand_sim_clock_ns();
    is_.checkpointed ? train() : sample();
    CHECK_EQ(rig().driver.stream_synchronize(stream_), driver::kSuccess);
    CHECK(rig().counters().mapped_peak <= high_);
    rig().runtime->clear_budget();
    return {static_cast<double>(stagehand_sim_clock_ns() - began) / 1e6,
            weights_.counts().loads - loads, rig().counters().host_waits - waits};
  }

 private:
  static constexpr Bytes kOthers = 200_MiB;
  static constexpr double kLinears = 0.8;  // of forward's time; attention's is the rest
  static constexpr Bytes kLowRank = 256;   // of `given`: the product between LoRA's two matrices

  void sample() {
    Made made = tensors_.make(is_.given, stream_);
    for (std::size_t block = 0; block < is_.count; ++block) {
      weights_.sample(block);
      made = forward(made, true, nullptr);
      weights_.left(block);
    }
    tensors_.drop(made);
  }

  void train() {
    Kept inputs;
    Made made = tensors_.make(is_.given, stream_);
    for (std::size_t block = 0; block < is_.count; ++block) {
      weights_.forward(block);
      save(made, is_.given, &inputs);
      made = forward(made, true, nullptr);
      weights_.left(block);
    }
    Made gradient = tensors_.make(is_.given, stream_);
    tensors_.drop(made);
    for (std::size_t block = is_.count; block-- > 0;) {
      weights_.backward(block);
      const auto input = tensors_.alias(inputs.back(), stream_);
      const Made detached = tensors_.make(is_.given, stream_);
      Kept kept;
      tensors_.drop(forward(detached, false, &kept));
      gradient = backward(&kept, gradient);
      tensors_.drop(detached);
      tensors_.unalias(input);
      tensors_.end(inputs.back());
      inputs.pop_back();
    }
    weights_.ended();
    tensors_.drop(gradient);
  }

  void compute(double of_forward) {
    const double ns = of_forward * is_.forward_ms * 1e6;
    CHECK_EQ(keep_busy(stream_, static_cast<std::uint64_t>(ns)), driver::kSuccess);
  }
  void save(const Made& made, Bytes bytes, Kept* kept) {
    if (kept != nullptr) {
      kept->push_back(tensors_.save(made, bytes, stream_, nullptr, 0, {}));
    }
  }
  Made linear(Bytes out, Kept* kept) {
    const Made base = tensors_.make(out, stream_);
    compute(kLinears * static_cast<double>(out) / static_cast<double>(5 * is_.given + is_.hidden));
    const Made low = tensors_.make(is_.given / kLowRank, stream_);
    save(low, is_.given / kLowRank, kept);
    const Made product = tensors_.make(out, stream_);
    tensors_.drop(low);
    const Made sum = tensors_.make(out, stream_);
    tensors_.drop(product);
    tensors_.drop(base);
    return sum;
  }
  // `kept`: what autograd does, null where it keeps nothing.
  Made forward(const Made& input, bool drops_input, Kept* kept) {
    const auto make = [&](Bytes bytes) {
      const Made made = tensors_.make(bytes, stream_);
      save(made, bytes, kept);
      return made;
    };
    const Made normed = make(is_.given);
    const Made qkv = linear(3 * is_.given, kept);
    tensors_.drop(normed);
    save(qkv, 3 * is_.given, kept);
    const Made attended = make(is_.given);
    const Made sums = make(is_.given / 64);
    compute(1 - kLinears);
    const Made joined = make(is_.given);
    tensors_.drop(attended);
    tensors_.drop(sums);
    tensors_.drop(qkv);
    const Made projected = linear(is_.given, kept);
    tensors_.drop(joined);
    const Made between = make(is_.given);
    tensors_.drop(projected);
    if (drops_input) {
      tensors_.drop(input);
    }
    const Made normed_too = make(is_.given);
    const Made up = linear(is_.hidden, kept);
    tensors_.drop(normed_too);
    save(up, is_.hidden, kept);
    const Made activated = make(is_.hidden);
    tensors_.drop(up);
    const Made down = linear(is_.given, kept);
    tensors_.drop(activated);
    const Made output = tensors_.make(is_.given, stream_);
    tensors_.drop(down);
    tensors_.drop(between);
    return output;
  }
  void use_last(Kept* kept) {
    tensors_.unalias(tensors_.alias(kept->back(), stream_));
    tensors_.end(kept->back());
    kept->pop_back();
  }
  // The gradient of a linear layer's input.
  Made linear_back(Bytes in, Kept* kept) {
    use_last(kept);
    const Made low = tensors_.make(is_.given / kLowRank, stream_);
    const Made base = tensors_.make(in, stream_);
    compute(1 - kLinears);
    const Made product = tensors_.make(in, stream_);
    const Made sum = tensors_.make(in, stream_);
    tensors_.drop(base);
    tensors_.drop(product);
    tensors_.drop(low);
    return sum;
  }
  Made backward(Kept* kept, const Made& gradient) {
    const auto next = [&](const Made& used, Bytes bytes) {
      use_last(kept);
      const Made made = tensors_.make(bytes, stream_);
      tensors_.drop(used);
      return made;
    };
    const Made activated = linear_back(is_.hidden, kept);
    use_last(kept);
    const Made up = next(activated, is_.hidden);
    const Made normed = linear_back(is_.given, kept);
    tensors_.drop(up);
    const Made between = next(next(normed, is_.given), is_.given);
    tensors_.drop(gradient);
    const Made joined = linear_back(is_.given, kept);
    use_last(kept);
    const Made qkv = tensors_.make(3 * is_.given, stream_);
    const Made accumulated = tensors_.make(2 * is_.given, stream_);
    compute(3 * (1 - kLinears));
    tensors_.drop(accumulated);
    for (int i = 0; i < 3; ++i) {
      use_last(kept);
    }
    tensors_.drop(joined);
    const Made input = linear_back(is_.given, kept);
    tensors_.drop(qkv);
    const Made given = next(input, is_.given);
    tensors_.drop(between);
    while (!kept->empty()) {
      use_last(kept);
    }
    return given;
  }

  const LoraBlocks is_;
  const Bytes high_;
  Tensors tensors_;
  const driver::Stream stream_;
  EngineWeights<Tensors> weights_;
  const Made others_;
  const Made batch_;
};

}  // namespace stagehand::core::test
