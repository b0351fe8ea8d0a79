// Growing, gathering and giving back: core/device_heap without a runtime.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/device_heap.hpp"
#include "native/core_rig.hpp"

namespace stagehand::core {
namespace {

// A heap of its own on a fresh simulated GPU. Blocks are owned here as torch would.
struct Heap {
  explicit Heap(Bytes memory = 512_MiB)
      : rig({.memory = memory}),
        gate(rig.driver),
        clocks(gate),
        heap(0, memory, 2_MiB, clocks, counters),
        stream(rig.stream()) {
    stagehand_sim_progress(0);
  }
  Arena& arena(driver::Stream on, Bytes bytes = 32_MiB, std::uint64_t graph = 0) {
    return *heap.arena_for(on, bytes, graph);
  }
  Arena& arena() { return arena(stream); }
  Block* own(Block* block) {
    if (block != nullptr) {
      block->owned_by_torch = true;
      counters.occupy(block->size);
    }
    return block;
  }
  Block* take(Arena& from, Bytes bytes) { return own(heap.take(from, bytes)); }
  Block* grown(Arena& from, Bytes bytes, Bytes ceiling = kUnlimited) {
    Block* block = take(from, bytes);
    if (block == nullptr) {
      CHECK_EQ(heap.grow(from, bytes, ceiling, ceiling), Status::ok);
      block = take(from, bytes);
    }
    CHECK(block != nullptr);
    return block;
  }
  void give(Block* block) {
    block->owned_by_torch = false;
    block->idle_from = block->clock->upcoming();
    counters.vacate(block->size);
    heap.give(block);
  }
  void fill(const Block* block, std::uint64_t seed) {
    CHECK_EQ(stagehand_sim_fill(block->clock->stream(), block->address, block->size, seed), 0);
  }
  void verify() {
    CHECK_EQ(std::string(heap.broken() != nullptr ? heap.broken() : ""), "");
    CHECK_EQ(counters.mapped, stagehand_sim_physical_bytes(0));
    CHECK_EQ(counters.mapped + counters.former_bytes, stagehand_sim_mapped_bytes(0));
    CHECK_EQ(stagehand_sim_hazards(STAGEHAND_SIM_ALL), 0);
    CHECK_EQ(stagehand_sim_mismatches(), 0);
  }

