// What must hold while a program runs, and when it has dropped everything.
#include "fuzz/faults.hpp"
#include "fuzz/stress.hpp"

namespace stagehand::fuzz {

using core::Bytes;
using core::Status;
using core::operator""_MiB;

// Refusing is right only where memory is really short, or the driver was made to fail.
void Stress::refused(Status status, Bytes bytes, std::size_t device) {
  say("  status %d", static_cast<int>(status));
  if (strict_) {
    return broke("refused with status " + std::to_string(static_cast<int>(status)));
  }
  if (faulty_ || capturing_) {
    return;  // what was evicted before a capture cannot be restored inside it
  }
  if (status != Status::out_of_memory) {
    return broke("status " + std::to_string(static_cast<int>(status)) + " without a fault");
  }
  if (!store_.owns_memory() || !graphs_.empty()) {
    return;  // torch's cache and graphs keep what they have
  }
  // What is not live can be evicted, and moved in whole pieces: each live block may hold on to the
  // largest pieces at its ends, and small blocks to their granule.
  core::Runtime& runtime = store_.runtime(device);
  const core::Counters now = runtime.counters();
  Bytes needed = bytes + bytes / 32 + 2 * core::kLargestPiece + now.occupied - now.retained;
  for (const Tensor& tensor : tensors_) {
    needed += tensor.reference.bytes > core::kSmallLimit ? 2 * core::kLargestPiece : 4_MiB;
  }
  needed += aliases_.size() * 2 * core::kLargestPiece;
  if (needed <= runtime.budget().limit) {
    broke("out of memory although there is room: " + runtime.report(bytes));
  }
}

// The driver's own word on what we hold: free there and mapped here, together.
Bytes Stress::driver_bytes(std::size_t device) {
  const driver::ContextGuard guard(table_, contexts_[device]);
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  table_.mem_get_info(&free_bytes, &total);
  return free_bytes + store_.runtime(device).counters().mapped;
}

void Stress::look() {
  if (broken_.empty()) {
    broke(contents_.seen());
  }
}

void Stress::verify() {
  if (!broken_.empty()) {
    return;
  }
  Bytes handles = 0;
  Bytes aliases = 0;
  for (std::size_t device = 0; device < store_.devices(); ++device) {
    core::Runtime& runtime = store_.runtime(device);
    broke(runtime.invariants_broken());
    const core::Counters now = runtime.counters();
    handles += now.handles;
    aliases += now.aliases;
    const Bytes whole = driver_bytes(device);
    if (!faulty_ && store_.owns_memory() && whole + contents_.driver_slack() < whole_[device]) {
      broke("memory is lost: the driver has " + std::to_string(whole_[device] - whole) +
            " bytes less than what is free and what is mapped");
    }
  }
  broke(store_.broken());
  broke(contents_.seen());
  if (handles != handles_.size() || (store_.owns_memory() && aliases != aliases_.size())) {
    broke("handles or aliases are not those of the program");
  }
}

// No more faults, backward of all that was saved, and everything dropped: nothing is left.
void Stress::settle() {
  end_capture();
  fault_plan().faults = {};
  faulty_ = false;
  current_ = 0;
  for (std::size_t device = 0; device < store_.devices(); ++device) {
    whole_[device] = driver_bytes(device);  // a release that failed is lost
    core::Runtime& runtime = store_.runtime(device);
    runtime.set_debug({});
    runtime.set_lane_limits({});
    runtime.set_limit(runtime.device_bytes());
  }
  while (!aliases_.empty()) {
    execute({Op::DropAlias, 0, 0, 0, 0});
  }
  while (!tensors_.empty()) {
    execute({Op::Free, 0, 0, 0, 0});
  }
  while (!graphs_.empty()) {
    release_graph(0);
  }
  for (std::size_t device = 0; device < store_.devices(); ++device) {
    store_.runtime(device).set_budget({store_.runtime(device).device_bytes(),
                                       store_.runtime(device).device_bytes(), core::kUnlimited,
                                       true});
  }
  while (!handles_.empty() && broken_.empty()) {
    execute({Op::Unpack, 0, 0, 0, 1});
    execute({Op::DropAlias, 0, 0, 0, 0});
    execute({Op::DropHandle, 0, 0, 0, 0});
    look();
  }
  leave_pool();
  verify_empty();
}

// Whatever was before: a step that needs little is trained, with tensors that have to leave, and
// nothing of it is refused.
void Stress::train_on() {
  if (!broken_.empty()) {
    return;
  }
  constexpr int kLayers = 8;
  const Bytes high = std::min<Bytes>(setup_.high, setup_.memory / 2);
  strict_ = true;
  for (std::size_t device = 0; device < store_.devices(); ++device) {
    for (int step = 0; step < 2 && broken_.empty(); ++step) {
      enter_pool(high * 1024 / setup_.high - 1, 256);
      for (int layer = 0; layer < kLayers; ++layer) {
        execute({Op::Allocate, 0, device * kStreams + 1, high / 6, 0});
        execute({Op::Save, 0, 0, 0, 0});
        execute({Op::Free, 0, 0, 0, 0});
      }
      leave_pool();
      if (broken_.empty() && handles_.size() != kLayers) {
        broke("a tensor of the next step was not saved");
      }
      while (!handles_.empty() && broken_.empty()) {
        execute({Op::Unpack, 0, 0, 0, 1});
        execute({Op::DropAlias, 0, 0, 0, 0});
        execute({Op::DropHandle, 0, 0, 0, 0});
      }
    }
  }
  strict_ = false;
  verify_empty();
}

void Stress::verify_empty() {
  if (!broken_.empty()) {
    return;
  }
  broke(contents_.finish());
  broke(store_.left());
  for (std::size_t device = 0; device < store_.devices(); ++device) {
    const core::Counters now = store_.runtime(device).counters();
    const auto zero = [&](const char* name, Bytes value) {
      if (value != 0) {
        broke("with everything dropped " + std::string(name) + " is " + std::to_string(value));
      }
    };
    zero("records", now.records);
    zero("handles", now.handles);
    zero("aliases", now.aliases);
    zero("occupied", now.occupied);
    zero("retained", now.retained);
    zero("evicted", now.evicted);
    zero("dropped", now.dropped);
    zero("pinned_used_bytes", now.pinned_used_bytes);
    zero("pageable_bytes", now.pageable_bytes);
  }
  verify();
}

}  // namespace stagehand::fuzz
