// The allocator stress test where torch's own allocator cuts the blocks: random programs of
// tensors, saves, drops, backward and captures on the fake of torch (native/held_torch.hpp), every
// byte compared with what it must be, every book with torch's, after each instruction.
//
//   test_held_fuzz                     some hundred programs; what ctest runs
//   test_held_fuzz --seed N [--trace]  one program again, printed as it runs
//   test_held_fuzz --minutes X         program after program
//   test_held_fuzz --plant R           with stream-order rule S1 to S6 (R = 1 to 6) broken
#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <set>

#include "native/held_rig.hpp"

namespace stagehand::fuzz {
namespace {

using namespace core::test;
using core::Bytes;
using core::operator""_KiB;
using core::operator""_MiB;

constexpr int kPrograms = 40;
constexpr int kSteps = 3;  // of a program; the last two may follow a plan
constexpr TorchPool kPool{7, 0};
constexpr Bytes kSizes[] = {100,   64_KiB, 700_KiB, 1_MiB + 512, 1_MiB + 512, 2_MiB,
                            2_MiB, 3_MiB,  4_MiB,   6_MiB + 96,  12_MiB};

// Every seed has its own machine and its own way with it.
struct Shape {
  Bytes memory = 256_MiB;
  core::Budget budget;
  bool triggers = true;
  bool mem_pool = false;
  bool expandable = false;
  bool faults = false;
  bool captures = false;  // else other streams read what torch is told of by record_stream
};

Shape shape_of(std::uint64_t seed) {
  constexpr Bytes kHigh[] = {24_MiB, 44_MiB, 64_MiB, 88_MiB};
  Shape shape;
  shape.memory = seed % 6 == 5 ? 64_MiB : 512_MiB;
  shape.budget.high = kHigh[seed % 4];
  shape.budget.low = shape.budget.high - (seed % 3 + 1) * 5_MiB;
  shape.budget.limit = core::kUnlimited;
  shape.triggers = seed % 7 != 6;
  shape.mem_pool = shape.triggers && seed % 5 == 4;
  shape.expandable = seed % 3 == 1;
  shape.faults = seed % 4 == 3;
  shape.captures = seed % 2 == 1;
  return shape;
}

struct Saved {
  SavedTensor tensor;
  driver::Stream stream = nullptr;  // of its block
  bool changed = false;             // in place since: autograd would refuse to unpack it
};

class Program {
 public:
  Program(std::uint64_t seed, bool trace)
      : shape_(shape_of(seed)),
        rig_({.seed = seed,
              .memory = shape_.memory,
              .classes = {{256_KiB, 4_MiB}, {16, 12}},
              .host_limit = 200_MiB},
             shape_.triggers),
        seed_(seed),
        random_(seed * 77 + 5),
        trace_(trace) {
    for (driver::Stream& stream : streams_) {
      stream = rig_.stream();
    }
    if (shape_.expandable) {
      rig_.torch.expandable = true;
      rig_.torch.drop(rig_.torch.make(1, streams_[0]));  // tells the map
    }
    if (shape_.mem_pool) {
      rig_.torch.use_segments(kPool);
    }
  }

  // Empty, or what broke.
  std::string run() {
    for (int step = 0; step < kSteps && broken_.empty(); ++step) {
      rig_.runtime->set_budget({shape_.budget.high, shape_.budget.low, shape_.budget.limit, true});
      if (shape_.mem_pool) {
        rig_.runtime->set_torch_pool(kPool);
        FakeTorch::use_pool(kPool);
      }
      std::mt19937_64 same(seed_);  // every step asks for the same
      const int layers = 12 + static_cast<int>(seed_ % 20);
      for (int layer = 0; layer < layers && broken_.empty(); ++layer) {
        forward(same);
        disturb();
      }
      rig_.runtime->clear_budget();
      while (!saved_.empty() && broken_.empty()) {
        backward();
        disturb();
      }
      if (shape_.mem_pool) {
        rig_.runtime->set_torch_pool({});
        FakeTorch::use_pool(kDefaultPool);
      }
      drop_tensors();
    }
    end_faults();
    while (!saved_.empty()) {
      drop_handle(saved_.size() - 1);
    }
    drop_tensors();
    if (broken_.empty()) {
      rig_.torch.destroy_pool(kPool);
      rig_.torch.release_cached();
      rig_.look(streams_[0]);
      if (const HeldTensor last = rig_.try_make(5_MiB, streams_[0]); last.storage != nullptr) {
        rig_.drop(last);  // it missed: what a capture kept back is gone
      }
      rig_.verify_empty();
    }
    return broken_;
  }
  core::Counters counters() { return rig_.counters(); }

