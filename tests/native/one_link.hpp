// A GPU's streams in virtual time, with one link each way that all streams' copies share: first
// ready, first served. It takes the place of the simulator's streams (whose copies would have to
// move bytes, or share nothing): work is queued here, and the host's clock is the simulator's.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "native/trace.hpp"

namespace stagehand::core::test {

class OneLink {
 public:
  enum class Kind : std::uint8_t { work, in, out, record, wait };

  // A new machine: nothing is queued.
  static void restart() { instance() = {}; }
  static OneLink& instance();

  void queue(driver::Stream stream, Kind kind, std::uint64_t ns);
  void record(driver::Event event, driver::Stream stream);
  void wait(driver::Stream stream, driver::Event event);
  bool passed(driver::Event event);
  float elapsed_ms(driver::Event start, driver::Event end) const;
  // The host waits until that has passed.
  void finish_event(driver::Event event);
  void finish_stream(driver::Stream stream);
  void finish();

 private:
  struct Mark {
    bool done = false;
    std::uint64_t ns = 0;
  };
  struct Op {
    Kind kind = Kind::work;
    std::uint64_t ns = 0;
    std::shared_ptr<Mark> mark{};  // made, or waited for
    std::uint64_t queued = 0;      // the host's time,
    std::uint64_t number = 0;      // and the how-maniest
  };
  struct Queue {
    std::deque<Op> ops;
    std::uint64_t free = 0;
  };

  static std::uint64_t ready_at(const Queue& queue);
  void push(driver::Stream stream, Op op);
  void run(std::uint64_t until, const std::function<bool()>& done);
  void run_one(Queue& queue, std::uint64_t at);

  std::map<driver::Stream, Queue> streams_;
  std::map<driver::Event, std::shared_ptr<Mark>> marks_;
  std::uint64_t links_[2] = {0, 0};  // free at
  std::uint64_t ops_ = 0;
};

// A driver whose streams are those, and whose pinning is charged for and not made.
void on_one_link(driver::Table& table);

}  // namespace stagehand::core::test
