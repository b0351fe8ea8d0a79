// Which records of the recorded steps an autograd node can make again, and what that takes on the
// GPU that they were recorded on. The models save the same tensors in each block, in this order;
// the times are those between two saves of the recordings.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "native/heap_replay.hpp"

namespace stagehand::core::test {

struct SavedByBlock {
  Bytes above = 3_MiB;  // smaller records are not of the pattern
  std::size_t skip = 0;
  std::size_t blocks = 0;
  std::vector<std::string> names;
  // Of a name: those it is made of, and the milliseconds for a GiB.
  using MadeOf = std::map<std::string, std::pair<std::vector<std::string>, double>>;
  MadeOf made_of;
  MadeOf products;  // of matrices
  // Blocks of one forward, where a step has several, and how many records lie between two of these.
  std::size_t in_forward = 0;
  std::size_t between = 0;

  std::size_t first_of(std::size_t block) const {
    const std::size_t forwards = in_forward != 0 ? block / in_forward : 0;
    return skip + block * names.size() + forwards * between;
  }
  bool ends_forward(std::size_t block) const {
    return (block + 1) % (in_forward != 0 ? in_forward : blocks) == 0;
  }
};

inline SavedByBlock saved_by_block(const std::string& trace) {
  if (trace == "gpt_8k.txt" || trace == "pipeline.txt") {
    const bool forwards = trace == "pipeline.txt";
    return {3_MiB,
            0,
            forwards ? 32U : 12U,
            {"x", "ln1", "qkv", "attn", "x2", "ln2", "up", "gelu"},
            {{"gelu", {{"up"}, 0.9}}},
            {{"up", {{"ln2"}, 6.8}}, {"qkv", {{"ln1"}, 6.8}}},
            forwards ? 8U : 0U,
            3};
  }
  if (trace == "llama.txt") {
    return {3_MiB,
            0,
            16,
            {"x", "normed", "norm", "k", "q", "v", "attn", "x2", "normed2", "norm2", "gate", "up",
             "silu", "product"},
            {{"norm", {{"normed"}, 2.4}},
             {"norm2", {{"normed2"}, 2.4}},
             {"silu", {{"gate"}, 0.6}},
             {"product", {{"silu", "up"}, 0.8}}},
            {{"q", {{"norm"}, 6}},
             {"k", {{"norm"}, 6}},
             {"v", {{"norm"}, 6}},
             {"gate", {{"norm2"}, 6}},
             {"up", {{"norm2"}, 6}}}};
  }
  return {2600_KiB,
          1,
          12,
          {"x", "ln1", "wq", "qkv", "attn", "x2", "ln2", "w1", "fc1", "gelu", "w2"},
          {{"gelu", {{"fc1"}, 0.6}}},
          {}};
}

// The blocks of the model as regions, each from the save of its input to that of the next one.
inline std::vector<Region> blocks_of(const std::string& trace) {
  const SavedByBlock by = saved_by_block(trace);
  const std::vector<Event> events = read_trace(trace);
  const std::map<std::uint64_t, Bytes> blocks = block_bytes(events);
  std::map<std::uint64_t, Bytes> seen;
  std::vector<std::size_t> large;  // lines of first saves
  for (std::size_t i = 0; i < events.size(); ++i) {
    const Event& event = events[i];
    if (event.kind == 's' && seen.emplace(event.a, blocks.at(event.b)).second &&
        blocks.at(event.b) > by.above) {
      large.push_back(i);
    }
  }
  std::vector<Region> regions;
  for (std::size_t block = 0; block < by.blocks; ++block) {
    const std::size_t first = by.first_of(block);
    regions.push_back({large.at(first), by.ends_forward(block)
                                            ? large.at(first + by.names.size() - 1) + 1
                                            : large.at(first + by.names.size())});
  }
  return regions;
}

// `products`: those of matrices too, which are to be proven.
inline std::map<std::uint64_t, Known> recipes_of(const std::string& trace, bool products = false) {
  const SavedByBlock by = saved_by_block(trace);
  const std::vector<Event> events = read_trace(trace);
  const std::map<std::uint64_t, Bytes> blocks = block_bytes(events);
  std::map<std::uint64_t, Bytes> seen;
  std::vector<std::pair<std::uint64_t, Bytes>> large;
  for (const Event& event : events) {
    if (event.kind == 's' && seen.emplace(event.a, blocks.at(event.b)).second &&
        blocks.at(event.b) > by.above) {
      large.emplace_back(event.a, blocks.at(event.b));
    }
  }
  std::map<std::uint64_t, Known> recipes;
  for (std::size_t block = 0; block < by.blocks; ++block) {
    std::map<std::string, std::pair<std::uint64_t, Bytes>> here;
    for (std::size_t i = 0; i < by.names.size(); ++i) {
      here[by.names[i]] = large.at(by.first_of(block) + i);
    }
    const auto add = [&](const SavedByBlock::MadeOf& all, bool exact) {
      for (const auto& [name, how] : all) {
        const auto [record, bytes] = here.at(name);
        Known known;
        for (const std::string& input : how.first) {
          known.inputs.push_back(here.at(input).first);
        }
        known.ns = static_cast<std::uint64_t>(how.second * 1e6 * static_cast<double>(bytes) /
                                              static_cast<double>(1_GiB));
        known.exact = exact;
        recipes.emplace(record, known);
      }
    };
    add(by.made_of, true);
    if (products) {
      add(by.products, false);
    }
  }
  return recipes;
}

}  // namespace stagehand::core::test
