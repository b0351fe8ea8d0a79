// Walks 6 and 7 as the rest of the program calls them.
#include <algorithm>

#include "core/pinner.hpp"
#include "core/runtime.hpp"

namespace stagehand::core {

GroupId Runtime::add_weights(Bytes bytes, std::byte* host) {
  Entry entry(d_.gate);
  return d_.weights.standing().add(bytes, host);
}

void Runtime::presume_weights(std::span<const GroupId> groups) {
  Entry entry(d_.gate);
  d_.weights.standing().order().presume(groups);
}

void Runtime::remove_weights(GroupId id) {
  Entry entry(d_.gate);
  while (d_.weights.standing().at(id).holds > 0) {
    d_.weights.leave(id);  // whoever held it is gone
  }
  d_.weights.drop(id);
  d_.weights.standing().retire(id);  // nobody brings it while the lock is given up
  if (d_.weights.standing().empty()) {
    d_.weights.forget_early();
  }
  // Copies may read the host's, or write to it. While a graph is captured the device is not waited
  // for, but the lanes are in none.
  if (!d_.room.wait_for_gpu(entry) && d_.gate.in_context()) {
    const StreamPlace lanes[] = {d_.transfers.out().clock().place(),
                                 d_.transfers.in(false).clock().place(),
                                 d_.transfers.in(true).clock().place()};
    const Unlocked unlocked(entry);
    for (const StreamPlace& lane : lanes) {
      synchronize(d_.gate.table(), lane);
    }
  }
  d_.weights.standing().remove(id);
}

Status Runtime::enter_weights(GroupId id, UseKind kind, driver::Stream consumer, Address* address) {
  Entry entry(d_.gate);
  const Status status = d_.weights.enter(entry, id, kind, consumer, address);
  d_.books.note_occupied();
  return status;
}

void Runtime::leave_weights(GroupId id) {
  Entry entry(d_.gate);
  d_.weights.leave(id);
}

Status Runtime::wrote_weights(GroupId id, Bytes bytes, driver::Stream writer) {
  Entry entry(d_.gate);
  return d_.weights.wrote(id, bytes, writer);
}

Status Runtime::weights_to_host(GroupId id) {
  Entry entry(d_.gate);
  return d_.weights.to_host(entry, id);
}

void Runtime::more_weights(driver::Stream consumer) {
  Entry entry(d_.gate);
  if (!d_.clocks.of(consumer).captured()) {
    d_.weights.bring_ahead(entry, consumer);
  }
}

void Runtime::drop_weights() {
  Entry entry(d_.gate);
  d_.weights.leave_all();
}

Runtime::WeightCounts Runtime::weight_counts() {
  Entry entry(d_.gate);
  const Standing& standing = d_.weights.standing();
  WeightCounts found{d_.weights.counts(), standing.bytes(), d_.weights.home_bytes(), 0};
  for (GroupId id = 0; id < standing.size(); ++id) {
    found.largest = std::max(found.largest, standing.at(id).bytes);
  }
  return found;
}

bool Runtime::pin(std::byte* host, Bytes bytes) {
  if (!d_.host.add_weights(bytes)) {
    return false;
  }
  const driver::ContextGuard guard(d_.gate.table(), d_.gate.context());
  const bool pinned =
      d_.gate.table().host_register(host, bytes, driver::kHostRegisterPortable) == driver::kSuccess;
  if (!pinned) {
    d_.host.remove_weights(bytes);
  }
  return pinned;
}

void Runtime::unpin(std::byte* host, Bytes bytes) {
  const driver::ContextGuard guard(d_.gate.table(), d_.gate.context());
  unpin_chunk(d_.gate.table(), {.host = host, .size = bytes});
  d_.host.remove_weights(bytes);
}

bool Runtime::read_out(std::span<const Copy> copies, std::span<const driver::Stream> streams) {
  Entry entry(d_.gate);
  Lane& lane = d_.transfers.out();
  for (const driver::Stream stream : streams) {
    if (d_.clocks.order_after(lane.clock(), d_.clocks.of(stream).now()) != Status::ok) {
      return false;
    }
  }
  const driver::Stream on = lane.clock().stream();
  if (!d_.gate.in_context()) {
    return false;
  }
  const Unlocked unlocked(entry);
  return std::all_of(copies.begin(), copies.end(),
                     [&](const Copy& copy) { return lane.copy_now(on, copy); });
}

Status Runtime::write_in(std::span<const Copy> copies, driver::Stream stream) {
  Entry entry(d_.gate);
  Lane& lane = d_.transfers.in();
  StreamClock& clock = d_.clocks.of(stream);
  Status status = d_.clocks.order_after(lane.clock(), clock.now());
  if (status == Status::ok) {
    status = lane.queue(copies);
  }
  Tick arrived;
  Status ordered = lane.clock().record(&arrived);
  if (ordered == Status::ok) {
    ordered = d_.clocks.order_after(clock, arrived);
  }
  if (status == Status::ok && ordered == Status::ok) {
    return Status::ok;
  }
  d_.room.wait_for_gpu(entry);  // the caller gives the memory up: nothing may be written there then
  return status != Status::ok ? status : ordered;
}

}  // namespace stagehand::core
