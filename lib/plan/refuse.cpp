#include "lib/plan/refuse.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <unordered_map>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <torch/csrc/autograd/variable.h>

#include "lib/optim/exact_text.h"
#include "lib/plan/text.h"

namespace rebind::plan {
namespace {

using absl::StatusCode;

struct Refusal {
  std::string what, remedy;
};

template <class Printable>
std::string text_of(const Printable& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

const char* strategy_text(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::kFullShard: return "kFullShard";
    case ShardingStrategy::kShardGradOp: return "kShardGradOp";
    case ShardingStrategy::kShardOptimizer: return "kShardOptimizer";
    case ShardingStrategy::kNoShard: return "kNoShard";
  }
  return "unknown";
}

std::optional<Refusal> unsupported_option(const FsdpOptions& options) {
  if (options.strategy != ShardingStrategy::kFullShard) {
    return Refusal{absl::StrCat("options.strategy is ", strategy_text(options.strategy), ", which is not supported yet"),
                   "Use ShardingStrategy::kFullShard"};
  }
  if (options.unit_policy.kind() == UnitPolicy::Kind::kBySize) {
    return Refusal{"options.unit_policy is by_size, which is not supported yet",
                   "Use automatic, by_module, by_type or whole_model"};
  }
  if (options.mixed_precision.param_dtype || options.mixed_precision.reduce_dtype) {
    const bool param = options.mixed_precision.param_dtype.has_value();
    const auto dtype = param ? *options.mixed_precision.param_dtype : *options.mixed_precision.reduce_dtype;
    return Refusal{absl::StrCat("options.mixed_precision.", param ? "param_dtype" : "reduce_dtype", " is ", dtype_text(dtype),
                                ", but mixed precision is not supported yet"),
                   "Leave it unset"};
  }
  if (options.replicate_group) {
    return Refusal{"options.replicate_group is set, but hybrid sharding is not supported yet", "Leave it unset"};
  }
  if (!options.reshard_after_forward) {
    return Refusal{"options.reshard_after_forward is false, which is not supported yet", "Leave it true"};
  }
  if (options.max_live_bytes) {
    return Refusal{absl::StrCat("options.max_live_bytes is ", *options.max_live_bytes, ", but a cap is not supported yet"),
                   "Leave it unset: one unit is gathered at a time"};
  }
  if (!options.ignored_parameters.empty()) {
    return Refusal{absl::StrCat("options.ignored_parameters names ", some_of(options.ignored_parameters),
                                ", but ignored parameters are not supported yet"),
                   "Leave it empty"};
  }
  return std::nullopt;
}

std::optional<Refusal> impossible_option(const FsdpOptions& options) {
  if (options.gradient_divide_factor && (!std::isfinite(*options.gradient_divide_factor) || *options.gradient_divide_factor == 0)) {
    return Refusal{absl::StrCat("options.gradient_divide_factor is ", optim::exact_text(*options.gradient_divide_factor)),
                   "Use a finite number other than 0, or leave it unset for the mean over the ranks"};
  }
  if (options.collective_timeout.count() <= 0) {
    return Refusal{absl::StrCat("options.collective_timeout is ", options.collective_timeout.count(), " ms"),
                   "Use a positive time"};
  }
  if (options.prefetch_units < 0) {
    return Refusal{absl::StrCat("options.prefetch_units is ", options.prefetch_units), "Use 0 or more"};
  }
  const auto [slot, quantum] = options.layout_rules;
  if (!(slot == 0 && quantum == 0) && !(slot > 0 && quantum > 0 && quantum % slot == 0)) {
    return Refusal{absl::StrCat("options.layout_rules has slot ", slot, " and quantum ", quantum),
                   "Both must be positive and quantum a multiple of slot; leave both 0 to have them chosen"};
  }
  if (options.unit_policy.kind() == UnitPolicy::Kind::kByModule && !options.unit_policy.predicate()) {
    return Refusal{"options.unit_policy is by_module without a predicate", "Give by_module a function"};
  }
  return std::nullopt;
}

// What may be a window: a plain leaf in CPU memory.
std::optional<Refusal> unsupported_parameter(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_nested()) {
    const std::string kind = tensor.is_quantized() ? "quantized" : tensor.is_nested() ? "nested" : text_of(tensor.layout());
    return Refusal{absl::StrCat("it is a ", kind, " tensor, which is not supported"), "Use a dense (strided) tensor"};
  }
  if (!tensor.is_cpu()) {
    return Refusal{absl::StrCat("it is on device ", tensor.device().str(), ", only cpu is supported yet"),
                   "Move the model to the CPU before building the optimizer"};
  }
  if (!at::isFloatingType(tensor.scalar_type()) || tensor.element_size() < 2) {
    return Refusal{absl::StrCat("it has dtype ", dtype_text(tensor.scalar_type()),
                                ", only float32, float64, bfloat16 and float16 are supported yet"),
                   "Register it as a buffer, or convert it"};
  }
  if (!tensor.is_leaf()) {
    return Refusal{"it is not a leaf: it was computed from other tensors", "Register a detached copy: t.detach().clone()"};
  }
  if (!tensor.requires_grad()) {
    return Refusal{"it has requires_grad=false, frozen parameters are not supported yet",
                   "Register it as a buffer, or set requires_grad to true"};
  }
  if (tensor.is_inference()) {
    return Refusal{"it was made under InferenceMode, which is not supported", "Build the model outside InferenceMode"};
  }
  if (tensor.is_neg()) return Refusal{"it is a negated view, which is not supported", "Register t.resolve_neg() instead"};
  if (!tensor.is_contiguous()) {
    return Refusal{absl::StrCat("it has shape ", shape_text(tensor.sizes().vec()), " and strides ",
                                shape_text(tensor.strides().vec()), ", only contiguous tensors are supported yet"),
                   "Register t.contiguous() instead (channels_last and transposed weights are such tensors)"};
  }
  if (torch::autograd::impl::post_acc_grad_hooks(tensor) != nullptr) {
    return Refusal{"it has a post-accumulate-grad hook, whose place is needed to reduce gradients",
                   "Remove the hook; a hook set by register_hook may stay"};
  }
  return std::nullopt;
}

std::optional<Refusal> unsupported_gradient(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return std::nullopt;
  const std::string remedy = "Call zero_grad() first";
  if (gradient.layout() != at::kStrided) {
    return Refusal{absl::StrCat("its gradient is a ", text_of(gradient.layout()), " tensor, which is not supported"), remedy};
  }
  if (gradient.device() != parameter.device() || gradient.scalar_type() != parameter.scalar_type() ||
      gradient.sizes() != parameter.sizes()) {
    const auto describe = [](const at::Tensor& t) {
      return absl::StrCat(dtype_text(t.scalar_type()), " ", shape_text(t.sizes().vec()), " on ", t.device().str());
    };
    return Refusal{absl::StrCat("its gradient is ", describe(gradient), ", the parameter ", describe(parameter)), remedy};
  }
  if (!gradient.is_contiguous()) {
    return Refusal{absl::StrCat("its gradient has strides ", shape_text(gradient.strides().vec()), " and is not contiguous"),
                   remedy};
  }
  if (gradient.requires_grad()) {
    return Refusal{"its gradient is part of a graph (backward with create_graph=true), which cannot be kept", remedy};
  }
  return std::nullopt;
}

// One dtype a model: a unit has one flat buffer yet.
absl::Status check_dtypes(const Census& census, const Where& where) {
  std::vector<const CensusParameter*> first(census.models.size(), nullptr);
  for (const CensusParameter& parameter : census.parameters) {
    const CensusParameter*& other = first[static_cast<size_t>(parameter.model)];
    if (other == nullptr) other = &parameter;
    if (other->tensor.scalar_type() == parameter.tensor.scalar_type()) continue;
    Where here = where;
    here.parameter = parameter.names.front();
    return error(StatusCode::kUnimplemented, here,
                 absl::StrCat("it has dtype ", dtype_text(parameter.tensor.scalar_type()), " and '", other->names.front(), "' has ",
                              dtype_text(other->tensor.scalar_type()), ", different dtypes in one model are not supported yet"),
                 "Convert the model to one dtype before building the optimizer");
  }
  return absl::OkStatus();
}

// A parameter's storage is replaced, so nobody else may look through it. All tensors are dense CPU memory by now.
absl::Status check_storages(const Census& census, const Where& where) {
  struct Span {
    const char *begin, *end;
    std::string name;
    bool is_parameter;
  };
  std::vector<Span> spans;
  std::unordered_map<const c10::StorageImpl*, std::string> owners;  // of parameters' storages
  const auto refuse = [&](const std::string& name, bool is_parameter, const std::string& other) {
    Where here = where;
    if (is_parameter) here.parameter = name;
    return error(
        StatusCode::kUnimplemented, here,
        absl::StrCat(is_parameter ? "it" : absl::StrCat("buffer '", name, "'"), " shares its storage with parameter '", other, "'"),
        is_parameter ? "Give each its own memory (clone()), or register one and the same tensor under both names"
                     : "Give the buffer its own memory (clone())");
  };
  const auto add = [&](const at::Tensor& tensor, const std::string& name, bool is_parameter) {
    const c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    const auto found = owners.find(storage);
    if (found != owners.end()) return refuse(name, is_parameter, found->second);
    if (is_parameter) owners.emplace(storage, name);
    const auto* begin = static_cast<const char*>(storage->data());
    if (begin != nullptr && storage->nbytes() > 0) spans.push_back({begin, begin + storage->nbytes(), name, is_parameter});
    return absl::OkStatus();
  };
  for (const CensusParameter& parameter : census.parameters) {
    if (absl::Status status = add(parameter.tensor, parameter.names.front(), true); !status.ok()) return status;
  }
  absl::Status status;
  for_each_buffer(census, [&](const std::string& name, const at::Tensor& buffer) {
    if (status.ok()) status = add(buffer, name, false);
  });
  if (!status.ok()) return status;

  // The same memory through storages that do not know of each other (from_blob).
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t i = 1, reach = 0; i < spans.size(); ++i) {
    const Span &a = spans[reach], &b = spans[i];
    if (b.begin < a.end && (a.is_parameter || b.is_parameter)) {
      return a.is_parameter ? refuse(b.name, b.is_parameter, a.name) : refuse(a.name, a.is_parameter, b.name);
    }
    if (b.end > a.end) reach = i;
  }
  return absl::OkStatus();
}

