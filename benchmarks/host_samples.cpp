// Where the host's time goes in a process: a signal each so many microseconds of its CPU time, and
// the frames that it meets. Built and read by host_samples.py.
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/time.h>

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
constexpr int kOwn = 2;  // of the handler, and the one that called it
constexpr std::size_t kSamples = 1 << 14;

struct Sample {
  std::atomic<int> frames{0};
  void* at[kFrames];
};

std::vector<Sample>* samples = nullptr;
std::atomic<std::size_t> taken{0};
std::atomic<int> taking{0};  // handlers that run

void take(int) {
  const int before = errno;
  ++taking;
  const std::size_t i = taken.fetch_add(1);
  if (i < kSamples) {
    (*samples)[i].frames = backtrace((*samples)[i].at, kFrames);
  }
  --taking;
  errno = before;
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
  action.sa_handler = take;
  action.sa_flags = SA_RESTART;
  sigaction(SIGPROF, &action, nullptr);
  set_timer(us);
}

// A line a frame, the innermost first: library, tab, function. An empty line ends a sample.
extern "C" int stop_samples(const char* path) {
  set_timer(0);
  while (taking > 0) {  // on other threads, for microseconds
  }
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) {
    return -1;
  }
  std::map<void*, std::string> names;
  const std::size_t count = std::min(taken.load(), kSamples);
  for (std::size_t i = 0; i < count; ++i) {
    const Sample& sample = (*samples)[i];
    for (int frame = kOwn; frame < sample.frames; ++frame) {
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
