// What Python asks of a device, without the GIL: its lock may be held by a thread that queues much.
// For answers that are plain data, of calls that hand nothing to torch.
#pragma once

#include <nanobind/nanobind.h>

#include <type_traits>

#include "entry/gil.hpp"
#include "entry/registry.hpp"

namespace stagehand::entry {

// What `ask` says of the device's runtime; an empty answer where it was not opened.
template <class Ask>
auto without_gil(int device, const Ask& ask) {
  using Answer = std::invoke_result_t<Ask, core::Runtime&>;
  const GilReleased unlocked;
  core::Runtime* const runtime = Registry::get().find(device);
  if constexpr (std::is_void_v<Answer>) {
    if (runtime != nullptr) {
      ask(*runtime);
    }
  } else {
    return runtime != nullptr ? ask(*runtime) : Answer{};
  }
}

}  // namespace stagehand::entry
