#include "entry/recipes.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "entry/handle_object.hpp"

namespace stagehand::entry {

namespace {
// What a proof rests on, of one input: its dtype and how it is aligned. Returns its layout.
std::uint32_t mix_input(std::uint32_t* word, const Handle& input) {
  Geometry passed;
  const Geometry* of = &input.geometry;
  std::int64_t place = static_cast<std::int64_t>(input.offset);
  if (input.passed.is_valid() && TorchApi::get().is_tensor(input.passed.ptr())) {
    const core::SeenTensor seen = TorchApi::get().look(input.passed.ptr());
    passed.set(seen);
    of = &passed;
    place = static_cast<std::int64_t>(reinterpret_cast<core::Address>(seen.data));
  }
  core::mix(word, of->dtype.code);
  core::mix(word, of->dtype.bits);
  core::mix(word, place % 512);
  return core::layout_of(of->ndim, of->shape(), of->shape() + of->ndim);
}
}  // namespace

Recipe Recipe::of(nb::handle tensor, nb::handle call, bool sharded, std::uint64_t leaf) {
  Recipe recipe;
  if (side_ == nullptr) {
    return recipe;
  }
  side_->find(tensor.ptr(), HandleObject::type(), &recipe.found_);
  core::Made& made = recipe.found_.made;
  made.any_size = made.exact && recipe.found_.inputs > 0;
  made.exact &= trusts_;
  core::mix(&made.rests_on, leaf);
  std::uint32_t layouts = recipe.found_.layout;
  bool apart = sharded && recipe.found_.leaf;
  for (std::uint32_t i = 0; i < recipe.found_.inputs; ++i) {
    const Handle* input = &HandleObject::in(recipe.found_.input[i]);
    recipe.depth_ = std::max(recipe.depth_, input->recipe ? input->recipe.depth_ + 1 : 1);
    const std::uint32_t layout = mix_input(&made.rests_on, *input);
    made.any_size &= layout == recipe.found_.layout;
    core::mix(&layouts, layout);
    if (input->runtime != nullptr) {
      made.of[i] = input->record;
    }
    apart |= input->call.is_valid() && !input->call.is(call);
    apart |= sharded && input->passed.is_valid();
  }
  if (!made.any_size) {  // sizes and strides choose the kernel, and which elements meet
    core::mix(&made.rests_on, layouts);
  }
  return recipe.depth_ <= kDepth && !apart ? std::move(recipe) : Recipe();
}

Recipe& Recipe::operator=(Recipe&& other) noexcept {
  std::swap(found_, other.found_);
  std::swap(depth_, other.depth_);
  return *this;
}

Recipe::~Recipe() {
  if (found_.recipe != nullptr) {
    side_->forget(found_.recipe);
  }
}

bool Recipe::ready() const {
  for (std::uint32_t i = 0; i < found_.inputs; ++i) {
    const Handle* input = &HandleObject::in(found_.input[i]);
    const bool dropped = input->runtime != nullptr && input->runtime->dropped(input->record);
    if (dropped && !input->by_node()) {
      return false;
    }
  }
  return true;
}

nb::object Recipe::run(Hooks& hooks, const std::function<void()>& making) const {
  std::array<nb::object, core::FoundRecipe::kInputs> inputs;
  std::array<void*, core::FoundRecipe::kInputs> raw{};
  for (std::uint32_t i = 0; i < found_.inputs; ++i) {
    const Handle* input = &HandleObject::in(found_.input[i]);
    inputs[i] = hooks.unpack(*input, true);
    raw[i] = inputs[i].ptr();
  }
  making();
  bool differs = false;
  nb::object made =
      nb::steal(static_cast<PyObject*>(side_->run(found_.recipe, raw.data(), &differs)));
  if (differs) {
    raise_recompute(std::string("A saved output of ") + found_.op +
                        ", made again for backward, has other sizes, strides or another dtype than "
                        "it had, or a "
                        "parameter that it is made of has changed since.",
                    "Pass recompute=False to the pool, and report what computes it.");
  }
  if (!made.is_valid()) {
    throw nb::python_error();
  }
  return made;
}

void raise_recompute(const std::string& what, const char* todo) {
  const nb::object type = nb::module_::import_("stagehand_alloc._errors").attr("RecomputeError");
  const nb::object error = type(what.c_str(), todo);
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

std::string Recipe::use(const core::RecipeSide* table) {
  if (table->version != core::RecipeSide::kVersion || table->size != sizeof(core::RecipeSide)) {
    return "it was built for another version of stagehand_alloc";
  }
  side_ = table;
  return {};
}

}  // namespace stagehand::entry
