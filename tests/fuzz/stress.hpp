// The allocator stress test: runs a program against a Runtime over any driver, as torch and
// autograd would use it, and verifies every byte and every invariant on the way.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "core/runtime.hpp"
#include "fuzz/contents.hpp"
#include "fuzz/program.hpp"

namespace stagehand::fuzz {

class Stress {
 public:
  static constexpr std::size_t kStreams = 6;

  // Streams are made in the current context. `trace`: where each instruction is printed as it runs
  // with what it came to, or null.
  Stress(const driver::Table& table, core::Runtime& runtime, Contents& contents,
         std::FILE* trace = nullptr);
  ~Stress();
  Stress(const Stress&) = delete;
  Stress& operator=(const Stress&) = delete;

  // Empty, or what broke, with the instruction it broke at. Ends with everything dropped.
  std::string run(const std::vector<Instruction>& program);

 private:
  // A part of a storage with contents of its own.
  struct View {
    core::Bytes offset = 0;
    core::Bytes bytes = 0;
    std::uint64_t seed = 0;
  };
  struct Tensor {
    core::Address address = 0;
    core::Bytes bytes = 0;
    std::size_t stream = 0;
    bool saved = false;   // its contents must not change any more
    bool shared = false;  // another stream reads it
    std::vector<View> views;
  };
  struct Handle {
    core::RecordId record;
    core::Bytes offset = 0;
    View view;
    std::size_t stream = 0;  // where the storage was made
  };
  struct Alias {
    core::Block* block = nullptr;
    core::Address address = 0;
    View view;
    std::size_t stream = 0;  // the consumer's
  };

  void execute(const Instruction& in);
  void allocate(const Instruction& in);
  void free(std::size_t index);
  void save(const Instruction& in);
  void unpack(const Instruction& in);
  void drop_alias(std::size_t index);
  void drop_handle(std::size_t index);
  void record_stream(const Instruction& in);
  void write(const Instruction& in);
  void steps(const Instruction& in);
  void settings(const Instruction& in);
  void fault(const Instruction& in);
  void drop_everything();

  void fill(Tensor& tensor);
  void check(const View& view, core::Address address, std::size_t stream);
  void order(std::size_t earlier, std::size_t later);
  void refused(core::Status status, core::Bytes bytes);
  void verify();
  void verify_empty();
  core::Bytes driver_bytes() const;
  void say(const char* format, ...) __attribute__((format(printf, 2, 3)));
  void broke(const std::string& what);

  const driver::Table& table_;
  core::Runtime& runtime_;
  Contents& contents_;
  std::FILE* trace_;
  std::vector<driver::Stream> streams_;
  std::vector<Tensor> tensors_;
  std::vector<Handle> handles_;
  std::vector<Alias> aliases_;
  std::uint64_t seeds_ = 0;
  core::Bytes whole_ = 0;  // what the driver has free and we have mapped, at the start
  bool faulty_ = false;    // a fault was planted: requests may fail
  std::string broken_;
};

}  // namespace stagehand::fuzz
