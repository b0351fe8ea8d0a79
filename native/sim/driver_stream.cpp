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
    if (allowed == kSuccess) {
      machine.count_wait(machine.scheduler.finish(stream));
    }
    return allowed;
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
    if (allowed == kSuccess && event.last != nullptr) {
      machine.count_wait(machine.scheduler.finish(event.last));
    }
    return allowed;
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
  return stream_call(Function::cuMemcpyDtoHAsync, handle, [&](Gpu& machine, StreamState& stream) {
    if (bytes == 0) {
      return kSuccess;
    }
    const Range to{number(host), bytes};
    const Result result =
        machine.submit(stream, copy_op(OpKind::kD2H, bytes), {{to, true}, {{device, bytes}}});
    if (result == kSuccess && !machine.memory.pinned(to)) {
      machine.count_wait(machine.scheduler.finish(stream));
    }
    return result;
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

}  // namespace stagehand::sim
