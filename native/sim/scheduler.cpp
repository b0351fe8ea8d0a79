#include "sim/scheduler.hpp"

#include <algorithm>
#include <utility>

#include "sim/execute.hpp"

namespace stagehand::sim {

namespace {

constexpr std::uint64_t kStreamBase = 0x5000000000000000ull;
constexpr std::uint64_t kDefaultBandwidth = 25'000'000'000ull;
constexpr std::uint64_t kDeviceBandwidth = 2'000'000'000'000ull;
constexpr std::uint64_t kCopyOverheadNs = 6000;  // measured on one H200, and so is the next
constexpr std::uint64_t kEventNs = 500;
constexpr std::uint64_t kLaunchNs = 2000;
constexpr std::uint64_t kQueueLimit = 1 << 16;  // beyond it, queuing makes progress
constexpr unsigned kPollLimit = 64;
constexpr std::uint64_t kPicksPerDraw = 32;

std::uint64_t transfer_ns(std::uint64_t bytes, std::uint64_t bytes_per_s) {
  return static_cast<std::uint64_t>(static_cast<double>(bytes) * 1e9 /
                                    static_cast<double>(bytes_per_s));
}

}  // namespace

// The host raises the word while we look.
bool HeldBy::reached() const {
  return static_cast<std::int64_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) >= 0;
}

Scheduler::Scheduler(const Settings& settings)
    : settings_(settings),
      random_(settings.seed),
      engines_(static_cast<std::size_t>(settings.devices)) {
  if (settings_.d2h_bytes_per_s == 0) {
    settings_.d2h_bytes_per_s = kDefaultBandwidth;
  }
  if (settings_.h2d_bytes_per_s == 0) {
    settings_.h2d_bytes_per_s = kDefaultBandwidth;
  }
  for (int device = 0; device < settings.devices; ++device) {
    auto stream = std::make_unique<StreamState>();
    stream->device = device;
    stream->slot = slots_++;
    stream->host_synchronous = settings.host_synchronous;
    defaults_.push_back(std::move(stream));
  }
}

StreamState* Scheduler::default_stream(int device) {
  return defaults_[static_cast<std::size_t>(device)].get();
}

StreamState* Scheduler::find(Stream handle) {
  const auto it = streams_.find(handle);
  return it == streams_.end() ? nullptr : it->second.get();
}

bool Scheduler::was_destroyed(Stream handle) const {
  const auto value = reinterpret_cast<std::uint64_t>(handle);
  return value >= kStreamBase && value < kStreamBase + (std::uint64_t{slots_} << 4) &&
         streams_.count(handle) == 0;
}

Stream Scheduler::create_stream(int device) {
  auto stream = std::make_unique<StreamState>();
  stream->device = device;
  stream->slot = slots_++;
  stream->handle = reinterpret_cast<Stream>(kStreamBase + (std::uint64_t{stream->slot} << 4));
  const Stream handle = stream->handle;
  streams_[handle] = std::move(stream);
  return handle;
}

void Scheduler::destroy_stream(Stream handle) {
  std::erase_if(destroyed_, [](const auto& stream) { return stream->queue.empty(); });
  const auto it = streams_.find(handle);
  if (!it->second->queue.empty()) {
    destroyed_.push_back(std::move(it->second));
  }
  streams_.erase(it);
}

bool Scheduler::captures_here() const {
  const auto mine = [](const auto& stream) {
    return stream->capturing && stream->capture_thread == std::this_thread::get_id();
  };
  return std::any_of(defaults_.begin(), defaults_.end(), mine) ||
         std::any_of(streams_.begin(), streams_.end(),
                     [&](const auto& entry) { return mine(entry.second); });
}

Access Scheduler::admit(StreamState& stream, OpKind kind) {
  stream.clock.join(host_);
  return {stream.clock.tick(stream.slot), ++ops_, stream.slot, kind, stream.device};
}

