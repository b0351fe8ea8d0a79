// What the engine asks of torch where torch's own caching allocator cuts the blocks (modes "native"
// and "mempool"), and what it is told in return. Filled by the trigger library, which is built
// against the installed torch's headers (native/torch_hook/trigger.cpp), or by
// entry/python_side.cpp where that cannot be built. Plain C types only: the two sides may come from
// different compilers.
//
// torch's allocator has a mutex per device, and calls `missed` and `event` under it. So the order
// of locks is: the GIL, torch's mutex, ours. Nothing here may take the GIL or be called under a
// lock of ours unless it says so.
#pragma once

#include "core/types.hpp"
#include "driver/driver.hpp"

namespace stagehand::core {

// A storage of torch's that the engine holds a reference to.
struct HeldStorage {
  void* storage = nullptr;         // the reference
  const void* identity = nullptr;  // the same for all references to one storage
  Address address = 0;
  Bytes bytes = 0;
  driver::Stream stream = nullptr;  // the one its block is handed out on; only from `make`
};

// A tensor's place in its storage, in elements; `dtype` as `hold` told it.
struct TensorPlace {
  std::int64_t offset = 0;
  const std::int64_t* shape = nullptr;
  const std::int64_t* strides = nullptr;
  std::int32_t ndim = 0;
  std::int32_t dtype = 0;
};

enum class Hold : int {
  held,
  foreign,    // not memory of torch's caching allocator
  capturing,  // a CUDA graph is being captured
};

// A change in torch's cache, in the order they happen on one device. `bytes` of blocks are those
// asked for; torch may hand out up to 1 MiB more.
struct CacheEvent {
  enum Kind : int {
    alloc,
    let_go,        // by the program: `freed` comes once no other stream works on it
    freed,         // and reusable
    segment,       // memory of the driver's of its own
    segment_gone,  // it went back
    mapped,        // the same of expandable segments: joins what ends where it begins
    unmapped,
  };
  Kind kind = alloc;
  int device = 0;
  Address address = 0;
  Bytes bytes = 0;
  driver::Stream stream = nullptr;
  std::uint64_t pool[2] = {0, 0};  // torch's MempoolId_t; {0, 0} is the default pool
  bool ours = false;               // of a block that `make` asked for
};

// One of 64 bits, by the size of a request.
constexpr std::uint64_t size_bit(Bytes bytes) {
  constexpr std::uint64_t kSpread = 0x9E3779B97F4A7C15U;  // most sizes are whole pages
  return std::uint64_t{1} << (round_up(bytes, kBlockUnit) * kSpread >> 58U);
}

struct TorchListener {
  // No free block fits, and a segment will be asked for next. True: something was given back, so
  // search again. On the thread that allocates, for `stream`; it may hold the GIL or not. `bytes`:
  // what it asks for; 0 where that is not known.
  bool (*missed)(int device, driver::Stream stream, Bytes bytes);
  // torch is asked for memory on the device, by anybody but the engine, and has not taken its mutex
  // yet. The thread may hold the GIL or not. Told only while the device's bit in `awaits` is set,
  // and never where torch does not tell of requests.
  void (*asks)(int device);
  std::uint64_t* awaits;  // atomically
  // For a large request that the program makes on `stream`: the stream whose blocks it should be
  // served from. If that is another one, torch is told that `stream` uses the block. Without any
  // lock; only where `survivor_sizes` of the device has the bit of that size.
  driver::Stream (*place)(int device, driver::Stream stream, Bytes bytes);
  std::uint64_t* survivor_sizes;  // atomically
  // `let_go` only while the device's bit in `follows` is set, atomically.
  void (*event)(const CacheEvent* event);
  std::uint64_t* follows;
  // What the cache holds already is told by `known`, between `snapshot` (on every device, in order
  // with its events) and `told`; events meanwhile come after what is known.
  void (*snapshot)(int device);
  void (*known)(const CacheEvent* event);
  void (*told)(int device);
  // This thread runs a backward, whose next node has not begun, and a pool is kept that does not
  // serve it. A backward that `route` was asked for has ended. Both without any lock, and without
  // the GIL.
  void (*backward_goes_on)(int device);
  void (*backward_ended)(int device);
};

struct TorchSide {
  static constexpr std::uint32_t kVersion = 7;
  std::uint32_t version = 0;
  std::uint32_t size = 0;  // of this table, in bytes
  // Whether `missed` is ever called, and whether `alone` and `drop` work without the GIL.
  int triggers = 0;
  // Whether `place` is ever called: torch tells of requests.
  int places = 0;

