// torch's stack of saved-tensor hooks on this thread, changed in one go: no Python runs in between,
// so no signal's handler sees it half done, or leaves it so. With the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace stagehand::entry {

// Neither is for where hooks are turned off: torch lets them be taken there, and not put back.
// Pairs of hooks that are on it.
std::size_t count_hooks();
// Puts the pair there right above the lowest `above`, below whatever else there is.
void put_hooks(nanobind::object pack, nanobind::object unpack, std::size_t above);

}  // namespace stagehand::entry
