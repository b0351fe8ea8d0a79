#include "core/sealer.hpp"

#include <algorithm>
#include <span>
#include <vector>

#include "core/checksum.hpp"
#include "core/device.hpp"

namespace stagehand::core {

namespace {

using Parts = std::vector<std::span<const std::byte>>;

Parts parts_of(const Record& record) {
  Parts parts;
  Bytes left = record.bytes();
  for (const Slab* slab : record.copy.slabs) {
    const Bytes bytes = std::min(slab->size, left);
    parts.emplace_back(slab->host, bytes);
    left -= bytes;
  }
  return parts;
}

std::uint32_t checksum_of(const Parts& parts) {
  std::uint32_t crc = 0;
  for (const auto& part : parts) {
    crc = crc32c(crc, part.data(), part.size());
  }
  return crc;
}

}  // namespace

void Sealer::note(const Record& record) {
  if (d_.debug.checksums) {
    unsealed_.push_back(Ledger::id_of(record));
  }
}

// What a record covers may grow while this waits, so its parts are noted before. A copy that is
// under way in another thread has its turn again later.
void Sealer::seal(Entry& entry) {
  if (unsealed_.empty()) {
    return;
  }
  for (std::size_t tries = unsealed_.size(); tries > 0 && !unsealed_.empty(); --tries) {
    const RecordId id = unsealed_.front();
    unsealed_.pop_front();
    Record* record = d_.ledger.find(id);
    if (record == nullptr || record->copy.state != CopyState::queued) {
      continue;
    }
    const Tick written = record->copy.written;
    driver::Event event = nullptr;
    Seq actual = 0;
    if (record->waited_for ||
        (written.seq != 0 &&
         d_.clocks.at(written.clock).event_for(written.seq, &event, &actual) != Status::ok)) {
      unsealed_.push_back(id);
      continue;
    }
    const Parts parts = parts_of(*record);
    std::uint32_t crc = 0;
    d_.books.wait(
        entry, *record,
        [&] {
          const bool arrived =
              event == nullptr || d_.gate.table().event_synchronize(event) == driver::kSuccess;
          crc = arrived ? checksum_of(parts) : 0;
          return arrived;
        },
        [&](bool good) {
          if (good) {
            d_.books.sealed(*record, crc);
          }
        });
  }
}

bool Sealer::intact(Record& record) {
  if (!d_.debug.checksums || record.copy.state != CopyState::sealed) {
    return true;
  }
  record.copy.checksum_found = checksum_of(parts_of(record));
  return record.copy.checksum_found == record.copy.checksum;
}

}  // namespace stagehand::core
