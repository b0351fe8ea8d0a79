// engine <case> <n>: measures one case. Without arguments: the names of all.
#include <cstdlib>
#include <cstring>

#include "bench.hpp"
#include "native/test.hpp"

int main(int argc, char** argv) {
  if (argc < 2) {
    for (const auto& one : stagehand::bench::cases()) {
      std::puts(one.name);
    }
    return 0;
  }
  for (const auto& one : stagehand::bench::cases()) {
    if (std::strcmp(one.name, argv[1]) == 0) {
      one.run(argc > 2 ? std::atoi(argv[2]) : 0);
      // What the rigs checked on the way did not hold: nothing here was measured.
      return stagehand::test::failures() == 0 ? 0 : 1;
    }
  }
  std::fprintf(stderr, "engine: there is no case '%s'\n", argv[1]);
  return 2;
}