absl::Status check_buffers(const Census& census, const Where& where) {
  absl::Status status;
  for_each_buffer(census, [&](const std::string& name, const at::Tensor& buffer) {
    if (!status.ok() || (buffer.is_cpu() && buffer.layout() == at::kStrided && !buffer.is_quantized() && !buffer.is_nested()))
      return;
    status = error(StatusCode::kUnimplemented, where,
                   absl::StrCat("buffer '", name, "' is a ", text_of(buffer.layout()), " ", dtype_text(buffer.scalar_type()),
                                " tensor on ", buffer.device().str(), ", only dense tensors on cpu are supported yet"),
                   "Move it to the CPU, or do not register it");
  });
  return status;
}

std::optional<Refusal> unsupported_state(const std::string& key, const at::Tensor& state, const at::Tensor& parameter) {
  const std::string remedy = "Erase or rebuild that state, then call again";
  const std::string what = absl::StrCat("state '", key, "' ");
  if (state.layout() != at::kStrided || !state.is_cpu()) {
    return Refusal{absl::StrCat(what, "is a ", text_of(state.layout()), " tensor on ", state.device().str(),
                                ", only dense tensors on cpu are supported"),
                   remedy};
  }
  if (state.dim() == 0) return std::nullopt;
  if (state.sizes() != parameter.sizes()) {
    return Refusal{absl::StrCat(what, "has shape ", shape_text(state.sizes().vec()), ", the parameter has ",
                                shape_text(parameter.sizes().vec())),
                   remedy};
  }
  if (!state.is_contiguous()) {
    return Refusal{absl::StrCat(what, "has strides ", shape_text(state.strides().vec()), " and is not contiguous"), remedy};
  }
  return std::nullopt;
}

}  // namespace

