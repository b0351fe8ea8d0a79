// The recipe library: how autograd's nodes made what they saved (core/recipe_side.hpp).
//
// A node that saved all its inputs can make its output again. Where the inputs went through our
// pack hook, the node holds what that gave for them, and says so without unpacking it.
//
// Built on first use against the headers of the installed torch, never part of the main build.
// Needs no CUDA. All is called with the GIL; no exception leaves.
#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/cudnn_batch_norm.h>
#include <ATen/ops/div.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <typeindex>
#include <unordered_map>

#include "core/recipe_side.hpp"
#include "torch_hook/over_storage.hpp"

namespace {

using stagehand::core::FoundRecipe;
using stagehand::core::mix;
using stagehand::core::RecipeSide;
using stagehand::core::TensorPlace;
using namespace torch::autograd;             // the nodes
using namespace torch::autograd::generated;  // of each op

constexpr std::size_t kInputs = FoundRecipe::kInputs;

struct Recipe;
struct InPlace;
using Inputs = at::Tensor (&)[kInputs];

// One op: what its node saved, and how it runs.
struct Op {
  std::uint32_t kind;
  const char* name;
  bool exact;
  // Whether the node has all that the op needs; notes it.
  bool (*note)(Node& node, Recipe& recipe, PyTypeObject* handle);
  at::Tensor (*run)(const Recipe& recipe, Inputs inputs);
};

// A parameter, as the node found it.
struct Leaf {
  at::Tensor tensor;
  std::uint32_t version = 0;
};

struct Recipe {
  const Op* op = nullptr;
  const InPlace* after = nullptr;  // what ran in place on the op's output; null for nothing
  std::uint32_t count = 0;
  PyObject* inputs[kInputs] = {};
  at::Scalar numbers[2];
  at::Scalar after_number;
  std::string word;
  Leaf leaves[2];  // what the node did not save of its inputs
  std::uint32_t settings = 0;
  at::DimVector sizes;
  std::uint64_t bytes = 0;
  bool reshaped = false;  // by a node that only gives the same bytes another shape
  at::DimVector strides;
  at::ScalarType dtype = at::ScalarType::Undefined;

  ~Recipe() {
    for (std::uint32_t i = 0; i < count; ++i) {
      Py_DECREF(inputs[i]);
    }
  }

