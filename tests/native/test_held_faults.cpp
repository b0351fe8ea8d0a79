// Where torch's own allocator cuts the blocks: any call of the engine's to the driver may fail
// (rule O4), ids are good for one record only (O2), and the host copy outlives its use (O3).
#include <algorithm>
#include <array>

#include "native/held_rig.hpp"

namespace stagehand::core::test {
namespace {

// Faults ------------------------------------------------------------------------------------------

enum Call : std::size_t {
  kEventCreate,
  kEventRecord,
  kEventQuery,
  kEventSynchronize,
  kStreamWaitEvent,
  kStreamIsCapturing,
  kStreamSynchronize,
  kCopyOut,
  kCopyIn,
  kCopyBatch,
  kHostRegister,
  kMemGetInfo,
  kCalls,
};

// Of the engine's calls only: torch's own, and what the test asks of the driver, always work.
struct Faults {
  std::size_t call = kCalls;  // which fails,
  std::uint64_t nth = 0;      // from here on
  std::uint64_t times = 0;
  bool armed = false;
  std::array<std::uint64_t, kCalls> calls{};  // while armed
};
Faults g_faults;

bool fails(std::size_t call) {
  if (!g_faults.armed) {
    return false;
  }
  const std::uint64_t count = ++g_faults.calls.at(call);
  return call == g_faults.call && count >= g_faults.nth && count - g_faults.nth < g_faults.times;
}

template <auto kMember, std::size_t kCall, typename... Args>
driver::Result may_fail(Args... args) {
  static const driver::Table real = sim::table();
  return fails(kCall) ? 999 : (real.*kMember)(args...);
}

template <auto kMember, std::size_t kCall, typename... Args>
void patch(driver::Table& table, driver::Result (*driver::Table::* /*member*/)(Args...)) {
  table.*kMember = &may_fail<kMember, kCall, Args...>;
}

template <auto kMember, std::size_t kCall>
void patch(driver::Table& table) {
  patch<kMember, kCall>(table, kMember);
}

void patch_all(driver::Table& table) {
  using driver::Table;
  patch<&Table::event_create, kEventCreate>(table);
  patch<&Table::event_record, kEventRecord>(table);
  patch<&Table::event_query, kEventQuery>(table);
  patch<&Table::event_synchronize, kEventSynchronize>(table);
  patch<&Table::stream_wait_event, kStreamWaitEvent>(table);
  patch<&Table::stream_is_capturing, kStreamIsCapturing>(table);
  patch<&Table::stream_synchronize, kStreamSynchronize>(table);
  patch<&Table::memcpy_dtoh_async, kCopyOut>(table);
  patch<&Table::memcpy_htod_async, kCopyIn>(table);
  patch<&Table::memcpy_batch_async, kCopyBatch>(table);
  patch<&Table::host_register, kHostRegister>(table);
  patch<&Table::mem_get_info, kMemGetInfo>(table);
}

Machine machine(std::uint64_t seed) {
  Machine with = kHeldMachine;
  with.seed = seed;
  with.patch = patch_all;
  return with;
}

class FaultRig : public HeldRig {
 public:
  explicit FaultRig(std::uint64_t seed = 1, bool triggers = true)
      : HeldRig(machine(seed), triggers) {
    driver = sim::table();
  }
  ~FaultRig() { g_faults = {}; }
  FaultRig(const FaultRig&) = delete;
  FaultRig& operator=(const FaultRig&) = delete;

  // Runs `act` with the fault in it. The books are whole after it, whatever has failed.
  template <typename Act>
  void under_fault(Act act) {
    g_faults.armed = true;
    act();
    g_faults.armed = false;
    verify();
  }
  std::uint64_t calls(Call call) const { return g_faults.calls.at(call); }

