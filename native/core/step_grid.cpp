#include "core/step_grid.hpp"

namespace stagehand::core {

std::vector<MadeAgain> made_again(const Grid& grid, std::span<const Fate> fates) {
  struct Run {
    double ns = 0;
    double bytes = 0;
    std::uint32_t by = 0;
    bool any = false;
  };
  std::vector<Run> runs(grid.calls + 1);
  std::vector<bool> by_node(fates.size());
  for (std::uint32_t i = 0; i < fates.size(); ++i) {
    const Placed& one = grid.records[i];
    // Inputs are saved before what is made of them.
    by_node[i] = one.again_ns > 0 &&
                 std::all_of(one.made_of, one.made_of + Made::kInputs, [&](std::uint32_t input) {
                   return input >= i || fates[input] != Fate::drop || by_node[input];
                 });
    if (fates[i] != Fate::drop || one.call == 0 || by_node[i]) {
      continue;
    }
    Run& run = runs[one.call];
    run.ns = std::max(run.ns, one.rerun_ns);
    run.bytes = std::max(run.bytes, one.rerun_bytes);
    // Of several in one bucket most likely the last one saved is the first one used.
    run.by = run.any && grid.records[run.by].used < one.used ? run.by : i;
    run.any = true;
  }
  std::vector<MadeAgain> all(fates.size());
  for (std::uint32_t i = 0; i < fates.size(); ++i) {
    const Placed& one = grid.records[i];
    const Run& run = runs[one.call];
    const bool comes = fates[i] == Fate::drop && one.call != 0 && run.any &&
                       (!by_node[i] || one.rerun_ns <= run.ns) &&
                       grid.records[run.by].used <= one.used;
    all[i] = !comes        ? MadeAgain{i, one.again_ns}
             : run.by == i ? MadeAgain{i, run.ns, run.bytes, true}
                           : MadeAgain{run.by, 0, 0, true};
  }
  return all;
}

}  // namespace stagehand::core
