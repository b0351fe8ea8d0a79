// Regions: what a function saved can be made again by running the function once more. One run of it
// under a pool is a *call*, an interval of saves on one thread: a handle knows its call and its
// place in there. Who runs it again is torch's own checkpoint, which holds the inputs and the
// states of random numbers and autocast (stagehand_alloc/_step/regions.py); Python is asked once a
// call and once a re-run. With the GIL, all of it.
#pragma once

#include <nanobind/nanobind.h>

#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "entry/hooks.hpp"

namespace stagehand::entry {

class Capture;

class Call {
 public:
  // `region`: what it is called, for people.
  Call(int device, const std::string& region);
  ~Call();
  Call(const Call&) = delete;

  // What this thread saves from here on, until `begin`, are the inputs.
  static void collect(nb::handle call);
  // The function runs on this thread. Unpacking what made `sentinel` has saved runs it again.
  static void begin(nb::handle call, nb::object sentinel);
  // It has returned, or raised.
  void end();
  // Of the re-run that is going on, whose function begins now; null without one.
  nb::object capture();

  // The innermost call that runs on this thread; null without one.
  static Call* open_here();
  // A pool was entered or left: whatever runs here was interrupted.
  static void forget_open();
  static Call& of(const Handle& handle) { return *nb::inst_ptr<Call>(handle.call); }

  core::Inside inside() const { return {id_, since_, nullptr, region_}; }
  // Its next save, or an input of the call that is about to begin.
  void saved(Handle& handle, const core::SeenTensor& seen);
  static void maybe_input(nb::handle tensor);
  // Backward inside the function: its re-runs have to keep what they save.
  void unpacked();
  // Runs it again, and gives every dropped record its bytes. A tensor as the saved one was where
  // its record could not take any; nothing otherwise. `exact`: that tensor in any case, as it was
  // when it was saved. Raises what the function does, and RecomputeError.
  nb::object make(Hooks& hooks, const Handle& handle, bool exact);

 private:
  friend class Capture;
  class Turn;

  struct Save {
    core::RecordId record;  // of a generation 0: none that the call can make
    core::Bytes offset = 0;
    Geometry geometry;
    std::int32_t dtype = 0;
    std::uint32_t version = 0;
    const char* op = nullptr;
    bool plain = false;
    bool inside = false;
  };
  // The last place of each dropped record: what was changed in place since is in there.
  std::vector<std::uint32_t> wanted() const;

  const char* const region_;
  core::Runtime* const runtime_;
  const std::uint64_t id_;
  const std::uint64_t since_;
  std::vector<Save> saves_;
  std::vector<std::pair<Followed, long>> inputs_;  // with their versions, until it ends
  nb::object sentinel_;
  nb::object outer_;  // the call that it ran inside of
  nb::object capture_;
  bool open_ = false;
  bool keeps_ = false;          // it ran backward inside
  std::mutex running_;          // held by a re-run; waited for without the GIL
  std::thread::id running_by_;  // guarded by the GIL
};

// The hooks of one re-run: they count what is saved, take what is wanted, and stop the run.
class Capture {
 public:
  // All of these live as long as the run.
  Capture(Hooks& hooks, Call& call, const Handle& asked, bool exact, nb::object stop);

  nb::object pack(nb::handle tensor);
  nb::object unpack(nb::handle packed) const;
  bool done() const { return done_; }
  // The run is over; its hooks may still be there.
  void end() { hooks_ = nullptr; }

  const std::string& failure() const { return failure_; }
  std::size_t count() const { return at_; }
  // The save that ends it.
  std::uint32_t last() const { return last_; }
  nb::object made() { return std::move(made_); }

 private:
  [[noreturn]] void stop();
  void compare(const Call::Save& save, nb::handle tensor);
  nb::object kept(nb::handle tensor) const;

  Hooks* hooks_;
  Call& call_;
  std::vector<std::uint32_t> wanted_;  // ascending
  std::size_t next_ = 0;               // of them
  std::uint32_t asked_;
  std::uint32_t last_;
  std::size_t at_ = 0;
  const bool keeps_;
  bool done_ = false;
  nb::object stop_;
  nb::object made_;
  std::string failure_;
};

}  // namespace stagehand::entry
