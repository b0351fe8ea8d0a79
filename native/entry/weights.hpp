// Weight groups as Python and the hooks see them: the storages of one block's parameters, or of
// what an optimizer keeps of some, which are open while somebody holds the group and sealed at all
// other times.
//
// Storages are opened and sealed with the GIL only, by whoever comes first and goes last. What the
// engine does with the memory in between touches no storage.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/runtime.hpp"
#include "core/storage_side.hpp"
#include "entry/dlpack.hpp"

namespace stagehand::entry {

namespace nb = nanobind;

// What lies on the host: where, and how many bytes.
using HostBytes = std::pair<std::uintptr_t, core::Bytes>;

// A copy of these, one after the other, in host memory that is not pinned yet: a group's host copy
// before there is the group. It is made without the GIL. Where the host has no memory it is empty.
class HostCopy {
 public:
  HostCopy(const std::vector<HostBytes>& sources, int numa_node);
  ~HostCopy();
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  // Its memory, which is the caller's from here on.
  std::byte* take() { return std::exchange(host_, nullptr); }
  core::Bytes bytes() const { return bytes_; }
  bool empty() const { return host_ == nullptr; }

 private:
  std::byte* host_ = nullptr;
  core::Bytes bytes_ = 0;
};

class WeightGroup {
 public:
  // Takes the table if it is one of ours; else says why not.
  static std::string use(const core::StorageSide* side);
  // The group that the tensor's storage is of; null for all others.
  static WeightGroup* find(PyObject* tensor) { return count_ == 0 ? nullptr : find_slowly(tensor); }

  // Whether a group that is open has the byte there: seldom asked, since all are looked at.
  static bool over_any(core::Address address);

  // A stretch of a memory file that other processes map: the file, where it begins, and whether
  // this process makes it. No file: -1.
  using Stretch = std::tuple<int, core::Bytes, bool>;

  // Copies the tensors' storages, one each, to host memory that is pinned for good, and seals them
  // with these texts. Their memory goes back to torch. All or nothing. `trained`: so many of the
  // first ones are. `sources`: where they are on the host, one each; then the storages have no
  // memory, only their size (`claim`), and nothing goes over the link. Empty: they are on the
  // device. `shared`: the host copy is there, and stays as it is; it is compared where another
  // process made it. `ready`: of those sources, which is taken; null or empty: it is made here.
  WeightGroup(int device, const std::vector<nb::object>& tensors,
              const std::vector<std::string>& texts, int numa_node, std::size_t trained,
              const std::vector<HostBytes>& sources, const Stretch& shared, HostCopy* ready);
  ~WeightGroup();
  WeightGroup(const WeightGroup&) = delete;
  WeightGroup& operator=(const WeightGroup&) = delete;

  // Holds the group, at home and open for what this thread's stream does from now on; `kind` is a
  // core::UseKind. `leave` as often.
  void enter(int kind);
  void leave();
  // It is being used: the next one comes, if that lacked room before and has it now.
  void more() const;
  // Backward needs it on this thread: held until two others were needed after it, or the backward
  // is over.
  static void touch(nb::handle self);
  // This backward has the gradient of what the block was given: it needs the group no more. A hint:
  // what needs it all the same touches it again.
  static void over(nb::handle self);
  // The backward with that number is over, on whichever thread it held any.
  static void end_backward(long task);
  // Such a hold ends.
  static void leave_backward(nb::handle self);
  // What this thread still holds for backwards, or for who looks at a node outside of any.
  static void end_here();
  // Called with the GIL where such a hold ends, while it is held still: what ran meanwhile may have
  // written to it. None: nobody.
  nb::object before_leave() const { return before_leave_; }
  void set_before_leave(nb::object call) { before_leave_ = std::move(call); }

  // What this thread's stream does so far writes to what is trained: it goes to the host copy
  // before the group leaves. While it is held.
  void wrote();
  // The same of all its tensors, and waits until the host copy has them. False: the host copy is
  // shared, and what was written is undone.
  bool write_back();
  // Waits until the host copy has all that was written.
  void to_host();
  // The storages get memory of their own with the bytes in it, and the group is over: entering and
  // leaving do nothing from here on. False, and nothing has changed, where it is held.
  bool restore();

  core::GroupId id() const { return id_; }
  core::Bytes bytes() const { return bytes_; }
  std::uint32_t open() const { return open_; }
  bool shared() const { return shared_; }
  // Where the host copies begin: of the tensors, in order. They live as long as the group. Shared
  // ones can be read only.
  std::vector<HostBytes> host() const;

 private:
  struct Held {
    void* storage = nullptr;  // a reference
    const void* identity = nullptr;
    core::Bytes offset = 0;  // in the group
    core::Bytes bytes = 0;
  };
  static WeightGroup* find_slowly(PyObject* tensor);
  void forget();
  void unmap_read_only();
  static void check_process();
  void written(core::Bytes bytes);
  bool same_as_shared(core::Runtime& engine, const std::vector<core::Copy>& copies,
                      driver::Stream stream, bool* read) const;
  core::Runtime& runtime() const;

  inline static std::size_t count_ = 0;  // of groups; guarded by the GIL

  int device_ = 0;
  dlpack::Device place_{};
  core::Address address_ = 0;        // while it is open
  driver::Stream stream_ = nullptr;  // that it was entered on last
  core::GroupId id_ = core::kNoGroup;
  core::Bytes bytes_ = 0;
  core::Bytes trained_ = 0;   // of them, the first ones
  std::uint64_t writes_ = 0;  // that were told; guarded by the GIL
  std::byte* host_ = nullptr;
  bool shared_ = false;             // with other processes: nobody writes to it,
  std::byte* read_only_ = nullptr;  // and who reads it beside us does so here
  std::vector<Held> held_;
  nb::object before_leave_ = nb::none();
  std::uint32_t open_ = 0;      // holds that have come to be; guarded by the GIL,
  std::uint32_t entering_ = 0;  // as are those that come to be
  bool restored_ = false;
};

void bind_weights(nb::module_& module);

}  // namespace stagehand::entry
