// The contract, part two: order, time, and the calling thread.
#include "native/contract_suite.hpp"

namespace stagehand::contract {

namespace {

void memset_fills_in_stream_order(Suite& suite) {
  Block block(suite, suite.granule);
  Slab out(suite, kPage);
  OwnedStream stream(suite);
  OK(suite, memset_d8_async, block.address, 0x11, kPage, stream);
  OK(suite, memset_d8_async, block.address + 100, 0x22, 200, stream);
  OK(suite, memcpy_dtoh_async, out.data(), block.address, kPage, stream);
  OK(suite, memset_d8_async, block.address, 0x33, kPage, stream);
  OK(suite, stream_synchronize, stream);
  suite.expect(all(out.data(), 100, 0x11) && all(out.data() + 100, 200, 0x22) &&
                   all(out.data() + 300, kPage - 300, 0x11),
               "the copy did not see exactly what was queued before it");
}

void waits_order_streams(Suite& suite) {
  Block block(suite, 2 * suite.granule);
  Slab in(suite, block.bytes);
  Slab out(suite, block.bytes);
  OwnedStream writer(suite);
  OwnedStream reader(suite);
  OwnedEvent written(suite);
  OwnedEvent read(suite);
  for (unsigned round = 0; round < 3; ++round) {
    in.number(block.bytes, round);
    OK(suite, memcpy_htod_async, block.address, in.data(), block.bytes, writer);
    OK(suite, event_record, written, writer);
    OK(suite, stream_wait_event, reader, written, 0);
    OK(suite, memcpy_dtoh_async, out.data(), block.address, block.bytes, reader);
    OK(suite, event_record, read, reader);
    OK(suite, stream_wait_event, writer, read, 0);
    OK(suite, memset_d8_async, block.address, 0, block.bytes, writer);
    OK(suite, stream_synchronize, reader);
    suite.expect(same(in, out, block.bytes), "a wait did not order two streams");
    OK(suite, stream_synchronize, writer);
  }
}

void a_wait_takes_the_record_at_the_call(Suite& suite) {
  Block block(suite, 2 * suite.granule);
  Slab out(suite, block.bytes);
  OwnedStream first(suite);
  OwnedStream second(suite);
  OwnedEvent event(suite);
  OwnedEvent done(suite);
  OK(suite, memset_d8_async, block.address, 0x01, block.bytes, first);
  OK(suite, event_record, event, first);
  OK(suite, stream_wait_event, second, event, 0);
  OK(suite, memcpy_dtoh_async, out.data(), block.address, block.bytes, second);
  OK(suite, event_record, done, second);
  OK(suite, stream_wait_event, first, done, 0);
  OK(suite, memset_d8_async, block.address, 0x02, block.bytes, first);
  // The second record comes after work that waits for the reader: were the reader's wait to take
  // this record instead, the two streams would wait for each other for ever.
  OK(suite, event_record, event, first);
  OK(suite, event_synchronize, event);
  suite.expect(all(out.data(), block.bytes, 0x01), "a wait took a later record");
}

void an_unrecorded_event_is_complete(Suite& suite) {
  OwnedEvent event(suite);
  OwnedStream stream(suite);
  OK(suite, event_query, event);
  OK(suite, event_synchronize, event);
  OK(suite, stream_wait_event, stream, event, 0);
  OK(suite, stream_synchronize, stream);
}

void queries_become_true(Suite& suite) {
  Block block(suite, suite.granule);
  OwnedStream stream(suite);
  OwnedEvent event(suite);
  OK(suite, memset_d8_async, block.address, 0x44, block.bytes, stream);
  OK(suite, event_record, event, stream);
  Result result = driver::kNotReady;
  for (long i = 0; i < 100'000'000 && result == driver::kNotReady; ++i) {
    result = suite.driver.event_query(event);
  }
  suite.ok(result, "event_query, asked again and again,");
  OK(suite, event_query, event);
}

void elapsed_time_grows_with_the_work(Suite& suite) {
  Block block(suite, suite.granule);
  Slab out(suite, suite.granule);
  OwnedStream stream(suite);
  OwnedEvent start(suite, 0);
  OwnedEvent middle(suite, 0);
  OwnedEvent end(suite, 0);
  OK(suite, event_record, start, stream);
  OK(suite, memcpy_dtoh_async, out.data(), block.address, block.bytes, stream);
  OK(suite, event_record, middle, stream);
  for (int i = 0; i < 8; ++i) {
    OK(suite, memcpy_dtoh_async, out.data(), block.address, block.bytes, stream);
  }
  OK(suite, event_record, end, stream);
  OK(suite, event_synchronize, end);
  float one = 0;
  float eight = 0;
  float nine = 0;
  OK(suite, event_elapsed_time, &one, start, middle);
  OK(suite, event_elapsed_time, &eight, middle, end);
  OK(suite, event_elapsed_time, &nine, start, end);
  suite.expect(one > 0 && eight > 2 * one && nine > eight, "times do not add up");
  OwnedEvent untimed(suite);
  OK(suite, event_record, untimed, stream);
  OK(suite, event_synchronize, untimed);
  suite.expect(suite.driver.event_elapsed_time(&one, start, untimed) != driver::kSuccess,
               "an event without timing gave a time");
}

void work_outlives_its_stream_and_event(Suite& suite) {
  Block block(suite, suite.granule);
  Slab out(suite, suite.granule);
  OwnedEvent done(suite);
  Stream brief = nullptr;
  Event between = nullptr;
  OwnedStream reader(suite);
  OK(suite, stream_create, &brief, driver::kStreamNonBlocking, 0);
  OK(suite, event_create, &between, driver::kEventDisableTiming);
  OK(suite, memset_d8_async, block.address, 0x66, block.bytes, brief);
  OK(suite, event_record, between, brief);
  OK(suite, stream_wait_event, reader, between, 0);
  OK(suite, event_destroy, between);
  OK(suite, stream_destroy, brief);
  OK(suite, memcpy_dtoh_async, out.data(), block.address, block.bytes, reader);
  OK(suite, event_record, done, reader);
  OK(suite, event_synchronize, done);
  suite.expect(all(out.data(), block.bytes, 0x66), "destroying a stream or event undid work");
}

void capture_mode_is_exchanged(Suite& suite) {
  int mode = driver::kCaptureModeRelaxed;
  OK(suite, thread_exchange_capture_mode, &mode);
  const int before = mode;
  OK(suite, thread_exchange_capture_mode, &mode);
  suite.expect(mode == driver::kCaptureModeRelaxed, "the mode set was not the mode found");
  suite.expect(before != mode, "a thread starts in the relaxed mode");
  OwnedStream stream(suite);
  int status = -1;
  OK(suite, stream_is_capturing, stream, &status);
  suite.expect(status == driver::kCaptureNone, "a fresh stream is captured");
}

void the_guard_restores_the_context(Suite& suite) {
  const driver::Table& driver = suite.driver;
  Context popped = nullptr;
  Context current = nullptr;
  OK(suite, ctx_pop_current, &popped);
  OK(suite, ctx_get_current, &current);
  {
    const driver::ContextGuard outer(driver, suite.context);
    const driver::ContextGuard inner(driver, suite.context);
    Context inside = nullptr;
    OK(suite, ctx_get_current, &inside);
    suite.expect(inside == suite.context, "the guard did not make its context current");
  }
  Context after = nullptr;
  OK(suite, ctx_get_current, &after);
  suite.expect(after == current, "the guard left another context than it found");
  OK(suite, ctx_push_current, suite.context);
}

void errors_have_names(Suite& suite) {
  const char* name = nullptr;
  OK(suite, get_error_name, driver::kOutOfMemory, &name);
  suite.expect(name != nullptr && std::strcmp(name, "CUDA_ERROR_OUT_OF_MEMORY") == 0,
               "error 2 is not named out of memory");
  OK(suite, get_error_name, driver::kNotReady, &name);
  suite.expect(name != nullptr && std::strcmp(name, "CUDA_ERROR_NOT_READY") == 0,
               "error 600 is not named not ready");
}

}  // namespace

std::vector<Promise> order_promises() {
  return {
      {"memset and copies of one stream run in order", memset_fills_in_stream_order},
      {"a wait orders two streams", waits_order_streams},
      {"a wait takes the record at the call", a_wait_takes_the_record_at_the_call},
      {"an event never recorded is complete", an_unrecorded_event_is_complete},
      {"a query becomes true without a wait", queries_become_true},
      {"elapsed time grows with the work", elapsed_time_grows_with_the_work},
      {"work outlives its stream and event", work_outlives_its_stream_and_event},
      {"the capture mode is exchanged", capture_mode_is_exchanged},
      {"the context guard restores what it found", the_guard_restores_the_context},
      {"errors have names", errors_have_names},
  };
}

}  // namespace stagehand::contract
