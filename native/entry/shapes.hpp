// Kinds of steps for Python: what was learned of one, and what the planner says of it.
#pragma once

#include <nanobind/nanobind.h>

namespace stagehand::entry {

void bind_shapes(nanobind::module_& module);

}  // namespace stagehand::entry