absl::Status check_options(const FsdpOptions& options, const Where& where) {
  if (const auto refusal = unsupported_option(options)) {
    return error(StatusCode::kUnimplemented, where, refusal->what, refusal->remedy);
  }
  if (const auto refusal = impossible_option(options)) {
    return error(StatusCode::kInvalidArgument, where, refusal->what, refusal->remedy);
  }
  return absl::OkStatus();
}

absl::Status check_tensors(const Census& census, const Where& where) {
  for (const CensusParameter& parameter : census.parameters) {
    auto refusal = unsupported_parameter(parameter.tensor);
    if (!refusal) refusal = unsupported_gradient(parameter.tensor);
    if (!refusal) continue;
    Where here = where;
    here.parameter = parameter.names.front();
    return error(StatusCode::kUnimplemented, here, refusal->what, refusal->remedy);
  }
  for (const auto check : {check_dtypes, check_buffers, check_storages}) {
    if (absl::Status status = check(census, where); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status check_state(const Census& census, const Where& where) {
  for (const CensusParameter& parameter : census.parameters) {
    for (const Holder& holder : parameter.holders) {
      const auto o = static_cast<size_t>(holder.optimizer);
      const torch::optim::OptimizerParamState* state = state_of(*census.optimizers[o], parameter.tensor);
      if (state == nullptr) continue;
      for (const auto& [key, tensor] : census.adapters[o]->take_apart(*state).tensors) {
        const auto refusal = unsupported_state(key, tensor, parameter.tensor);
        if (!refusal) continue;
        Where here = where;
        here.parameter = parameter.names.front();
        here.optimizer = census.adapters[o]->name();
        here.optimizer_index = holder.optimizer;
        here.group = holder.group;
        return error(StatusCode::kUnimplemented, here, refusal->what, refusal->remedy);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace rebind::plan