void Scheduler::enqueue(StreamState& stream, Op op) {
  op.submitted_ns = host_ns_;
  const bool one_piece = op.kind == OpKind::kKernel || op.kind == OpKind::kCheck || op.bytes == 0;
  op.pieces_left = one_piece ? 1 : draw_pieces(op.bytes, random_);
  if (stream.queue.empty()) {
    active_.push_back(&stream);
  }
  if (op.kind == OpKind::kWaitValue) {
    op.record = std::make_shared<Record>();
    held_.emplace_back(op.held_by, op.record);
  }
  stream.queue.push_back(std::move(op));
  ++queued_;
  look_at_values();
  if (stream.host_synchronous) {
    maybe_progress();
    owed_ = &stream;
  }
  while (queued_ > kQueueLimit && step()) {
  }
}

std::shared_ptr<Record> Scheduler::record(StreamState& stream) {
  Op op;
  op.kind = OpKind::kRecord;
  op.access = admit(stream, OpKind::kRecord);
  auto record = std::make_shared<Record>();
  record->captured = stream.capturing;
  record->clock = stream.clock;
  record->stream = &stream;
  op.record = record;
  enqueue(stream, std::move(op));
  return record;
}

void Scheduler::wait(StreamState& stream, std::shared_ptr<Record> record) {
  Op op;
  op.kind = OpKind::kWait;
  op.access = admit(stream, OpKind::kWait);
  stream.clock.join(record->clock);
  op.record = std::move(record);
  enqueue(stream, std::move(op));
}

bool Scheduler::ready(const StreamState& stream) const {
  const Op& head = stream.queue.front();
  if (head.kind == OpKind::kWaitValue) {
    return head.record->done && head.held_by.reached();
  }
  return head.kind != OpKind::kWait || head.record->done;
}

// Follows waits to the stream that must run first; null where that one is held back by a value. It
// ends: a wait names an earlier record, and a record that is not done is in a queue.
StreamState* Scheduler::runnable_toward(StreamState& stream) {
  StreamState* at = &stream;
  while (at != nullptr && !ready(*at)) {
    at = at->queue.front().record->stream;
  }
  return at;
}

void Scheduler::look_at_values() {
  std::erase_if(held_, [&](const auto& entry) {
    const auto& [held_by, record] = entry;
    if (!held_by.reached()) {
      return false;
    }
    record->done = true;
    record->time_ns = host_ns_;
    return true;
  });
}

bool Scheduler::step() {
  if (picks_++ % kPicksPerDraw == 0) {
    constexpr unsigned kWeights[] = {1, 1, 2, 8, 32};  // now and then, some streams starve
    for (StreamState* stream : active_) {
      stream->weight = kWeights[random_.below(5)];
    }
  }
  std::uint64_t total = 0;
  for (const StreamState* stream : active_) {
    total += ready(*stream) ? stream->weight : 0;
  }
  if (total == 0) {
    return false;
  }
  std::uint64_t draw = random_.below(total);
  for (StreamState* stream : active_) {
    const std::uint64_t weight = ready(*stream) ? stream->weight : 0;
    if (draw < weight) {
      run_piece(*stream);
      return true;
    }
    draw -= weight;
  }
  return false;
}

void Scheduler::reseed(std::uint64_t seed) {
  random_ = Random(seed);
  picks_ = 0;
  for (const auto& stream : defaults_) {
    stream->weight = 1;
  }
  for (const auto& [handle, stream] : streams_) {
    stream->weight = 1;
  }
}

void Scheduler::maybe_progress() {
  if (active_.empty() || !random_.chance(progress_)) {
    return;
  }
  for (std::uint64_t steps = 1 + random_.below(4); steps > 0 && step(); --steps) {
  }
}

Finish Scheduler::finish(const std::shared_ptr<Record>& record) {
  const bool waited = !record->done;
  while (!record->done) {
    maybe_progress();
    if (!record->done) {
      StreamState* const next = runnable_toward(*record->stream);
      if (next == nullptr) {
        return Finish::kHeld;
      }
      run_piece(*next);
    }
  }
  learn(record->clock, record->time_ns);
  return waited ? Finish::kWaited : Finish::kWasDone;
}

