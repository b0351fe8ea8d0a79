#include "entry/shapes.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/step_shape.hpp"
#include "entry/gil.hpp"
#include "entry/registry.hpp"
#include "entry/torch_api.hpp"
#include "entry/without_gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace stagehand::entry {

namespace {

// KnownRecord, with -1 for never: bytes, retained, used, again_ns, call, rerun_ns, made_of,
// rerun_bytes.
constexpr std::size_t kFields = 7 + core::Made::kInputs;
using RecordRow = std::array<std::int64_t, kFields>;
// IdleWeights, likewise: bytes, from, until.
using IdleRow = std::array<std::int64_t, 3>;

std::int64_t signed_place(std::uint32_t place) {
  return place == core::KnownRecord::kNever ? -1 : static_cast<std::int64_t>(place);
}

std::uint32_t place_of(std::int64_t given, std::size_t end, const char* what) {
  if (given == -1) {
    return core::KnownRecord::kNever;
  }
  if (given < 0 || given >= static_cast<std::int64_t>(end)) {
    throw std::invalid_argument(std::string(what) + " is outside of the step");
  }
  return static_cast<std::uint32_t>(given);
}

nb::dict step_shape(int device) {
  nb::dict found;
  const core::StepShape shape =
      without_gil(device, [](core::Runtime& runtime) { return runtime.step_shape(); });
  if (shape.id == 0) {
    return found;
  }
  std::vector<RecordRow> records;
  for (const core::KnownRecord& one : shape.records) {
    RecordRow row{static_cast<std::int64_t>(one.bytes),
                  signed_place(one.retained),
                  signed_place(one.used),
                  static_cast<std::int64_t>(one.again_ns),
                  static_cast<std::int64_t>(one.call),
                  static_cast<std::int64_t>(one.rerun_ns)};
    for (std::size_t n = 0; n < core::Made::kInputs; ++n) {
      row[6 + n] = signed_place(one.made_of[n]);
    }
    row.back() = static_cast<std::int64_t>(one.rerun_bytes);
    records.push_back(row);
  }
  nb::list fates;
  for (const core::Fate fate : shape.fates) {
    fates.append(static_cast<int>(fate));
  }
  nb::list occupied;
  nb::list mapped;
  for (const core::Trace::Held& one : shape.held) {
    occupied.append(one.occupied);
    mapped.append(one.mapped);
  }
  found["id"] = shape.id;
  found["high"] = shape.high;
  found["live_before"] = shape.live_before;
  found["records"] = records;
  found["fates"] = fates;
  found["full"] = shape.full;
  found["occupied"] = occupied;
  found["mapped"] = mapped;
  found["at_ns"] = shape.at_ns;
  std::vector<IdleRow> idle;
  for (const core::IdleWeights& one : shape.idle) {
    idle.push_back(
        {static_cast<std::int64_t>(one.bytes), signed_place(one.from), signed_place(one.until)});
  }
  found["idle"] = idle;
  found["dirty"] = shape.dirty;
  found["out_bytes_per_ns"] = shape.rates_known ? shape.rates.out : 0.0;
  found["in_bytes_per_ns"] = shape.rates_known ? shape.rates.in : 0.0;
  found["all_ns"] = shape.totals.all_ns;
  found["waited_ns"] = shape.totals.waited_ns;
  found["again_ns"] = shape.totals.again_ns;
  return found;
}

nb::dict advise(const std::vector<RecordRow>& rows, const std::vector<core::Bytes>& full,
                const std::vector<std::uint64_t>& at_ns, const std::vector<IdleRow>& idle_rows,
                core::Bytes high, double out, double in) {
  if (full.empty() || full.size() != at_ns.size() || !(out > 0) || !(in > 0)) {
    throw std::invalid_argument("a step has as many times as moments, and lanes that carry some");
  }
  if (!std::is_sorted(at_ns.begin(), at_ns.end())) {
    throw std::invalid_argument("the times of a step go up");
  }
  std::vector<core::KnownRecord> records;
  for (const RecordRow& row : rows) {
    core::KnownRecord one;
    if (row[0] <= 0 || row[3] < 0 || row[4] < 0 || row[5] < 0 || row.back() < 0) {
      throw std::invalid_argument("a record has a size, and nothing it takes is negative");
    }
    one.bytes = static_cast<core::Bytes>(row[0]);
    one.retained = place_of(row[1], full.size(), "where a record is retained");
    one.used = place_of(row[2], full.size(), "where a record is used");
    one.again_ns = static_cast<std::uint64_t>(row[3]);
    one.call = static_cast<std::uint64_t>(row[4]);
    one.rerun_ns = static_cast<std::uint64_t>(row[5]);
    for (std::size_t n = 0; n < core::Made::kInputs; ++n) {
      one.made_of[n] = place_of(row[6 + n], rows.size(), "what a record is made of");
    }
    one.rerun_bytes = static_cast<core::Bytes>(row.back());
    records.push_back(one);
  }
  std::vector<core::IdleWeights> idle;
  for (const IdleRow& row : idle_rows) {
    if (row[0] <= 0 || row[1] < 0) {
      throw std::invalid_argument("idle weights have a size, and are so from some moment on");
    }
    idle.push_back({static_cast<core::Bytes>(row[0]),
                    place_of(row[1], full.size(), "where weights are idle"),
                    place_of(row[2], full.size(), "where weights are used")});
  }
  core::Advice advice;
  {
    const GilReleased unlocked;
    advice = core::advise({records, full, at_ns, high, out, in, idle});
  }
  nb::dict found;
  nb::list fates;
  for (const core::Fate fate : advice.fates) {
    fates.append(static_cast<int>(fate));
  }
  found["fates"] = fates;
  found["late_ns"] = advice.forecast.late_ns;
  found["again_ns"] = advice.forecast.again_ns;
  found["moved"] = advice.forecast.bytes;
  found["dropped"] = advice.forecast.dropped;
  found["weights"] = advice.forecast.weights;
  found["host"] = advice.host;
  found["least"] = advice.least;
  found["fullest"] = advice.fullest;
  return found;
}

// (notes: what, ns, bytes, record, occupied, mapped, evicted; copies: lane, bytes, queued, begin
// and end in ns; how many are missing)
nb::tuple stop_timeline(int device) {
  const core::Timeline::Taken taken =
      without_gil(device, [](core::Runtime& runtime) { return runtime.stop_timeline(); });
  nb::list notes;
  for (const core::Timeline::Note& one : taken.notes) {
    notes.append(nb::make_tuple(static_cast<int>(one.what), one.ns, one.bytes, one.record,
                                one.occupied, one.mapped, one.evicted));
  }
  nb::list copies;
  for (const core::Timeline::Copy& one : taken.copies) {
    copies.append(nb::make_tuple(one.lane, one.bytes, one.queued_ns, one.begin_ns, one.end_ns));
  }
  return nb::make_tuple(notes, copies, taken.missed);
}

// (records: order, bytes, state, address, block's bytes, retained, op, region; arenas: base,
// stream, small, blocks: address, bytes, state)
nb::tuple contents(int device) {
  nb::list records;
  nb::list arenas;
  const core::Contents found =
      without_gil(device, [](core::Runtime& runtime) { return runtime.contents(); });
  for (const core::SeenRecord& one : found.records) {
    records.append(nb::make_tuple(one.order, one.bytes, one.state, one.address, one.block_bytes,
                                  one.retained, one.op != nullptr ? op_name(one.op) : std::string(),
                                  one.region != nullptr ? one.region : ""));
  }
  for (const core::SeenArena& one : found.arenas) {
    nb::list blocks;
    for (const core::SeenBlock& block : one.blocks) {
      blocks.append(nb::make_tuple(block.address, block.bytes, block.state));
    }
    arenas.append(nb::make_tuple(one.base, one.stream, one.small, blocks));
  }
  return nb::make_tuple(records, arenas);
}

}  // namespace

void bind_shapes(nb::module_& module) {
  module.def(
      "step_kind",
      [](int device) {
        return without_gil(device, [](core::Runtime& runtime) { return runtime.step_kind(); });
      },
      "device"_a);
  module.def(
      "start_timeline",
      [](int device) {
        opened(device);
        return without_gil(device, [](core::Runtime& runtime) { return runtime.start_timeline(); });
      },
      "device"_a);
  module.def("stop_timeline", &stop_timeline, "device"_a);
  module.def("contents", &contents, "device"_a);
  module.def("step_shape", &step_shape, "device"_a);
  module.def("advise", &advise, "records"_a, "full"_a, "at_ns"_a, "idle"_a, "high"_a,
             "out_bytes_per_ns"_a, "in_bytes_per_ns"_a);
}

}  // namespace stagehand::entry
