// The allocator in front of torch's, over one that stands for torch's: no CUDA is called.
// tests/python/test_trigger_source.py builds and runs it.
#include "torch_hook/requests.hpp"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

// What torch's CUDA libraries have, of what its headers name.
namespace c10::cuda {
#if TORCH_VERSION_MINOR >= 14
CUDAErrorLogCapture::CUDAErrorLogCapture() noexcept = default;
void c10_cuda_check_implementation(const int32_t, const char*, const char*, const uint32_t, bool,
                                   CUDAErrorLogCapture*) {}
#else
void c10_cuda_check_implementation(const int32_t, const char*, const char*, const uint32_t, bool) {}
#endif
namespace CUDACachingAllocator {
std::atomic<CUDAAllocator*> allocator;
}
}  // namespace c10::cuda
extern "C" cudaError_t cudaMemGetInfo(std::size_t*, std::size_t*) { return cudaSuccess; }

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
namespace hook = stagehand::torch_hook;
using Device = c10::DeviceIndex;
using Pool = c10::MempoolId_t;

void expect(bool right, const char* what) {
  if (!right) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
  }
}

void nothing(void*) {}

int g_asked = 0;
void asked() { ++g_asked; }

// Requests of 700 bytes are placed apart.
const auto kApart = reinterpret_cast<cudaStream_t>(std::uintptr_t{32});
c10::cuda::CUDAStream used_on() {
  return c10::cuda::CUDAStream(c10::cuda::CUDAStream::UNCHECKED,
                               c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, 0), 5));
}
std::optional<hook::Apart> place(std::size_t bytes) {
  return bytes == 700 ? std::optional(hook::Apart{kApart, used_on()}) : std::nullopt;
}
constexpr hook::Tells kTells{&asked, &place};

struct Torchs final : caching::CUDAAllocator {
  hook::Asked seen;
  bool full = false;
  bool full_apart = false;
  int freed = 0;
  const void* told_of = nullptr;
  c10::StreamId told_stream = 0;
  Pool emptied{0, 0};

  void* give() {
    seen = hook::t_asked;
    if (full) {
      throw std::runtime_error("broken");
    }
    if (full_apart && seen.stream == kApart) {
      throw c10::OutOfMemoryError({__func__, __FILE__, 0}, "out of memory");
    }
    return this;
  }
  c10::DataPtr allocate(std::size_t) override {
    return {give(), this, &nothing, c10::Device(c10::kCUDA, 0)};
  }
  void* raw_alloc(std::size_t) override { return give(); }
  void* raw_alloc_with_stream(std::size_t, cudaStream_t) override { return give(); }
  void raw_delete(void*) override { ++freed; }
  c10::DeleterFnPtr raw_deleter() const override { return &nothing; }
  void copy_data(void*, const void*, std::size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(Pool pool) override { emptied = pool; }
  void recordStream(const c10::DataPtr& memory, c10::cuda::CUDAStream stream) override {
    told_of = memory.get();
    told_stream = stream.id();
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Device) override { return {}; }
  void resetAccumulatedStats(Device) override {}
  void resetPeakStats(Device) override {}
  void init(int) override {}
  double getMemoryFraction(Device) override { return 0.25; }
  void setMemoryFraction(double, Device) override {}
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(Device) override { return {}; }
  void enable(bool) override {}
  bool isEnabled() const override { return true; }
  void cacheInfo(Device, std::size_t* largest) override { *largest = 7; }
  void* getBaseAllocation(void* address, std::size_t*) override { return address; }
  caching::SnapshotInfo snapshot(Pool, bool) override { return {}; }
  void beginAllocateToPool(Device, Pool, std::function<bool(cudaStream_t)>) override {}
  void endAllocateToPool(Device, Pool) override {}
  void releasePool(Device, Pool) override {}
  caching::ShareableHandle shareIpcHandle(void*) override { return {3, "handle"}; }
  std::shared_ptr<void> getIpcDevPtr(std::string) override { return nullptr; }
  void recordHistory(bool, caching::CreateContextFn, std::size_t, caching::RecordContext, bool,
                     const std::vector<std::string>&) override {}
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver) override {}
#if TORCH_VERSION_MINOR >= 12
  void attachOomRejectionObserver(caching::OomRejectionObserver) override {}
#endif
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker) override {}
  void enablePeerAccess(Device, Device) override {}
  cudaError_t memcpyAsync(void*, int, const void*, int, std::size_t, cudaStream_t, bool) override {
    return cudaSuccess;
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(Device, Pool) override {
    return nullptr;
  }
  caching::CheckpointDelta setCheckpointPoolState(
      Device, std::shared_ptr<caching::AllocatorState>) override {
    return {};
  }
  std::string name() override { return "torch's"; }
};

}  // namespace