Finish Scheduler::finish(StreamState& stream) {
  const bool waited = !stream.queue.empty();
  while (!stream.queue.empty()) {
    if (!stream.host_synchronous) {
      maybe_progress();
    }
    if (!stream.queue.empty()) {
      StreamState* const next = runnable_toward(stream);
      if (next == nullptr) {
        return Finish::kHeld;
      }
      run_piece(*next);
    }
  }
  learn(stream.clock, stream.free_ns);
  return waited ? Finish::kWaited : Finish::kWasDone;
}

Finish Scheduler::finish_device(int device) {
  Finish all = Finish::kWasDone;
  std::vector<StreamState*> streams{default_stream(device)};
  for (const auto& [handle, stream] : streams_) {
    streams.push_back(stream.get());
  }
  for (const auto& stream : destroyed_) {
    streams.push_back(stream.get());
  }
  for (StreamState* stream : streams) {
    if (stream->device == device) {
      all = std::max(all, finish(*stream));
    }
  }
  return all;
}

void Scheduler::drain() {
  while (step()) {
  }
}

bool Scheduler::poll(EventState& event) {
  const std::shared_ptr<Record> record = event.last;
  if (!record->done) {
    maybe_progress();
  }
  if (!record->done && ++event.polls < kPollLimit) {
    return false;
  }
  event.polls = 0;
  return finish(record) != Finish::kHeld;
}

bool Scheduler::poll(StreamState& stream) {
  if (!stream.queue.empty()) {
    maybe_progress();
    StreamState* const next = stream.queue.empty() ? nullptr : runnable_toward(stream);
    if (next != nullptr) {
      run_piece(*next);
    }
  }
  if (!stream.queue.empty()) {
    return false;
  }
  finish(stream);
  return true;
}

void Scheduler::learn(const VectorClock& clock, std::uint64_t time_ns) {
  host_.join(clock);
  host_ns_ = std::max(host_ns_, time_ns);
}

void Scheduler::run_piece(StreamState& stream) {
  Op& op = stream.queue.front();
  mismatches_ += execute_piece(op, random_);
  if (op.pieces_left > 0) {
    return;
  }
  complete(stream, op);
  stream.queue.pop_front();
  --queued_;
  if (stream.queue.empty()) {
    std::erase(active_, &stream);
  }
}

std::uint64_t Scheduler::run_time(const Op& op, std::uint64_t start, int device) {
  const bool d2h = op.kind == OpKind::kD2H;
  if (d2h || op.kind == OpKind::kH2D) {
    // One engine each way: both directions at once, but two copies one way in turn.
    std::uint64_t& engine = engines_[static_cast<std::size_t>(device)][d2h ? 0 : 1];
    const std::uint64_t begin = std::max(start, engine);
    const std::uint64_t rate = d2h ? settings_.d2h_bytes_per_s : settings_.h2d_bytes_per_s;
    engine = begin + (op.cost_paid ? 0 : kCopyOverheadNs) + transfer_ns(op.bytes, rate);
    return engine;
  }
  switch (op.kind) {
    case OpKind::kD2D:
    case OpKind::kMemset:
      return start + kLaunchNs + transfer_ns(op.bytes, kDeviceBandwidth);
    case OpKind::kRecord:
      return start + kEventNs;
    case OpKind::kWait:
    case OpKind::kWaitValue:
      return std::max(start, op.record->time_ns);
    default:
      return start + op.duration_ns;
  }
}

void Scheduler::complete(StreamState& stream, Op& op) {
  const std::uint64_t start = std::max(stream.free_ns, op.submitted_ns);
  stream.free_ns = run_time(op, start, stream.device);
  if (op.kind == OpKind::kRecord) {
    op.record->time_ns = stream.free_ns;
    op.record->done = true;
  }
}

}  // namespace stagehand::sim
