#include "native/one_link.hpp"

#include <algorithm>
#include <utility>

namespace stagehand::core::test {

namespace {
constexpr std::uint64_t kEver = ~std::uint64_t{0};

bool never() { return false; }

void host_at(std::uint64_t ns) {
  const std::uint64_t now = stagehand_sim_clock_ns();
  stagehand_sim_advance_ns(ns > now ? ns - now : 0);
}
}  // namespace

OneLink& OneLink::instance() {
  static OneLink only;
  return only;
}

void OneLink::queue(driver::Stream stream, Kind kind, std::uint64_t ns) {
  push(stream, {kind, ns});
}

void OneLink::record(driver::Event event, driver::Stream stream) {
  marks_[event] = std::make_shared<Mark>();
  push(stream, {Kind::record, 0, marks_[event]});
}

void OneLink::wait(driver::Stream stream, driver::Event event) {
  if (const auto found = marks_.find(event); found != marks_.end()) {
    push(stream, {Kind::wait, 0, found->second});
  }
}

bool OneLink::passed(driver::Event event) {
  run(stagehand_sim_clock_ns(), never);
  const auto found = marks_.find(event);
  return found == marks_.end() || found->second->done;
}

float OneLink::elapsed_ms(driver::Event start, driver::Event end) const {
  return static_cast<float>(static_cast<double>(marks_.at(end)->ns) -
                            static_cast<double>(marks_.at(start)->ns)) /
         1e6F;
}

void OneLink::finish_event(driver::Event event) {
  if (const auto found = marks_.find(event); found != marks_.end()) {
    const std::shared_ptr<Mark> mark = found->second;
    run(kEver, [&] { return mark->done; });
    host_at(mark->ns);
  }
}

void OneLink::finish_stream(driver::Stream stream) {
  const Queue& queue = streams_[stream];
  run(kEver, [&] { return queue.ops.empty(); });
  host_at(queue.free);
}

void OneLink::finish() {
  run(kEver, never);
  for (const auto& [stream, queue] : streams_) {
    host_at(queue.free);
  }
}

void OneLink::push(driver::Stream stream, Op op) {
  op.queued = stagehand_sim_clock_ns();
  op.number = ++ops_;
  streams_[stream].ops.push_back(std::move(op));
}

std::uint64_t OneLink::ready_at(const Queue& queue) {
  if (queue.ops.empty()) {
    return kEver;
  }
  const Op& op = queue.ops.front();
  const std::uint64_t at = std::max(queue.free, op.queued);
  return op.kind != Kind::wait ? at : op.mark->done ? std::max(at, op.mark->ns) : kEver;
}

// In the order of time: what is queued later is ready no sooner.
void OneLink::run(std::uint64_t until, const std::function<bool()>& done) {
  while (!done()) {
    Queue* next = nullptr;
    std::uint64_t at = kEver;
    for (auto& [stream, queue] : streams_) {
      const std::uint64_t ready = ready_at(queue);
      if (ready < at ||
          (ready == at && ready != kEver && queue.ops.front().number < next->ops.front().number)) {
        next = &queue;
        at = ready;
      }
    }
    if (next == nullptr || at > until) {
      return;
    }
    run_one(*next, at);
  }
}

void OneLink::run_one(Queue& queue, std::uint64_t at) {
  const Op& op = queue.ops.front();
  if (op.kind == Kind::in || op.kind == Kind::out) {
    std::uint64_t& link = links_[op.kind == Kind::in ? 0 : 1];
    link = std::max(link, at) + op.ns;
    queue.free = link;
  } else {
    queue.free = at + op.ns;
  }
  if (op.kind == Kind::record) {
    *op.mark = {true, at};
  }
  queue.ops.pop_front();
}

void on_one_link(driver::Table& table) {
  using Kind = OneLink::Kind;
  OneLink::restart();
  charge_copies(table);
  static const auto link = []() -> OneLink& { return OneLink::instance(); };
  busy() = [](driver::Stream on, std::uint64_t ns) {
    link().queue(on, Kind::work, ns);
    return driver::kSuccess;
  };
  table.memcpy_dtoh_async = [](void*, driver::DevicePtr, std::size_t bytes, driver::Stream on) {
    link().queue(on, Kind::out, copy_ns(bytes));
    return driver::kSuccess;
  };
  table.memcpy_htod_async = [](driver::DevicePtr, const void*, std::size_t bytes,
                               driver::Stream on) {
    link().queue(on, Kind::in, copy_ns(bytes));
    return driver::kSuccess;
  };
  table.event_record = [](driver::Event event, driver::Stream on) {
    link().record(event, on);
    return driver::kSuccess;
  };
  table.stream_wait_event = [](driver::Stream on, driver::Event event, unsigned) {
    link().wait(on, event);
    return driver::kSuccess;
  };
  table.event_query = [](driver::Event event) {
    return link().passed(event) ? driver::kSuccess : driver::kNotReady;
  };
  table.event_elapsed_time = [](float* ms, driver::Event start, driver::Event end) {
    *ms = link().elapsed_ms(start, end);
    return driver::kSuccess;
  };
  table.event_synchronize = [](driver::Event event) {
    link().finish_event(event);
    return driver::kSuccess;
  };
  table.stream_synchronize = [](driver::Stream stream) {
    link().finish_stream(stream);
    return driver::kSuccess;
  };
  table.ctx_synchronize = [] {
    link().finish();
    return driver::kSuccess;
  };
}

}  // namespace stagehand::core::test
