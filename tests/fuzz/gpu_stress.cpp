#include "fuzz/gpu_stress.hpp"

#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/stress.hpp"
#include "native/contract.hpp"

namespace stagehand::fuzz {
namespace {

using core::Address;
using core::Bytes;

constexpr std::size_t kLength = 400;  // instructions of a program

// Memsets to a byte of each block's own; checks copy a few stretches out and compare them once
// the GPU is known to be done, so that looking does not order anything.
class GpuContents : public Contents {
 public:
  explicit GpuContents(const driver::Table& table) : table_(table) {
    void* memory =
        mmap(nullptr, kBuffer, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    host_ = memory == MAP_FAILED ? nullptr : static_cast<unsigned char*>(memory);
    if (host_ == nullptr ||
        table_.host_register(host_, kBuffer, driver::kHostRegisterPortable) != driver::kSuccess) {
      wrong_ = "no pinned memory to compare in";
    }
  }
  ~GpuContents() override {
    table_.ctx_synchronize();
    if (host_ != nullptr && table_.host_unregister(host_) == driver::kSuccess) {
      munmap(host_, kBuffer);
    }
  }

  void fill(driver::Stream stream, Address address, Bytes bytes, std::uint64_t seed) override {
    expect(table_.memset_d8_async(address, byte_of(seed), bytes, stream), "memset");
  }
  void check(driver::Stream stream, Address address, Bytes bytes, std::uint64_t seed) override {
    for (const Bytes at : {Bytes{0}, bytes / 3, bytes / 3 * 2, bytes - std::min(bytes, kStretch)}) {
      if (pending_.size() == kBuffer / kStretch) {
        finish();
      }
      const Bytes length = std::min(kStretch, bytes - at);
      const Pending pending{pending_.size() * kStretch, length, byte_of(seed)};
      expect(table_.memcpy_dtoh_async(host_ + pending.at, address + at, length, stream), "copy");
      pending_.push_back(pending);
    }
  }
  std::string finish() override {
    expect(table_.ctx_synchronize(), "waiting for the GPU");
    for (const Pending& pending : pending_) {
      for (Bytes i = 0; i < pending.bytes && wrong_.empty(); ++i) {
        if (host_[pending.at + i] != pending.value) {
          wrong_ = "a byte is " + std::to_string(host_[pending.at + i]) + ", not " +
                   std::to_string(pending.value);
        }
      }
    }
    pending_.clear();
    return wrong_;
  }
  std::string seen() override { return wrong_; }
  Bytes driver_slack() const override { return Bytes{256} << 20; }

 private:
  static constexpr Bytes kStretch = 256;
  static constexpr Bytes kBuffer = 1 << 20;
  struct Pending {
    Bytes at;
    Bytes bytes;
    unsigned char value;
  };
  // Neighbours in time differ, and nothing is 0 or the poison 0xFF.
  static unsigned char byte_of(std::uint64_t seed) {
    return static_cast<unsigned char>(1 + seed * 101 % 251);
  }
  void expect(driver::Result result, const char* what) {
    if (result != driver::kSuccess && wrong_.empty()) {
      wrong_ = std::string(what) + " failed with " + std::to_string(result);
    }
  }

  const driver::Table& table_;
  unsigned char* host_ = nullptr;
  std::vector<Pending> pending_;
  std::string wrong_;
};

struct sigaction before_us;

// Where in here, as offsets in this library; then what was there before says where in Python.
void tell_where(int signal) {
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
  sigaction(signal, &before_us, nullptr);
}

void tell_of_crashes() {
  static bool told = false;  // once: what was there before is not to be ourselves
  if (std::exchange(told, true)) {
    return;
  }
  void* first = nullptr;
  backtrace(&first, 1);  // loads what it needs now
  static char stack[1 << 16];
  stack_t apart = {};  // the one that overflowed has no room to tell of it
  apart.ss_sp = stack;
  apart.ss_size = sizeof stack;
  sigaltstack(&apart, nullptr);
  struct sigaction ours = {};
  ours.sa_handler = &tell_where;
  ours.sa_flags = SA_ONSTACK;
  sigaction(SIGSEGV, &ours, &before_us);
}

driver::Table table_from(const void* const* addresses) {
  driver::Table table;
  std::memcpy(static_cast<void*>(&table), addresses, sizeof table);
  return table;
}

void tell(const std::string& what, char* text, std::size_t size) {
  if (text != nullptr && size > 0) {
    std::strncpy(text, what.c_str(), size - 1);
    text[size - 1] = '\0';
  }
}

// One runtime for all programs, as a process has it; each program ends with everything dropped.
std::string stress(const driver::Table& table, int device, driver::Context context,
                   std::uint64_t seed, double seconds) {
  using Clock = std::chrono::steady_clock;
  std::string error;
  core::Runtime* const runtime = core::Runtime::open(table, device, &error);  // leaked, rule T3
  if (runtime == nullptr) {
    return error;
  }
  runtime->configure_pinned({{1 << 20, 16 << 20, 256 << 20}, {64, 8, 1}}, Bytes{8} << 30);
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  do {
    GpuContents contents(table);
    // Programs for a small device keep more blocks apart in the same time; every other one is for
    // all there is.
    Setup setup;
    setup.seed = seed;
    setup.memory = seed % 2 == 0 ? runtime->device_bytes() / 2 : Bytes{2} << 30;
    setup.high = setup.memory / 2 >> seed % 3;
    setup.check_every = 1;
    HeapStore store({runtime});
    error = Stress(table, {context}, store, contents, setup).run(generate(setup, kLength));
    if (!error.empty()) {
      return "seed " + std::to_string(seed) + ": " + error;
    }
    ++seed;
  } while (Clock::now() < until);
  return "";
}

}  // namespace
}  // namespace stagehand::fuzz

int stagehand_run_stress(const void* const* driver_addresses, int device, std::uint64_t seed,
                         double seconds, char* text, std::size_t size) {
  stagehand::fuzz::tell_of_crashes();
  // The runtime outlives the call, and so does its table.
  const auto& table = *new stagehand::driver::Table(stagehand::fuzz::table_from(driver_addresses));
  stagehand::driver::Context context = nullptr;
  if (table.primary_ctx_retain(&context, device) != stagehand::driver::kSuccess) {
    stagehand::fuzz::tell("the device's context cannot be had", text, size);
    return 1;
  }
  const stagehand::driver::ContextGuard guard(table, context);
  const std::string broken = stagehand::fuzz::stress(table, device, context, seed, seconds);
  stagehand::fuzz::tell(broken, text, size);
  return broken.empty() ? 0 : 1;
}

int stagehand_run_contract(const void* const* driver_addresses, char* text, std::size_t size) {
  const stagehand::driver::Table table = stagehand::fuzz::table_from(driver_addresses);
  const std::vector<std::string> broken = stagehand::contract::run_contract(table);
  std::string lines;
  for (const std::string& promise : broken) {
    lines += promise + "\n";
  }
  stagehand::fuzz::tell(lines, text, size);
  return static_cast<int>(broken.size());
}