  // Asks until the record comes back, as a program that catches the error would.
  void back_at_last(const SavedTensor& saved, driver::Stream consumer) {
    CHECK(try_read(saved, consumer));
    drop_handle(saved);
  }
  // False: it did not come back, and nothing has changed.
  bool try_read(const SavedTensor& saved, driver::Stream consumer) {
    const Bytes aliases = counters().aliases;
    const Unpacked again = runtime->unpack(saved.record, saved.offset, consumer);
    if (again.status != Status::ok) {
      CHECK(again.block == nullptr);
      CHECK(again.storage == nullptr);
      CHECK_EQ(counters().aliases, aliases);
      return false;
    }
    check(again, saved, consumer);
    drop(view(again, saved, consumer));
    return true;
  }
  // All is dropped. A storage whose stream could not be made to wait leaves at the next miss, or
  // without the trigger at the next save.
  void verify_all_gone(driver::Stream s) {
    torch.drop(torch.make(50_MiB, s));
    look(s);
    verify_empty();
  }
};

constexpr std::uint64_t kSeeds = 2;
constexpr std::uint64_t kMostCalls = 8;

// Every call of every function fails while `scenario` runs what it puts under fault: alone, and
// with all that follow it. Returns how often each was called there at most.
template <typename Scenario>
std::array<std::uint64_t, kCalls> fail_each_call(Scenario scenario, bool triggers = true) {
  std::array<std::uint64_t, kCalls> most{};
  for (std::size_t call = 0; call < kCalls; ++call) {
    for (const std::uint64_t times : {1, 100'000}) {
      std::uint64_t calls = 1;
      for (std::uint64_t nth = 1; nth <= calls && nth <= kMostCalls; ++nth) {
        for (std::uint64_t seed = 0; seed < (calls > 0 ? kSeeds : 0); ++seed) {
          g_faults = {call, nth, times, false, {}};
          FaultRig rig(seed, triggers);
          const int before = stagehand::test::failures();
          const driver::Stream s = rig.stream();
          scenario(rig, s);
          calls = g_faults.calls.at(call);
          most.at(call) = std::max(most.at(call), calls);
          rig.verify_all_gone(s);
          if (stagehand::test::failures() != before) {
            std::fprintf(stderr, "  with call %zu of %zu, %s, seed %zu\n", std::size_t{nth}, call,
                         times == 1 ? "alone" : "and all after it", std::size_t{seed});
            return most;
          }
        }
      }
    }
  }
  return most;
}

// O4 ----------------------------------------------------------------------------------------------

TEST("O4: whatever fails while a miss evicts, the bytes are right and the next miss evicts") {
  const auto calls = fail_each_call([](FaultRig& rig, driver::Stream s) {
    rig.budget(kHeldSegment, 16_MiB);
    const SavedTensor saved = rig.retain(kHeldBlock, s);
    const HeldTensor rest = rig.make(16_MiB, s);
    HeldTensor next;
    rig.under_fault([&] { next = rig.make(kHeldBlock, s); });
    rig.check(next, s);
    rig.check(rest, s);
    rig.evict_all(s);
    CHECK(!rig.resident(saved));
    const HeldTensor more = rig.make(kHeldBlock, s);
    rig.check(more, s);
    rig.drop(more);
    rig.drop(next);
    rig.drop(rest);
    rig.back_at_last(saved, s);
  });
  for (const Call call : {kEventRecord, kStreamWaitEvent, kCopyOut, kHostRegister}) {
    CHECK(calls.at(call) > 0);
  }
}

TEST("O4: whatever fails while small records leave together, each comes back with its bytes") {
  const auto calls = fail_each_call([](FaultRig& rig, driver::Stream s) {
    rig.budget(64_MiB, 64_MiB);
    std::vector<SavedTensor> saved = rig.retain_many(4, 32_KiB, s);
    rig.under_fault([&] { rig.evict_all(s); });
    rig.evict_all(s);
    for (const SavedTensor& one : saved) {
      // Host memory that was refused is not asked for again at once.
      CHECK(!rig.resident(one) || g_faults.call == kHostRegister);
      rig.back_at_last(one, s);
    }
  });
  CHECK(calls.at(kCopyBatch) > 0);
}

TEST("O4: whatever fails while a clean record leaves, its copy serves the next restore") {
  fail_each_call([](FaultRig& rig, driver::Stream s) {
    const driver::Stream consumer = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const SavedTensor saved = rig.retain(kHeldBlock, s);
    rig.evict_all(s);
    rig.drop(rig.unpack(saved, consumer));
    rig.under_fault([&] { rig.evict_all(s); });
    rig.evict_all(s);
    CHECK(!rig.resident(saved));
    CHECK_EQ(rig.counters().dirty_evictions, 1);
    const HeldTensor next = rig.make(kHeldBlock, s);
    rig.check(next, s);
    rig.drop(next);
    rig.back_at_last(saved, consumer);
  });
}

TEST("O4: whatever fails while a record comes back, it does so at the next try") {
  const auto calls = fail_each_call([](FaultRig& rig, driver::Stream s) {
    const driver::Stream consumer = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const SavedTensor one = rig.retain(kHeldBlock, s);
    const SavedTensor two = rig.retain(kHeldBlock, s);
    rig.evict_all(s);
    rig.under_fault([&] {
      rig.try_read(one, s);
      rig.try_read(two, consumer);
    });
    rig.back_at_last(two, consumer);
    rig.back_at_last(one, s);
    CHECK_EQ(rig.counters().pinned_used_bytes, 0);
  });
  for (const Call call : {kEventRecord, kStreamWaitEvent, kCopyIn}) {
    CHECK(calls.at(call) > 0);
  }
}

TEST("O4: whatever fails while a restore has to evict another record, both come back") {
  const auto calls = fail_each_call([](FaultRig& rig, driver::Stream s) {
    rig.budget(kHeldSegment, 16_MiB);
    const SavedTensor first = rig.retain(kHeldBlock, s);
    rig.evict_all(s);
    const SavedTensor second = rig.retain(kHeldBlock, s);
    const HeldTensor rest = rig.make(16_MiB, s);
    rig.under_fault([&] {
      rig.look(s);
      rig.try_read(first, s);
    });
    rig.check(rest, s);
    rig.back_at_last(second, s);
    rig.back_at_last(first, s);
    rig.drop(rest);
  });
  CHECK(calls.at(kCopyOut) > 0);
  CHECK(calls.at(kCopyIn) > 0);
}

TEST("O4: whatever fails while a prefetch runs, what was asked for and what was not come back") {
  const auto calls = fail_each_call([](FaultRig& rig, driver::Stream s) {
    rig.budget(64_MiB, 64_MiB);
    std::vector<SavedTensor> saved = rig.retain_many(2, kHeldBlock, s);
    rig.evict_all(s);
    saved.push_back(rig.retain(kHeldBlock, s));  // all copies in are ahead of need
    rig.under_fault([&] { rig.try_read(saved.back(), s); });
    for (; !saved.empty(); saved.pop_back()) {
      rig.back_at_last(saved.back(), s);
    }
    CHECK_EQ(rig.counters().pinned_used_bytes, 0);
  });
  for (const Call call : {kEventRecord, kStreamWaitEvent, kCopyIn}) {
    CHECK(calls.at(call) > 0);
  }
}

TEST("O4: whatever fails while a handle dies, the address is reused only behind its readers") {
  for (const bool restored : {false, true}) {
    for (const bool handle_first : {false, true}) {
      const auto calls = fail_each_call([&](FaultRig& rig, driver::Stream s) {
        const driver::Stream consumer = rig.stream();
        rig.budget(64_MiB, 64_MiB);
        const SavedTensor saved = rig.retain(kHeldBlock, s);
        if (restored) {
          rig.evict_all(s);
        }
        rig.order(s, consumer);
        const HeldTensor view = rig.unpack(saved, consumer);
        HeldTensor next;
        g_faults.armed = true;  // no drain: the consumer still reads when the block is reused
        if (handle_first) {
          rig.drop_handle(saved);
          rig.drop(view);
        } else {
          rig.drop(view);
          rig.look(s);
          rig.drop_handle(saved);
        }
        next = rig.make(kHeldBlock, s);
        g_faults.armed = false;
        rig.check(next, s);
        CHECK_EQ(rig.counters().records, 0);
        rig.verify();
        rig.drop(next);
      });
      CHECK(calls.at(kEventRecord) > 0);
      CHECK(calls.at(kStreamWaitEvent) > 0);
    }
  }
}

TEST("O4: whatever fails where there is no trigger, room is made at the next save") {
  const auto calls = fail_each_call(
      [](FaultRig& rig, driver::Stream s) {
        rig.budget(16_MiB, 8_MiB);
        std::vector<SavedTensor> saved = rig.retain_many(4, kHeldBlock, s);
        rig.under_fault([&] {
          for (int i = 0; i < 2; ++i) {
            const HeldTensor tensor = rig.make(kHeldBlock, s);
            saved.push_back(rig.save(tensor));
            rig.drop(tensor);
          }
          rig.look(s);
        });
        for (int i = 0; i < 4; ++i) {
          rig.look(s);
          stagehand_sim_drain();
        }
        CHECK(rig.torch.allocated() <= 16_MiB);
        for (; !saved.empty(); saved.pop_back()) {
          rig.back_at_last(saved.back(), s);
        }
      },
      false);
  for (const Call call : {kEventRecord, kEventQuery, kEventSynchronize, kCopyOut}) {
    CHECK(calls.at(call) > 0);
  }
}

// O2 ----------------------------------------------------------------------------------------------

void check_stale(HeldRig& rig, const SavedTensor& gone, driver::Stream s) {
  const Counters before = rig.counters();
  const Unpacked again = rig.runtime->unpack(gone.record, gone.offset, s);
  CHECK_EQ(again.status, Status::stale);
  CHECK(again.block == nullptr);
  CHECK(!rig.resident(gone));
  CHECK_EQ(rig.runtime->bytes_of(gone.record), 0);
  rig.drop_handle(gone);
  CHECK_EQ(rig.counters().handles, before.handles);
  CHECK_EQ(rig.counters().records, before.records);
}

TEST("O2: with its last handle a record's id is stale, also once its address is saved again") {
  for (const bool restored : {false, true}) {
    HeldRig rig;
    const driver::Stream s = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const SavedTensor gone = rig.retain(kHeldBlock, s);
    if (restored) {
      rig.evict_all(s);
    }
    const HeldTensor view = rig.unpack(gone, s);
    const Address address = view.address();
    rig.drop_handle(gone);
    check_stale(rig, gone, s);  // the block is still there
    rig.drop(view);
    const HeldTensor next = rig.make(kHeldBlock, s);
    CHECK_EQ(next.address(), address);
    check_stale(rig, gone, s);
    const SavedTensor saved = rig.save(next);
    CHECK_EQ(saved.record.index, gone.record.index);
    CHECK(saved.record.generation != gone.record.generation);
    check_stale(rig, gone, s);
    rig.drop(next);
    rig.evict_all(s);
    check_stale(rig, gone, s);
    rig.back(saved, s);
    rig.verify_empty();
  }
}

TEST("O2: a storage saved again after its record's end has an id of its own") {
  HeldRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const HeldTensor tensor = rig.make(kHeldBlock, s);
  const SavedTensor gone = rig.save(tensor);
  rig.drop_handle(gone);
  const SavedTensor saved = rig.save(tensor);
  CHECK(saved.record.generation != gone.record.generation);
  check_stale(rig, gone, s);
  CHECK(rig.resident(saved));
  rig.drop(tensor);
  rig.back(saved, s);
  rig.verify_empty();
}

// O3 ----------------------------------------------------------------------------------------------

TEST("O3: the host copy stays while a handle does, and a second eviction copies nothing") {
  FaultRig rig;
  const driver::Stream s = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  const HeldTensor tensor = rig.make(kHeldBlock, s);
  const SavedTensor one = rig.save(tensor);
  const SavedTensor two = rig.save(tensor);
  rig.drop(tensor);
  rig.evict_all(s);
  CHECK_EQ(rig.counters().pinned_used_bytes, kHeldBlock);
  const HeldTensor view = rig.unpack(one, s);
  rig.drop_handle(one);
  CHECK_EQ(rig.counters().pinned_used_bytes, kHeldBlock);
  rig.drop(view);
  const Counters before = rig.counters();
  rig.under_fault([&] { rig.evict_all(s); });
  CHECK(!rig.resident(two));
  CHECK_EQ(rig.calls(kCopyOut), 0);
  CHECK_EQ(rig.counters().clean_evictions, before.clean_evictions + 1);
  CHECK_EQ(rig.counters().dirty_evictions, before.dirty_evictions);
  CHECK_EQ(rig.counters().evicted_bytes, before.evicted_bytes);
  CHECK_EQ(rig.counters().pinned_used_bytes, kHeldBlock);
  rig.drop(rig.unpack(two, s));
  CHECK_EQ(rig.counters().pinned_used_bytes, kHeldBlock);
  rig.drop_handle(two);
  CHECK_EQ(rig.counters().pinned_used_bytes, 0);
  rig.verify_empty();
}

TEST("O3: host memory whose record is gone is written again only behind the restore from it") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    HeldRig rig({.seed = seed, .classes = {{kHeldBlock}, {1}}, .host_limit = kHeldBlock});
    const driver::Stream s = rig.stream();
    rig.budget(64_MiB, 64_MiB);
    const SavedTensor first = rig.retain(kHeldBlock, s);
    rig.evict_all(s);
    const unsigned char* host = last_host_copy();
    const HeldTensor view = rig.unpack(first, s);
    rig.drop_handle(first);
    const driver::Stream other = rig.stream();
    const SavedTensor second = rig.retain(kHeldBlock, other);
    rig.evict_all(other);
    CHECK(!rig.resident(second));
    CHECK(last_host_copy() == host);
    rig.check(view, s);
    rig.drop(view);
    rig.back(second, other);
    rig.verify_empty();
  }
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
