// replay TRACE MODE SHARE [NAME=VALUE ...]: steps of a recorded training (tests/native/traces), in
// virtual time, inside a budget. Prints a line of JSON: the later half's mean and worst step of
// plain torch's, and how many of all steps but those of the first two cycles went over `high`.
//
// MODE: allocator, native, or expandable (native, in expandable segments). SHARE: of the
// activations; everything that stays comes on top of it. `micro_batches`: steps of one of the
// optimizer's; `state`: bytes that it makes in its first step; `beside`: bytes more for `high`,
// which tell how much rests on this one budget; `steps`.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "native/first_steps.hpp"
#include "native/lora_replay.hpp"
#include "native/optimizer_sizes.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {
namespace {

struct Asked {
  std::string trace;
  std::string mode;
  double share = 0;
  std::map<std::string, long long> numbers{
      {"micro_batches", 1}, {"state", 0}, {"beside", 0}, {"steps", 48}};

  long long of(const char* name) const { return numbers.at(name); }
};

template <class Tensors>
int replay_in(const Asked& asked) {
  constexpr Bytes kOthers = LoraReplay<Tensors, NoWeights>::others();
  const auto use = measured<HeldSide>(asked.trace);
  LoraModel model{read_trace(asked.trace)};
  model.expandable = asked.mode == "expandable";
  const auto micro_batches = static_cast<int>(asked.of("micro_batches"));
  const auto state = static_cast<Bytes>(asked.of("state"));
  const Bytes high = kOthers + state + static_cast<Bytes>(asked.of("beside")) +
                     static_cast<Bytes>(asked.share * static_cast<double>(use.peak - use.start));
  LoraReplay<Tensors, NoWeights> replay(model, high, lora_machine(on_one_link));
  if (micro_batches > 1) {
    if constexpr (requires { replay.accumulate(micro_batches); }) {
      replay.set_high(high + replay.accumulate(micro_batches));
    } else {
      std::fprintf(stderr,
                   "the rigs of that checkout know no micro-batches: replay it without them\n");
      return 1;
    }
  }
  replay.rig().runtime->await_optimizer(state > 0);
  const auto steps = static_cast<int>(asked.of("steps"));
  std::vector<double> later;
  int over = 0;
  for (int i = 0; i < steps; ++i) {
    const LoraStep step = replay.step();
    if constexpr (!Tensors::kMoves) {
      if (state > 0 && i == micro_batches - 1) {
        replay.optimizer_keeps(optimizer_sizes(state));
        replay.rig().runtime->await_optimizer(false);
      }
    }
    over += i >= 2 * micro_batches && step.over > 0 ? 1 : 0;
    if (2 * i >= steps) {
      later.push_back(step.ms / replay.plain_ms());
    }
  }
  double sum = 0;
  for (const double one : later) {
    sum += one;
  }
  std::printf("{\"mean\": %.4f, \"worst\": %.4f, \"over\": %d}\n",
              sum / static_cast<double>(later.size()),
              *std::max_element(later.begin(), later.end()), over);
  return stagehand::test::failures() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace stagehand::core::test

int main(int argc, char** argv) {
  using namespace stagehand::core::test;
  Asked asked;
  bool known = argc > 3;
  if (known) {
    asked.trace = std::string(argv[1]) + ".txt";
    asked.mode = argv[2];
    asked.share = std::atof(argv[3]);
    known = asked.mode == "allocator" || asked.mode == "native" || asked.mode == "expandable";
  }
  for (int i = 4; known && i < argc; ++i) {
    const std::string word = argv[i];
    const auto equals = std::min(word.find('='), word.size() - 1);
    const auto number = asked.numbers.find(word.substr(0, equals));
    known = number != asked.numbers.end();
    if (known) {
      number->second = std::atoll(word.c_str() + equals + 1);
    }
  }
  if (!known || read_trace(asked.trace).empty()) {
    std::fprintf(stderr, "replay TRACE allocator|native|expandable SHARE [NAME=VALUE ...]\n");
    return 2;
  }
  return asked.mode == "allocator" ? replay_in<HeapTensors>(asked) : replay_in<HeldTensors>(asked);
}
