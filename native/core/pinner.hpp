// Making page-locked host memory fast: anonymous memory with huge pages, near the GPU, faulted in
// by several threads and registered in one call. Everything here waits, for the kernel or for the
// driver: it is called without a lock, and `pin` and `unpin` with the device's context.
#pragma once

#include <cstddef>
#include <span>
#include <thread>
#include <vector>

#include "core/types.hpp"
#include "driver/driver.hpp"

namespace stagehand::core {

// One stretch of host memory, mapped and registered as a whole, cut into slabs of one class.
struct Chunk {
  std::byte* host = nullptr;
  Bytes size = 0;
  Bytes slab_bytes = 0;
  std::size_t slab_size = 0;  // as SlabSizes counts them
  Bytes reserved = 0;         // what was planned; `size` may come out smaller
  std::uint32_t number = 0;   // given when it enters the pool
};

// Fresh memory of at least `size` bytes, or null. `node`: where it should come from, -1 anywhere.
std::byte* map_host(Bytes size, int node);
void unmap_host(std::byte* host, Bytes size);
// The same of a memory file, which other processes map, too: from `offset` on, a huge page's
// border. Not `writable`: whoever writes there ends the process.
std::byte* map_shared(int file, Bytes offset, Bytes size, int node, bool writable);

// Faults memory in, with several threads where it is worth it.
class Toucher {
 public:
  ~Toucher() { wait(); }
  void start(std::byte* host, Bytes size);
  void wait();

 private:
  std::vector<std::thread> threads_;
};

// Bytes from one place on the host to another.
struct HostMove {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  Bytes bytes = 0;
};

// Copies, with several threads where it is worth it. They fault in what they write to: memory fresh
// from `map_host` is gone through once, and not touched first.
void copy_on_host(std::span<const HostMove> copies);
// Whether the bytes are there already, each at its place.
bool same_on_host(std::span<const HostMove> copies);

// Each answers a refusal with half as much, down to one slab. False: nothing is left mapped.
bool map_chunk(Chunk* chunk, int node);
bool pin_chunk(const driver::Table& table, Chunk* chunk);
void unpin_chunk(const driver::Table& table, const Chunk& chunk);

}  // namespace stagehand::core
