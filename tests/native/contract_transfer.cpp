// The contract, part three: copies in batches, and streams held back by a value.
#include <atomic>
#include <chrono>
#include <thread>

#include "native/contract_suite.hpp"

namespace stagehand::contract {

namespace {

constexpr std::size_t kParts = 64;

// Copies to queue at once.
struct Batch {
  std::vector<DevicePtr> to;
  std::vector<DevicePtr> from;
  std::vector<std::size_t> sizes;
  void add(DevicePtr to_address, DevicePtr from_address, std::size_t bytes) {
    to.push_back(to_address);
    from.push_back(from_address);
    sizes.push_back(bytes);
  }
  void queue(Suite& suite, Stream stream) {
    driver::CopyAttributes attributes;
    std::size_t start = 0;
    OK(suite, memcpy_batch_async, to.data(), from.data(), sizes.data(), sizes.size(), &attributes,
       &start, 1, stream);
  }
};

DevicePtr number(const void* host) { return reinterpret_cast<DevicePtr>(host); }

// Part i: apart from its neighbours, at an odd address or not, of a size of its own.
constexpr std::size_t part_at(std::size_t i) { return i * kPage + 3 * i; }
constexpr std::size_t part_bytes(std::size_t i) { return 1 + 61 * i; }
constexpr std::size_t kSpan = (kParts + 1) * kPage;

// The bytes of every part are `in`'s, and all others are `fill`.
bool exactly_the_parts(const Slab& in, const Slab& out, unsigned char fill) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < kParts; ++i) {
    const std::size_t begin = part_at(i);
    if (!all(out.data() + at, begin - at, fill) ||
        std::memcmp(out.data() + begin, in.data() + begin, part_bytes(i)) != 0) {
      return false;
    }
    at = begin + part_bytes(i);
  }
  return all(out.data() + at, kSpan - at, fill);
}

void a_batch_moves_exactly_its_bytes(Suite& suite) {
  if (suite.driver.memcpy_batch_async == nullptr) {
    return;
  }
  Block block(suite, suite.granule);
  Slab in(suite, kSpan);
  Slab out(suite, kSpan);
  Slab whole(suite, kSpan);
  OwnedStream stream(suite);
  in.number(kSpan, 5);
  Batch inward;
  Batch outward;
  for (std::size_t i = kParts; i-- > 0;) {
    inward.add(block.address + part_at(i), number(in.data() + part_at(i)), part_bytes(i));
    outward.add(number(out.data() + part_at(i)), block.address + part_at(i), part_bytes(i));
  }
  OK(suite, memset_d8_async, block.address, 0xA5, kSpan, stream);
  inward.queue(suite, stream);
  OK(suite, memcpy_dtoh_async, whole.data(), block.address, kSpan, stream);
  outward.queue(suite, stream);
  OK(suite, stream_synchronize, stream);
  suite.expect(exactly_the_parts(in, whole, 0xA5), "a batch in wrote other bytes than its own");
  suite.expect(exactly_the_parts(in, out, 0), "a batch out wrote other bytes than its own");
}

void a_batch_keeps_its_place_in_its_stream(Suite& suite) {
  if (suite.driver.memcpy_batch_async == nullptr) {
    return;
  }
  const std::size_t half = 2 * suite.granule;
  Block block(suite, 2 * half);
  Slab out(suite, 2 * half);
  OwnedStream stream(suite);
  OwnedStream other(suite);
  OwnedEvent done(suite);
  for (unsigned char round = 1; round < 4; ++round) {
    OK(suite, memset_d8_async, block.address, round, block.bytes, stream);
    Batch batch;
    batch.add(number(out.data() + half), block.address + half, half);
    batch.add(number(out.data()), block.address, half);
    batch.queue(suite, stream);
    OK(suite, event_record, done, stream);
    OK(suite, stream_wait_event, other, done, 0);
    OK(suite, memset_d8_async, block.address, 0xEE, block.bytes, other);
    OK(suite, stream_synchronize, other);
    suite.expect(all(out.data(), block.bytes, round),
                 "a batch saw other bytes than those of its place in the stream");
  }
}

// The word that a stream waits for.
class Gate {
 public:
  explicit Gate(Suite& suite) : word_(suite, kPage) {}
  DevicePtr address() const { return number(word_.data()); }
  void raise(std::uint64_t value) {
    std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(word_.data()))
        .store(value, std::memory_order_release);
  }

 private:
  Slab word_;
};

