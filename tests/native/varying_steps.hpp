// Steps whose sizes differ from one to the next, as a mixture of experts and an LSTM over sequences
// of other lengths have them, to be replayed like recorded ones (trace.hpp).
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "native/heap_replay.hpp"

namespace stagehand::core::test {

// Writes down a step as benchmarks/record_trace.py would.
class StepWriter {
 public:
  std::uint64_t allocate(Bytes bytes) {
    events_.push_back({'a', ++blocks_, bytes});
    sizes_.push_back(bytes);
    return blocks_;
  }
  void free(std::uint64_t block) { events_.push_back({'f', block}); }
  // Saves the block, which the step itself lets go of later; returns the record.
  std::uint64_t save(std::uint64_t block) {
    events_.push_back({'s', ++records_, block, 0, sizes_.at(block - 1)});
    return records_;
  }
  // Backward's use of a record begins, and ends.
  std::uint64_t use(std::uint64_t record) {
    events_.push_back({'u', record, ++aliases_});
    return aliases_;
  }
  void end(std::uint64_t alias) { events_.push_back({'d', alias}); }
  void used(std::uint64_t record, std::uint64_t alias) {
    events_.push_back({'h', record});
    events_.push_back({'d', alias});
  }
  // The GPU and the host are busy. `ready`: the host then waits for the GPU.
  void work(double us, bool ready = false) {
    us_ += us;
    events_.push_back({'t', static_cast<std::uint64_t>(us_), static_cast<std::uint64_t>(us_)});
    if (ready) {
      events_.push_back({'w'});
    }
  }
  std::vector<Event> take() { return std::move(events_); }

