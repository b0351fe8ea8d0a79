// Runs a fuzz program against a store over any driver, as torch and autograd would use it, and
// verifies every byte and every invariant on the way.
//
// After each instruction: hazards and wrong bytes. After every `check_every`th, after each Settle
// and at the end: all invariants of the runtimes and the store. A Settle, and the end, run backward
// of all that is saved and drop everything: nothing may be left. At the end, a step trains without
// faults, and nothing of it may be refused.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "fuzz/contents.hpp"
#include "fuzz/program.hpp"
#include "fuzz/store.hpp"

namespace stagehand::fuzz {

class Stress {
 public:
  // Of a device; the first is the default stream.
  static constexpr std::size_t kStreams = 5;

  // `table`: of the program's own calls. `contexts`: what may be current at a call; of the store's
  // devices, in order, then others. `trace`: where each instruction is printed as it runs with what
  // it came to, or null.
  Stress(const driver::Table& table, std::vector<driver::Context> contexts, Store& store,
         Contents& contents, const Setup& setup, std::FILE* trace = nullptr);
  Stress(const Stress&) = delete;
  Stress& operator=(const Stress&) = delete;

  // Empty, or what broke, with the instruction it broke at. Ends with everything dropped.
  std::string run(const std::vector<Instruction>& code);
  std::uint64_t operations() const { return operations_; }  // calls of the allocator so far

 private:
  // A part of a storage with contents of its own.
  struct View {
    core::Bytes offset = 0;
    core::Bytes bytes = 0;
    std::uint64_t seed = 0;
  };
  // What all tensors over one storage and its copies see.
  struct Storage {
    std::vector<View> views;
    std::uint64_t version = 0;  // goes up with each change in place: autograd refuses older ones
    bool saved = false;         // a copy of it may be under way
    bool shared = false;        // another stream reads it
    bool captured = false;      // a graph's: it is never saved
    core::Bytes bytes = 0;
    Again again;  // while it is not changed
  };
  struct Place {
    std::size_t device = 0;
    std::size_t stream = 0;
  };
  struct Tensor {
    Reference reference;
    Place place;
    std::shared_ptr<Storage> storage;
    std::size_t view = 0;  // of an alias: the one it sees
  };
  struct Handle {
    core::RecordId record;
    core::Bytes offset = 0;
    std::size_t view = 0;
    std::uint64_t version = 0;
    Place place;  // where the storage was made
    std::shared_ptr<Storage> storage;
  };
  struct Graph {
    std::size_t device = 0;
    std::uint64_t id = 0;
  };

  // stress.cpp: instructions
  void execute(const Instruction& in);
  void allocate(const Instruction& in);
  void free(std::vector<Tensor>& from, std::uint64_t pick);
  void save(const Instruction& in);
  void save_tensor(const Tensor& tensor, std::size_t view);
  void unpack(const Instruction& in);
  core::Status make_again(const Handle& handle, Place on);
  void drop_handle(std::uint64_t pick);
  void record_stream(const Instruction& in);
  void write(const Instruction& in);
  void rewrite(const Instruction& in);
  void settings(const Instruction& in);
  void enter_pool(core::Bytes share, std::uint64_t more);
  void leave_pool();
  void begin_capture(const Instruction& in);
  void end_capture();
  void release_graph(std::uint64_t pick);
  void fault(const Instruction& in);
  // stress_check.cpp: what must hold
  void settle();
  void train_on();
  void refused(core::Status status, core::Bytes bytes, std::size_t device);
  void look();
  void verify();
  void verify_empty();
  core::Bytes driver_bytes(std::size_t device);

  driver::Stream stream(Place place) const { return streams_[place.device][place.stream]; }
  Place place_of(std::uint64_t number) const;
  bool crosses_capture(Place one, Place two) const;
  core::Address address_of(const Tensor& tensor, std::size_t view) const;
  void fill(const Tensor& tensor, std::size_t view);
  void check(const Tensor& tensor, std::size_t view, Place on);
  void check_all(const Tensor& tensor, Place on);
  void order(Place earlier, Place later);
  template <typename Call>
  auto call(Call&& body);
  void say(const char* format, ...) __attribute__((format(printf, 2, 3)));
  void broke(const std::string& what);

  const driver::Table& table_;
  const std::vector<driver::Context> contexts_;
  Store& store_;
  Contents& contents_;
  const Setup setup_;
  std::FILE* trace_;
  std::vector<std::vector<driver::Stream>> streams_;
  std::vector<Tensor> tensors_;
  std::vector<Tensor> aliases_;
  std::vector<Handle> handles_;
  std::vector<Graph> graphs_;
  std::size_t current_ = 0;  // which context is current at calls of the allocator
  bool in_pool_ = false;
  bool capturing_ = false;
  Place captured_;
  std::uint64_t graph_ = 0;
  std::uint64_t graphs_made_ = 0;
  std::uint64_t seeds_ = 0;
  std::uint64_t operations_ = 0;
  std::vector<core::Bytes> whole_;  // what the driver has free and we have mapped, at the start
  bool faulty_ = false;             // a fault was planned: requests may fail
  bool strict_ = false;             // nothing may be refused
  std::string broken_;
};

// Whatever driver call: what the program calls of the allocator is counted, and made with the
// context current that was drawn for this instruction.
template <typename Call>
auto Stress::call(Call&& body) {
  ++operations_;
  const driver::ContextGuard guard(table_, contexts_[current_ % contexts_.size()]);
  return body();
}

}  // namespace stagehand::fuzz
