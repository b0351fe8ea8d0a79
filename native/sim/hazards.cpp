#include "sim/hazards.hpp"

#include <cstdio>
#include <iterator>
#include <utility>

namespace stagehand::sim {

namespace {

constexpr std::size_t kTextsKept = 1000;

// The cell that holds `at`, or the first one after it.
template <typename Cells>
auto first_over(Cells& cells, std::uint64_t at) {
  auto cell = cells.upper_bound(at);
  if (cell != cells.begin() && std::prev(cell)->second.end > at) {
    --cell;
  }
  return cell;
}

}  // namespace

const char* op_name(OpKind kind) {
  switch (kind) {
    case OpKind::kD2H:
      return "d2h copy";
    case OpKind::kH2D:
      return "h2d copy";
    case OpKind::kD2D:
      return "d2d copy";
    case OpKind::kMemset:
      return "memset";
    case OpKind::kKernel:
      return "kernel";
    case OpKind::kFill:
      return "fill kernel";
    case OpKind::kCheck:
      return "check kernel";
    case OpKind::kRecord:
      return "event record";
    case OpKind::kWait:
      return "event wait";
    case OpKind::kWaitValue:
      return "value wait";
  }
  return "operation";
}

std::string describe(const Access& access) {
  if (access.time == 0) {
    return "the host";
  }
  return std::string(op_name(access.kind)) + " #" + std::to_string(access.op) + " on stream " +
         std::to_string(access.slot);
}

std::string range_text(const Range& range) {
  char text[64];
  std::snprintf(text, sizeof text, "0x%llx+%llu", static_cast<unsigned long long>(range.address),
                static_cast<unsigned long long>(range.bytes));
  return text;
}

void HazardLog::add(int kind, std::string text) {
  ++counts_[static_cast<std::size_t>(kind)];
  ++counts_[STAGEHAND_SIM_ALL];
  if (entries_.size() < kTextsKept) {
    entries_.push_back({kind, std::move(text)});
  }
}

const std::string* HazardLog::text(std::uint64_t index) const {
  return index < entries_.size() ? &entries_[index].text : nullptr;
}

int HazardLog::kind(std::uint64_t index) const {
  return index < entries_.size() ? entries_[index].kind : 0;
}

void HazardLog::clear() {
  entries_.clear();
  counts_.fill(0);
}

void History::report(const Piece& piece, const Access& earlier, bool earlier_wrote,
                     const Access& later, bool later_writes) {
  // One conflict of two operations is one hazard, however many stretches of bytes it spans.
  if (later.time == 0 || later.op != reporting_) {
    reporting_ = later.op;
    reported_.clear();
  }
  const std::pair<int, std::uint64_t> pair{piece.space, earlier.op};
  if (std::find(reported_.begin(), reported_.end(), pair) != reported_.end()) {
    return;
  }
  reported_.push_back(pair);
  const bool host = piece.space == kHostSpace;
  const std::string where =
      host ? "host bytes " : "device " + std::to_string(piece.space) + " physical bytes ";
  log_.add(host ? STAGEHAND_SIM_HOST_RACE : STAGEHAND_SIM_DEVICE_RACE,
           "race: " + describe(later) + (later_writes ? " writes " : " reads ") + where +
               range_text({piece.offset, piece.bytes}) + " that " + describe(earlier) +
               (earlier_wrote ? " writes" : " reads") + ", and nothing orders them");
}

void History::check(const Cells& cells, const Piece& piece, bool write, const Access& access,
                    const VectorClock& now) {
  const std::uint64_t end = piece.offset + piece.bytes;
  for (auto it = first_over(cells, piece.offset); it != cells.end() && it->first < end; ++it) {
    const Cell& cell = it->second;
    if (!cell.write.before(now)) {
      report(piece, cell.write, true, access, write);
    }
    for (const Access& read : cell.reads) {
      if (write && !read.before(now)) {
        report(piece, read, false, access, write);
      }
    }
  }
}

void History::touch(const Piece& piece, bool write, const Access& access, const VectorClock& now) {
  if (piece.bytes == 0) {
    return;
  }
  Cells& cells = spaces_[piece.space];
  check(cells, piece, write, access, now);
  if (access.time == 0) {
    return;
  }
  split(cells, piece.offset);
  split(cells, piece.offset + piece.bytes);
  if (write) {
    keep_write(cells, piece, access);
  } else {
    keep_read(cells, piece, access, now);
  }
}

void History::split(Cells& cells, std::uint64_t at) {
  auto it = first_over(cells, at);
  if (it == cells.end() || it->first >= at) {
    return;
  }
  Cell tail = it->second;
  it->second.end = at;
  cells.emplace_hint(std::next(it), at, std::move(tail));
}

// A write that is ordered after all before it stands for them; one that is not was reported.
void History::keep_write(Cells& cells, const Piece& piece, const Access& access) {
  const std::uint64_t end = piece.offset + piece.bytes;
  auto it = cells.erase(cells.lower_bound(piece.offset), cells.lower_bound(end));
  Cell cell;
  cell.end = end;
  cell.write = access;
  cells.emplace_hint(it, piece.offset, std::move(cell));
}

void History::keep_read(Cells& cells, const Piece& piece, const Access& access,
                        const VectorClock& now) {
  const std::uint64_t end = piece.offset + piece.bytes;
  std::uint64_t at = piece.offset;
  auto it = cells.lower_bound(at);
  while (at < end) {
    if (it == cells.end() || it->first > at) {  // a stretch nobody touched yet
      Cell cell;
      cell.end = it == cells.end() ? end : std::min(end, it->first);
      it = cells.emplace_hint(it, at, std::move(cell));
    }
    std::vector<Access>& reads = it->second.reads;
    std::erase_if(reads, [&](const Access& read) { return read.before(now); });
    reads.push_back(access);
    at = it->second.end;
    ++it;
  }
}

const Access* History::unordered(const Piece& piece, const VectorClock& now) const {
  const auto space = spaces_.find(piece.space);
  if (space == spaces_.end()) {
    return nullptr;
  }
  const std::uint64_t end = piece.offset + piece.bytes;
  const Cells& cells = space->second;
  for (auto it = first_over(cells, piece.offset); it != cells.end() && it->first < end; ++it) {
    if (!it->second.write.before(now)) {
      return &it->second.write;
    }
    for (const Access& read : it->second.reads) {
      if (!read.before(now)) {
        return &read;
      }
    }
  }
  return nullptr;
}

void History::forget(const Piece& piece) {
  const auto space = spaces_.find(piece.space);
  if (space == spaces_.end()) {
    return;
  }
  Cells& cells = space->second;
  split(cells, piece.offset);
  split(cells, piece.offset + piece.bytes);
  cells.erase(cells.lower_bound(piece.offset), cells.lower_bound(piece.offset + piece.bytes));
}

void History::sweep_if_large(const VectorClock& host) {
  std::size_t size = 0;
  for (const auto& [space, cells] : spaces_) {
    size += cells.size();
  }
  if (size < sweep_at_) {
    return;
  }
  std::size_t left = 0;
  for (auto& [space, cells] : spaces_) {
    for (auto it = cells.begin(); it != cells.end();) {
      Cell& cell = it->second;
      std::erase_if(cell.reads, [&](const Access& read) { return read.before(host); });
      const bool done = cell.reads.empty() && cell.write.before(host);
      it = done ? cells.erase(it) : std::next(it);
    }
    left += cells.size();
  }
  sweep_at_ = std::max<std::size_t>(4096, 2 * left);
}

}  // namespace stagehand::sim
