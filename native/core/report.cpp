#include "core/report.hpp"

#include <cstdio>

namespace stagehand::core {

std::string out_of_memory_report(Device& device, const Counters& counted, Bytes bytes) {
  Bytes in_use = 0;
  Bytes aliased = 0;
  Bytes evictable = 0;
  for (const Record* r = device.ledger.oldest(); r != nullptr; r = r->newer) {
    if (r->block != nullptr) {
      Bytes& kind = r->block->owned_by_torch ? in_use : r->block->aliases > 0 ? aliased : evictable;
      kind += r->block->size;
    }
  }
  std::size_t driver_free = 0;
  std::size_t driver_total = 0;
  device.gate->mem_get_info(&driver_free, &driver_total);
  const auto mib = [](Bytes value) { return static_cast<double>(value) / (1 << 20); };
  char text[768];
  std::snprintf(
      text, sizeof(text),
      "asked for %.2f MiB on device %d; mapped %.2f MiB, occupied %.2f MiB (retained %.2f MiB), "
      "evicted %.2f MiB; high %.2f MiB, limit %.2f MiB; the driver has %.2f MiB free. Of the saved "
      "activations still on the GPU, "
      "%.2f MiB are in use by torch, %.2f MiB by backward, and %.2f MiB could not be moved to the "
      "host (pinned %.2f MiB, in use %.2f MiB)",
      mib(bytes), device.number, mib(counted.mapped), mib(counted.occupied), mib(counted.retained),
      mib(counted.evicted), mib(device.budget.high), mib(device.budget.limit), mib(driver_free),
      mib(in_use), mib(aliased), mib(evictable), mib(counted.pinned_bytes),
      mib(counted.pinned_used_bytes));
  return text;
}

std::string record_history(const Record* record) {
  if (record == nullptr) {
    return "its record is gone";
  }
  char text[256];
  std::snprintf(text, sizeof(text),
                "%llu bytes, saved as number %llu, evicted %u times and restored %u times since, "
                "in %zu slab(s); CRC %08x was written, %08x was found",
                static_cast<unsigned long long>(record->bytes()),
                static_cast<unsigned long long>(record->order), record->evictions, record->restores,
                record->copy.slabs.size(), record->copy.checksum, record->copy.checksum_found);
  return text;
}

}  // namespace stagehand::core
