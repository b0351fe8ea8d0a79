// Weight groups on a CoreRig whose bytes are known: what the tests of walks 6 and 7 share.
#pragma once

#include <vector>

#include "native/core_rig.hpp"

namespace stagehand::core::test {

inline constexpr Bytes kGroup = 2_MiB;
inline const Machine kMachine{.memory = 64_MiB, .classes = {{1_MiB}, {8}}, .host_limit = 16_MiB};

class Planted {
 public:
  explicit Planted(Rule rule) { planted_rule = rule; }
  ~Planted() { planted_rule = Rule::none; }
  Planted(const Planted&) = delete;
  Planted& operator=(const Planted&) = delete;
};

// Groups whose bytes are pattern(seed) of seeds of their own.
class Model {
 public:
  Model(CoreRig& rig, int count, Bytes bytes = kGroup) : rig_(rig), host_(count * bytes) {
    CHECK(rig.runtime->pin(host_.data(), host_.size()));
    const driver::Stream s = rig.stream();
    for (int i = 0; i < count; ++i) {
      const Tensor tensor{rig.allocate(bytes, s), bytes, s, 900 + static_cast<std::uint64_t>(i)};
      rig.fill(tensor, s);
      const Copy copy{tensor.address, host_.data() + static_cast<Bytes>(i) * bytes, bytes};
      CHECK(rig.runtime->read_out({&copy, 1}, {&s, 1}));
      rig.drop(tensor);
      ids.push_back(rig.runtime->add_weights(bytes, copy.host));
      seeds.push_back(tensor.seed);
    }
    rig.runtime->presume_weights(ids);
    rig.runtime->trim(0);
    bytes_ = bytes;
  }
  ~Model() {
    for (const GroupId id : ids) {
      rig_.runtime->remove_weights(id);
    }
    rig_.driver.host_unregister(host_.data());
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  Tensor enter(std::size_t i, driver::Stream on, UseKind kind = UseKind::forward) {
    Address address = 0;
    CHECK_EQ(rig_.runtime->enter_weights(ids[i], kind, on, &address), Status::ok);
    return {address, bytes_, on, seeds[i]};
  }
  void leave(std::size_t i) { rig_.runtime->leave_weights(ids[i]); }
  // A block of a model: reads its weights.
  void run(std::size_t i, driver::Stream on, UseKind kind = UseKind::forward) {
    rig_.check(enter(i, on, kind), on);
    leave(i);
  }
  // An optimizer's step: other bytes from here on.
  void step(std::size_t i, driver::Stream on) {
    Tensor tensor = enter(i, on, UseKind::sampling);
    rig_.check(tensor, on);
    write(i, tensor, on);
    leave(i);
  }
  // The same while somebody holds it.
  void write(std::size_t i, Tensor tensor, driver::Stream on) {
    tensor.seed = seeds[i] += 1000;
    rig_.fill(tensor, on);
    CHECK_EQ(rig_.runtime->wrote_weights(ids[i], bytes_, on), Status::ok);
  }
  std::byte* host(std::size_t i) { return host_.data() + i * bytes_; }
  Runtime::WeightCounts counts() { return rig_.runtime->weight_counts(); }

  std::vector<GroupId> ids;
  std::vector<std::uint64_t> seeds;  // of what their bytes are

 private:
  CoreRig& rig_;
  std::vector<std::byte> host_;
  Bytes bytes_ = 0;
};

}  // namespace stagehand::core::test
