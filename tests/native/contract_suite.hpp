// What the contract's promises are written with: owners of driver things that note what fails.
#pragma once

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "driver/driver.hpp"

namespace stagehand::contract {

using driver::Context;
using driver::DevicePtr;
using driver::Event;
using driver::PhysicalHandle;
using driver::Result;
using driver::Stream;

inline constexpr std::size_t kPage = 4096;

// What a promise may use. `expect` notes what does not hold; a promise goes on where it can.
struct Suite {
  const driver::Table& driver;
  Context context;
  std::size_t granule;
  const char* promise = "";
  std::vector<std::string> broken;

  bool expect(bool holds, const char* what) {
    if (!holds) {
      broken.push_back(std::string(promise) + ": " + what);
    }
    return holds;
  }
  bool ok(Result result, const char* call) {
    return expect(result == driver::kSuccess,
                  (std::string(call) + " returned " + std::to_string(result)).c_str());
  }
};

#define OK(suite, name, ...) (suite).ok((suite).driver.name(__VA_ARGS__), #name)

class OwnedStream {
 public:
  explicit OwnedStream(Suite& suite) : suite_(suite) {
    OK(suite, stream_create, &stream_, driver::kStreamNonBlocking, 0);
  }
  ~OwnedStream() {
    OK(suite_, stream_synchronize, stream_);
    OK(suite_, stream_destroy, stream_);
  }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  operator Stream() const { return stream_; }

 private:
  Suite& suite_;
  Stream stream_ = nullptr;
};

class OwnedEvent {
 public:
  explicit OwnedEvent(Suite& suite, unsigned flags = driver::kEventDisableTiming) : suite_(suite) {
    OK(suite, event_create, &event_, flags);
  }
  ~OwnedEvent() { OK(suite_, event_destroy, event_); }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;
  operator Event() const { return event_; }

 private:
  Suite& suite_;
  Event event_ = nullptr;
};

// Pinned host memory.
class Slab {
 public:
  Slab(Suite& suite, std::size_t bytes)
      : suite_(suite), data_(static_cast<unsigned char*>(std::aligned_alloc(kPage, bytes))) {
    std::memset(data_, 0, bytes);
    OK(suite, host_register, data_, bytes, driver::kHostRegisterPortable);
  }
  ~Slab() {
    OK(suite_, host_unregister, data_);
    std::free(data_);
  }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;
  unsigned char* data() const { return data_; }
  void number(std::size_t bytes, unsigned seed) {
    for (std::size_t i = 0; i < bytes; ++i) {
      data_[i] = static_cast<unsigned char>(i * 7 + i / 251 + seed);
    }
  }

 private:
  Suite& suite_;
  unsigned char* data_;
};

// Device memory: reserved, created, mapped and accessible; each part can be taken over.
struct Block {
  Block(Suite& suite, std::size_t with_bytes) : owner(suite), bytes(with_bytes) {
    const driver::AllocationProp prop;
    OK(suite, address_reserve, &address, bytes, 0, 0, 0);
    OK(suite, mem_create, &handle, bytes, &prop, 0);
    map(address);
  }
  ~Block() {
    if (mapped) {
      OK(owner, mem_unmap, address, bytes);
    }
    if (held) {
      OK(owner, mem_release, handle);
    }
    OK(owner, address_free, address, bytes);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  void map(DevicePtr at) {
    const driver::AccessDesc access;
    OK(owner, mem_map, at, bytes, 0, handle, 0);
    OK(owner, mem_set_access, at, bytes, &access, 1);
  }

  Suite& owner;
  std::size_t bytes;
  DevicePtr address = 0;
  PhysicalHandle handle = 0;
  bool mapped = true;
  bool held = true;
};

inline bool same(const Slab& left, const Slab& right, std::size_t bytes) {
  return std::memcmp(left.data(), right.data(), bytes) == 0;
}

inline bool all(const unsigned char* data, std::size_t bytes, unsigned char value) {
  for (std::size_t i = 0; i < bytes; ++i) {
    if (data[i] != value) {
      return false;
    }
  }
  return true;
}

struct Promise {
  const char* text;
  void (*check)(Suite&);
};

std::vector<Promise> memory_promises();    // contract_memory.cpp
std::vector<Promise> order_promises();     // contract_order.cpp
std::vector<Promise> transfer_promises();  // contract_transfer.cpp

}  // namespace stagehand::contract
