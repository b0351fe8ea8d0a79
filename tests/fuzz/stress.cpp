#include "fuzz/stress.hpp"

#include <algorithm>
#include <cstdarg>
#include <map>
#include <utility>

namespace stagehand::fuzz {

using core::Address;
using core::Bytes;
using core::Status;
using core::operator""_MiB;

namespace {

constexpr Bytes kLargestView = 256 << 10;  // large blocks are looked at in parts

template <typename Kept>
Kept taken(std::vector<Kept>& from, std::size_t index) {
  std::swap(from[index], from.back());
  Kept kept = std::move(from.back());
  from.pop_back();
  return kept;
}

// A share in 1/1024.
Bytes share_of(Bytes whole, Bytes share) { return whole / 1024 * share; }

}  // namespace

Stress::Stress(const driver::Table& table, core::Runtime& runtime, Contents& contents,
               std::FILE* trace)
    : table_(table), runtime_(runtime), contents_(contents), trace_(trace) {
  // One set of streams a runtime, as a process has: each costs an address range for good.
  static std::map<const core::Runtime*, std::vector<driver::Stream>> made;
  std::vector<driver::Stream>& streams = made[&runtime];
  while (streams.size() < kStreams) {
    driver::Stream stream = nullptr;
    if (table_.stream_create(&stream, driver::kStreamNonBlocking, 0) != driver::kSuccess) {
      broke("a stream could not be made");
    }
    streams.push_back(stream);
  }
  streams_ = streams;
  whole_ = driver_bytes();
}

Stress::~Stress() = default;  // streams stay: the runtime knows them

std::string Stress::run(const std::vector<Instruction>& program) {
  for (std::size_t i = 0; i < program.size() && broken_.empty(); ++i) {
    if (trace_ != nullptr) {
      say("%4zu  %s", i, print(program[i]).c_str());
    }
    execute(program[i]);
    verify();
    say("\n");
    if (!broken_.empty()) {
      broken_ = "at instruction " + std::to_string(i) + " " + print(program[i]) + ": " + broken_;
    }
  }
  if (broken_.empty()) {
    drop_everything();
    verify_empty();
  }
  return broken_;
}

void Stress::execute(const Instruction& in) {
  switch (in.op) {
    case Op::Allocate:
      return allocate(in);
    case Op::Free:
      return tensors_.empty() ? void() : free(in.pick % tensors_.size());
    case Op::Save:
      return save(in);
    case Op::Unpack:
      return unpack(in);
    case Op::DropAlias:
      return aliases_.empty() ? void() : drop_alias(in.pick % aliases_.size());
    case Op::DropHandle:
      return handles_.empty() ? void() : drop_handle(in.pick % handles_.size());
    case Op::RecordStream:
      return record_stream(in);
    case Op::Write:
      return write(in);
    case Op::Kernel:
      if (!tensors_.empty()) {
        const Tensor& tensor = tensors_[in.pick % tensors_.size()];
        for (const View& view : tensor.views) {
          check(view, tensor.address, tensor.stream);
        }
      }
      return;
    case Op::Keep:
      if (!tensors_.empty()) {
        runtime_.keep(tensors_[in.pick % tensors_.size()].address);
      }
      return;
    case Op::Fault:
      return fault(in);
    case Op::Steps:
      return steps(in);
    case Op::Finish:
      if (const std::string wrong = contents_.finish(); !wrong.empty()) {
        broke(wrong);
      }
      return;
    default:
      return settings(in);
  }
}

void Stress::allocate(const Instruction& in) {
  Tensor tensor;
  tensor.bytes = in.bytes;
  tensor.stream = in.stream % kStreams;
  const Status status =
      runtime_.allocate(tensor.bytes, streams_[tensor.stream], 0, &tensor.address);
  if (status != Status::ok) {
    return refused(status, tensor.bytes);
  }
  say("  %llu bytes at %llx", static_cast<unsigned long long>(tensor.bytes),
      static_cast<unsigned long long>(tensor.address));
  // One to three views at random places; small blocks whole.
  std::uint64_t draw = in.more;
  const std::uint64_t count = tensor.bytes < 4096 ? 1 : 1 + draw % 3;
  const Bytes part = tensor.bytes / count;
  for (std::uint64_t i = 0; i < count; ++i) {
    draw = draw * 6364136223846793005u + 1442695040888963407u;
    View view;
    view.bytes = std::min(part, kLargestView);
    view.offset = i * part + (draw >> 33) % (part - view.bytes + 1);
    tensor.views.push_back(view);
  }
  fill(tensor);
  tensors_.push_back(tensor);
}

void Stress::fill(Tensor& tensor) {
  for (View& view : tensor.views) {
    view.seed = ++seeds_;
    contents_.fill(streams_[tensor.stream], tensor.address + view.offset, view.bytes, view.seed);
  }
}

void Stress::check(const View& view, Address address, std::size_t stream) {
  contents_.check(streams_[stream], address + view.offset, view.bytes, view.seed);
}

void Stress::free(std::size_t index) {
  const Tensor tensor = taken(tensors_, index);
  for (const View& view : tensor.views) {
    check(view, tensor.address, tensor.stream);
  }
  say("  %llx", static_cast<unsigned long long>(tensor.address));
  if (!runtime_.free(tensor.address)) {
    broke("torch's block was not known");
  }
}

void Stress::save(const Instruction& in) {
  if (tensors_.empty()) {
    return;
  }
  // Mostly what was just made: older ones may be older than the pool.
  const std::size_t newest = tensors_.size() - 1;
  Tensor& tensor = tensors_[in.stream % 4 == 0 ? in.pick % tensors_.size() : newest];
  const View& view = tensor.views[in.more % tensor.views.size()];
  const Address first = tensor.address + view.offset;
  const core::Saved saved = runtime_.save(first, first, first + view.bytes);
  if (saved.refusal != core::Refusal::none) {
    say("  refused: %d", static_cast<int>(saved.refusal));
    return;
  }
  say("  record %u.%u", saved.record.index, saved.record.generation);
  tensor.saved = true;
  handles_.push_back({saved.record, saved.offset, view, tensor.stream});
}

void Stress::unpack(const Instruction& in) {
  if (handles_.empty()) {
    return;
  }
  const Handle& handle = handles_[in.pick % handles_.size()];
  // Mostly where it was made, as autograd does.
  const std::size_t consumer = in.more % 4 == 0 ? in.stream % kStreams : handle.stream;
  order(handle.stream, consumer);
  const core::Unpacked again = runtime_.unpack(handle.record, handle.offset, streams_[consumer]);
  if (again.status != Status::ok) {
    return refused(again.status, runtime_.bytes_of(handle.record));  // the whole storage comes back
  }
  say("  record %u.%u at %llx", handle.record.index, handle.record.generation,
      static_cast<unsigned long long>(again.address));
  View whole = handle.view;
  whole.offset = 0;
  check(whole, again.address, consumer);
  aliases_.push_back({again.block, again.address, whole, consumer});
}

void Stress::drop_alias(std::size_t index) {
  const Alias alias = taken(aliases_, index);
  check(alias.view, alias.address, alias.stream);
  runtime_.drop_alias(alias.block);
}

void Stress::drop_handle(std::size_t index) {
  const Handle handle = taken(handles_, index);
  runtime_.drop_handle(handle.record);
}

void Stress::record_stream(const Instruction& in) {
  if (tensors_.empty()) {
    return;
  }
  Tensor& tensor = tensors_[in.pick % tensors_.size()];
  const std::size_t user = in.stream % kStreams;
  order(tensor.stream, user);
  runtime_.record_stream(tensor.address, streams_[user]);
  for (const View& view : tensor.views) {
    check(view, tensor.address, user);
  }
  tensor.shared |= user != tensor.stream;
}

void Stress::write(const Instruction& in) {
  if (tensors_.empty()) {
    return;
  }
  Tensor& tensor = tensors_[in.pick % tensors_.size()];
  if (!tensor.saved && !tensor.shared) {
    fill(tensor);
  }
}

void Stress::steps(const Instruction& in) {
  constexpr std::size_t kRounds = 3;
  constexpr std::size_t kLayers = 6;
  const Bytes high = share_of(runtime_.device_bytes(), 64 + in.bytes / 2);
  for (std::size_t round = 0; round < kRounds && broken_.empty(); ++round) {
    const std::size_t others = handles_.size();
    runtime_.set_budget({high, high / 4 * 3, runtime_.device_bytes(), true});
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      Instruction made{Op::Allocate, 0, in.stream, 0, in.more};
      made.bytes = high / 32 * (1 + (in.more >> 4 * layer) % 8);
      const std::size_t before = tensors_.size();
      allocate(made);
      if (tensors_.size() > before) {
        save({Op::Save, 0, 1, 0, 0});  // the newest
        free(tensors_.size() - 1);
      }
    }
    runtime_.clear_budget();
    while (handles_.size() > others) {
      const std::size_t before = aliases_.size();
      unpack({Op::Unpack, static_cast<std::uint32_t>(handles_.size() - 1), in.stream, 0, 1});
      if (aliases_.size() > before) {
        drop_alias(aliases_.size() - 1);
      }
      drop_handle(handles_.size() - 1);
    }
    verify();
  }
}