  // What our pack hook gave for a saved variable. False: it was saved without it.
  bool take(const SavedVariable& saved, PyTypeObject* handle) {
    const auto packed = saved.retrieve_unpack_hook_data();
    PyObject* object = packed.has_value() ? packed->second.ptr(getPyInterpreter()) : nullptr;
    if (object == nullptr || !PyObject_TypeCheck(object, handle)) {
      return false;
    }
    Py_INCREF(object);
    inputs[count++] = object;
    return true;
  }
};

// One op that writes its output over its input, and saves that.
struct InPlace {
  std::uint32_t kind;
  const char* name;
  // Whether the node was in place; notes what it has.
  bool (*note)(Node& node, Recipe& recipe, PyTypeObject* handle);
  void (*run)(const Recipe& recipe, at::Tensor& made);
};

// Takes the leaf that the node's n-th gradient is for, as it is now. False: that is none.
bool take_leaf(const Node& node, std::size_t n, Recipe& recipe, std::size_t place = 0) {
  auto* to = node.num_outputs() > n ? node.next_edge(n).function.get() : nullptr;
  auto* leaf = dynamic_cast<AccumulateGrad*>(to);
  if (leaf != nullptr) {
    recipe.leaves[place] = {leaf->variable.detach(),
                            static_cast<std::uint32_t>(leaf->variable._version())};
  }
  return leaf != nullptr;
}

// A norm's.
bool take_weight_and_bias(const Node& node, Recipe& recipe) {
  return take_leaf(node, 1, recipe, 0) && take_leaf(node, 2, recipe, 1);
}

template <class Node_>
bool note_self(Node& node, Recipe& recipe, PyTypeObject* handle) {
  return recipe.take(static_cast<Node_&>(node).self_, handle);
}

template <class Node_>
bool note_self_and_other(Node& node, Recipe& recipe, PyTypeObject* handle) {
  auto& of = static_cast<Node_&>(node);
  return recipe.take(of.self_, handle) && recipe.take(of.other_, handle);
}

template <class Node_>
bool note_matrices(Node& node, Recipe& recipe, PyTypeObject* handle) {
  auto& of = static_cast<Node_&>(node);
  return recipe.take(of.self_, handle) && recipe.take(of.mat2_, handle);
}

// In training only. Running statistics stay as they are: they are not given to what runs.
template <class Node_>
bool note_batch_norm(Node& node, Recipe& recipe, PyTypeObject* handle, double eps) {
  auto& of = static_cast<Node_&>(node);
  recipe.numbers[0] = eps;
  return of.training && take_weight_and_bias(node, recipe) && recipe.take(of.input_, handle);
}

// On a GPU with the mean and the deviation that forward saved, which an op takes: finding them
// reads all of the input once more, with as many blocks of threads as there are channels.
bool note_native_batch_norm(Node& node, Recipe& recipe, PyTypeObject* handle) {
  auto& of = static_cast<NativeBatchNormBackward0&>(node);
  return note_batch_norm<NativeBatchNormBackward0>(node, recipe, handle, of.eps) &&
         (!node.input_metadata(0).device().is_cuda() ||
          (recipe.take(of.result1_, handle) && recipe.take(of.result2_, handle)));
}

at::Tensor run_native_batch_norm(const Recipe& recipe, Inputs in) {
  const at::Tensor& weight = recipe.leaves[0].tensor;
  const at::Tensor& bias = recipe.leaves[1].tensor;
  const double eps = recipe.numbers[0].toDouble();
  return in[1].defined()
             ? at::batch_norm_elemt(in[0], weight, bias, in[1], in[2], eps)
             : std::get<0>(at::native_batch_norm(in[0], weight, bias, {}, {}, true, 0, eps));
}

const std::unordered_map<std::type_index, Op>& ops() {
  static const std::unordered_map<std::type_index, Op> all = {
      {typeid(GeluBackward0),
       {1, "gelu", true,
        [](Node& node, Recipe& recipe, PyTypeObject* handle) {
          recipe.word = static_cast<GeluBackward0&>(node).approximate;
          return note_self<GeluBackward0>(node, recipe, handle);
        },
        [](const Recipe& recipe, Inputs in) { return at::gelu(in[0], recipe.word); }}},
      {typeid(SiluBackward0),
       {2, "silu", true, &note_self<SiluBackward0>,
        [](const Recipe&, Inputs in) { return at::silu(in[0]); }}},
      {typeid(MishBackward0),
       {3, "mish", true, &note_self<MishBackward0>,
        [](const Recipe&, Inputs in) { return at::mish(in[0]); }}},
      {typeid(HardswishBackward0),
       {4, "hardswish", true, &note_self<HardswishBackward0>,
        [](const Recipe&, Inputs in) { return at::hardswish(in[0]); }}},
      {typeid(SinBackward0),
       {5, "sin", true, &note_self<SinBackward0>,
        [](const Recipe&, Inputs in) { return at::sin(in[0]); }}},
      {typeid(CosBackward0),
       {6, "cos", true, &note_self<CosBackward0>,
        [](const Recipe&, Inputs in) { return at::cos(in[0]); }}},
      {typeid(SoftplusBackward0),
       {7, "softplus", true,
        [](Node& node, Recipe& recipe, PyTypeObject* handle) {
          auto& of = static_cast<SoftplusBackward0&>(node);
          recipe.numbers[0] = of.beta;
          recipe.numbers[1] = of.threshold;
          return recipe.take(of.self_, handle);
        },
        [](const Recipe& recipe, Inputs in) {
          return at::softplus(in[0], recipe.numbers[0], recipe.numbers[1]);
        }}},
      {typeid(LeakyReluBackward0),
       {8, "leaky_relu", true,
        [](Node& node, Recipe& recipe, PyTypeObject* handle) {
          auto& of = static_cast<LeakyReluBackward0&>(node);
          recipe.numbers[0] = of.negative_slope;
          return recipe.take(of.self_, handle);
        },
        [](const Recipe& recipe, Inputs in) { return at::leaky_relu(in[0], recipe.numbers[0]); }}},
      {typeid(PowBackward0),
       {9, "pow", true,
        [](Node& node, Recipe& recipe, PyTypeObject* handle) {
          auto& of = static_cast<PowBackward0&>(node);
          recipe.numbers[0] = of.exponent;
          return recipe.take(of.self_, handle);
        },
        [](const Recipe& recipe, Inputs in) { return at::pow(in[0], recipe.numbers[0]); }}},
      {typeid(MulBackward0),
       {10, "mul", true, &note_self_and_other<MulBackward0>,
        [](const Recipe&, Inputs in) { return at::mul(in[0], in[1]); }}},
      {typeid(DivBackward0),
       {11, "div", true, &note_self_and_other<DivBackward0>,
        [](const Recipe&, Inputs in) { return at::div(in[0], in[1]); }}},
      {typeid(MmBackward0),
       {12, "mm", false, &note_matrices<MmBackward0>,
        [](const Recipe&, Inputs in) { return at::mm(in[0], in[1]); }}},
      {typeid(BmmBackward0),
       {13, "bmm", false, &note_matrices<BmmBackward0>,
        [](const Recipe&, Inputs in) { return at::bmm(in[0], in[1]); }}},
      {typeid(AddmmBackward0),
       {14, "addmm", false,
        [](Node& node, Recipe& recipe, PyTypeObject* handle) {
          auto& of = static_cast<AddmmBackward0&>(node);
          recipe.numbers[0] = of.beta;
          recipe.numbers[1] = of.alpha;
          return take_leaf(node, 0, recipe) && recipe.take(of.mat1_, handle) &&
                 recipe.take(of.mat2_, handle);
        },
        [](const Recipe& recipe, Inputs in) {
          return at::addmm(recipe.leaves[0].tensor, in[0], in[1], recipe.numbers[0],
                           recipe.numbers[1]);
        }}},
      {typeid(NativeBatchNormBackward0),
       {15, "batch_norm", false, &note_native_batch_norm, &run_native_batch_norm}},
      {typeid(CudnnBatchNormBackward0),
       {16, "batch_norm", false,
        [](Node& node, Recipe& recipe, PyTypeObject* handle) {
          using Norm = CudnnBatchNormBackward0;
          return note_batch_norm<Norm>(node, recipe, handle, static_cast<Norm&>(node).epsilon);
        },
        [](const Recipe& recipe, Inputs in) {
          return std::get<0>(at::cudnn_batch_norm(in[0], recipe.leaves[0].tensor,
                                                  recipe.leaves[1].tensor, {}, {}, true, 0,
                                                  recipe.numbers[0].toDouble()));
        }}},
      {typeid(NativeGroupNormBackward0),
       {17, "group_norm", false,
        [](Node& node, Recipe& recipe, PyTypeObject* handle) {
          auto& of = static_cast<NativeGroupNormBackward0&>(node);
          recipe.numbers[0] = of.eps;
          recipe.numbers[1] = of.group;
          return take_weight_and_bias(node, recipe) && recipe.take(of.input_, handle);
        },
        [](const Recipe& recipe, Inputs in) {
          return at::group_norm(in[0], recipe.numbers[1].toLong(), recipe.leaves[0].tensor,
                                recipe.leaves[1].tensor, recipe.numbers[0].toDouble());
        }}},
  };
  return all;
}

// relu has one node for both ways. Out of place what relu saved is of version 0, and who wrote to
// it since may have made it 1. Our hook saw that save, which gave the record no recipe, and so
// forbids one; or this is that save: no node is younger, and nothing is saved yet.
bool relu_was_in_place(Node& node, Recipe&, PyTypeObject* handle) {
  const SavedVariable& result = static_cast<ReluBackward0&>(node).result_;
  if (const auto packed = result.retrieve_unpack_hook_data(); packed.has_value()) {
    PyObject* object = packed->second.ptr(getPyInterpreter());
    return object != nullptr && PyObject_TypeCheck(object, handle);
  }
  const auto raw = result.get_raw_data();
  const bool saved = result.has_hooks() || (raw.has_value() && raw->defined());
  return !saved && at::sequence_number::peek() == node.sequence_nr() + 1;
}

const std::unordered_map<std::type_index, InPlace>& in_place_ops() {
  static const std::unordered_map<std::type_index, InPlace> all = {
      {typeid(ReluBackward0),
       {1, "relu_", &relu_was_in_place, [](const Recipe&, at::Tensor& made) { at::relu_(made); }}},
      {typeid(LeakyReluBackward1),  // in place always
       {2, "leaky_relu_",
        [](Node& node, Recipe& recipe, PyTypeObject*) {
          recipe.after_number = static_cast<LeakyReluBackward1&>(node).negative_slope;
          return true;
        },
        [](const Recipe& recipe, at::Tensor& made) {
          at::leaky_relu_(made, recipe.after_number);
        }}},
  };
  return all;
}

// What chooses the kernel of a matrix product, beside its operands.
std::uint32_t settings_now() {
  at::Context& context = at::globalContext();
  using at::Float32Backend;
  using at::Float32Op;
  std::uint32_t word = 0;
  for (const auto one :
       {static_cast<int>(context.float32Precision(Float32Backend::CUDA, Float32Op::MATMUL)),
        static_cast<int>(context.float32Precision(Float32Backend::MKLDNN, Float32Op::MATMUL)),
        static_cast<int>(context.allowFP16ReductionCuBLAS()),
        static_cast<int>(context.allowBF16ReductionCuBLAS()),
        static_cast<int>(context.allowFP16AccumulationCuBLAS()),
        static_cast<int>(context.deterministicAlgorithms()),
        static_cast<int>(context.userEnabledMkldnn()),
        static_cast<int>(context.blasPreferredBackend())}) {
    word = word * 8 + static_cast<std::uint32_t>(one);
  }
  return word;
}

void mix_tensor(std::uint32_t* word, const at::Tensor& tensor) {
  mix(word, static_cast<int>(tensor.scalar_type()));
  mix(word, tensor.sizes().data(), tensor.sizes().size() * sizeof(std::int64_t));
  mix(word, tensor.strides().data(), tensor.strides().size() * sizeof(std::int64_t));
}

// Of those of one kind the time is that of their bytes.
std::uint32_t kind_of(const Recipe& recipe) {
  constexpr std::uint32_t kOps = 64;
  return recipe.op->kind + (recipe.after != nullptr ? kOps * recipe.after->kind : 0);
}

// What a proof of it rests on, beside its inputs.
std::uint32_t rests_on(const Recipe& recipe, const at::Tensor& made) {
  std::uint32_t word = stagehand::core::kMixed;
  mix(&word, recipe.settings);
  mix(&word, static_cast<int>(made.scalar_type()));
  for (const at::Scalar& number : {recipe.numbers[0], recipe.numbers[1], recipe.after_number}) {
    mix(&word, number.isComplex() ? 0.0 : number.to<double>());
  }
  mix(&word, kind_of(recipe));
  mix(&word, recipe.word.data(), recipe.word.size());
  for (const auto& [leaf, version] : recipe.leaves) {
    if (leaf.defined()) {
      mix_tensor(&word, leaf);
      mix(&word, reinterpret_cast<std::uintptr_t>(leaf.data_ptr()) % 512);
    }
  }
  return word;
}

template <class Op_>
const Op_* known(const std::unordered_map<std::type_index, Op_>& all, const Node& node) {
  const auto found = all.find(typeid(node));
  return found != all.end() ? &found->second : nullptr;
}

Node* node_before(const Node& node) {
  const bool first = node.num_outputs() > 0 && node.next_edge(0).input_nr == 0;
  return first ? node.next_edge(0).function.get() : nullptr;
}

// A view's storage is as its base was made. What was changed in place since is not what the node
// made, and is told by the version: 0, or 1 after an op in place.
void find(void* object, void* handle, FoundRecipe* found) {
  try {
    const at::Tensor& given = THPVariable_Unpack(static_cast<PyObject*>(object));
    const at::Tensor made = given.is_view() ? at::Tensor(given._base()) : given;
    const auto last = made.grad_fn();
    if (last == nullptr) {
      return;
    }
    const InPlace* after = made._version() == 1 ? known(in_place_ops(), *last) : nullptr;
    if (made._version() != (after != nullptr ? 1 : 0)) {
      return;
    }
    Node* node = after != nullptr ? node_before(*last) : last.get();
    const bool reshaped = node != nullptr && typeid(*node) == typeid(UnsafeViewBackward0);
    node = reshaped ? node_before(*node) : node;
    const Op* op = node != nullptr ? known(ops(), *node) : nullptr;
    if (op == nullptr || made.output_nr() != 0 || made.storage_offset() != 0 ||
        !made.is_non_overlapping_and_dense()) {
      return;
    }
    auto recipe = std::make_unique<Recipe>();
    recipe->op = op;
    recipe->after = after;
    auto* const type = static_cast<PyTypeObject*>(handle);
    if ((after != nullptr && !after->note(*last, *recipe, type)) ||
        !op->note(*node, *recipe, type)) {
      return;
    }
    recipe->sizes = made.sizes();
    recipe->strides = made.strides();
    recipe->dtype = made.scalar_type();
    recipe->bytes = made.nbytes();
    recipe->reshaped = reshaped;
    recipe->settings = recipe->op->exact ? 0 : settings_now();
    found->made = {reinterpret_cast<stagehand::core::Address>(made.data_ptr()), made.nbytes(),
                   kind_of(*recipe), recipe->op->exact, rests_on(*recipe, made)};
    found->leaf = recipe->leaves[0].tensor.defined();
    found->layout = stagehand::core::layout_of(static_cast<std::int32_t>(made.dim()),
                                               made.sizes().data(), made.strides().data());
    found->op = recipe->after != nullptr ? recipe->after->name : recipe->op->name;
    found->inputs = recipe->count;
    std::copy_n(recipe->inputs, recipe->count, found->input);
    found->recipe = recipe.release();
  } catch (const std::exception&) {  // its node was released, or has no memory to look at
    PyErr_Clear();
  }
}

// A dispatch mode of the user's must not see what we compute: torch's selective checkpoint counts
// the ops of a forward, and of the run that repeats it.
struct Unseen {
  c10::impl::ExcludeDispatchKeyGuard modes{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  at::NoGradGuard no_grad;
};

void* run(void* made_by, void* const* inputs, bool* differs) {
  HANDLE_TH_ERRORS
  const Recipe& recipe = *static_cast<const Recipe*>(made_by);
  at::Tensor in[kInputs];
  for (std::uint32_t i = 0; i < recipe.count; ++i) {
    in[i] = THPVariable_Unpack(static_cast<PyObject*>(inputs[i]));
  }
  const stagehand::torch_hook::OutOfInference usual;
  const Unseen unseen;
  // Autocast chose the inputs' types before the node saw them.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::Tensor made = recipe.op->run(recipe, in);
  if (recipe.after != nullptr) {
    recipe.after->run(recipe, made);
  }
  const bool alike = recipe.reshaped
                         ? made.is_contiguous() && made.nbytes() == recipe.bytes
                         : made.sizes() == recipe.sizes && made.strides() == recipe.strides;
  bool changed = !recipe.op->exact && settings_now() != recipe.settings;
  for (const auto& [leaf, version] : recipe.leaves) {
    changed |= leaf.defined() && leaf._version() != version;
  }
  if (!alike || changed || made.scalar_type() != recipe.dtype || made.storage_offset() != 0) {
    *differs = true;
    return nullptr;
  }
  return THPVariable_Wrap(made);
  END_HANDLE_TH_ERRORS_RET(nullptr)
}

void* view(void* object, const TensorPlace* place) {
  HANDLE_TH_ERRORS
  const auto count = static_cast<std::size_t>(place->ndim);
  const at::NoGradGuard no_grad;
  at::Tensor tensor = THPVariable_Unpack(static_cast<PyObject*>(object)).detach();
  const auto type = static_cast<at::ScalarType>(place->dtype);
  if (type != tensor.scalar_type()) {
    tensor = tensor.flatten().view(type);
  }
  return THPVariable_Wrap(
      tensor.as_strided({place->shape, count}, {place->strides, count}, place->offset));
  END_HANDLE_TH_ERRORS_RET(nullptr)
}

c10::Device place_of(std::int32_t device_type, std::int32_t device) {
  const auto type = device_type == 2 ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  return {type, static_cast<c10::DeviceIndex>(type == c10::DeviceType::CUDA ? device : -1)};
}

void* sum(stagehand::core::Address first, std::uint64_t bytes, std::int32_t device_type,
          std::int32_t device) {
  HANDLE_TH_ERRORS
  const stagehand::torch_hook::OutOfInference usual;
  const Unseen unseen;
  const bool words = first % 8 == 0 && bytes % 8 == 0;
  const auto options =
      at::TensorOptions(words ? at::kLong : at::kByte).device(place_of(device_type, device));
  const at::Tensor over =
      at::from_blob(reinterpret_cast<void*>(first),
                    {static_cast<std::int64_t>(words ? bytes / 8 : bytes)}, options);
  return THPVariable_Wrap(at::sum(over, at::kLong));
  END_HANDLE_TH_ERRORS_RET(nullptr)
}

void* differ(stagehand::core::Address one, stagehand::core::Address other, std::uint64_t bytes,
             std::int32_t device_type, std::int32_t device) {
  HANDLE_TH_ERRORS
  constexpr std::uint64_t kTogether = std::uint64_t{128} << 20;  // an eighth of it is needed beside
  const Unseen unseen;
  const c10::Device place = place_of(device_type, device);
  at::Tensor found;
  for (std::uint64_t at = 0; at < bytes;) {
    const std::uint64_t some = std::min(bytes - at, kTogether);
    const bool words = (one + at) % 8 == 0 && (other + at) % 8 == 0 && some % 8 == 0;
    const auto options = at::TensorOptions(words ? at::kLong : at::kByte).device(place);
    const auto over = [&](std::uint64_t address) {
      return at::from_blob(reinterpret_cast<void*>(address + at),
                           {static_cast<std::int64_t>(words ? some / 8 : some)}, options);
    };
    const at::Tensor here = at::ne(over(one), over(other)).any();
    found = found.defined() ? at::logical_or(found, here) : here;
    at += some;
  }
  return THPVariable_Wrap(found);
  END_HANDLE_TH_ERRORS_RET(nullptr)
}

// Numbers of the leaves that were asked for. A weak reference keeps the address from being another
// leaf's; those of leaves that are gone go when there are twice as many as were alive last.
std::uint64_t leaf(void* object) {
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Known {
    Weak leaf;
    std::uint64_t number;
  };
  static auto& known = *new std::unordered_map<const c10::TensorImpl*, Known>;
  static std::uint64_t last = 0;
  static std::size_t many = 1024;
  try {
    const at::Tensor& given = THPVariable_Unpack(static_cast<PyObject*>(object));
    const at::TensorBase& one = given.is_view() ? given._base() : given;
    if (!one.is_leaf() || !one.requires_grad()) {
      return 0;
    }
    const auto found = known.find(one.unsafeGetTensorImpl());
    if (found != known.end()) {
      return found->second.number;
    }
    if (known.size() >= many) {
      std::erase_if(known, [](const auto& entry) { return entry.second.leaf.expired(); });
      many = std::max(many, 2 * known.size());
    }
    known.emplace(one.unsafeGetTensorImpl(), Known{Weak(one.getIntrusivePtr()), ++last});
    return last;
  } catch (const std::exception&) {
    return 0;
  }
}

void forget(void* recipe) { delete static_cast<Recipe*>(recipe); }

}  // namespace

extern "C" __attribute__((visibility("default"))) const void* stagehand_recipe_side() {
  static const RecipeSide side = [] {
    RecipeSide made;
    made.version = RecipeSide::kVersion;
    made.size = sizeof(RecipeSide);
    made.find = &find;
    made.run = &run;
    made.view = &view;
    made.differ = &differ;
    made.sum = &sum;
    made.forget = &forget;
    made.leaf = &leaf;
    return made;
  }();
  return &side;
}
