#include "fuzz/stress.hpp"

#include <algorithm>
#include <array>
#include <cstdarg>
#include <map>
#include <utility>

#include "fuzz/faults.hpp"

namespace stagehand::fuzz {

using core::Address;
using core::Bytes;
using core::Status;

namespace {

constexpr Bytes kLargestView = 96 << 10;  // large blocks are looked at in parts

// From the newest on.
template <typename Kept>
std::size_t index_of(const std::vector<Kept>& all, std::uint64_t pick) {
  return all.size() - 1 - pick % all.size();
}

template <typename Kept>
Kept taken(std::vector<Kept>& from, std::uint64_t pick) {
  const auto at = from.begin() + static_cast<std::ptrdiff_t>(index_of(from, pick));
  Kept kept = std::move(*at);
  from.erase(at);
  return kept;
}

// A share in 1/1024.
Bytes share_of(Bytes whole, Bytes share) { return whole / 1024 * share; }

}  // namespace

Stress::Stress(const driver::Table& table, std::vector<driver::Context> contexts, Store& store,
               Contents& contents, const Setup& setup, std::FILE* trace)
    : table_(table),
      contexts_(std::move(contexts)),
      store_(store),
      contents_(contents),
      setup_(setup),
      trace_(trace) {
  // One set of streams a runtime, as a process has: each costs an address range for good.
  static std::map<const core::Runtime*, std::vector<driver::Stream>> made;
  for (std::size_t device = 0; device < store.devices(); ++device) {
    const driver::ContextGuard guard(table_, contexts_[device]);
    std::vector<driver::Stream>& streams = made[&store.runtime(device)];
    while (streams.size() < kStreams) {
      driver::Stream stream = nullptr;
      if (!streams.empty() &&
          table_.stream_create(&stream, driver::kStreamNonBlocking, 0) != driver::kSuccess) {
        broke("a stream could not be made");
      }
      streams.push_back(stream);
    }
    streams_.push_back(streams);
    whole_.push_back(driver_bytes(device));
  }
}

std::string Stress::run(const std::vector<Instruction>& code) {
  for (std::size_t i = 0; i < code.size() && broken_.empty(); ++i) {
    if (trace_ != nullptr) {
      say("%4zu  %s", i, print(code[i]).c_str());
    }
    current_ = setup_.contexts != 0 ? code[i].more / 7 + code[i].pick / 3 : 0;
    execute(code[i]);
    look();
    if (setup_.check_every != 0 && i % setup_.check_every == 0) {
      verify();
    }
    say("\n");
    if (!broken_.empty()) {
      broken_ = "at instruction " + std::to_string(i) + " " + print(code[i]) + ": " + broken_;
    }
  }
  if (broken_.empty()) {
    settle();
    train_on();
    if (!broken_.empty()) {
      broken_ = "after the program: " + broken_;
    }
  }
  return broken_;
}

void Stress::execute(const Instruction& in) {
  switch (in.op) {
    case Op::Allocate:
      return allocate(in);
    case Op::Free:
      return tensors_.empty() ? void() : free(tensors_, in.pick);
    case Op::Save:
      return save(in);
    case Op::Unpack:
      return unpack(in);
    case Op::DropAlias:
      return aliases_.empty() ? void() : free(aliases_, in.pick);
    case Op::DropHandle:
      return handles_.empty() ? void() : drop_handle(in.pick);
    case Op::RecordStream:
      return record_stream(in);
    case Op::Write:
      return write(in);
    case Op::Rewrite:
      return rewrite(in);
    case Op::Check:
      if (!tensors_.empty()) {
        const Tensor& tensor = tensors_[index_of(tensors_, in.pick)];
        check_all(tensor, tensor.place);
      }
      return;
    case Op::Keep:
      return tensors_.empty()
                 ? void()
                 : call([&] { store_.keep(tensors_[index_of(tensors_, in.pick)].reference); });
    case Op::BeginCapture:
      return begin_capture(in);
    case Op::EndCapture:
      return end_capture();
    case Op::ReleaseGraph:
      return graphs_.empty() || capturing_ ? void() : release_graph(in.pick);
    case Op::Progress:
      return contents_.progress(in.pick);
    case Op::Fault:
      return fault(in);
    case Op::Finish:
      return capturing_ ? void() : broke(contents_.finish());
    case Op::Settle:
      return settle();
    default:
      return settings(in);
  }
}

Stress::Place Stress::place_of(std::uint64_t number) const {
  return {number / kStreams % streams_.size(), number % kStreams};
}

void Stress::allocate(const Instruction& in) {
  Tensor tensor;
  tensor.place = capturing_ && in.more % 3 == 0 ? captured_ : place_of(in.stream);
  const bool captured = capturing_ && stream(tensor.place) == stream(captured_) &&
                        tensor.place.device == captured_.device;
  tensor.reference.bytes = std::max<Bytes>(in.bytes, 1);
  tensor.reference.device = tensor.place.device;
  const Status status = call(
      [&] { return store_.make(stream(tensor.place), captured ? graph_ : 0, &tensor.reference); });
  if (status != Status::ok) {
    return refused(status, tensor.reference.bytes, tensor.place.device);
  }
  say("  at %llx", static_cast<unsigned long long>(tensor.reference.address));
  tensor.storage = std::make_shared<Storage>();
  tensor.storage->captured = captured;
  tensor.storage->bytes = tensor.reference.bytes;
  constexpr std::array kHow{Again::no,    Again::no,           Again::no,
                            Again::exact, Again::to_be_proven, Again::by_call};
  tensor.storage->again = {kHow[in.more % kHow.size()], 1 + in.pick % 3};
  // One to three views at random places; small blocks whole.
  const Bytes bytes = tensor.reference.bytes;
  std::uint64_t drawn = in.more;
  const std::uint64_t count = bytes < 4096 ? 1 : 1 + drawn % 3;
  const Bytes part = bytes / count;
  for (std::uint64_t i = 0; i < count; ++i) {
    drawn = drawn * 6364136223846793005u + 1442695040888963407u;
    View view;
    view.bytes = std::min(part, kLargestView);
    view.offset = i * part + (drawn >> 33) % (part - view.bytes + 1);
    tensor.storage->views.push_back(view);
    fill(tensor, i);
  }
  tensors_.push_back(std::move(tensor));
}

// An alias begins where its view does.
Address Stress::address_of(const Tensor& tensor, std::size_t view) const {
  const bool alias = tensor.reference.bytes == 0;
  return tensor.reference.address + (alias ? 0 : tensor.storage->views[view].offset);
}

void Stress::fill(const Tensor& tensor, std::size_t view) {
  View& of = tensor.storage->views[view];
  of.seed = ++seeds_;
  const driver::ContextGuard guard(table_, contexts_[tensor.place.device]);
  contents_.fill(stream(tensor.place), address_of(tensor, view), of.bytes, of.seed);
}

void Stress::check(const Tensor& tensor, std::size_t view, Place on) {
  const View& of = tensor.storage->views[view];
  const driver::ContextGuard guard(table_, contexts_[on.device]);
  contents_.check(stream(on), address_of(tensor, view), of.bytes, of.seed);
}

void Stress::check_all(const Tensor& tensor, Place on) {
  if (tensor.reference.bytes == 0) {
    return check(tensor, tensor.view, on);
  }
  for (std::size_t view = 0; view < tensor.storage->views.size(); ++view) {
    check(tensor, view, on);
  }
}

void Stress::free(std::vector<Tensor>& from, std::uint64_t pick) {
  const Tensor tensor = taken(from, pick);
  check_all(tensor, tensor.place);
  if (!call([&] { return store_.drop(tensor.reference); })) {
    broke("torch's block was not known");
  }
}

void Stress::save(const Instruction& in) {
  const bool alias = in.stream % 8 == 7;
  const std::vector<Tensor>& from = alias ? aliases_ : tensors_;
  if (!from.empty()) {
    const Tensor& tensor = from[index_of(from, in.pick)];
    save_tensor(tensor, alias ? tensor.view : in.more % tensor.storage->views.size());
  }
}

void Stress::save_tensor(const Tensor& tensor, std::size_t view) {
  const Address first = address_of(tensor, view);
  // What came back may be a part of its storage.
  const bool whole = tensor.reference.bytes != 0;
  const Again again = whole && tensor.storage->version == 0 ? tensor.storage->again : Again();
  const core::Saved saved = call([&] {
    return store_.save(tensor.reference, stream(tensor.place), first,
                       first + tensor.storage->views[view].bytes, again);
  });
  if (saved.refusal != core::Refusal::none) {
    return say("  refused: %d", static_cast<int>(saved.refusal));
  }
  say("  record %u.%u", saved.record.index, saved.record.generation);
  tensor.storage->saved = true;
  handles_.push_back(
      {saved.record, saved.offset, view, tensor.storage->version, tensor.place, tensor.storage});
}

void Stress::unpack(const Instruction& in) {
  if (handles_.empty()) {
    return;
  }
  const Handle& handle = handles_[index_of(handles_, in.pick)];
  // Mostly where it was made, as autograd does.
  Place consumer = handle.place;
  consumer.stream = in.more % 4 == 0 ? in.stream % kStreams : consumer.stream;
  if (handle.version != handle.storage->version || crosses_capture(handle.place, consumer)) {
    return;
  }
  order(handle.place, consumer);
  Tensor alias;
  const auto ask = [&] {
    return call([&] {
      return store_.unpack(handle.place.device, handle.record, handle.offset, stream(consumer),
                           &alias.reference);
    });
  };
  Status status = ask();
  const bool again = status == Status::recompute;
  if (again) {
    status = make_again(handle, consumer);
    status = status == Status::ok ? ask() : status;
  }
  if (status != Status::ok) {
    // What was saved of the storage comes back, or is made again with all of it.
    const std::size_t device = handle.place.device;
    const Bytes saved = store_.runtime(device).bytes_of(handle.record);
    return refused(status, again ? handle.storage->bytes : saved, device);
  }
  say("  record %u.%u at %llx", handle.record.index, handle.record.generation,
      static_cast<unsigned long long>(alias.reference.address));
  alias.place = consumer;
  alias.storage = handle.storage;
  alias.view = handle.view;
  check_all(alias, consumer);
  if (!store_.owns_memory()) {
    order(consumer, handle.place);  // torch hands the storage out on its own stream
    alias.place = handle.place;
  }
  aliases_.push_back(std::move(alias));
}

// As the hook does: the storage's op once more, on the stream that asks.
Status Stress::make_again(const Handle& handle, Place on) {
  Tensor made;
  made.place = on;
  made.reference.bytes = handle.storage->bytes;
  made.reference.device = on.device;
  made.storage = std::make_shared<Storage>(*handle.storage);
  const bool captured =
      capturing_ && stream(on) == stream(captured_) && on.device == captured_.device;
  const Status status =
      call([&] { return store_.make(stream(on), captured ? graph_ : 0, &made.reference); });
  if (status != Status::ok) {
    return status;
  }
  const driver::ContextGuard guard(table_, contexts_[on.device]);
  for (const View& view : made.storage->views) {
    contents_.fill(stream(on), made.reference.address + view.offset, view.bytes, view.seed);
  }
  const bool taken = call([&] { return store_.refill(handle.record, made.reference, stream(on)); });
  call([&] { store_.drop(made.reference); });
  const std::shared_ptr<Storage> storage = handle.storage;
  for (Handle& one : handles_) {
    one.place = taken && one.storage == storage ? on : one.place;
  }
  return taken ? Status::ok : Status::out_of_memory;
}

void Stress::drop_handle(std::uint64_t pick) {
  const Handle handle = taken(handles_, pick);
  call([&] { store_.drop_handle(handle.place.device, handle.record); });
}

void Stress::record_stream(const Instruction& in) {
  if (tensors_.empty()) {
    return;
  }
  Tensor& tensor = tensors_[index_of(tensors_, in.pick)];
  const Place user{tensor.place.device, in.stream % kStreams};
  if (crosses_capture(tensor.place, user)) {
    return;
  }
  order(tensor.place, user);
  check_all(tensor, user);
  call([&] { store_.record_stream(tensor.reference, stream(user)); });
  tensor.storage->shared |= user.stream != tensor.place.stream;
}

void Stress::write(const Instruction& in) {
  if (tensors_.empty()) {
    return;
  }
  const Tensor& tensor = tensors_[index_of(tensors_, in.pick)];
  for (std::size_t view = 0; view < tensor.storage->views.size(); ++view) {
    if (!tensor.storage->saved && !tensor.storage->shared) {
      fill(tensor, view);
    }
  }
}

// A change in place: what was saved before is no good any more. It may be saved again.
void Stress::rewrite(const Instruction& in) {
  if (tensors_.empty() || capturing_) {
    return;
  }
  const Tensor& tensor = tensors_[index_of(tensors_, in.pick)];
  if (tensor.storage->captured) {
    return;
  }
  broke(contents_.finish());  // a copy under way would read it, for nobody
  for (std::size_t other = 0; other < kStreams; ++other) {
    order({tensor.place.device, other}, tensor.place);
  }
  ++tensor.storage->version;
  for (std::size_t view = 0; view < tensor.storage->views.size(); ++view) {
    fill(tensor, view);
  }
  // Aliases of it are read where they were unpacked.
  for (const Tensor& alias : aliases_) {
    if (alias.storage == tensor.storage) {
      order(tensor.place, alias.place);
    }
  }
  if (in.more % 4 != 0) {
    save_tensor(tensor, in.more % tensor.storage->views.size());
  }
}

void Stress::settings(const Instruction& in) {
  const std::size_t device = in.stream % store_.devices();
  core::Runtime& runtime = store_.runtime(device);
  const Bytes all = runtime.device_bytes();
  call([&] {
    switch (in.op) {
      case Op::EnterPool:
        return enter_pool(in.bytes, in.more);
      case Op::LeavePool:
        return leave_pool();
      case Op::SetLimit:
        return runtime.set_limit(in.more % 2 == 0 ? all : share_of(all, in.bytes));
      case Op::LaneLimits: {
        core::LaneLimits limits;
        limits.inflight_d2h = static_cast<std::uint32_t>(in.more % 4);
        limits.inflight_h2d = static_cast<std::uint32_t>(in.more / 4 % 4);
        limits.piece = in.more / 16 % 3 == 0 ? 64 << 10 : 0;
        runtime.set_lane_limits(limits);
        return;
      }
      case Op::Trim:
        return store_.trim(device, share_of(all, in.bytes) / 2);
      case Op::SetDebug:
        return runtime.set_debug({in.more % 3 == 0, in.more % 2 == 0, in.more % 5 == 0});
      case Op::Pinned:
        if (in.more % 3 == 0) {
          runtime.release_pinned((in.more >> 8) % 48 << 20);
          return;
        }
        runtime.configure_pinned(in.more % 2 == 0 ? core::SizeClasses{{64 << 10, 1 << 20}, {16, 4}}
                                                  : core::SizeClasses{{1 << 20, 8 << 20}, {4, 1}},
                                 (in.more >> 8) % 48 << 20);
        return;
      default:
        return;
    }
  });
}

void Stress::enter_pool(Bytes share, std::uint64_t more) {
  in_pool_ = true;
  for (std::size_t device = 0; device < store_.devices(); ++device) {
    core::Runtime& runtime = store_.runtime(device);
    const Bytes high = share_of(setup_.high, share % 1024 + 1);
    const Bytes limit = more % 5 == 3 ? high : runtime.device_bytes();
    runtime.set_budget({high, share_of(high, 1023 - more % 769), limit, true});
  }
  store_.enter_pool();
}

void Stress::leave_pool() {
  in_pool_ = false;
  store_.leave_pool();
  for (std::size_t device = 0; device < store_.devices(); ++device) {
    store_.runtime(device).clear_budget();
  }
}

void Stress::fault(const Instruction& in) {
  constexpr driver::Result kCodes[] = {driver::kOutOfMemory, 999, 1};
  const std::size_t symbol = in.pick % driver::kFunctionCount;
  faulty_ = true;
  fault_plan().faults[symbol] = {1 + in.bytes % 1024, 1 + in.stream % 3,
                                 kCodes[in.more % std::size(kCodes)]};
  say("  %s, call %llu from now", driver::kSymbols[symbol],
      static_cast<unsigned long long>(1 + in.bytes % 1024));
}

// `later` waits for what `earlier` has queued: the program's own ordering, as torch's autograd
// engine does it.
void Stress::order(Place earlier, Place later) {
  if (stream(earlier) == stream(later) || crosses_capture(earlier, later)) {
    return;
  }
  const driver::ContextGuard guard(table_, contexts_[earlier.device]);
  driver::Event event = nullptr;
  if (table_.event_create(&event, driver::kEventDisableTiming) != driver::kSuccess ||
      table_.event_record(event, stream(earlier)) != driver::kSuccess ||
      table_.stream_wait_event(stream(later), event, 0) != driver::kSuccess) {
    broke("the program could not order its own streams");
  }
  table_.event_destroy(event);
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