  test::CoreRig rig;
  Gate gate;
  ClockBank clocks;
  Counters counters;
  DeviceHeap heap;
  driver::Stream stream;
};

TEST("blocks are whole units of 512 bytes, and large ones lose at most 1.6 %") {
  CHECK_EQ(DeviceHeap::block_bytes(1), 512);
  CHECK_EQ(DeviceHeap::block_bytes(512), 512);
  CHECK_EQ(DeviceHeap::block_bytes(513), 1024);
  CHECK_EQ(DeviceHeap::block_bytes(1_MiB), 1_MiB);
  for (Bytes bytes = 1_MiB + 1; bytes < 100_GiB; bytes += bytes / 7) {
    const Bytes block = DeviceHeap::block_bytes(bytes);
    CHECK(block >= bytes);
    CHECK_EQ(block % kBlockUnit, 0);
    CHECK(static_cast<double>(block - bytes) <= 0.016 * static_cast<double>(bytes));
  }
}

TEST("a stream has one small and one large arena, and a graph has its own") {
  Heap t;
  Arena& large = t.arena(t.stream, 2_MiB);
  CHECK(&t.arena(t.stream, 2_GiB) == &large);
  CHECK(&t.arena(t.stream, 1_MiB) != &large);
  CHECK(&t.arena(t.stream, 2_MiB, 9) != &large);
  CHECK(&t.arena(t.rig.stream(), 2_MiB) != &large);
}

TEST("growth adds less than one piece more than was asked, in few calls, and the rest is used") {
  for (const Bytes bytes : {2_MiB, 30_MiB, 100_MiB, 510_MiB}) {
    Heap t(1_GiB);
    t.grown(t.arena(), bytes);
    CHECK(t.counters.mapped >= bytes);
    CHECK(t.counters.mapped < bytes + kLargestPiece);
    CHECK(stagehand_sim_call_count("cuMemCreate") <= 17);
    CHECK_EQ(stagehand_sim_call_count("cuMemSetAccess"), 1);
    const Bytes rest = t.counters.mapped - bytes;
    CHECK(rest == 0 || t.take(t.arena(), rest) != nullptr);
    CHECK_EQ(t.counters.grows, 1);
    t.verify();
  }
}

// A piece costs as much whatever its size, and beside a copy out a millisecond.
TEST("a request of some MiB takes one to three pieces on a large device, more on a small one") {
  const auto pieces = [](Bytes memory, Bytes bytes) {
    Heap t(memory);
    Arena& arena = t.arena();
    t.grown(arena, bytes);
    return arena.pieces.size();
  };
  for (const Bytes memory : {24_GiB, 80_GiB}) {
    CHECK_EQ(pieces(memory, 4_MiB), 1);
    CHECK_EQ(pieces(memory, 20_MiB), 3);
    CHECK_EQ(pieces(memory, 64_MiB), 8);
    CHECK_EQ(pieces(memory, 192_MiB), 12);
  }
  CHECK_EQ(pieces(2_GiB, 20_MiB), 10);
}

TEST("a small arena grows by one granule") {
  Heap t;
  t.grown(t.arena(t.stream, 512), 512);
  CHECK_EQ(t.counters.mapped, 2_MiB);
  t.verify();
}

TEST("coarser pieces are half of a typical block, or 1/512 of what is mapped, up to 32 MiB") {
  const auto pieces = [](Bytes mapped, Bytes block) {
    Heap t(64_GiB);
    t.give(t.grown(t.arena(t.stream), mapped));
    CHECK(t.heap.coarsen(block));
    CHECK(!t.heap.coarsen(2 * block));  // once
    Arena& other = t.arena(t.rig.stream());
    t.give(t.grown(other, 64_MiB));
    return other.pieces.size();
  };
  CHECK_EQ(pieces(1_GiB, 34_MiB), 4);
  CHECK_EQ(pieces(1_GiB, 71_MiB), 2);
  CHECK_EQ(pieces(1_GiB, 3_GiB), 2);  // no larger than 32 MiB
  CHECK_EQ(pieces(16_GiB, 1_MiB), 2);
}

TEST("growth under a ceiling is what is missing where a whole piece would cross it") {
  Heap t;
  t.grown(t.arena(), 20_MiB, 20_MiB);
  CHECK_EQ(t.counters.mapped, 20_MiB);
  CHECK_EQ(t.heap.grow(t.arena(), 6_MiB, 24_MiB, 24_MiB), Status::out_of_memory);
  CHECK_EQ(t.heap.grow(t.arena(), 4_MiB, 24_MiB, 24_MiB), Status::ok);
  CHECK_EQ(t.counters.mapped, 24_MiB);
  t.verify();
}

TEST("free memory that ends where the hole begins counts toward the request") {
  Heap t;
  t.grown(t.arena(), 8_MiB);
  t.give(t.grown(t.arena(), 24_MiB));
  const Bytes before = t.counters.mapped;
  CHECK_EQ(t.heap.grow(t.arena(), 40_MiB, before + 16_MiB), Status::ok);
  CHECK_EQ(t.counters.mapped, before + 16_MiB);
  CHECK(t.take(t.arena(), 40_MiB) != nullptr);
  t.verify();
}

TEST("a freed block is found by no address but its own, and joins its neighbours") {
  Heap t;
  Block* a = t.grown(t.arena(), 8_MiB);
  Block* b = t.grown(t.arena(), 8_MiB);
  CHECK(t.heap.find(a->address + 8_MiB - 1) == a);
  CHECK(t.heap.find(a->address + 8_MiB) == b);
  CHECK(t.heap.find(12345) == nullptr);
  t.give(a);
  t.give(b);
  CHECK(t.take(t.arena(), 16_MiB) != nullptr);
  t.verify();
}

TEST("S7: a block freed by its own stream is free at once, without event or wait") {
  Heap t;
  Block* a = t.grown(t.arena(), 8_MiB);
  t.fill(a, 1);
  t.give(a);
  CHECK(t.take(t.arena(), 8_MiB) == a);
  CHECK_EQ(stagehand_sim_call_count("cuEventRecord"), 0);
  CHECK_EQ(stagehand_sim_call_count("cuStreamWaitEvent"), 0);
  CHECK_EQ(stagehand_sim_call_count("cuEventQuery"), 0);
}

TEST("a block with an open fence is evicting until the fence has passed") {
  Heap t;
  Block* a = t.grown(t.arena(), 32_MiB);
  StreamClock& other = t.clocks.of(t.rig.stream());
  stagehand_sim_kernel(other.stream(), 1000, nullptr, 0, nullptr, 0, nullptr, nullptr);
  Tick tick;
  other.record(&tick);
  a->fence.add(tick);
  t.give(a);
  CHECK(a->state == BlockState::evicting);
  CHECK(t.take(t.arena(), 8_MiB) == nullptr);
  t.heap.settle(t.arena());
  CHECK(a->state == BlockState::evicting);
  stagehand_sim_drain();
  t.heap.settle(t.arena());
  CHECK(t.take(t.arena(), 8_MiB) != nullptr);
  t.verify();
}

TEST("gathering moves free pieces of other streams behind their last use, without a host wait") {
  Heap t;
  Arena& other = t.arena(t.rig.stream());
  Block* a = t.grown(other, 32_MiB);
  t.fill(a, 1);
  t.give(a);
  CHECK_EQ(t.heap.gather(t.arena(), 32_MiB, 32_MiB), Status::ok);
  CHECK_EQ(t.counters.mapped, 32_MiB);
  CHECK_EQ(t.counters.former_bytes, 32_MiB);  // still mapped at its old address
  Block* run = t.arena().first;
  CHECK(run->state == BlockState::evicting);
  run = t.own(t.heap.take_run(t.arena(), run, run, 32_MiB));
  t.fill(run, 2);
  CHECK_EQ(stagehand_sim_check(t.stream, run->address, run->size, 2), 0);
  CHECK_EQ(stagehand_sim_host_waits(), 0);
  t.verify();
  CHECK(other.find(a->address) == nullptr);
}

TEST("memory lent to another stream is behind its last use, and comes back behind the borrower") {
  Heap h;
  Arena& lender = h.arena();
  Arena& borrower = h.arena(h.rig.stream());
  Block* block = h.grown(lender, 32_MiB);
  h.fill(block, 1);
  h.give(block);
  const Address address = block->address;
  const std::uint64_t mapped = h.counters.map_calls;
  for (std::uint64_t round = 2; round < 6; ++round) {
    Block* lent = h.own(h.heap.borrow(borrower, 20_MiB));
    CHECK(lent != nullptr);
    CHECK_EQ(lent->address, address);
    CHECK_EQ(lent->size, 20_MiB);
    CHECK(lent->clock == &borrower.clock);
    h.fill(lent, round);
    h.verify();
    h.give(lent);
    CHECK(lent->clock == &lender.clock);
    CHECK(lent->state == BlockState::evicting);  // the borrower's work is queued still
    Block* whole = h.own(h.heap.take_run(lender, lent, lent->next, 32_MiB));
    h.fill(whole, 10 * round);
    h.give(whole);
    CHECK(whole->state == BlockState::free);
  }
  CHECK_EQ(h.counters.loans, 4);
  CHECK_EQ(h.counters.map_calls, mapped);
  stagehand_sim_drain();
  h.verify();
}

TEST("a small request borrows no large block, and a graph's memory is not lent") {
  Heap h;
  h.give(h.grown(h.arena(), 32_MiB));
  Arena& graph = h.arena(h.rig.stream(), 32_MiB, 7);
  h.give(h.grown(graph, 32_MiB));
  const driver::Stream other = h.rig.stream();
  CHECK(h.heap.borrow(h.arena(other, 4_KiB), 4_KiB) == nullptr);
  CHECK(h.heap.borrow(graph, 8_MiB) == nullptr);
  CHECK(h.heap.lends(h.arena(), h.arena(other)));
  CHECK(!h.heap.lends(graph, h.arena(other)));
  h.verify();
}

TEST("a former address is unmapped only once its last use has passed") {
  Heap t;
  Arena& other = t.arena(t.rig.stream());
  Block* a = t.grown(other, 32_MiB);
  t.fill(a, 1);
  t.give(a);
  t.heap.gather(t.arena(), 32_MiB, 32_MiB);
  Tick tick;
  other.clock.record(&tick);
  t.heap.free_addresses(other);
  CHECK_EQ(t.counters.former_bytes, 32_MiB);
  stagehand_sim_drain();
  t.heap.free_addresses(other);
  CHECK_EQ(t.counters.former_bytes, 0);
  CHECK(other.first->state == BlockState::hole);
  CHECK(other.first->next == nullptr);
  t.verify();
}

TEST("memory that goes home and moves again calls nothing of the driver, and is behind its uses") {
  Heap t;
  const driver::Stream stream = t.rig.stream();
  Arena& other = t.arena(stream);
  Block* a = t.grown(other, 32_MiB);
  const Address home = a->address;
  t.give(a);
  CHECK_EQ(t.heap.gather(t.arena(), 32_MiB, 32_MiB), Status::ok);
  Block* b = t.arena().first;
  b = t.own(t.heap.take_run(t.arena(), b, b, 32_MiB));
  const Address away = b->address;
  const Bytes calls = t.counters.map_calls;
  for (std::uint64_t i = 1; i <= 4; ++i) {
    t.fill(b, 2 * i);  // nothing of this runs yet
    t.give(b);
    t.arena(stream);  // somebody asks there in every step
    t.heap.go_home();
    CHECK(t.arena().find(away) == nullptr);
    Block* last = other.first;
    while (last->end() < home + 32_MiB) {
      last = last->next;
    }
    Block* there = t.own(t.heap.take_run(other, other.first, last, 32_MiB));
    CHECK(there->address == home && there->size == 32_MiB);
    t.fill(there, 2 * i + 1);
    CHECK_EQ(stagehand_sim_check(other.clock.stream(), home, 32_MiB, 2 * i + 1), 0);
    t.give(there);
    b = t.own(t.heap.take_up(t.arena(), 32_MiB));
    CHECK(b != nullptr && b->address == away);
    CHECK_EQ(stagehand_sim_check(t.stream, away, 32_MiB, 2 * i + 1), 0);
  }
  CHECK_EQ(t.counters.map_calls, calls);
  CHECK_EQ(stagehand_sim_host_waits(), 0);
  stagehand_sim_drain();
  t.verify();
}

TEST("memory does not go home to a stream that nobody uses: its addresses are given back") {
  Heap t;
  driver::Stream old = t.rig.stream();
  t.give(t.grown(t.arena(old), 32_MiB));
  t.heap.go_home();  // from here on nobody asks there
  t.heap.gather(t.arena(), 32_MiB, 32_MiB);
  t.heap.go_home();
  CHECK(t.arena().find(t.arena().first->address) != nullptr);
  stagehand_sim_drain();
  for (int i = 0; i < 40; ++i) {
    t.arena(t.rig.stream());
  }
  for (const auto& arena : t.heap.arenas()) {
    CHECK(arena->key.stream != old);
  }
  t.verify();
}

TEST("a run of former addresses that holds the same memory twice is not taken") {
  Heap t;
  Arena& other = t.arena(t.rig.stream());
  t.give(t.grown(other, 32_MiB));
  for (int i = 0; i < 2; ++i) {  // mapped side by side in turn
    CHECK_EQ(t.heap.gather(t.arena(), 32_MiB, 32_MiB), Status::ok);
    stagehand_sim_drain();
    t.heap.settle(t.arena());
    if (i == 0) {
      t.heap.gather(other, 32_MiB, 32_MiB);
    }
  }
  t.heap.go_home();
  t.give(t.grown(other, 64_MiB));  // enough is idle
  CHECK(t.arena().formers >= 2 * t.arena().former_bytes / 64_MiB);
  CHECK_EQ(t.arena().former_bytes, 64_MiB);
  Address begin = kUnlimited;
  for (const Block* b = t.arena().former.first(); b != nullptr; b = b->bin_next) {
    begin = std::min(begin, b->address);
  }
  CHECK(t.heap.take_up(t.arena(), 64_MiB) == nullptr);
  CHECK(t.heap.take_at(t.arena(), begin, 64_MiB) == nullptr);
  CHECK(t.own(t.heap.take_up(t.arena(), 32_MiB)) != nullptr);
  t.verify();
}

TEST("a former address whose memory is in use elsewhere is not taken up") {
  Heap t;
  Arena& other = t.arena(t.rig.stream());
  t.give(t.grown(other, 32_MiB));
  t.heap.gather(t.arena(), 32_MiB, 32_MiB);
  t.heap.go_home();
  Block* corner = t.take(other, 2_MiB);
  t.give(t.grown(other, 64_MiB));  // enough is idle elsewhere
  CHECK(t.heap.take_up(t.arena(), 32_MiB) == nullptr);
  t.give(corner);
  CHECK(t.own(t.heap.take_up(t.arena(), 32_MiB)) != nullptr);
  t.verify();
}

TEST("a block is taken at an address out of the middle of free memory") {
  Heap t;
  t.give(t.grown(t.arena(), 32_MiB));
  const Address begin = t.arena().first->address;
  const std::uint64_t calls = t.counters.map_calls;
  Block* block = t.own(t.heap.take_at(t.arena(), begin + 10_MiB, 4_MiB));
  CHECK(block != nullptr && block->address == begin + 10_MiB && block->size == 4_MiB);
  CHECK(t.heap.take_at(t.arena(), begin + 8_MiB, 4_MiB) == nullptr);   // half of it is in use
  CHECK(t.heap.take_at(t.arena(), begin + 30_MiB, 4_MiB) == nullptr);  // half of it is not mapped
  CHECK(t.own(t.heap.take_at(t.arena(), begin, 10_MiB)) != nullptr);
  CHECK_EQ(t.counters.map_calls, calls);
  t.verify();
}

TEST("at its former address memory is taken once its last use elsewhere is known to be past") {
  Heap t;
  Arena& other = t.arena(t.rig.stream());
  t.give(t.grown(t.arena(), 32_MiB));
  const Address home = t.arena().first->address;
  CHECK_EQ(t.heap.gather(other, 32_MiB, 32_MiB), Status::ok);
  Block* first = other.evicting.first();
  Block* away = t.own(t.heap.take_run(other, first, first, 32_MiB));
  CHECK(t.heap.take_at(t.arena(), home, 32_MiB) == nullptr);  // in use there
  t.fill(away, 3);
  t.give(away);
  CHECK(t.heap.take_at(t.arena(), home, 32_MiB) == nullptr);  // its stream would wait
  other.clock.gpu_passed(other.clock.mark());
  stagehand_sim_drain();
  const std::uint64_t calls = t.counters.map_calls;
  CHECK(t.heap.take_at(t.arena(), home + 1_MiB, 8_MiB) == nullptr);  // only whole pieces move
  Block* block = t.own(t.heap.take_at(t.arena(), home, 32_MiB));
  CHECK(block != nullptr && block->address == home);
  CHECK_EQ(t.counters.map_calls, calls);
  t.verify();
}

TEST("memory that still waits for a copy is not taken at its address, nor at a former one") {
  Heap t;
  Arena& other = t.arena(t.rig.stream());
  Block* block = t.grown(t.arena(), 32_MiB);
  const Address begin = block->address;
  block->fence.add(other.clock.now());
  t.give(block);
  CHECK(t.heap.take_at(t.arena(), begin, 32_MiB) == nullptr);
  CHECK_EQ(t.heap.gather(t.arena(), 64_MiB, 64_MiB), Status::ok);
  CHECK_EQ(t.arena().formers, t.arena().former_bytes / 4_MiB);
  CHECK(t.arena().at(begin)->state == BlockState::former);
  CHECK(t.heap.take_at(t.arena(), begin, 32_MiB) == nullptr);
  t.clocks.order_after(t.arena().clock, t.arena().evicting.first()->fence);
  CHECK(t.own(t.heap.take_at(t.arena(), begin, 32_MiB)) != nullptr);
  t.verify();
}

TEST("an address is not taken whose memory lies beside it in the same run") {
  Heap t;
  Block* block = t.grown(t.arena(), 32_MiB);
  const Address begin = block->address;
  block->fence.add(t.arena(t.rig.stream()).clock.now());  // else the hole begins with it
  t.give(block);
  CHECK_EQ(t.heap.gather(t.arena(), 64_MiB, 64_MiB), Status::ok);
  t.clocks.order_after(t.arena().clock, t.arena().evicting.first()->fence);
  t.heap.settle(t.arena());
  CHECK(t.arena().at(begin)->state == BlockState::former);
  CHECK(t.heap.take_at(t.arena(), begin, 36_MiB) == nullptr);  // it lies behind
  t.heap.go_home();
  CHECK(t.arena().at(begin)->state == BlockState::free);
  CHECK(t.arena().at(begin + 32_MiB)->state == BlockState::former);
  CHECK(t.heap.take_at(t.arena(), begin + 16_MiB, 20_MiB) == nullptr);  // in front of the address
  CHECK(t.own(t.heap.take_at(t.arena(), begin + 16_MiB, 16_MiB)) != nullptr);
  t.verify();
}

TEST("an address may be free again later unless some of it is a hole") {
  Heap t;
  Block* block = t.grown(t.arena(), 32_MiB);
  const Address begin = block->address;
  CHECK(DeviceHeap::is_mapped_at(t.arena(), begin, 32_MiB));
  CHECK(DeviceHeap::is_mapped_at(t.arena(), begin + 2_MiB, 8_MiB));
  CHECK(!DeviceHeap::is_mapped_at(t.arena(), begin + 8_MiB, 32_MiB));
  CHECK(!DeviceHeap::is_mapped_at(t.arena(), begin + 64_MiB, 2_MiB));
  t.verify();
}

TEST("memory given back to the driver is unmapped at its former addresses too") {
  Heap t;
  Arena& other = t.arena(t.rig.stream());
  t.give(t.grown(other, 32_MiB));
  t.heap.gather(t.arena(), 32_MiB, 32_MiB);
  t.heap.go_home();
  stagehand_sim_drain();
  for (const auto& arena : t.heap.arenas()) {
    arena->clock.gpu_passed(arena->clock.mark());
  }
  CHECK_EQ(t.heap.trim(0), 32_MiB);
  CHECK_EQ(stagehand_sim_mapped_bytes(0), 0);
  t.verify();
}

TEST("former addresses take no more than half of an arena's") {
  Heap t;
  Arena* arenas[2] = {&t.arena(t.rig.stream()), &t.arena()};
  t.give(t.grown(*arenas[0], 32_MiB));
  for (int i = 1; i < 200; ++i) {
    Arena& to = *arenas[i % 2];
    CHECK_EQ(t.heap.gather(to, 32_MiB, 32_MiB), Status::ok);
    for (Arena* arena : arenas) {
      Tick tick;
      arena->clock.record(&tick);
    }
    stagehand_sim_drain();
    t.heap.settle(*arenas[0]);
    t.heap.settle(*arenas[1]);
    CHECK(t.counters.former_bytes <= arenas[0]->reserved / 2 + arenas[1]->reserved / 2);
  }
  t.verify();
}

TEST("gathering adds new memory for what free pieces lack, under the ceiling") {
  Heap t;
  Arena& other = t.arena(t.rig.stream());
  t.give(t.grown(other, 32_MiB));
  CHECK_EQ(t.heap.gather(t.arena(), 48_MiB, 47_MiB), Status::out_of_memory);
  t.verify();
  CHECK_EQ(t.heap.gather(t.arena(), 48_MiB, 48_MiB), Status::ok);
  CHECK_EQ(t.counters.mapped, 48_MiB);
  t.verify();
}

TEST("gathering leaves partly used pieces and graphs alone") {
  Heap t;
  Arena& other = t.arena(t.rig.stream(), 512);
  Block* used = t.grown(other, 512);  // a corner of a granule
  Arena& graph = t.arena(t.stream, 32_MiB, 5);
  t.give(t.grown(graph, 32_MiB));
  CHECK_EQ(t.heap.gather(t.arena(), 2_MiB, 0), Status::out_of_memory);
  t.give(used);
  CHECK_EQ(t.heap.gather(t.arena(), 2_MiB, 0), Status::ok);
  CHECK_EQ(t.counters.former_bytes, 2_MiB);
  CHECK(graph.first->state == BlockState::free);
  t.verify();
}

TEST("gathering within one stream joins free pieces that used ones keep apart") {
  Heap t;
  Block* blocks[4];
  for (Block*& block : blocks) {
    block = t.grown(t.arena(), 32_MiB);
    t.fill(block, 1);
  }
  t.give(blocks[0]);
  t.give(blocks[2]);
  CHECK_EQ(t.heap.gather(t.arena(), 64_MiB, 0), Status::ok);
  Block* joined = t.take(t.arena(), 64_MiB);  // its own stream: nothing to wait for
  CHECK(joined != nullptr);
  t.fill(joined, 2);
  CHECK_EQ(stagehand_sim_call_count("cuStreamWaitEvent"), 0);
  CHECK_EQ(stagehand_sim_check(t.stream, joined->address, joined->size, 2), 0);
  t.verify();
}

TEST("gathering uses a larger hole where free pieces do not fit the tightest one") {
  Heap t(2_GiB);
  t.grown(t.arena(), 32_MiB, 32_MiB);
  Block* odd = t.grown(t.arena(), 20_MiB, 52_MiB);
  t.grown(t.arena(), 32_MiB, 84_MiB);
  t.give(odd);
  Tick tick;
  t.arena().clock.record(&tick);
  stagehand_sim_drain();
  CHECK_EQ(t.heap.trim(64_MiB), 20_MiB);            // used, a hole of 20 MiB, used, the arena's end
  t.give(t.grown(t.arena(t.rig.stream()), 1_GiB));  // large pieces
  CHECK_EQ(t.heap.gather(t.arena(), 18_MiB, t.counters.mapped), Status::ok);
  t.verify();
}

TEST("trim gives back free pieces until the target, and no block that is used") {
  Heap t;
  Block* a = t.grown(t.arena(), 32_MiB);
  Block* b = t.grown(t.arena(), 32_MiB);
  Block* c = t.grown(t.arena(), 32_MiB);
  t.give(a);
  t.give(c);
  Tick tick;
  t.arena().clock.record(&tick);
  stagehand_sim_drain();
  CHECK_EQ(t.heap.trim(64_MiB), 32_MiB);
  t.verify();
  CHECK_EQ(t.heap.trim(0), 32_MiB);
  CHECK_EQ(t.counters.mapped, 32_MiB);
  CHECK(t.heap.find(b->address) == b);
  t.verify();
}

TEST("trim does not touch memory whose last use may not have passed") {
  Heap t;
  Block* a = t.grown(t.arena(), 32_MiB);
  t.fill(a, 1);
  t.give(a);
  CHECK_EQ(t.heap.trim(0), 0);
  Tick tick;
  t.arena().clock.record(&tick);
  CHECK_EQ(t.heap.trim(0), 0);
  stagehand_sim_drain();
  CHECK_EQ(t.heap.trim(0), 32_MiB);
  t.verify();
}

// A step begins, and the GPU has done all.
void begin_step(Heap& t) {
  t.heap.go_home();
  for (const auto& arena : t.heap.arenas()) {
    Tick tick;
    arena->clock.record(&tick);
  }
  stagehand_sim_drain();
}

TEST("a renewed heap has as much as before, each arena's in one place, and no more than may be") {
  for (const Bytes target : {kUnlimited, 100_MiB}) {
    Heap t;
    const driver::Stream second = t.rig.stream();
    Block* a = t.grown(t.arena(), 20_MiB);
    Block* used = t.grown(t.arena(), 40_MiB);
    Block* b = t.grown(t.arena(), 20_MiB);
    Block* other = t.grown(t.arena(second), 32_MiB);
    for (Block* block : {a, b, other}) {
      t.give(block);
    }
    begin_step(t);
    CHECK_EQ(t.heap.renew(target), 72_MiB);
    CHECK_EQ(t.counters.mapped, std::min(target, 112_MiB));
    CHECK(t.take(t.arena(), 40_MiB) != nullptr);
    CHECK_EQ(t.take(t.arena(second), 32_MiB) != nullptr, target == kUnlimited);
    CHECK(t.heap.find(used->address) == used);
    t.verify();
  }
}

TEST("what was renewed before stays where it is, with what can join it behind, or as one with it") {
  constexpr Bytes kStretch = 128_MiB;
  Heap t(2_GiB);
  const driver::Stream second = t.rig.stream();
  const auto renewed = [&](Bytes released, Bytes target = kUnlimited) {
    t.arena(second);  // is asked, as is the other
    t.arena();
    begin_step(t);
    const std::uint64_t calls = t.counters.map_calls;
    CHECK_EQ(t.heap.renew(target), released);
    CHECK_EQ(t.counters.map_calls == calls, released == 0);
    t.verify();
  };
  const auto grown = [&](Bytes bytes) { return t.grown(t.arena(), bytes); };
  t.give(grown(kStretch));
  t.give(t.grown(t.arena(second), 64_MiB));  // in pieces that may stay
  renewed(kStretch);                         // not these, which are larger
  renewed(0);
  // Something used lies behind it now: a sixteenth of it is nothing, more joins it elsewhere.
  Block* all = grown(kStretch);
  Block* used = grown(32_MiB);
  for (const Bytes rest : {8_MiB, 64_MiB}) {
    Block* more = grown(rest);
    t.give(more);
    t.give(all);
    renewed(rest == 8_MiB ? 8_MiB : kStretch + rest);
    all = t.take(t.arena(), rest == 8_MiB ? kStretch : kStretch + rest);
    CHECK(all != nullptr);
  }
  CHECK(t.heap.find(used->address) == used);
  t.give(all);
  renewed(t.counters.mapped - 96_MiB, 96_MiB);  // never more than may be
}

TEST("a renewed heap leaves out a stream that nobody uses, and a graph that is gone") {
  Heap t;
  Block* idle = t.grown(t.arena(t.rig.stream()), 32_MiB);
  t.give(idle);
  t.heap.go_home();
  Block* kept = t.grown(t.arena(t.rig.stream(), 32_MiB, 5), 32_MiB);
  t.heap.release_graph(5);  // while somebody uses it
  t.give(kept);
  t.give(t.grown(t.arena(), 32_MiB));
  begin_step(t);
  CHECK_EQ(t.heap.renew(kUnlimited), 96_MiB);
  CHECK_EQ(t.counters.mapped, 32_MiB);
  CHECK(t.take(t.arena(), 32_MiB) != nullptr);
  t.verify();
}

TEST("a renewed small arena is of single granules, as it grew") {
  constexpr Bytes kSmall = 512_KiB;
  Heap t;
  std::vector<Block*> blocks;
  for (int i = 0; i < 28; ++i) {
    blocks.push_back(t.grown(t.arena(t.stream, kSmall), kSmall));
  }
  for (Block* block : blocks) {
    t.give(block);
  }
  begin_step(t);
  t.heap.renew(kUnlimited);
  CHECK_EQ(t.arena(t.stream, kSmall).pieces.size(), 7);
  t.verify();
}

TEST("O4: where the driver refuses to renew it, a heap has what is used, and grows after") {
  for (const char* symbol : {"cuMemCreate", "cuMemMap", "cuMemSetAccess"}) {
    for (const std::uint64_t nth : {1, 2}) {
      Heap t;
      t.grown(t.arena(), 32_MiB);
      t.give(t.grown(t.arena(), 128_MiB));
      begin_step(t);
      stagehand_sim_fail(symbol, nth, 1000, 999);
      CHECK_EQ(t.heap.renew(kUnlimited), 128_MiB);
      const bool once = std::string(symbol) == "cuMemSetAccess" && nth == 2;  // it is one call
      CHECK_EQ(t.counters.mapped, once ? 160_MiB : 32_MiB);
      stagehand_sim_fail(symbol, 1, 0, 0);
      t.verify();
      CHECK(t.grown(t.arena(), 64_MiB) != nullptr);
      t.verify();
    }
  }
}

TEST("a graph's memory goes back to the driver once the graph is gone, addresses and all") {
  Heap t;
  Arena& graph = t.arena(t.rig.stream(), 32_MiB, 5);
  t.give(t.grown(graph, 32_MiB));
  CHECK_EQ(t.heap.gather(t.arena(), 32_MiB, 0), Status::out_of_memory);
  const std::size_t arenas = t.heap.arenas().size();
  t.heap.release_graph(5);
  CHECK_EQ(t.counters.mapped, 0);
  CHECK_EQ(t.heap.arenas().size(), arenas - 1);
  t.verify();
}

TEST("contents survive everything that happens to other blocks") {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    Heap t;
    stagehand_sim_progress(0.25);
    Arena& other = t.arena(t.rig.stream());
    std::vector<Block*> kept;
    std::vector<Block*> gone;
    for (std::uint64_t i = 0; i < 4; ++i) {
      gone.push_back(t.grown(i % 2 == 0 ? t.arena() : other, 32_MiB));
      kept.push_back(t.grown(i % 2 == 0 ? other : t.arena(), 8_MiB));
      t.fill(gone.back(), 100);
      t.fill(kept.back(), i);
    }
    for (Block* block : gone) {
      t.give(block);
    }
    CHECK_EQ(t.heap.gather(t.arena(), 64_MiB, t.counters.mapped), Status::ok);
    Block* last = t.arena().first;
    while (last->next->state != BlockState::hole || last->next->next != nullptr) {
      last = last->next;
    }
    Block* run = t.own(t.heap.take_run(t.arena(), last, last, last->size));
    t.fill(run, 200);
    for (std::uint64_t i = 0; i < kept.size(); ++i) {
      stagehand_sim_check(kept[i]->clock->stream(), kept[i]->address, kept[i]->size, i);
    }
    stagehand_sim_drain();
    t.verify();
  }
}

// O4 ----------------------------------------------------------------------------------------------

// Runs `act` on a fresh heap that `prepare` has brought into a state, with one driver call of each
// kind that growing and gathering make failing: the first, the second and the last. Nothing may
// have changed, and `act` works once the driver does.
template <typename Prepare, typename Act>
void fail_each_call(Prepare prepare, Act act) {
  for (const char* symbol : {"cuMemCreate", "cuMemMap", "cuMemSetAccess"}) {
    std::uint64_t calls = 0;
    {
      Heap t;
      prepare(t);
      const std::uint64_t before = stagehand_sim_call_count(symbol);
      CHECK_EQ(act(t), Status::ok);
      calls = stagehand_sim_call_count(symbol) - before;
    }
    CHECK(calls > 0);
    for (const std::uint64_t nth : {std::uint64_t{1}, std::uint64_t{2}, calls}) {
      for (const int result : {int{driver::kOutOfMemory}, 999}) {
        if (nth > calls) {
          continue;
        }
        Heap t;
        prepare(t);
        const Counters before = t.counters;
        stagehand_sim_fail(symbol, nth, 1000, result);
        const Status status = act(t);
        CHECK(status != Status::ok);
        CHECK(status == Status::out_of_memory || result != driver::kOutOfMemory ||
              std::string(symbol) != "cuMemCreate");
        Counters after = t.counters;
        after.map_calls = before.map_calls;  // what was tried counts
        CHECK_EQ(std::memcmp(&before, &after, sizeof before), 0);
        t.verify();
        stagehand_sim_fail(symbol, 1, 0, 0);
        CHECK_EQ(act(t), Status::ok);
        t.verify();
      }
    }
  }
}

TEST("O4: a growth that the driver refuses at any call changes nothing, and works after") {
  fail_each_call([](Heap& t) { t.grown(t.arena(), 32_MiB); },
                 [](Heap& t) { return t.heap.grow(t.arena(), 90_MiB, kUnlimited); });
}

TEST("O4: a growth refused as whole pieces is tried with what the request needs") {
  Heap t(38_MiB);
  t.grown(t.arena(), 32_MiB);
  CHECK_EQ(t.heap.grow(t.arena(), 6_MiB, kUnlimited), Status::ok);
  CHECK_EQ(t.counters.mapped, 38_MiB);
  t.verify();
}

TEST("O4: a gathering that the driver refuses at any call changes nothing, and works after") {
  fail_each_call(
      [](Heap& t) {
        Arena& other = t.arena(t.rig.stream());
        Block* blocks[2] = {t.grown(other, 32_MiB), t.grown(other, 32_MiB)};
        for (Block* block : blocks) {
          t.fill(block, 1);
          t.give(block);
        }
      },
      [](Heap& t) { return t.heap.gather(t.arena(), 100_MiB, kUnlimited); });
}

TEST("O4: a former address that cannot be unmapped yet is kept and tried again") {
  Heap t;
  Arena& other = t.arena(t.rig.stream());
  t.give(t.grown(other, 32_MiB));
  t.heap.gather(t.arena(), 32_MiB, 32_MiB);
  Tick tick;
  other.clock.record(&tick);
  stagehand_sim_drain();
  stagehand_sim_fail("cuMemUnmap", 1, 1, 999);
  t.heap.free_addresses(other);
  CHECK(t.counters.former_bytes > 0);
  t.verify();
  t.heap.free_addresses(other);
  CHECK_EQ(t.counters.former_bytes, 0);
  t.verify();
}

TEST("O4: an arena whose addresses cannot be reserved does not exist, until they can be") {
  Heap t;
  stagehand_sim_fail("cuMemAddressReserve", 1, 6, driver::kOutOfMemory);  // all smaller tries too
  CHECK(t.heap.arena_for(t.stream, 2_MiB, 0) == nullptr);
  CHECK(t.heap.arena_for(t.stream, 2_MiB, 0) != nullptr);
  t.verify();
}

TEST("O4: a run that cannot be ordered is not taken, and the books are as before") {
  Heap t;
  Block* a = t.grown(t.arena(), 32_MiB);
  StreamClock& other = t.clocks.of(t.rig.stream());
  stagehand_sim_kernel(other.stream(), 1000, nullptr, 0, nullptr, 0, nullptr, nullptr);
  Tick tick;
  other.record(&tick);
  a->fence.add(tick);
  t.give(a);
  stagehand_sim_fail("cuStreamWaitEvent", 1, 1, 999);
  CHECK(t.heap.take_run(t.arena(), a, a, 32_MiB) == nullptr);
  CHECK(a->state == BlockState::evicting);
  t.verify();
  CHECK(t.own(t.heap.take_run(t.arena(), a, a, 32_MiB)) != nullptr);
  t.verify();
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
