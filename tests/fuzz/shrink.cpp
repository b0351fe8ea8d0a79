#include "fuzz/shrink.hpp"

#include <algorithm>
#include <utility>

namespace stagehand::fuzz {

namespace {

class Shrinker {
 public:
  Shrinker(Program program, const std::function<bool(const Program&)>& fails, std::size_t tries)
      : program_(std::move(program)), fails_(fails), tries_(tries) {}

  Program run() {
    do {
      changed_ = false;
      leave_out();
      simplify();
    } while (changed_ && tries_ > 0);
    return std::move(program_);
  }

 private:
  bool try_one(Program candidate) {
    if (tries_ == 0) {
      return false;
    }
    --tries_;
    if (!fails_(candidate)) {
      return false;
    }
    program_ = std::move(candidate);
    changed_ = true;
    return true;
  }

  // Delta debugging: runs of half the program first, then ever shorter ones, from the end, since
  // what comes after the failure is the first to go.
  void leave_out() {
    for (std::size_t part = (program_.code.size() + 1) / 2; part > 0; part /= 2) {
      std::size_t end = program_.code.size();
      while (end > 0) {
        const std::size_t begin = end - std::min(part, end);
        Program candidate = program_;
        candidate.code.erase(candidate.code.begin() + static_cast<std::ptrdiff_t>(begin),
                             candidate.code.begin() + static_cast<std::ptrdiff_t>(end));
        try_one(std::move(candidate));
        end = begin;
      }
    }
  }

  template <typename Number>
  void lessen(std::size_t at, Number Instruction::* number) {
    // Nothing at all; a round number; half.
    const Number now = program_.code[at].*number;
    for (const Number less : {Number{0}, Number{1}, now >> 20 << 20, now >> 1}) {
      if (less < program_.code[at].*number) {
        Program candidate = program_;
        candidate.code[at].*number = less;
        try_one(std::move(candidate));
      }
    }
  }

  void simplify() {
    for (std::size_t at = 0; at < program_.code.size(); ++at) {
      lessen(at, &Instruction::pick);
      lessen(at, &Instruction::stream);
      lessen(at, &Instruction::bytes);
      lessen(at, &Instruction::more);
    }
  }

  Program program_;
  const std::function<bool(const Program&)>& fails_;
  std::size_t tries_;
  bool changed_ = false;
};

}  // namespace

Program shrunk(Program program, const std::function<bool(const Program&)>& fails,
               std::size_t tries) {
  return Shrinker(std::move(program), fails, tries).run();
}

}  // namespace stagehand::fuzz
