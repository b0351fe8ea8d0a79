// A thread of the core's own, for the life of the process.
#pragma once

#include <pthread.h>

#include <csignal>
#include <system_error>
#include <thread>

namespace stagehand::core {

// Detached: nothing may wait for it at exit, and what it works on is leaked too (rule T3). Signals
// are for the program's own threads. False: no thread can be had.
template <class Work>
bool start_background(Work work) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    std::thread(std::move(work)).detach();
  } catch (const std::system_error&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

}  // namespace stagehand::core