 private:
  std::vector<Event> events_;
  std::vector<Bytes> sizes_;
  std::uint64_t blocks_ = 0;
  std::uint64_t records_ = 0;
  std::uint64_t aliases_ = 0;
  double us_ = 0;
};

// A GPT of width 2048 with 8 experts in 8 layers over 8192 tokens: each token's best two experts,
// found with nonzero. How many tokens an expert has differs by layer, and by `jitter` from step to
// step; now and then, where `idle` says so, one has none. `recipes`: gets what can be made again.
inline std::vector<Event> experts_step(std::uint64_t number, double jitter, bool idle = false,
                                       std::map<std::uint64_t, Known>* recipes = nullptr) {
  constexpr int kLayers = 8;
  constexpr int kExperts = 8;
  constexpr Bytes kTokens = 8192;
  constexpr Bytes kRow = 4096;  // bytes of one token
  constexpr Bytes kGeluBytesPerNs = 1200;
  constexpr Bytes kAll = kTokens * kRow;
  std::minstd_rand of_model(7);
  std::minstd_rand of_step(static_cast<unsigned>(number) * 7919 + 3);
  std::uniform_real_distribution<double> part(0, 1);
  of_step.discard(10);
  StepWriter step;
  struct Saved {
    std::uint64_t record;
    Bytes bytes;
  };
  struct Expert {
    Bytes tokens = 0;
    std::vector<Saved> saved;
  };
  struct Layer {
    std::vector<Saved> attention;
    std::vector<Expert> experts;
  };
  const auto keep = [&](std::vector<Saved>& to, Bytes bytes) {
    const std::uint64_t block = step.allocate(bytes);
    to.push_back({step.save(block), bytes});
    return block;
  };
  std::vector<Layer> layers;
  std::uint64_t x = step.allocate(kAll);
  for (int number_of = 0; number_of < kLayers; ++number_of) {
    Layer layer;
    std::vector<double> share;
    double sum = 0;
    for (int e = 0; e < kExperts; ++e) {
      const double usual = 0.7 + 0.6 * part(of_model);
      const bool none = idle && part(of_step) < 0.05;
      share.push_back(none ? 0 : usual * (1 + jitter * (2 * part(of_step) - 1)));
      sum += share.back();
    }
    layer.attention.push_back({step.save(x), kAll});
    std::vector<std::uint64_t> gone{x};
    gone.push_back(keep(layer.attention, kTokens * 4));
    gone.push_back(keep(layer.attention, kTokens * 4));
    gone.push_back(keep(layer.attention, kAll));
    step.work(60);
    gone.push_back(keep(layer.attention, 3 * kAll));
    step.work(350);
    gone.push_back(keep(layer.attention, kAll));
    gone.push_back(keep(layer.attention, kTokens * 64));
    step.work(700);
    const std::uint64_t merged = step.allocate(kAll);
    step.work(120);
    const std::uint64_t after = step.allocate(kAll);
    step.free(merged);
    layer.attention.push_back({step.save(after), kAll});
    gone.push_back(keep(layer.attention, kTokens * 4));
    gone.push_back(keep(layer.attention, kTokens * 4));
    const std::uint64_t normed = keep(layer.attention, kAll);
    gone.push_back(keep(layer.attention, kTokens * 16));
    step.work(100);
    for (const std::uint64_t block : gone) {
      step.free(block);
    }
    const std::uint64_t result = step.allocate(kAll);
    for (int e = 0; e < kExperts; ++e) {
      const auto tokens =
          static_cast<Bytes>(share[static_cast<std::size_t>(e)] / sum * 2 * kTokens);
      if (tokens == 0) {
        step.work(60, true);
        continue;
      }
      Expert expert{tokens, {}};
      step.work(60, true);  // nonzero
      std::vector<std::uint64_t> own;
      own.push_back(keep(expert.saved, tokens * 16));
      own.push_back(keep(expert.saved, tokens * kRow));
      step.work(40);
      own.push_back(keep(expert.saved, 4 * tokens * kRow));
      step.work(static_cast<double>(tokens) / 10);
      own.push_back(keep(expert.saved, 4 * tokens * kRow));
      if (recipes != nullptr) {  // gelu's, of what the first matrix made
        Known gelu{{expert.saved[2].record}, expert.saved[3].bytes / kGeluBytesPerNs, false, true};
        (*recipes)[expert.saved[3].record] = std::move(gelu);
      }
      step.work(40);
      own.push_back(keep(expert.saved, tokens * kRow));
      step.work(static_cast<double>(tokens) / 10);
      own.push_back(keep(expert.saved, tokens * 2));
      const std::uint64_t weighed = step.allocate(tokens * kRow);
      step.work(40);
      step.free(weighed);
      for (const std::uint64_t block : own) {
        step.free(block);
      }
      layer.experts.push_back(std::move(expert));
    }
    step.free(normed);
    x = step.allocate(kAll);
    step.free(result);
    step.free(after);
    step.work(30);
    layers.push_back(std::move(layer));
  }
  std::vector<Saved> head;
  head.push_back({step.save(x), kAll});
  const std::uint64_t normed = keep(head, kAll);
  step.free(x);
  const std::uint64_t logits = step.allocate(kTokens * 65536);
  step.work(1700);
  const std::uint64_t wide = step.allocate(kTokens * 131072);
  step.free(logits);
  step.work(300);
  const std::uint64_t likely = keep(head, kTokens * 131072);
  step.free(wide);
  step.free(normed);
  step.free(likely);
  step.work(500);
  // Backward.
  const auto use = [&](const Saved& saved, double us, Bytes makes, std::uint64_t drops) {
    const std::uint64_t alias = step.use(saved.record);
    const std::uint64_t made = step.allocate(makes);
    step.work(us);
    step.used(saved.record, alias);
    if (drops != 0) {
      step.free(drops);
    }
    return made;
  };
  std::uint64_t gradient = use(head[2], 500, kTokens * 131072, 0);
  const std::uint64_t narrow = step.allocate(kTokens * 65536);
  step.free(gradient);
  gradient = use(head[1], 3400, kAll, narrow);
  step.allocate(128_MiB);  // the head's own gradient
  gradient = use(head[0], 100, kAll, gradient);
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
    const std::uint64_t sum = step.allocate(kAll);
    for (auto expert = layer->experts.rbegin(); expert != layer->experts.rend(); ++expert) {
      const auto ns = static_cast<double>(expert->tokens);
      const std::vector<Saved>& saved = expert->saved;
      std::uint64_t grown = use(saved[5], 30, expert->tokens * kRow, 0);
      grown = use(saved[4], 30, expert->tokens * kRow, grown);
      step.allocate(32_MiB);  // of the expert's weights
      grown = use(saved[3], ns / 5, 4 * expert->tokens * kRow, grown);
      grown = use(saved[2], 40, 4 * expert->tokens * kRow, grown);
      step.allocate(32_MiB);
      grown = use(saved[1], ns / 5, expert->tokens * kRow, grown);
      const std::uint64_t spread = use(saved[0], 100, kAll, grown);
      step.free(spread);
      step.work(20, true);
    }
    const std::vector<Saved>& saved = layer->attention;
    step.free(sum);
    for (std::size_t i = saved.size(); i-- > 0;) {
      const bool large = saved[i].bytes >= kAll;
      const std::uint64_t made = use(saved[i], large ? 350 : 10, large ? saved[i].bytes : 512, 0);
      step.free(large ? gradient : made);
      gradient = large ? made : gradient;
    }
    step.allocate(32_MiB);  // of the projections' weights
  }
  step.free(gradient);
  return step.take();
}