void Stress::settings(const Instruction& in) {
  const Bytes device = runtime_.device_bytes();
  switch (in.op) {
    case Op::SetBudget: {
      const Bytes high = share_of(device, in.bytes) >> in.stream % 3;
      const Bytes limit = in.more % 3 == 0 ? high : device;
      runtime_.set_budget({high, share_of(high, 256 + in.more % 769), limit, true});
      return;
    }
    case Op::ClearBudget:
      return runtime_.clear_budget();
    case Op::SetLimit:
      return runtime_.set_limit(in.more % 2 == 0 ? device : share_of(device, in.bytes));
    case Op::Trim:
      runtime_.trim(share_of(device, in.bytes) / 2);
      return;
    case Op::SetDebug:
      return runtime_.set_debug({in.more % 3 == 0, in.more % 2 == 0});
    case Op::Pinned:
      if (in.more % 3 == 0) {
        runtime_.release_pinned((in.more >> 8) % 48 << 20);
        return;
      }
      runtime_.configure_pinned(in.more % 2 == 0 ? core::SizeClasses{{64 << 10, 1 << 20}, {16, 4}}
                                                 : core::SizeClasses{{1 << 20, 8 << 20}, {4, 1}},
                                (in.more >> 8) % 48 << 20);
      return;
    default:
      return;
  }
}