// Asks for five milliseconds, and at least 200 times: longer than a page takes that nothing holds.
bool stays_undone(Suite& suite, Event event) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
  for (int i = 0; i < 200 || std::chrono::steady_clock::now() < until; ++i) {
    if (suite.driver.event_query(event) != driver::kNotReady) {
      return false;
    }
  }
  return true;
}

// Asks for seconds, but not for ever: the value that would let a wait end is not raised yet.
bool gets_done(Suite& suite, Event event) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  Result result = driver::kNotReady;
  while (result == driver::kNotReady && std::chrono::steady_clock::now() < until) {
    result = suite.driver.event_query(event);
  }
  return result == driver::kSuccess;
}

void a_value_holds_back_its_stream_only(Suite& suite) {
  Block block(suite, suite.granule);
  Slab held_bytes(suite, kPage);
  Slab other_bytes(suite, kPage);
  Gate gate(suite);
  OwnedStream held(suite);
  OwnedStream other(suite);
  OwnedEvent before(suite);
  OwnedEvent beside(suite);
  OwnedEvent after(suite);
  OK(suite, memset_d8_async, block.address, 0x31, kPage, held);
  OK(suite, event_record, before, held);
  OK(suite, stream_wait_value64, held, gate.address(), 2, driver::kWaitValueGeq);
  OK(suite, memcpy_dtoh_async, held_bytes.data(), block.address, kPage, held);
  OK(suite, event_record, after, held);
  OK(suite, memset_d8_async, block.address + kPage, 0x32, kPage, other);
  OK(suite, memcpy_dtoh_async, other_bytes.data(), block.address + kPage, kPage, other);
  OK(suite, event_record, beside, other);
  suite.expect(gets_done(suite, before), "work before the value was held back");
  suite.expect(gets_done(suite, beside) && all(other_bytes.data(), kPage, 0x32),
               "work of another stream was held back");
  suite.expect(stays_undone(suite, after) && all(held_bytes.data(), kPage, 0),
               "work behind a value ran before the value was there");
  gate.raise(1);
  suite.expect(stays_undone(suite, after), "work behind a value ran at a smaller value");
  gate.raise(2);
  OK(suite, event_synchronize, after);
  suite.expect(all(held_bytes.data(), kPage, 0x31), "work behind a value was lost");
}

void a_value_raised_while_the_host_waits_lets_it_go(Suite& suite) {
  Block block(suite, suite.granule);
  Slab out(suite, kPage);
  Gate gate(suite);
  OwnedStream held(suite);
  OwnedStream follower(suite);
  OwnedEvent event(suite);
  OK(suite, memset_d8_async, block.address, 0x41, kPage, held);
  OK(suite, stream_wait_value64, held, gate.address(), 1, driver::kWaitValueGeq);
  OK(suite, event_record, event, held);
  OK(suite, stream_wait_event, follower, event, 0);
  OK(suite, memcpy_dtoh_async, out.data(), block.address, kPage, follower);
  std::thread raiser([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    suite.driver.event_query(event);  // a thread that raises values may call the driver
    gate.raise(1);
  });
  OK(suite, stream_synchronize, follower);
  raiser.join();
  suite.expect(all(out.data(), kPage, 0x41), "a stream behind a held one saw other bytes");
}

void a_value_already_there_holds_nothing_back(Suite& suite) {
  Gate gate(suite);
  OwnedStream stream(suite);
  gate.raise(7);
  for (const std::uint64_t value : {std::uint64_t{7}, std::uint64_t{3}, std::uint64_t{0}}) {
    OK(suite, stream_wait_value64, stream, gate.address(), value, driver::kWaitValueGeq);
  }
  OK(suite, stream_synchronize, stream);
  // Counted round: 5 comes after the largest values.
  gate.raise(5);
  OK(suite, stream_wait_value64, stream, gate.address(), ~std::uint64_t{0}, driver::kWaitValueGeq);
  OK(suite, stream_synchronize, stream);
}

}  // namespace

std::vector<Promise> transfer_promises() {
  return {
      {"a batch of copies moves exactly its bytes", a_batch_moves_exactly_its_bytes},
      {"a batch of copies keeps its place in its stream", a_batch_keeps_its_place_in_its_stream},
      {"a value holds back its stream, and no other", a_value_holds_back_its_stream_only},
      {"a value raised while the host waits lets it go",
       a_value_raised_while_the_host_waits_lets_it_go},
      {"a value already there holds nothing back", a_value_already_there_holds_nothing_back},
  };
}

}  // namespace stagehand::contract