int main() {
  auto& torchs = *new Torchs;
  caching::allocator.store(&torchs);
  hook::tell_requests(kTells);
  expect(caching::get() != &torchs, "nothing is in front of torch's allocator");

  const auto stream = reinterpret_cast<cudaStream_t>(std::uintptr_t{16});
  expect(caching::get()->allocate(100).get() == &torchs, "other memory than torch's");
  expect(torchs.seen.bytes == 100 && !torchs.seen.names_stream, "allocate does not tell");
  caching::raw_alloc(200);
  expect(torchs.seen.bytes == 200 && !torchs.seen.names_stream, "raw_alloc does not tell");
  caching::raw_alloc_with_stream(300, stream);
  expect(torchs.seen.bytes == 300 && torchs.seen.stream == stream, "the stream is not told");
  expect(hook::t_asked.bytes == 0, "a request outlived its call");
  expect(g_asked == 3, "not each request is told of before");
  {
    const hook::Request engines({.bytes = 100});
    caching::raw_alloc(100);
  }
  expect(g_asked == 3, "the engine is told of its own request");
  torchs.full = true;
  try {
    caching::raw_alloc(400);
    expect(false, "an exception did not pass");
  } catch (const std::runtime_error&) {
  }
  expect(torchs.seen.bytes == 400 && hook::t_asked.bytes == 0, "a request outlived its exception");

  torchs.full = false;
  expect(torchs.told_of == nullptr, "a block is told of another stream");
  {
    const c10::DataPtr apart = caching::get()->allocate(700);
    expect(apart.get() == &torchs && apart.get_deleter() == torchs.raw_deleter() &&
               apart.get_context() == &torchs,
           "what is placed apart is not as torch's own");
  }
  expect(torchs.seen.bytes == 700 && torchs.seen.stream == kApart, "it is not placed apart");
  expect(torchs.told_of == &torchs && torchs.told_stream == 5,
         "torch is not told who uses what is placed apart");
  torchs.told_of = nullptr;
  expect(caching::raw_alloc(700) == &torchs && torchs.told_of == &torchs,
         "raw_alloc does not place apart");
  torchs.full_apart = true;
  expect(caching::get()->allocate(700).get() == &torchs && !torchs.seen.names_stream,
         "what has no place apart is not served as any");
  {
    const hook::Request engines({.bytes = 100});
    caching::raw_alloc(700);
  }
  expect(torchs.seen.bytes == 700 && !torchs.seen.names_stream, "the engine's own is placed apart");

  caching::raw_delete(nullptr);
  caching::emptyCache({1, 2});
  std::size_t largest = 0;
  caching::cacheInfo(0, &largest);
  expect(torchs.freed == 1 && torchs.emptied == Pool{1, 2} && largest == 7, "a call ended here");
  expect(caching::name() == "torch's" && caching::getMemoryFraction(0) == 0.25 &&
             caching::shareIpcHandle(nullptr).offset == 3 &&
             caching::get()->raw_deleter() == torchs.raw_deleter(),
         "an answer is not torch's");

  hook::tell_no_more();
  expect(caching::get() == &torchs, "torch's allocator is not back in its place");
  hook::tell_no_more();
  hook::tell_requests(kTells);
  caching::allocator.store(&torchs);  // somebody else's
  hook::tell_no_more();
  expect(caching::get() == &torchs, "somebody else's allocator was taken away");
}