 private:
  std::uint64_t draw(std::uint64_t below) { return random_() % below; }

  void forward(std::mt19937_64& same) {
    const Bytes bytes = kSizes[same() % std::size(kSizes)];
    const driver::Stream stream = streams_[same() % 4 == 0 ? 1 : 0];
    const bool half = same() % 5 == 0;  // a part of a storage is saved, and what is made again
    const bool stays = same() % 4 == 0;
    HeldTensor tensor = rig_.try_make(half ? 2 * bytes : bytes, stream);
    note("make", bytes, tensor.storage != nullptr);
    if (tensor.storage == nullptr) {
      return;
    }
    if (half) {
      tensor.bytes = bytes;
      tensor.offset = bytes;
      rig_.fill(tensor, stream);
    }
    save(tensor);
    if (same() % 6 == 0) {
      save(tensor);
    }
    if (stays) {
      tensors_.push_back(tensor);
    } else {
      rig_.check(tensor, stream);
      rig_.drop(tensor);
    }
    verify("drop");
  }

  void save(const HeldTensor& tensor) {
    const SavedTensor saved = rig_.try_save(tensor, tensor.stream);
    note("save", tensor.bytes, saved.refusal == core::Refusal::none);
    if (saved.refusal == core::Refusal::none) {
      saved_.push_back({saved, tensor.stream, false});
    } else if (shape_.triggers) {
      broken_ = "a tensor was refused";
    }
  }

  // The newest saved, mostly.
  void backward() {
    const std::size_t at = saved_.size() - 1 - (draw(6) == 0 ? draw(saved_.size()) : 0);
    if (!saved_[at].changed) {
      unpack(saved_[at]);
    }
    if (draw(8) != 0) {
      drop_handle(at);
    }
    if (tensors_.size() > 4) {
      drop_tensor(draw(tensors_.size()));
    }
  }

  void unpack(const Saved& saved) {
    const driver::Stream consumer = streams_[draw(4) == 0 ? 2 : 0];
    join(saved.stream, consumer);
    rig_.note_usage();
    const core::Unpacked again =
        rig_.runtime->unpack(saved.tensor.record, saved.tensor.offset, consumer);
    note("unpack", saved.tensor.bytes, again.status == core::Status::ok);
    if (again.status == core::Status::ok) {
      HeldTensor view = rig_.view(again, saved.tensor, consumer);
      rig_.check(again, saved.tensor, consumer);
      join(consumer, saved.stream);
      view.stream = saved.stream;
      tensors_.push_back(view);
    } else if (again.status == core::Status::stale) {
      broken_ = "a record with a handle is gone";
    }
    verify("unpack");
  }

  void drop_handle(std::size_t at) {
    note("drop handle", saved_[at].tensor.bytes, true);
    rig_.drop_handle(saved_[at].tensor);
    saved_.erase(saved_.begin() + static_cast<std::ptrdiff_t>(at));
    verify("drop handle");
  }
  void drop_tensor(std::size_t at) {
    rig_.check(tensors_[at], tensors_[at].stream);
    rig_.drop(tensors_[at]);
    tensors_.erase(tensors_.begin() + static_cast<std::ptrdiff_t>(at));
    verify("drop tensor");
  }
  void drop_tensors() {
    while (!tensors_.empty()) {
      drop_tensor(tensors_.size() - 1);
    }
  }

