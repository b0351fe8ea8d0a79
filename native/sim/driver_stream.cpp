// Streams, events, and the work queued on them.
#include <utility>

#include "sim/gpu.hpp"

namespace stagehand::sim {

namespace {

constexpr std::uint64_t kEventBase = 0x6000000000000000ull;

std::uint64_t number(const void* host) { return reinterpret_cast<std::uint64_t>(host); }

// Finds the stream, then runs body(machine, stream).
template <typename Body>
Result stream_call(Function function, Stream handle, Body body) {
  return driver_call(function, [&](Gpu& machine) {
    StreamState* stream = nullptr;
    const Result found = machine.find_stream(handle, symbol_of(function), &stream);
    return found != kSuccess ? found : body(machine, *stream);
  });
}

template <typename Body>
Result event_call(Function function, Event handle, Body body) {
  return driver_call(function, [&](Gpu& machine) {
    EventState* event = nullptr;
    const Result found = machine.find_event(handle, symbol_of(function), &event);
    return found != kSuccess ? found : body(machine, *event);
  });
}

// One of each batch's attributes, as cuda.h has them; what they say changes nothing here.
bool attributes_fit(std::size_t count, const CopyAttributes* attributes, const std::size_t* starts,
                    std::size_t attribute_count) {
  constexpr int kLastOrder = 3;
  if (attributes == nullptr || starts == nullptr || attribute_count == 0 || starts[0] != 0) {
    return false;
  }
  for (std::size_t i = 0; i < attribute_count; ++i) {
    const bool in_order = starts[i] < count && (i == 0 || starts[i] > starts[i - 1]);
    if (!in_order || attributes[i].source_order < 1 || attributes[i].source_order > kLastOrder) {
      return false;
    }
  }
  return true;
}

Op copy_op(OpKind kind, std::size_t bytes) {
  Op op;
  op.kind = kind;
  op.bytes = bytes;
  return op;
}

// Asking about captured work, or asking anything in a strict capture.
Result may_ask(Gpu& machine, const EventState& event, const char* symbol) {
  if (event.last != nullptr && event.last->captured) {
    machine.log.add(STAGEHAND_SIM_CAPTURE,
                    std::string("capture: ") + symbol + " of an event recorded in a capture");
    return kCapturedEvent;
  }
  return machine.unsafe_in_capture(symbol);
}

Result may_ask(Gpu& machine, const StreamState& stream, const char* symbol) {
  if (stream.capturing) {
    machine.log.add(STAGEHAND_SIM_CAPTURE,
                    std::string("capture: ") + symbol + " of a stream that is captured");
    return kCaptureUnsupported;
  }
  return machine.unsafe_in_capture(symbol);
}

Result create_stream(Gpu& machine, Stream* stream) {
  const int device = current_device(machine);
  if (device < 0) {
    return kInvalidContext;
  }
  *stream = machine.scheduler.create_stream(device);
  return kSuccess;
}

}  // namespace

STAGEHAND_SIM_API cuStreamCreateWithPriority(Stream* stream, unsigned /*flags*/, int /*priority*/) {
  return driver_call(Function::cuStreamCreateWithPriority,
                     [&](Gpu& machine) { return create_stream(machine, stream); });
}

STAGEHAND_SIM_API cuStreamCreate(Stream* stream, unsigned /*flags*/) {
  return driver_call(Function::cuStreamCreate,
                     [&](Gpu& machine) { return create_stream(machine, stream); });
}

STAGEHAND_SIM_API cuStreamDestroy(Stream handle) {
  return stream_call(Function::cuStreamDestroy, handle, [&](Gpu& machine, StreamState& stream) {
    if (stream.handle == nullptr) {
      return kInvalidHandle;
    }
    machine.captures -= stream.capturing ? 1 : 0;
    machine.scheduler.destroy_stream(handle);
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuStreamWaitEvent(Stream handle, Event event_handle, unsigned /*flags*/) {
  return stream_call(Function::cuStreamWaitEvent, handle, [&](Gpu& machine, StreamState& stream) {
    EventState* event = nullptr;
    const Result found = machine.find_event(event_handle, "cuStreamWaitEvent", &event);
    if (found != kSuccess || event->last == nullptr) {
      return found;
    }
    if (event->last->captured != stream.capturing) {
      machine.log.add(STAGEHAND_SIM_CAPTURE,
                      stream.capturing
                          ? "capture: a captured stream waits for work outside the capture"
                          : "capture: a stream outside the capture waits for captured work");
      return kCaptureIsolation;
    }
    machine.scheduler.wait(stream, event->last);
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuStreamSynchronize(Stream handle) {
  return stream_call(Function::cuStreamSynchronize, handle, [&](Gpu& machine, StreamState& stream) {
    const Result allowed = may_ask(machine, stream, "cuStreamSynchronize");
    return allowed == kSuccess ? machine.waited(machine.scheduler.finish(stream)) : allowed;
  });
}

STAGEHAND_SIM_API cuStreamQuery(Stream handle) {
  return stream_call(Function::cuStreamQuery, handle, [&](Gpu& machine, StreamState& stream) {
    const Result allowed = may_ask(machine, stream, "cuStreamQuery");
    if (allowed != kSuccess) {
      return allowed;
    }
    return machine.scheduler.poll(stream) ? kSuccess : kNotReady;
  });
}

STAGEHAND_SIM_API cuStreamIsCapturing(Stream handle, int* status) {
  return stream_call(Function::cuStreamIsCapturing, handle, [&](Gpu&, StreamState& stream) {
    *status = stream.capturing ? 1 : driver::kCaptureNone;
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuStreamGetCtx(Stream handle, Context* context) {
  return stream_call(Function::cuStreamGetCtx, handle, [&](Gpu&, StreamState& stream) {
    *context = context_of(stream.device);
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuThreadExchangeStreamCaptureMode(int* mode) {
  return driver_call(Function::cuThreadExchangeStreamCaptureMode, [&](Gpu& machine) {
    if (mode == nullptr || *mode < 0 || *mode > driver::kCaptureModeRelaxed) {
      return kInvalidValue;
    }
    std::swap(thread_state(machine).capture_mode, *mode);
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuEventCreate(Event* event, unsigned flags) {
  return driver_call(Function::cuEventCreate, [&](Gpu& machine) {
    const int device = current_device(machine);
    if (device < 0) {
      return kInvalidContext;
    }
    EventState state;
    state.device = device;
    state.timed = (flags & driver::kEventDisableTiming) == 0;
    *event = reinterpret_cast<Event>(kEventBase + (++machine.events_made << 4));
    machine.events.emplace(*event, std::move(state));
    return kSuccess;
  });
}

// What waits for it keeps waiting.
STAGEHAND_SIM_API cuEventDestroy(Event handle) {
  return event_call(Function::cuEventDestroy, handle, [&](Gpu& machine, EventState&) {
    machine.events.erase(handle);
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuEventRecord(Event event_handle, Stream handle) {
  return event_call(Function::cuEventRecord, event_handle, [&](Gpu& machine, EventState& event) {
    StreamState* stream = nullptr;
    const Result found = machine.find_stream(handle, "cuEventRecord", &stream);
    if (found != kSuccess) {
      return found;
    }
    if (stream->device != event.device) {
      return kInvalidHandle;
    }
    event.last = machine.scheduler.record(*stream);
    event.polls = 0;
    return kSuccess;
  });
}

STAGEHAND_SIM_API cuEventQuery(Event handle) {
  return event_call(Function::cuEventQuery, handle, [&](Gpu& machine, EventState& event) {
    const Result allowed = may_ask(machine, event, "cuEventQuery");
    if (allowed != kSuccess || event.last == nullptr) {
      return allowed;
    }
    return machine.scheduler.poll(event) ? kSuccess : kNotReady;
  });
}

STAGEHAND_SIM_API cuEventSynchronize(Event handle) {
  return event_call(Function::cuEventSynchronize, handle, [&](Gpu& machine, EventState& event) {
    const Result allowed = may_ask(machine, event, "cuEventSynchronize");
    return allowed == kSuccess && event.last != nullptr
               ? machine.waited(machine.scheduler.finish(event.last))
               : allowed;
  });
}

STAGEHAND_SIM_API cuEventElapsedTime(float* milliseconds, Event start_handle, Event end_handle) {
  return event_call(
      Function::cuEventElapsedTime, start_handle, [&](Gpu& machine, EventState& start) {
        EventState* end = nullptr;
        const Result found = machine.find_event(end_handle, "cuEventElapsedTime", &end);
        if (found != kSuccess) {
          return found;
        }
        if (!start.timed || !end->timed || start.last == nullptr || end->last == nullptr) {
          return kInvalidHandle;
        }
        if (!start.last->done || !end->last->done) {
          return kNotReady;
        }
        const double nanoseconds =
            static_cast<double>(end->last->time_ns) - static_cast<double>(start.last->time_ns);
        *milliseconds = static_cast<float>(nanoseconds * 1e-6);
        return kSuccess;
      });
}

// To pageable memory the call returns when the copy is complete: a host wait.
STAGEHAND_SIM_API cuMemcpyDtoHAsync(void* host, DevicePtr device, std::size_t bytes,
                                    Stream handle) {
  bool queued = false;
  return stream_call(Function::cuMemcpyDtoHAsync, handle, [&](Gpu& machine, StreamState& stream) {
    if (bytes == 0) {
      return kSuccess;
    }
    const Range to{number(host), bytes};
    Result result = kSuccess;
    if (!std::exchange(queued, true)) {
      result =
          machine.submit(stream, copy_op(OpKind::kD2H, bytes), {{to, true}, {{device, bytes}}});
    }
    return result == kSuccess && !machine.memory.pinned(to)
               ? machine.waited(machine.scheduler.finish(stream))
               : result;
  });
}

// From pageable memory the bytes are staged at the call, and the host may change them after it.
STAGEHAND_SIM_API cuMemcpyHtoDAsync(DevicePtr device, const void* host, std::size_t bytes,
                                    Stream handle) {
  return stream_call(Function::cuMemcpyHtoDAsync, handle, [&](Gpu& machine, StreamState& stream) {
    if (bytes == 0) {
      return kSuccess;
    }
    const Range from{number(host), bytes};
    Op op = copy_op(OpKind::kH2D, bytes);
    if (machine.memory.pinned(from)) {
      return machine.submit(stream, std::move(op), {{{device, bytes}, true}, {from}});
    }
    machine.host_touch(from, false);
    const auto* const begin = static_cast<const unsigned char*>(host);
    op.staged.assign(begin, begin + bytes);
    return machine.submit(stream, std::move(op), {{{device, bytes}, true}});
  });
}

STAGEHAND_SIM_API cuMemcpyDtoDAsync(DevicePtr to, DevicePtr from, std::size_t bytes,
                                    Stream handle) {
  return stream_call(Function::cuMemcpyDtoDAsync, handle, [&](Gpu& machine, StreamState& stream) {
    return bytes == 0 ? kSuccess
                      : machine.submit(stream, copy_op(OpKind::kD2D, bytes),
                                       {{{to, bytes}, true}, {{from, bytes}}});
  });
}

// The copies run one after another, in an order that the seed chooses; the call is paid for once.
STAGEHAND_SIM_API cuMemcpyBatchAsync(DevicePtr* destinations, DevicePtr* sources,
                                     std::size_t* sizes, std::size_t count,
                                     CopyAttributes* attributes, std::size_t* attribute_starts,
                                     std::size_t attribute_count, Stream handle) {
  return stream_call(Function::cuMemcpyBatchAsync, handle, [&](Gpu& machine, StreamState& stream) {
    if (stream.handle == nullptr || count == 0 ||
        !attributes_fit(count, attributes, attribute_starts, attribute_count)) {
      return kInvalidValue;
    }
    std::vector<Work> batch;
    for (std::size_t i = 0; i < count; ++i) {
      const Range to{destinations[i], sizes[i]};
      const Range from{sources[i], sizes[i]};
      const bool to_device = machine.memory.is_device(to.address);
      const bool from_device = machine.memory.is_device(from.address);
      const bool reachable =
          (to_device || machine.memory.pinned(to)) && (from_device || machine.memory.pinned(from));
      if (sizes[i] == 0 || !reachable || (!to_device && !from_device)) {
        return kInvalidValue;
      }
      const OpKind kind = !to_device ? OpKind::kD2H : !from_device ? OpKind::kH2D : OpKind::kD2D;
      batch.push_back({copy_op(kind, sizes[i]), {{to, true}, {from}}});
    }
    for (std::size_t left = batch.size(); left > 1; --left) {
      std::swap(batch[left - 1], batch[machine.scheduler.draw(left)]);
    }
    for (std::size_t i = 1; i < batch.size(); ++i) {
      batch[i].op.cost_paid = true;
    }
    return machine.submit_batch(stream, std::move(batch));
  });
}

STAGEHAND_SIM_API cuStreamWaitValue64(Stream handle, DevicePtr address, std::uint64_t value,
                                      unsigned flags) {
  return stream_call(Function::cuStreamWaitValue64, handle, [&](Gpu& machine, StreamState& stream) {
    const Range word{address, sizeof(std::uint64_t)};
    if (flags != driver::kWaitValueGeq || address % sizeof(std::uint64_t) != 0 ||
        !machine.memory.pinned(word)) {
      return kInvalidValue;
    }
    Op op;
    op.kind = OpKind::kWaitValue;
    op.held_by = {reinterpret_cast<const std::uint64_t*>(address), value};
    return machine.submit(stream, std::move(op), {{word}});
  });
}

STAGEHAND_SIM_API cuMemsetD8Async(DevicePtr device, unsigned char value, std::size_t bytes,
                                  Stream handle) {
  return stream_call(Function::cuMemsetD8Async, handle, [&](Gpu& machine, StreamState& stream) {
    Op op = copy_op(OpKind::kMemset, bytes);
    op.seed = value;
    return bytes == 0 ? kSuccess : machine.submit(stream, std::move(op), {{{device, bytes}, true}});
  });
}

STAGEHAND_SIM_ALIAS(cuStreamDestroy, cuStreamDestroy_v2)
STAGEHAND_SIM_ALIAS(cuEventDestroy, cuEventDestroy_v2)
STAGEHAND_SIM_ALIAS(cuEventElapsedTime, cuEventElapsedTime_v2)
STAGEHAND_SIM_ALIAS(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2)
STAGEHAND_SIM_ALIAS(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2)
STAGEHAND_SIM_ALIAS(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2)
STAGEHAND_SIM_ALIAS(cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2)
STAGEHAND_SIM_ALIAS(cuStreamWaitValue64, cuStreamWaitValue64_v2)

}  // namespace stagehand::sim
