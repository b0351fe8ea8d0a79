// The fuzzer of the allocator on the simulated GPU. docs/testing.md says what is checked when.
//
//   stagehand_fuzz --store allocator|torch|both    which of the two; both without it
//     --first N --seeds M --ops K      M programs of K instructions, from seed N on
//     --sweep                          instead: short programs, each driver call failing in turn
//     --seed N                         one seed; a failing one is printed as short as it gets
//     --program FILE                   a program of that text
//     --trace                          prints each instruction as it runs
//     --plant R                        with stream-order rule S1 to S6 (R = 1 to 6) broken
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "fuzz/shrink.hpp"
#include "fuzz/simulated.hpp"

namespace stagehand::fuzz {
namespace {

constexpr std::size_t kShown = 5;  // kinds of failure that are printed in full

struct Options {
  bool allocator = true;
  bool torch = true;
  std::uint64_t first = 0;
  std::uint64_t seeds = 8;
  std::size_t ops = 1000;
  bool sweep = false;
  bool one = false;
  bool trace = false;
  std::string program;
};

// What a failure is about, so that a program does not shrink to another one: its text without
// numbers and without the instruction.
std::string kind_of(const std::string& broken) {
  std::string kind = broken.substr(
      broken.rfind("at instruction") == 0 && broken.find(": ") < 200 ? broken.find(": ") + 2 : 0);
  kind.erase(std::remove_if(kind.begin(), kind.end(), [](char c) { return c >= '0' && c <= '9'; }),
             kind.end());
  return kind.substr(0, 48);
}

class Campaign {
 public:
  explicit Campaign(bool shrinks) : shrinks_(shrinks) {}

  void run(const Program& program, const std::string& name) {
    take(run_apart(program), program, name);
  }

  // Each driver call of the program fails once, in turn: the first twelve of each symbol, then one
  // of each further twelve, which one by the seed.
  void sweep(Program program, const std::string& name) {
    const Outcome clean = run_apart(program);
    take(clean, program, name);
    if (!clean.broken.empty()) {
      return;
    }
    program.code.insert(program.code.begin(), Instruction{Op::Fault, 0, 0, 0, 0});
    Instruction& fault = program.code.front();
    for (fault.pick = 0; fault.pick < driver::kFunctionCount; ++fault.pick) {
      const std::uint64_t calls = std::min<std::uint64_t>(clean.calls[fault.pick], 600);
      for (fault.bytes = 0; fault.bytes < calls;
           fault.bytes += fault.bytes < 12 ? 1 : 6 + program.setup.seed % 13) {
        fault.more = program.setup.seed + fault.bytes;  // which error
        run(program, name + ", " + driver::kSymbols[fault.pick] + " call " +
                         std::to_string(fault.bytes + 1));
      }
    }
  }

  int report() const {
    std::printf(
        "%llu programs, %llu operations, %llu evicted, %llu restored, %llu prefetched, "
        "%llu gathered, %llu taken up, %llu lent, %llu made again\n",
        number(programs_), number(sum_.operations),
        number(sum_.counters.dirty_evictions + sum_.counters.clean_evictions),
        number(sum_.counters.restores), number(sum_.counters.prefetches),
        number(sum_.counters.gathers), number(sum_.counters.take_ups), number(sum_.counters.loans),
        number(sum_.counters.recomputes));
    for (const auto& [kind, count] : kinds_) {
      std::printf("%6llu x %s\n", number(count), kind.c_str());
    }
    // Where a whole batch is copied out for a request, its records leave as clean ones.
    const bool reached = sum_.counters.dirty_evictions + sum_.counters.clean_evictions > 0 &&
                         sum_.counters.restores > 0 && sum_.counters.prefetches > 0 &&
                         sum_.counters.recomputes > 0;
    if (!reached) {
      std::printf("the programs did not reach every part of the allocator\n");
    }
    std::printf("%llu passed, %llu failed\n", number(programs_ - failed_), number(failed_));
    return failed_ == 0 && reached ? 0 : 1;
  }

 private:
  static unsigned long long number(std::uint64_t value) { return value; }