  void disturb() {
    switch (draw(14)) {
      case 0:
        if (!tensors_.empty()) {
          change(draw(tensors_.size()));
        }
        break;
      case 1:
        if (!tensors_.empty()) {
          drop_tensor(draw(tensors_.size()));
        }
        break;
      case 2:
        if (!saved_.empty()) {
          if (const Saved saved = saved_[draw(saved_.size())]; !saved.changed) {
            unpack(saved);
          }
        }
        break;
      case 3:
        if (!saved_.empty()) {
          shape_.captures ? end_in_capture(draw(saved_.size())) : drop_handle(draw(saved_.size()));
        }
        break;
      case 4:
        if (!tensors_.empty() && !shape_.captures) {
          read_aside(tensors_[draw(tensors_.size())]);
        }
        break;
      case 5: {
        const HeldTensor scratch = rig_.try_make(kSizes[draw(std::size(kSizes))], streams_[0]);
        if (scratch.storage != nullptr) {
          rig_.check(scratch, streams_[0]);
          rig_.drop(scratch);
        }
        break;
      }
      case 6:
        stagehand_sim_step(draw(20));
        break;
      case 7:
        if (draw(4) == 0) {
          rig_.torch.release_cached();
        }
        break;
      case 8:
        if (shape_.faults) {
          fault();
        }
        break;
      default:
        break;
    }
    verify("disturb");
  }

  // In place, and saved again: what was saved before is no good any more.
  void change(std::size_t at) {
    stagehand_sim_drain();  // a copy under way would read it, for nobody
    Storage* storage = tensors_[at].storage;
    const std::uint64_t seed = 1'000'000 + ++changes_;
    for (driver::Stream stream : streams_) {
      join(stream, tensors_[at].stream);
    }
    HeldTensor changed = tensors_[at];
    changed.seed = seed;
    rig_.fill(changed, changed.stream);
    const SavedTensor saved = rig_.try_save(changed, changed.stream);
    note("change", changed.bytes, saved.refusal == core::Refusal::none);
    for (HeldTensor& tensor : tensors_) {
      tensor.seed = tensor.storage == storage ? seed : tensor.seed;
    }
    if (saved.refusal == core::Refusal::none) {
      for (Saved& one : saved_) {
        one.changed = one.changed || (one.tensor.record.index == saved.record.index &&
                                      one.tensor.record.generation == saved.record.generation);
      }
      saved_.push_back({saved, changed.stream, false});
    } else {
      broken_ = "a changed tensor was refused";
    }
  }

  // Another stream reads it, and only torch is told.
  void read_aside(const HeldTensor& tensor) {
    join(tensor.stream, streams_[2]);
    rig_.check(tensor, streams_[2]);
    rig_.torch.record_stream(tensor.storage, streams_[2]);
    note("read aside", tensor.bytes, true);
  }

  // Its last handle goes while the stream of its block is captured into a graph.
  void end_in_capture(std::size_t at) {
    const driver::Stream stream = saved_[at].stream;
    stagehand_sim_capture(stream, 1);
    int mode = driver::kCaptureModeRelaxed;
    rig_.driver.thread_exchange_capture_mode(&mode);
    drop_handle(at);
    rig_.driver.thread_exchange_capture_mode(&mode);
    stagehand_sim_capture(stream, 0);
  }

  void fault() {
    constexpr const char* kFailing[] = {"cuMemHostRegister", "cuMemcpyDtoHAsync",
                                        "cuMemcpyHtoDAsync", "cuMemcpyBatchAsync", "cuMemCreate"};
    const char* const failing = kFailing[draw(std::size(kFailing))];
    stagehand_sim_fail(failing, 1 + draw(3), 1 + draw(2), driver::kOutOfMemory);
    note(failing, 0, false);
  }
  static void end_faults() {
    for (const char* symbol : driver::kSymbols) {
      stagehand_sim_fail(symbol, 1, 0, 0);
    }
  }

  void join(driver::Stream earlier, driver::Stream later) {
    if (earlier != later) {
      rig_.order(earlier, later);
    }
  }