// Four cuDNN LSTM layers of width 2048, a batch of 256, over this many steps: a few storages, of
// which each is a share of all.
inline std::vector<Event> lstm_step(Bytes length) {
  constexpr int kLayers = 4;
  StepWriter step;
  const Bytes plain = length * 1_MiB;  // input or output
  const Bytes kept = 6 * plain;        // cuDNN's reserve
  const Bytes scratch = plain + plain / 2;
  const double us = static_cast<double>(length) * 40;  // a layer's forward
  struct Layer {
    std::uint64_t input = 0;
    std::uint64_t output = 0;
    std::uint64_t reserve = 0;
  };
  std::vector<Layer> layers;
  std::uint64_t x = 0;
  std::uint64_t input = 0;
  for (int i = 0; i < kLayers; ++i) {
    const std::uint64_t y = step.allocate(plain);
    const std::uint64_t work = step.allocate(scratch);
    const std::uint64_t reserve = step.allocate(kept);
    step.work(us);
    step.free(work);
    Layer layer{input, step.save(y), step.save(reserve)};
    step.free(reserve);
    if (x != 0) {
      step.free(x);
    }
    x = y;
    input = layer.output;
    layers.push_back(layer);
  }
  const std::uint64_t wide = step.allocate(2 * plain);
  const std::uint64_t saved = step.save(wide);
  const std::uint64_t square = step.allocate(2 * plain);
  step.free(x);
  step.free(wide);
  step.work(1500);
  step.free(square);
  const std::uint64_t back = step.allocate(2 * plain);
  const std::uint64_t alias = step.use(saved);
  step.work(1500);
  step.used(saved, alias);
  std::uint64_t gradient = step.allocate(plain);
  step.free(back);
  for (int i = kLayers; i-- > 0;) {
    const Layer& layer = layers[static_cast<std::size_t>(i)];
    const std::uint64_t output = step.use(layer.output);
    const std::uint64_t reserve = step.use(layer.reserve);
    const std::uint64_t before = layer.input != 0 ? step.use(layer.input) : 0;
    const std::uint64_t work = step.allocate(scratch);
    const std::uint64_t next = step.allocate(plain);
    step.work(2 * us);
    step.free(work);
    step.allocate(64_MiB);
    step.used(layer.reserve, reserve);
    step.used(layer.output, output);
    if (before != 0) {
      step.end(before);
    }
    step.free(gradient);
    gradient = next;
  }
  step.free(gradient);
  return step.take();
}

}  // namespace stagehand::core::test