  void take(const Outcome& outcome, const Program& program, const std::string& name) {
    ++programs_;
    sum_.operations += outcome.operations;
#define STAGEHAND_FUZZ_ADD(field) sum_.counters.field += outcome.counters.field;
    STAGEHAND_COUNTERS(STAGEHAND_FUZZ_ADD)
#undef STAGEHAND_FUZZ_ADD
    if (outcome.broken.empty()) {
      return;
    }
    ++failed_;
    const std::string kind = kind_of(outcome.broken);
    if (++kinds_[kind] > 1 || kinds_.size() > kShown) {
      return;
    }
    std::printf("%s: %s\n", name.c_str(), outcome.broken.c_str());
    if (shrinks_) {
      show(program, kind);
    }
    std::fflush(stdout);
  }

  static void show(Program program, const std::string& kind) {
    program.setup.check_every = 1;
    const auto fails = [&](const Program& candidate) {
      return kind_of(run_apart(candidate).broken) == kind;
    };
    if (!fails(program)) {
      program.setup.check_every = 16;  // looking at it earlier shows something else
    }
    const Program least = shrunk(std::move(program), fails);
    std::printf("%s# it ends with: %s\n\n", print(least).c_str(), run_apart(least).broken.c_str());
  }

  const bool shrinks_;
  std::uint64_t programs_ = 0;
  std::uint64_t failed_ = 0;
  Outcome sum_;
  std::map<std::string, std::uint64_t> kinds_;
};

int replay(const Program& program, bool trace) {
  const Outcome outcome = run_apart(program, trace);
  std::printf("%s\n", outcome.broken.empty() ? "passed" : outcome.broken.c_str());
  return outcome.broken.empty() ? 0 : 1;
}

int replay_file(const Options& options) {
  std::ifstream file(options.program);
  std::stringstream text;
  text << file.rdbuf();
  Program program;
  std::string error;
  if (!file || !parse(text.str(), &program, &error) || program.setup.memory == 0) {
    std::printf("%s is no program: %s\n", options.program.c_str(), error.c_str());
    return 2;
  }
  return replay(program, options.trace);
}

int run_seeds(const Options& options) {
  Campaign campaign(true);
  const std::uint64_t end = options.first + (options.one ? 1 : options.seeds);
  int replayed = 0;
  for (std::uint64_t seed = options.first; seed < end; ++seed) {
    for (const bool torch : {false, true}) {
      if (torch ? !options.torch : !options.allocator) {
        continue;
      }
      Program program{setup_of(seed, torch), {}};
      program.code = generate(program.setup, options.ops);
      const std::string name =
          "seed " + std::to_string(seed) + (torch ? " on torch's store" : " on our store");
      if (options.sweep) {
        program.setup.check_every = 4;
        program.code.resize(std::min<std::size_t>(program.code.size(), 120));
        std::erase_if(program.code, [](const Instruction& in) { return in.op == Op::Fault; });
        campaign.sweep(std::move(program), name);
      } else if (options.trace) {
        replayed |= replay(program, true);
      } else {
        campaign.run(program, name);
      }
    }
  }
  const int result = campaign.report();
  return options.trace ? replayed : result;
}

bool parse_options(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const char* const value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (name == "--trace") {
      options->trace = true;
    } else if (name == "--sweep") {
      options->sweep = true;
    } else if (value == nullptr) {
      return false;
    } else if (name == "--store") {
      options->allocator = std::strcmp(value, "torch") != 0;
      options->torch = std::strcmp(value, "allocator") != 0;
      ++i;
    } else {
      const std::uint64_t number = std::strtoull(value, nullptr, 10);
      ++i;
      if (name == "--seed") {
        options->first = number;
        options->one = true;
      } else if (name == "--first") {
        options->first = number;
      } else if (name == "--seeds") {
        options->seeds = number;
      } else if (name == "--ops") {
        options->ops = number;
      } else if (name == "--plant") {
        core::planted_rule = static_cast<core::Rule>(number % 7);
      } else if (name == "--program") {
        options->program = value;
      } else {
        return false;
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace stagehand::fuzz

int main(int argc, char** argv) {
  stagehand::fuzz::Options options;
  if (!stagehand::fuzz::parse_options(argc, argv, &options)) {
    std::fprintf(stderr, "usage: see the head of tests/fuzz/test_fuzz.cpp\n");
    return 2;
  }
  return options.program.empty() ? stagehand::fuzz::run_seeds(options)
                                 : stagehand::fuzz::replay_file(options);
}
