#include "fuzz/simulated.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "fuzz/faults.hpp"
#include "fuzz/stress.hpp"
#include "fuzz/torch_store.hpp"
#include "sim/control.hpp"

namespace stagehand::fuzz {

using core::operator""_MiB;

namespace {

constexpr unsigned kSeconds = 240;  // a program that takes longer hangs

class SimulatedContents : public Contents {
 public:
  void fill(driver::Stream stream, core::Address address, core::Bytes bytes,
            std::uint64_t seed) override {
    queued(stagehand_sim_fill(stream, address, bytes, seed));
  }
  void check(driver::Stream stream, core::Address address, core::Bytes bytes,
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
  void progress(std::uint64_t steps) override { stagehand_sim_step(steps); }
  bool capture(driver::Stream stream, bool on) override {
    return stagehand_sim_capture(stream, on ? 1 : 0) == 0;
  }

 private:
  void queued(int result) { refused_ += result == 0 ? 0 : 1; }
  std::uint64_t refused_ = 0;
};

// What a child tells, before the text.
struct Told {
  std::uint64_t operations = 0;
  core::Counters counters;
  std::array<std::uint64_t, driver::kFunctionCount> calls{};
};

std::string run(const Program& program, std::FILE* trace, Told* told) {
  const Setup& setup = program.setup;
  const unsigned flags =
      STAGEHAND_SIM_NO_POISON | (setup.old_driver != 0 ? STAGEHAND_SIM_OLD_DRIVER : 0);
  const int devices = static_cast<int>(std::clamp<std::uint64_t>(setup.devices, 1, 4));
  stagehand_sim_configure(setup.memory, devices, setup.seed, 0, 0, flags);
  // Leaked on purpose (rule T3), and kept reachable, so that leak checkers know.
  static auto* const plain = new driver::Table(sim::table());
  static auto* const table = new driver::Table(faulty(*plain));
  std::vector<driver::Context> contexts;
  std::vector<core::Runtime*> runtimes;
  for (int device = 0; device < devices; ++device) {
    driver::Context context = nullptr;
    plain->primary_ctx_retain(&context, device);
    contexts.push_back(context);
    std::string error;
    runtimes.push_back(core::Runtime::open(*table, device, &error));
    if (runtimes.back() == nullptr) {
      return error;
    }
    runtimes.back()->configure_pinned({{64 << 10, 1 << 20}, {16, 4}}, 48_MiB);
  }
  const driver::ContextGuard guard(*plain, contexts[0]);
  std::unique_ptr<Store> store;
  if (setup.torch != 0) {
    store = std::make_unique<TorchStore>(*plain, *runtimes[0], contexts[0], setup);
  } else {
    store = std::make_unique<HeapStore>(runtimes);
  }
  SimulatedContents contents;
  Stress stress(*plain, contexts, *store, contents, setup, trace);
  fault_plan() = {};
  std::string broken = stress.run(program.code);
  told->operations = stress.operations();
  told->counters = runtimes[0]->counters();
  told->calls = fault_plan().calls;
  return broken;
}

std::string read_all(std::FILE* file) {
  std::rewind(file);
  std::string text;
  char part[4096];
  for (std::size_t n = 0; (n = std::fread(part, 1, sizeof part, file)) > 0;) {
    text.append(part, n);
  }
  std::fclose(file);
  return text;
}

[[noreturn]] void child(const Program& program, bool trace, int out, int errors) {
  dup2(errors, STDERR_FILENO);
  alarm(kSeconds);
  Told told;
  const std::string broken = run(program, trace ? stdout : nullptr, &told);
  std::fflush(stdout);
  bool written = write(out, &told, sizeof told) == static_cast<ssize_t>(sizeof told);
  written =
      written && write(out, broken.data(), broken.size()) == static_cast<ssize_t>(broken.size());
  _exit(written ? 0 : 1);
}

}  // namespace

Outcome run_apart(const Program& program, bool trace) {
  std::FILE* const out = std::tmpfile();
  std::FILE* const errors = std::tmpfile();
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    child(program, trace, fileno(out), fileno(errors));
  }
  int status = 0;
  waitpid(pid, &status, 0);
  const std::string answer = read_all(out);
  const std::string said = read_all(errors);
  Outcome outcome;
  if (WIFSIGNALED(status) || WEXITSTATUS(status) != 0 || answer.size() < sizeof(Told)) {
    const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    outcome.broken = signal == SIGALRM
                         ? "it hangs"
                         : "it crashes, signal " + std::to_string(signal) + ": " + said;
    return outcome;
  }
  Told told;
  std::memcpy(static_cast<void*>(&told), answer.data(), sizeof told);
  outcome.operations = told.operations;
  outcome.counters = told.counters;
  outcome.calls = told.calls;
  outcome.broken = answer.substr(sizeof told);
  return outcome;
}

}  // namespace stagehand::fuzz
