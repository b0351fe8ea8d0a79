#include "entry/hook_stack.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace stagehand::entry {

namespace nb = nanobind;

namespace {

using Pair = std::pair<nb::object, nb::object>;

nb::module_ torch_stack() { return nb::module_::import_("torch._C._autograd"); }

// All of them, the topmost first; the stack is empty then.
std::vector<Pair> take_all(const nb::module_& stack) {
  const nb::object top = stack.attr("_top_saved_tensors_default_hooks");
  const nb::object pop = stack.attr("_pop_saved_tensors_default_hooks");
  std::vector<Pair> found;
  for (nb::object one = top(true); !one.is_none(); one = top(true)) {
    found.emplace_back(one[0], one[1]);
    pop();
  }
  return found;
}

void push_all(const nb::module_& stack, const std::vector<Pair>& topmost_first) {
  const nb::object push = stack.attr("_push_saved_tensors_default_hooks");
  for (auto one = topmost_first.rbegin(); one != topmost_first.rend(); ++one) {
    push(one->first, one->second);
  }
}

}  // namespace

std::size_t count_hooks() {
  const nb::module_ stack = torch_stack();
  const std::vector<Pair> found = take_all(stack);
  push_all(stack, found);
  return found.size();
}

void put_hooks(nb::object pack, nb::object unpack, std::size_t above) {
  const nb::module_ stack = torch_stack();
  std::vector<Pair> after = take_all(stack);
  const auto place = after.end() - static_cast<std::ptrdiff_t>(std::min(above, after.size()));
  after.emplace(place, std::move(pack), std::move(unpack));
  push_all(stack, after);
}

}  // namespace stagehand::entry
