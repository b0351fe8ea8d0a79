#include "fuzz/store.hpp"

namespace stagehand::fuzz {

using core::Address;
using core::Bytes;
using core::Status;

Status HeapStore::make(driver::Stream stream, std::uint64_t graph, Reference* made) {
  return runtime(made->device).allocate(made->bytes, stream, graph, &made->address);
}

bool HeapStore::drop(const Reference& reference) {
  if (reference.block == nullptr) {
    return runtime(reference.device).free(reference.address);
  }
  runtime(reference.device).drop_alias(reference.block);
  return true;
}

core::Saved HeapStore::save(const Reference& of, driver::Stream /*on*/, Address first, Address last,
                            Again again) {
  return runtime(of.device).save(first, first, last, false, again.made(of.address, of.bytes),
                                 again.inside());
}

bool HeapStore::refill(core::RecordId record, const Reference& with, driver::Stream on) {
  return runtime(with.device).refill(record, with.address, on);
}

Status HeapStore::unpack(std::size_t device, core::RecordId record, Bytes offset,
                         driver::Stream consumer, Reference* again) {
  const core::Unpacked unpacked = runtime(device).unpack(record, offset, consumer);
  say_proved(device, record, unpacked);
  *again = {nullptr, unpacked.block, unpacked.address, 0, device};
  return unpacked.status;
}

void HeapStore::drop_handle(std::size_t device, core::RecordId record) {
  runtime(device).drop_handle(record);
}

void HeapStore::record_stream(const Reference& of, driver::Stream user) {
  runtime(of.device).record_stream(of.address, user);
}

void HeapStore::keep(const Reference& reference) {
  runtime(reference.device).keep(reference.address);
}

void HeapStore::trim(std::size_t device, Bytes target) { runtime(device).trim(target); }

void HeapStore::capture(std::size_t device, int change) { runtime(device).capture(change); }

void HeapStore::release_graph(std::size_t device, std::uint64_t graph) {
  runtime(device).release_graph(graph);
}

std::string HeapStore::left() {
  for (core::Runtime* each : runtimes_) {
    each->trim(0);
    each->trim(0);  // what retired in the first
    const core::Counters now = each->counters();
    if (now.mapped != 0 || now.former_bytes != 0) {
      return "mapped is " + std::to_string(now.mapped) + ", former " +
             std::to_string(now.former_bytes);
    }
  }
  return "";
}

}  // namespace stagehand::fuzz