void Stress::fault(const Instruction& in) {
  constexpr const char* kSymbols[] = {"cuMemCreate",       "cuMemMap",           "cuMemSetAccess",
                                      "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync",  "cuEventRecord",
                                      "cuEventCreate",     "cuStreamWaitEvent",  "cuEventQuery",
                                      "cuMemHostRegister", "cuMemAddressReserve"};
  faulty_ = true;
  const char* symbol = kSymbols[in.pick % std::size(kSymbols)];
  const std::uint64_t nth = 1 + in.more % 6;
  say("  %s, call %llu from now", symbol, static_cast<unsigned long long>(nth));
  contents_.fault(symbol, nth, in.stream % 2 == 0 ? driver::kOutOfMemory : 999);
}

// `later` waits for what `earlier` has queued: the program's own ordering, as torch's autograd
// engine does it. Asked again where a planted fault hits it.
void Stress::order(std::size_t earlier, std::size_t later) {
  if (earlier == later) {
    return;
  }
  driver::Event event = nullptr;
  const auto stubborn = [](auto call) {
    for (int tries = 0; tries < 4; ++tries) {
      if (call() == driver::kSuccess) {
        return true;
      }
    }
    return false;
  };
  const bool ordered =
      stubborn([&] { return table_.event_create(&event, driver::kEventDisableTiming); }) &&
      stubborn([&] { return table_.event_record(event, streams_[earlier]); }) &&
      stubborn([&] { return table_.stream_wait_event(streams_[later], event, 0); });
  if (!ordered) {
    broke("the program could not order its own streams");
  }
  table_.event_destroy(event);
}