  void note(const char* what, Bytes bytes, bool done) {
    if (trace_) {
      std::printf("%-12s %9llu %s\n", what, static_cast<unsigned long long>(bytes),
                  done ? "" : "refused");
    }
  }
  void verify(const char* after) {
    if (!broken_.empty()) {
      return;
    }
    if (stagehand_sim_hazards(STAGEHAND_SIM_ALL) > 0) {
      broken_ = hazard_text(0);
    } else if (stagehand_sim_mismatches() > 0) {
      broken_ = std::to_string(stagehand_sim_mismatches()) + " wrong bytes";
    } else if (broken_ = rig_.runtime->invariants_broken(); broken_.empty()) {
      broken_ = rig_.torch.differs(rig_.cache);
    }
    if (!broken_.empty()) {
      broken_ = std::string(after) + ": " + broken_;
    }
  }

  Shape shape_;
  HeldRig rig_;
  const std::uint64_t seed_;
  std::mt19937_64 random_;
  const bool trace_;
  driver::Stream streams_[3] = {};
  std::vector<HeldTensor> tensors_;
  std::vector<Saved> saved_;
  std::uint64_t changes_ = 0;
  std::string broken_;
};

core::Counters& reach() {
  static core::Counters all;
  return all;
}

std::string run(std::uint64_t seed, bool trace) {
  stagehand::test::failures() = 0;
  Program program(seed, trace);
  std::string broken = program.run();
  if (broken.empty() && stagehand::test::failures() > 0) {
    broken = std::to_string(stagehand::test::failures()) + " checks failed";
  }
  const core::Counters counters = program.counters();
#define STAGEHAND_FUZZ_ADD(name) reach().name += counters.name;
  STAGEHAND_COUNTERS(STAGEHAND_FUZZ_ADD)
#undef STAGEHAND_FUZZ_ADD
  return broken;
}

int run_many(std::uint64_t seed, double minutes) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(minutes * 60);
  int passed = 0;
  int failed = 0;
  for (; minutes > 0 ? Clock::now() < until : passed + failed < kPrograms; ++seed) {
    const std::string broken = run(seed, false);
    if (broken.empty()) {
      ++passed;
    } else if (++failed <= 20) {
      std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed),
                   broken.c_str());
    }
  }
  const core::Counters& sum = reach();
  std::printf("misses %llu dirty %llu clean %llu restores %llu prefetches %llu\n",
              static_cast<unsigned long long>(sum.misses),
              static_cast<unsigned long long>(sum.dirty_evictions),
              static_cast<unsigned long long>(sum.clean_evictions),
              static_cast<unsigned long long>(sum.restores),
              static_cast<unsigned long long>(sum.prefetches));
  if (sum.misses == 0 || sum.dirty_evictions == 0 || sum.clean_evictions == 0 ||
      sum.restores == 0 || sum.prefetches == 0) {
    std::fprintf(stderr, "the programs did not reach every part of the engine\n");
    ++failed;
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace stagehand::fuzz

int main(int argc, char** argv) {
  std::uint64_t seed = 0;
  bool one = false;
  bool trace = false;
  double minutes = 0;
  for (int i = 1; i < argc; ++i) {
    const bool value = i + 1 < argc;
    if (std::strcmp(argv[i], "--trace") == 0) {
      trace = true;
    } else if (std::strcmp(argv[i], "--seed") == 0 && value) {
      seed = std::strtoull(argv[++i], nullptr, 10);
      one = true;
    } else if (std::strcmp(argv[i], "--minutes") == 0 && value) {
      minutes = std::strtod(argv[++i], nullptr);
    } else if (std::strcmp(argv[i], "--plant") == 0 && value) {
      stagehand::core::planted_rule =
          static_cast<stagehand::core::Rule>(std::strtoul(argv[++i], nullptr, 10) % 7);
    } else {
      std::fprintf(stderr, "usage: %s [--seed N] [--trace] [--minutes X] [--plant R]\n", argv[0]);
      return 2;
    }
  }
  if (!one || minutes > 0) {
    return stagehand::fuzz::run_many(seed, minutes);
  }
  const std::string broken = stagehand::fuzz::run(seed, trace);
  std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed),
              broken.empty() ? "passed" : broken.c_str());
  return broken.empty() ? 0 : 1;
}
