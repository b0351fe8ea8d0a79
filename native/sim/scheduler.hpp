// Streams as queues, run by a seeded scheduler on a virtual clock.
//
// Queuing runs nothing. Work runs, one piece at a time, only when somebody waits (then at least
// what the wait needs), asks, or works host-synchronously; the seed decides what else runs and
// when. A copy takes several pieces, so a half-done one can be seen by whoever fails to wait for
// it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sim/clocks.hpp"
#include "sim/common.hpp"
#include "sim/control.hpp"

namespace stagehand::sim {

struct StreamState;

// One recording of an event. Recording again makes another; waits keep the one they were given.
struct Record {
  bool done = false;
  bool captured = false;
  std::uint64_t time_ns = 0;
  VectorClock clock;
  StreamState* stream = nullptr;  // whose queue holds it, while not done; null: a value
};

// A word of host memory that a stream waits for.
struct HeldBy {
  const std::uint64_t* word = nullptr;
  std::uint64_t value = 0;
  bool reached() const;
};

// What became of a wait by the host.
enum class Finish : std::uint8_t {
  kWasDone,  // there was nothing to wait for
  kWaited,
  kHeld  // not done: all that may run has run, and the rest is held back by a value
};

struct EventState {
  bool timed = true;
  int device = 0;
  unsigned polls = 0;  // unsuccessful queries in a row
  std::shared_ptr<Record> last;
};

struct Op {
  OpKind kind = OpKind::kKernel;
  Access access;
  std::vector<Piece> to;
  std::vector<Piece> from;
  std::uint64_t bytes = 0;  // to move; 0 for what runs in one piece
  std::uint64_t done_bytes = 0;
  unsigned pieces_left = 1;
  std::uint64_t submitted_ns = 0;
  std::uint64_t duration_ns = 0;      // of a kernel
  std::uint64_t seed = 0;             // of a pattern, or the byte of a memset
  std::vector<unsigned char> staged;  // the source of a copy from pageable memory
  stagehand_sim_callback callback = nullptr;
  void* user = nullptr;
  std::shared_ptr<Record> record;  // made here, or waited for
  HeldBy held_by;                  // of a value wait; its record says when the value was reached
  bool cost_paid = false;          // a copy of a batch whose call another one has paid for
};

struct StreamState {
  Stream handle = nullptr;
  int device = 0;
  std::uint32_t slot = 0;  // its place in every vector clock
  bool host_synchronous = false;
  bool capturing = false;
  std::thread::id capture_thread;
  unsigned weight = 1;  // how eagerly the scheduler picks it, redrawn now and then
  std::uint64_t free_ns = 0;
  VectorClock clock;
  std::deque<Op> queue;
};

class Scheduler {
 public:
  struct Settings {
    std::uint64_t seed = 0;
    std::uint64_t d2h_bytes_per_s = 0;
    std::uint64_t h2d_bytes_per_s = 0;
    int devices = 1;
    bool host_synchronous = false;
  };
  explicit Scheduler(const Settings& settings);

  // Streams. The default stream of a device always exists. find is null for what is not a stream.
  StreamState* default_stream(int device);
  StreamState* find(Stream handle);
  bool was_destroyed(Stream handle) const;
  Stream create_stream(int device);
  void destroy_stream(Stream handle);  // what is queued still runs

  // Gives the operation its place in time. Its clock is then the stream's.
  Access admit(StreamState& stream, OpKind kind);
  void enqueue(StreamState& stream, Op op);
  std::shared_ptr<Record> record(StreamState& stream);
  void wait(StreamState& stream, std::shared_ptr<Record> record);

  // Progress. The finish functions make the host know, unless they return kHeld.
  Finish finish(const std::shared_ptr<Record>& record);
  Finish finish(StreamState& stream);
  Finish finish_device(int device);
  void drain();  // runs everything that may run, and the host learns nothing
  bool step();   // one piece of a random ready stream; false when there is none
  // Looks at the values that hold streams back. One reached since was reached now.
  void look_at_values();
  void maybe_progress();
  bool poll(EventState& event);  // a query: true, and the host knows, when the record is done
  bool poll(StreamState& stream);

  // The host-synchronous stream, when the call in progress has queued work on it.
  StreamState* take_owed() { return std::exchange(owed_, nullptr); }
  std::uint64_t draw(std::uint64_t bound) { return random_.below(bound); }

  bool captures_here() const;  // the calling thread captures a stream

  const VectorClock& host() const { return host_; }
  std::uint64_t host_ns() const { return host_ns_; }
  void advance_ns(std::uint64_t nanoseconds) { host_ns_ += nanoseconds; }
  void set_progress(double probability) { progress_ = probability; }
  void reseed(std::uint64_t seed);  // as from the start: draws, and how eagerly streams are picked
  std::uint64_t queued() const { return queued_; }
  std::uint64_t mismatches() const { return mismatches_; }

 private:
  bool ready(const StreamState& stream) const;
  StreamState* runnable_toward(StreamState& stream);
  void run_piece(StreamState& stream);
  void complete(StreamState& stream, Op& op);
  void learn(const VectorClock& clock, std::uint64_t time_ns);
  std::uint64_t run_time(const Op& op, std::uint64_t start, int device);

  Settings settings_;
  Random random_;
  double progress_ = 0.25;
  std::vector<std::unique_ptr<StreamState>> defaults_;
  std::unordered_map<Stream, std::unique_ptr<StreamState>> streams_;
  std::vector<std::unique_ptr<StreamState>> destroyed_;           // still with work to do
  std::vector<StreamState*> active_;                              // those with a queue
  std::vector<std::pair<HeldBy, std::shared_ptr<Record>>> held_;  // not reached when last seen
  StreamState* owed_ = nullptr;
  std::vector<std::array<std::uint64_t, 2>> engines_;  // per device: d2h and h2d, free at
  std::uint32_t slots_ = 0;
  std::uint64_t ops_ = 0;
  std::uint64_t queued_ = 0;
  std::uint64_t picks_ = 0;
  std::uint64_t mismatches_ = 0;
  VectorClock host_;
  std::uint64_t host_ns_ = 0;
};

}  // namespace stagehand::sim
