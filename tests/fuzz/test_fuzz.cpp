// The allocator stress test on the simulated GPU.
//
//   test_fuzz                              a few hundred programs; what ctest runs
//   test_fuzz --seed N [--ops M] [--trace] one program again, printed as it runs
//   test_fuzz --seed N [--ops M] --shrink  the shortest program found that still fails
//   test_fuzz --minutes X [--seed N]       program after program
//   test_fuzz --plant R                    with stream-order rule S1 to S6 (R = 1 to 6) broken
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "fuzz/stress.hpp"
#include "sim/control.hpp"

namespace stagehand::fuzz {
namespace {

using core::Bytes;
using core::operator""_MiB;

constexpr std::size_t kPrograms = 300;
constexpr std::size_t kLength = 120;

class SimulatedContents : public Contents {
 public:
  void fill(driver::Stream stream, core::Address address, Bytes bytes,
            std::uint64_t seed) override {
    queued(stagehand_sim_fill(stream, address, bytes, seed));
  }
  void check(driver::Stream stream, core::Address address, Bytes bytes,
             std::uint64_t seed) override {
    queued(stagehand_sim_check(stream, address, bytes, seed));
  }
  std::string finish() override {
    stagehand_sim_drain();
    return seen();
  }
  std::string seen() override {
    if (stagehand_sim_hazards(STAGEHAND_SIM_ALL) > 0) {
      char text[400] = "";
      stagehand_sim_hazard_text(0, text, sizeof text);
      return std::string("hazard: ") + text;
    }
    const std::uint64_t wrong = stagehand_sim_mismatches();
    return refused_ > 0 ? std::to_string(refused_) + " kernels could not be queued"
           : wrong > 0  ? std::to_string(wrong) + " wrong bytes"
                        : "";
  }
  void fault(const char* symbol, std::uint64_t nth, int result) override {
    stagehand_sim_fail(symbol, nth, 1 + nth / 3, result);
  }
  void end_faults() override {
    for (const char* symbol : driver::kSymbols) {
      stagehand_sim_fail(symbol, 1, 0, 0);
    }
  }