  // Whether `missed` cannot be called now: torch would take the GIL where it frees, which comes
  // before its mutex. Room is then made at packs and unpacks. Takes no lock.
  bool (*blocked)() = nullptr;
  // A reference to the tensor's storage; `tensor` is a PyObject*. With the GIL.
  Hold (*hold)(void* tensor, HeldStorage* held, std::int32_t* dtype) = nullptr;
  // A new tensor (PyObject*, owned by the caller) over the storage; null with a Python error set.
  // With the GIL.
  void* (*wrap)(void* storage, const TensorPlace* place) = nullptr;
  // Whether the reference held is the only one, and the memory still the one that was held. Takes
  // no lock.
  bool (*alone)(void* storage, Address address, Bytes bytes) = nullptr;
  // Work on `stream` uses the storage from now on: torch hands it out again only behind that.
  // Takes torch's mutex. With the GIL.
  void (*used_on)(void* storage, int device, driver::Stream stream) = nullptr;
  // Gives the reference up; takes torch's mutex. Where the storage is not alone: with the GIL.
  void (*drop)(void* storage) = nullptr;
  // Memory from torch for work on `stream`; takes torch's mutex. `quiet`: without `missed`.
  bool (*make)(int device, Bytes bytes, driver::Stream stream, bool quiet,
               HeldStorage* held) = nullptr;
  // Segments that are wholly free go back to the driver; waits for the GPU. Only one thread of the
  // process does so at a time: false where another is at it.
  bool (*release_cached)() = nullptr;
  // The share of the device that torch's cache may take. Takes torch's mutex.
  double (*fraction)(int device) = nullptr;
  void (*set_fraction)(int device, double share) = nullptr;
  // Which requests a MemPool serves. All of these are null where torch cannot be told; else they
  // are called by one thread at a time but `routed` and `in_backward`, which any may call and which
  // take no lock. The others take torch's mutex and may need the GIL: call them without it.
  //
  // From now on the pool serves this thread's requests beside those it serves already: all of them,
  // or `backward`, those while it runs a backward, whose end `backward_ended` tells. False: a graph
  // is captured on this thread's stream, it runs no backward, or torch refused.
  bool (*route)(int device, const std::uint64_t pool[2], bool backward) = nullptr;
  // No longer all requests of the thread that asked for that.
  void (*leave_route)(int device) = nullptr;
  // No requests any more. True: that had to wait for the GPU.
  bool (*end_route)(int device) = nullptr;
  // The pool stays there although nobody else refers to it, until it is let go.
  bool (*keep_pool)(int device, const std::uint64_t pool[2]) = nullptr;
  void (*let_pool_go)(int device, const std::uint64_t pool[2]) = nullptr;
  // From now on `backward_goes_on` is called: nodes of backward take a little longer.
  void (*watch_backwards)() = nullptr;
  // Whether this thread's requests are served by the pool; whether it runs a backward.
  bool (*routed)(int device) = nullptr;
  bool (*in_backward)() = nullptr;
  // Starts the calls of the listener. Once, with torch's CUDA initialised. Null, or what failed.
  const char* (*listen)(const TorchListener* listener) = nullptr;
  // Requests come without their size from here on: all that `listen` put before torch's allocator
  // is taken away. Null where nothing was.
  void (*tell_no_more)() = nullptr;
};

}  // namespace stagehand::core
