// A TorchSide whose MemPools serve threads: what PoolRoute tells torch, and which thread's requests
// come from where. A backward is what the test says it is.
#pragma once

#include <atomic>
#include <map>
#include <thread>

#include "native/held_torch.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {

// What torch was told.
struct Told {
  bool on = false;
  TorchPool pool{};
  std::thread::id inside;
  std::map<std::thread::id, int> joined;  // and for which backward
  int kept = 0;                           // pools kept that were not let go
  int backwards = 0;                      // whose end is to be told
  bool in_capture = false;
  bool waits = false;  // at the end
};
inline Told g_told;
inline std::atomic<int> g_backwards{0};
inline thread_local int t_backward = 0;  // the number of this thread's

inline TorchSide routing(TorchSide side = {}) {
  side.route = [](int, const std::uint64_t pool[2], bool backward) {
    if (g_told.in_capture || (backward && t_backward == 0)) {
      return false;
    }
    const TorchPool wanted{pool[0], pool[1]};
    CHECK(!g_told.on || g_told.pool == wanted);
    g_told.on = true;
    g_told.pool = wanted;
    if (backward) {
      g_told.joined[std::this_thread::get_id()] = t_backward;
      ++g_told.backwards;
    } else {
      g_told.inside = std::this_thread::get_id();
    }
    return true;
  };
  side.leave_route = [](int) { g_told.inside = {}; };
  side.end_route = [](int) {
    CHECK(g_told.on);
    g_told.on = false;
    g_told.inside = {};
    g_told.joined.clear();
    return g_told.waits;
  };
  side.keep_pool = [](int, const std::uint64_t*) {
    ++g_told.kept;
    return true;
  };
  side.let_pool_go = [](int, const std::uint64_t*) {
    CHECK(!g_told.on);
    --g_told.kept;
  };
  side.routed = [](int) {
    const std::thread::id here = std::this_thread::get_id();
    const auto joined = g_told.joined.find(here);
    return g_told.on &&
           (g_told.inside == here ||
            (t_backward != 0 && joined != g_told.joined.end() && joined->second == t_backward));
  };
  side.in_backward = [] { return t_backward != 0; };
  side.watch_backwards = [] {};
  return side;
}

// FakeTorch's, whose memory for records that come back is that of the thread.
inline const TorchSide& routed() {
  static TorchSide side;
  side = routing(FakeTorch::side(true));
  g_told = {};
  side.make = [](int device, Bytes bytes, driver::Stream stream, bool quiet, HeldStorage* held) {
    FakeTorch::use_pool(side.routed(device) ? g_told.pool : kDefaultPool);
    const bool made = FakeTorch::side(true).make(device, bytes, stream, quiet, held);
    FakeTorch::use_pool(kDefaultPool);
    return made;
  };
  return side;
}

struct Backward {
  Backward() : before_(t_backward) { t_backward = ++g_backwards; }
  ~Backward() { t_backward = before_; }
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;

 private:
  const int before_;
};

}  // namespace stagehand::core::test