 private:
  void queued(int result) { refused_ += result == 0 ? 0 : 1; }
  std::uint64_t refused_ = 0;
};

struct Options {
  std::uint64_t seed = 0;
  bool one = false;
  std::size_t ops = kLength;
  bool trace = false;
  bool shrink = false;
  double minutes = 0;
};

// Every seed has its own machine: memory, and whether calls fail.
Shape shape_of(std::uint64_t seed) {
  constexpr Bytes kMemory[] = {32_MiB, 64_MiB, 256_MiB, 1024_MiB};
  return {kMemory[seed % 4], seed % 3 == 0};
}

// What all programs together have come to: a slice that never evicts proves nothing.
struct Reach {
  core::Counters sum;
  void add(const core::Counters& one) {
#define STAGEHAND_FUZZ_ADD(name) sum.name += one.name;
    STAGEHAND_COUNTERS(STAGEHAND_FUZZ_ADD)
#undef STAGEHAND_FUZZ_ADD
  }
  bool everywhere() const {
    return sum.hits > 0 && sum.grows > 0 && sum.gathers > 0 && sum.dirty_evictions > 0 &&
           sum.clean_evictions > 0 && sum.restores > 0 && sum.prefetches > 0 &&
           sum.pageable_copies > 0 && sum.out_of_memory > 0 && sum.write_backs > 0 &&
           sum.overshoot_bytes > 0;
  }
  void print() const {
    const auto show = [](const char* name, Bytes value) {
      std::printf("%s %llu  ", name, static_cast<unsigned long long>(value));
    };
    show("allocations", sum.allocations);
    show("hits", sum.hits);
    show("gathers", sum.gathers);
    show("dirty", sum.dirty_evictions);
    show("clean", sum.clean_evictions);
    show("restores", sum.restores);
    show("prefetches", sum.prefetches);
    show("pageable", sum.pageable_copies);
    show("write-backs", sum.write_backs);
    show("refused", sum.out_of_memory);
    std::printf("\n");
  }
};

Reach& reach() {
  static Reach all;
  return all;
}

// Empty, or what broke.
std::string run(const std::vector<Instruction>& program, std::uint64_t seed, std::FILE* trace) {
  const Shape shape = shape_of(seed);
  stagehand_sim_configure(shape.memory, 1, seed, 0, 0, STAGEHAND_SIM_NO_POISON);
  // A runtime is leaked on purpose (rule T3): kept reachable, so that leak checkers know.
  static auto* const kept = new std::vector<void*>;
  auto* const table = new driver::Table(sim::table());
  kept->push_back(table);
  driver::Context context = nullptr;
  table->primary_ctx_retain(&context, 0);
  table->ctx_push_current(context);
  std::string broken;
  core::Runtime* const runtime = core::Runtime::open(*table, 0, &broken);
  kept->push_back(runtime);
  if (runtime != nullptr) {
    runtime->configure_pinned({{64 << 10, 1 << 20}, {16, 4}}, 48_MiB);
    SimulatedContents contents;
    broken = Stress(*table, *runtime, contents, trace).run(program);
    reach().add(runtime->counters());
    runtime->configure_pinned({{4096}, {1}}, 0);  // gives the pinned memory back
  }
  table->ctx_pop_current(&context);
  return broken;
}

// Leaves out what is not needed for the program to fail: halves first, then ever smaller parts.
std::vector<Instruction> shrunk(std::vector<Instruction> program, std::uint64_t seed) {
  for (std::size_t part = program.size() / 2; part > 0; part /= 2) {
    for (std::size_t at = 0; at + part <= program.size();) {
      std::vector<Instruction> shorter = program;
      const auto begin = shorter.begin() + static_cast<std::ptrdiff_t>(at);
      shorter.erase(begin, begin + static_cast<std::ptrdiff_t>(part));
      if (run(shorter, seed, nullptr).empty()) {
        at += part;
      } else {
        program = std::move(shorter);
      }
    }
  }
  return program;
}

int replay(const Options& options) {
  std::vector<Instruction> program = generate(options.seed, options.ops, shape_of(options.seed));
  if (options.shrink && !run(program, options.seed, nullptr).empty()) {
    program = shrunk(program, options.seed);
  }
  const bool trace = options.trace || options.shrink;
  const std::string broken = run(program, options.seed, trace ? stdout : nullptr);
  std::printf("seed %llu: %s\n", static_cast<unsigned long long>(options.seed),
              broken.empty() ? "passed" : broken.c_str());
  return broken.empty() ? 0 : 1;
}

int run_many(const Options& options) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(options.minutes * 60);
  std::size_t passed = 0;
  std::size_t failed = 0;
  std::uint64_t seed = options.seed;
  while (options.minutes > 0 ? Clock::now() < until : passed + failed < kPrograms) {
    const std::string broken = run(generate(seed, options.ops, shape_of(seed)), seed, nullptr);
    if (broken.empty()) {
      ++passed;
    } else if (++failed <= 20) {
      std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed),
                   broken.c_str());
    }
    ++seed;
  }
  reach().print();
  if (!reach().everywhere()) {
    std::fprintf(stderr, "the programs did not reach every part of the allocator\n");
    ++failed;
  }
  std::printf("%zu passed, %zu failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

bool parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const bool value = i + 1 < argc;
    if (std::strcmp(argv[i], "--trace") == 0) {
      options->trace = true;
    } else if (std::strcmp(argv[i], "--shrink") == 0) {
      options->shrink = true;
    } else if (std::strcmp(argv[i], "--seed") == 0 && value) {
      options->seed = std::strtoull(argv[++i], nullptr, 10);
      options->one = true;
    } else if (std::strcmp(argv[i], "--ops") == 0 && value) {
      options->ops = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::strcmp(argv[i], "--plant") == 0 && value) {
      core::planted_rule = static_cast<core::Rule>(std::strtoul(argv[++i], nullptr, 10) % 7);
    } else if (std::strcmp(argv[i], "--minutes") == 0 && value) {
      options->minutes = std::strtod(argv[++i], nullptr);
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace stagehand::fuzz

int main(int argc, char** argv) {
  stagehand::fuzz::Options options;
  if (!stagehand::fuzz::parse(argc, argv, &options)) {
    std::fprintf(stderr,
                 "usage: %s [--seed N] [--ops M] [--trace] [--shrink] [--minutes X] [--plant R]\n",
                 argv[0]);
    return 2;
  }
  return options.one && options.minutes == 0 ? stagehand::fuzz::replay(options)
                                             : stagehand::fuzz::run_many(options);
}