// Refusing is right only where memory is really short, or the driver was made to fail.
void Stress::refused(Status status, Bytes bytes) {
  say("  status %d", static_cast<int>(status));
  if (faulty_) {
    return;
  }
  if (status != Status::out_of_memory) {
    return broke("status " + std::to_string(static_cast<int>(status)) + " without a fault");
  }
  // What is not live can be evicted, and moved in whole pieces: each live block may hold on to the
  // largest pieces at its ends, and small blocks to their granule.
  const core::Counters now = runtime_.counters();
  Bytes needed = bytes + bytes / 32 + 2 * core::kLargestPiece + now.occupied - now.retained;
  for (const Tensor& tensor : tensors_) {
    needed += tensor.bytes > core::kSmallLimit ? 2 * core::kLargestPiece : 4_MiB;
  }
  needed += aliases_.size() * 2 * core::kLargestPiece;
  if (needed <= runtime_.budget().limit) {
    broke("out of memory although there is room: " + runtime_.report(bytes));
  }
}

// The driver's own word on what we hold: free there and mapped here, together.
Bytes Stress::driver_bytes() const {
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  table_.mem_get_info(&free_bytes, &total);
  return free_bytes + runtime_.counters().mapped;
}

void Stress::verify() {
  if (!broken_.empty()) {
    return;
  }
  const Bytes whole = driver_bytes();
  if (!faulty_ && (whole + contents_.driver_slack() < whole_)) {
    broke("memory is lost: the driver has " + std::to_string(whole_ - whole) +
          " bytes less than what is free and what is mapped");
  }
  if (const std::string what = runtime_.invariants_broken(); !what.empty()) {
    broke(what);
  }
  if (const std::string what = contents_.seen(); !what.empty()) {
    broke(what);
  }
  const core::Counters now = runtime_.counters();
  if (now.handles != handles_.size() || now.aliases != aliases_.size()) {
    broke("handles or aliases are not those of the program");
  }
}

void Stress::drop_everything() {
  contents_.end_faults();
  faulty_ = false;
  whole_ = driver_bytes();  // a release that failed is lost
  runtime_.set_debug({});
  while (!aliases_.empty()) {
    drop_alias(0);
  }
  while (!tensors_.empty()) {
    free(0);
  }
  runtime_.set_limit(runtime_.device_bytes());
  runtime_.set_budget({runtime_.device_bytes(), runtime_.device_bytes(), core::kUnlimited, true});
  // Backward of all that was saved: every byte is still there.
  while (!handles_.empty() && broken_.empty()) {
    Instruction in;
    in.pick = static_cast<std::uint32_t>(handles_.size() - 1);
    in.more = 1;
    unpack(in);
    if (!aliases_.empty()) {
      drop_alias(0);
    }
    drop_handle(handles_.size() - 1);
    verify();
  }
  runtime_.clear_budget();
}

void Stress::verify_empty() {
  if (!broken_.empty()) {
    broken_ = "in the last backward: " + broken_;
    return;
  }
  if (const std::string wrong = contents_.finish(); !wrong.empty()) {
    return broke("at the end: " + wrong);
  }
  runtime_.trim(0);
  runtime_.trim(0);  // what retired in the first
  const core::Counters now = runtime_.counters();
  const auto zero = [&](const char* name, Bytes value) {
    if (value != 0) {
      broke("at the end " + std::string(name) + " is " + std::to_string(value));
    }
  };
  zero("records", now.records);
  zero("handles", now.handles);
  zero("aliases", now.aliases);
  zero("occupied", now.occupied);
  zero("retained", now.retained);
  zero("evicted", now.evicted);
  zero("pinned_used_bytes", now.pinned_used_bytes);
  zero("pageable_bytes", now.pageable_bytes);
  zero("mapped", now.mapped);
  zero("retiring_bytes", now.retiring_bytes);
  verify();
}

void Stress::say(const char* format, ...) {
  if (trace_ == nullptr) {
    return;
  }
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(trace_, format, arguments);
  va_end(arguments);
  std::fflush(trace_);
}

void Stress::broke(const std::string& what) {
  if (broken_.empty()) {
    broken_ = what;
  }
}

}  // namespace stagehand::fuzz
