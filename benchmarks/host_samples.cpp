// Where the host's time goes in a process: a signal each so many microseconds of its CPU time, and
// the frames that it meets. Built and read by host_samples.py.
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

constexpr int kFrames = 32;
constexpr int kOwn = 2;  // of the handler, and the one that called it, where no more is known
constexpr std::size_t kSamples = 1 << 14;

struct Sample {
  std::atomic<int> frames{0};
  int first = 0;  // that is not the handler's, or what called that
  void* at[kFrames];
};

std::vector<Sample>* samples = nullptr;
std::atomic<std::size_t> taken{0};
std::atomic<int> taking{0};   // handlers that run
std::atomic<bool> on{false};  // a signal may come late

// A signal may come where the tables that frames are found by are not exact: in a function's first
// instructions, or in code without any. Then the unwinder reads where nothing is mapped. That must
// not end the process: the sample is of the function alone. No lock is held while it reads: since
// 2.35 the C library finds tables without one.
__attribute__((tls_model("initial-exec"))) thread_local sigjmp_buf* volatile unwinding = nullptr;
constexpr int kFaults[] = {SIGSEGV, SIGBUS};
struct sigaction others[2];  // who had them before

void fault(int signal, siginfo_t*, void*) {
  if (unwinding != nullptr) {
    siglongjmp(*unwinding, 1);
  }
  const int which = signal == kFaults[0] ? 0 : 1;
  sigaction(signal, &others[which], nullptr);  // it comes again, to whom it is for
}

// Whether it came to its end.
template <class Work>
bool guarded(Work work) {
  sigjmp_buf here;
  const bool ends = sigsetjmp(here, 1) == 0;
  if (ends) {
    unwinding = &here;
    work();
  }
  unwinding = nullptr;
  return ends;
}

void* interrupted(const void* context) {
#ifdef __x86_64__
  const auto* where = static_cast<const ucontext_t*>(context);
  return reinterpret_cast<void*>(where->uc_mcontext.gregs[REG_RIP]);
#else
  (void)context;
  return nullptr;
#endif
}

void take(int, siginfo_t*, void* context) {
  const int before = errno;
  ++taking;
  const std::size_t i = on ? taken.fetch_add(1) : kSamples;
  if (i < kSamples) {
    Sample& sample = (*samples)[i];
    void* const at = interrupted(context);
    int frames = 0;
    if (!guarded([&] { frames = backtrace(sample.at, kFrames); })) {
      sample.at[0] = at;
      frames = 1;
    }
    void** const found = std::find(sample.at, sample.at + frames, at);
    const auto before_it = static_cast<int>(found - sample.at);
    sample.first = before_it < frames ? before_it : std::min(kOwn, frames);
    sample.frames = frames;
  }
  --taking;
  errno = before;
}

void watch_faults() {
  struct sigaction action{};
  action.sa_sigaction = fault;
  action.sa_flags = SA_SIGINFO;
  for (int i = 0; i < 2; ++i) {
    sigaction(kFaults[i], &action, &others[i]);
  }
}

void leave_faults() {
  for (int i = 0; i < 2; ++i) {
    sigaction(kFaults[i], &others[i], nullptr);
  }
}

void set_timer(long us) {
  const timeval every{us / 1'000'000, us % 1'000'000};
  const itimerval timer{every, every};
  setitimer(ITIMER_PROF, &timer, nullptr);
}

// Of the library, and of the function where its name is known.
std::string name_of(void* at) {
  Dl_info found{};
  if (dladdr(at, &found) == 0 || found.dli_fname == nullptr) {
    return "?\t";
  }
  const char* slash = std::strrchr(found.dli_fname, '/');
  std::string name = std::string(slash != nullptr ? slash + 1 : found.dli_fname) + "\t";
  if (found.dli_sname != nullptr) {
    int status = 0;
    char* clear = abi::__cxa_demangle(found.dli_sname, nullptr, nullptr, &status);
    name += status == 0 ? clear : found.dli_sname;
    std::free(clear);
  }
  return name;
}

}  // namespace

extern "C" void start_samples(long us) {
  if (samples == nullptr) {  // the handler stays: a signal that comes late would end the process
    samples = new std::vector<Sample>(kSamples);
    void* any[1];
    backtrace(any, 1);  // the first one loads a library, which no signal handler may
  }
  for (Sample& sample : *samples) {
    sample.frames = 0;
  }
  taken = 0;
  struct sigaction action{};
  action.sa_sigaction = take;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  watch_faults();
  on = true;
  sigaction(SIGPROF, &action, nullptr);
  set_timer(us);
}

// For a test, while samples are taken: whether a fault inside the unwinder is survived.
extern "C" int survives_a_fault() {
  int* volatile nowhere = nullptr;
  return guarded([&] { *nowhere = 1; }) ? 0 : 1;
}

// A line a frame, the innermost first: library, tab, function. An empty line ends a sample.
extern "C" int stop_samples(const char* path) {
  set_timer(0);
  on = false;
  while (taking > 0) {  // on other threads, for microseconds
  }
  leave_faults();
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) {
    return -1;
  }
  std::map<void*, std::string> names;
  const std::size_t count = std::min(taken.load(), kSamples);
  for (std::size_t i = 0; i < count; ++i) {
    const Sample& sample = (*samples)[i];
    for (int frame = sample.first; frame < sample.frames; ++frame) {
      const auto [found, is_new] = names.try_emplace(sample.at[frame]);
      if (is_new) {
        found->second = name_of(sample.at[frame]);
      }
      std::fprintf(file, "%s\n", found->second.c_str());
    }
    std::fputc('\n', file);
  }
  return std::fclose(file) == 0 ? static_cast<int>(count) : -1;
}
