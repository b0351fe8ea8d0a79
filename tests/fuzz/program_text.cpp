// Programs as text: a line of settings, then one instruction a line. What follows a # is a comment.
#include <iterator>
#include <sstream>

#include "fuzz/program.hpp"

namespace stagehand::fuzz {

namespace {

constexpr const char* kNames[] = {
#define STAGEHAND_FUZZ_NAME(name) #name,
    STAGEHAND_FUZZ_OPS(STAGEHAND_FUZZ_NAME)
#undef STAGEHAND_FUZZ_NAME
};

bool parse_setting(const std::string& word, Setup* setup) {
  const std::size_t equals = word.find('=');
  if (equals == std::string::npos) {
    return false;
  }
  const std::string name = word.substr(0, equals);
  std::istringstream value(word.substr(equals + 1));
#define STAGEHAND_FUZZ_READ(field) \
  if (name == #field) {            \
    value >> setup->field;         \
    return !value.fail();          \
  }
  STAGEHAND_FUZZ_SETTINGS(STAGEHAND_FUZZ_READ)
#undef STAGEHAND_FUZZ_READ
  return false;
}

bool parse_instruction(const std::string& name, std::istringstream& words, Instruction* into) {
  for (std::size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) {
      into->op = static_cast<Op>(i);
      words >> into->pick >> into->stream >> into->bytes >> into->more;
      return !words.fail();
    }
  }
  return false;
}

}  // namespace

std::string print(const Instruction& in) {
  std::ostringstream out;
  out << kNames[static_cast<std::size_t>(in.op)] << ' ' << in.pick << ' ' << in.stream << ' '
      << in.bytes << ' ' << in.more;
  return out.str();
}

std::string print(const Program& program) {
  std::ostringstream out;
  out << "machine";
#define STAGEHAND_FUZZ_WRITE(field) out << " " #field "=" << program.setup.field;
  STAGEHAND_FUZZ_SETTINGS(STAGEHAND_FUZZ_WRITE)
#undef STAGEHAND_FUZZ_WRITE
  out << "\n# operation, pick, stream, bytes, more\n";
  for (const Instruction& in : program.code) {
    out << print(in) << '\n';
  }
  return out.str();
}

bool parse(const std::string& text, Program* program, std::string* error) {
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::string name;
    bool right = true;
    if (!(words >> name)) {
      continue;
    }
    if (name == "machine") {
      for (std::string word; right && words >> word;) {
        right = parse_setting(word, &program->setup);
      }
    } else {
      Instruction in;
      right = parse_instruction(name, words, &in);
      program->code.push_back(in);
    }
    if (!right) {
      *error = "line " + std::to_string(number) + ": " + line;
      return false;
    }
  }
  return true;
}

}  // namespace stagehand::fuzz
