// The GIL is given up, and taken again: with an eye on the end of the process. A daemon thread that
// takes it again while Python ends is ended by Python itself, in the middle of our frames, which
// aborts the process (until Python 3.14). So from the end on it stays held, and Python's end waits
// for those who are without it.
#pragma once

#include <nanobind/nanobind.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace stagehand::entry {

class GilReleased {
 public:
  GilReleased() {
    if (!ending_) {
      ++inside_;
      state_ = PyEval_SaveThread();
    }
  }
  ~GilReleased() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
      --inside_;
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

  // Called once, when the module is made.
  static void watch_the_end() {
    pthread_atfork(nullptr, nullptr, [] { inside_ = 0; });  // a child has the one thread
    nanobind::module_::import_("atexit").attr("register")(nanobind::cpp_function(&end));
  }

 private:
  static void end() {
    constexpr int kMost = 2000;  // ms; who waits for the GPU longer than that is on its own
    ending_ = true;
    PyThreadState* const state = PyEval_SaveThread();
    for (int waited = 0; inside_ > 0 && waited < kMost; ++waited) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    PyEval_RestoreThread(state);
  }

  // Both change with the GIL held; they are atomic for the wait above.
  static inline std::atomic<bool> ending_{false};
  static inline std::atomic<int> inside_{0};
  PyThreadState* state_ = nullptr;
};

}  // namespace stagehand::entry
