#include "lib/plan/refuse.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <unordered_map>

#include <absl/strings/str_cat.h>
#include <torch/csrc/autograd/variable.h>

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

bool is_supported_integer(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kBool: return true;
    default: return false;
  }
}

bool is_supported_floating(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Each element has a place of its own, and there are no others: the memory can be read as one flat vector.
bool is_dense(const at::Tensor& tensor) { return tensor.numel() == 0 || tensor.is_non_overlapping_and_dense(); }

std::string strides_text(const at::Tensor& tensor) {
  return absl::StrCat("strides ", shape_text(tensor.strides().vec()), ", so its elements overlap or leave gaps");
}

// What may be a window or, if `foreign`, be replicated: a leaf in dense CPU memory.
std::optional<Refusal> unsupported_tensor(const at::Tensor& tensor, bool foreign) {
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_nested()) {
    const std::string kind = tensor.is_quantized() ? "quantized" : tensor.is_nested() ? "nested" : text_of(tensor.layout());
    return Refusal{absl::StrCat("it is a ", kind, " tensor, which is not supported"), "Use a dense (strided) tensor"};
  }
  if (!tensor.is_cpu()) {
    return Refusal{absl::StrCat("it is on device ", tensor.device().str(), ", only cpu is supported yet"),
                   "Move the model to the CPU before building the optimizer"};
  }
  const at::ScalarType dtype = tensor.scalar_type();
  if (foreign && !is_supported_floating(dtype)) {
    return Refusal{absl::StrCat("it belongs to no given model and has dtype ", dtype_text(dtype),
                                ", only float32, float64, bfloat16 and float16 are supported there"),
                   "Take it out of the optimizer"};
  }
  if (!is_supported_floating(dtype) && !is_supported_integer(dtype)) {
    return Refusal{absl::StrCat("it has dtype ", dtype_text(dtype),
                                ", only float32, float64, bfloat16, float16, int8 to int64, uint8 and bool are supported"),
                   "Register it as a buffer, or convert it"};
  }
  if (!tensor.is_leaf()) {
    return Refusal{"it is not a leaf: it was computed from other tensors", "Register a detached copy: t.detach().clone()"};
  }
  if (tensor.is_inference()) {
    return Refusal{"it was made under InferenceMode, which is not supported", "Build the model outside InferenceMode"};
  }
  if (tensor.is_neg()) return Refusal{"it is a negated view, which is not supported", "Register t.resolve_neg() instead"};
  if (!is_dense(tensor)) {
    return Refusal{absl::StrCat("it has shape ", shape_text(tensor.sizes().vec()), " and ", strides_text(tensor)),
                   "Register t.contiguous() instead"};
  }
  // A tensor that never met autograd has no place for hooks, and must not be asked.
  if (torch::autograd::impl::get_autograd_meta(tensor) != nullptr &&
      torch::autograd::impl::post_acc_grad_hooks(tensor) != nullptr) {
    return Refusal{"it has a post-accumulate-grad hook, whose place is needed to reduce gradients",
                   "Remove the hook; a hook set by register_hook may stay"};
  }
  return std::nullopt;
}

std::optional<Refusal> unsupported_gradient(const at::Tensor& tensor) {
  const at::Tensor& gradient = tensor.grad();
  if (!gradient.defined()) return std::nullopt;
  const std::string remedy = "Call zero_grad() first";
  if (!tensor.requires_grad())
    return Refusal{"it has requires_grad=false and a gradient, by which a step would still move it", remedy};
  if (gradient.layout() != at::kStrided) {
    return Refusal{absl::StrCat("its gradient is a ", text_of(gradient.layout()), " tensor, which is not supported"), remedy};
  }
  if (gradient.device() != tensor.device() || gradient.scalar_type() != tensor.scalar_type() ||
      gradient.sizes() != tensor.sizes()) {
    const auto describe = [](const at::Tensor& t) {
      return absl::StrCat(dtype_text(t.scalar_type()), " ", shape_text(t.sizes().vec()), " on ", t.device().str());
    };
    return Refusal{absl::StrCat("its gradient is ", describe(gradient), ", the parameter ", describe(tensor)), remedy};
  }
  if (!is_dense(gradient)) return Refusal{absl::StrCat("its gradient has ", strides_text(gradient)), remedy};
  if (gradient.requires_grad()) {
    return Refusal{"its gradient is part of a graph (backward with create_graph=true), which cannot be kept", remedy};
  }
  return std::nullopt;
}

Where place_of(const Census& census, const Holder& holder, const Where& where) {
  Where here = where;
  here.optimizer = census.adapters[static_cast<size_t>(holder.optimizer)]->name();
  here.optimizer_index = holder.optimizer;
  here.group = holder.group;
  here.index = holder.index;
  return here;
}

// A parameter's storage is replaced, so nobody else may look through it. All tensors are dense CPU memory by now. One without
// elements has nothing to share.
class StorageChecker {
 public:
  StorageChecker(const Census& census, const Where& where) : census_(census), where_(where) {}

  absl::Status check() {
    for (const CensusParameter& parameter : census_.parameters) {
      Where here = where_;
      here.parameter = parameter.names.front();
      add(parameter.tensor, {.name = parameter.names.front(), .place = here});
    }
    for (const ForeignTensor& foreign : census_.foreign) {
      add(foreign.tensor, {.name = "", .place = place_of(census_, foreign.holders.front(), where_)});
    }
    for_each_buffer(census_, [&](const std::string& name, const at::Tensor& buffer) {
      add(buffer, {.name = "", .place = where_, .buffer = name});
    });
    if (status_.ok()) check_memory();
    return status_;
  }

 private:
  struct Item {
    std::string name;  // of a parameter, else ""
    Where place;
    std::string buffer{};
  };
  struct Span {
    const char *begin, *end;
    size_t item;
  };

  void add(const at::Tensor& tensor, Item item) {
    if (!status_.ok() || tensor.numel() == 0) return;
    const c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    const size_t index = items_.size();
    items_.push_back(std::move(item));
    if (const auto found = owners_.find(storage); found != owners_.end()) return refuse(items_[index], items_[found->second]);
    if (is_parameter(index)) owners_.emplace(storage, index);
    const auto* begin = static_cast<const char*>(storage->data());
    if (begin != nullptr && storage->nbytes() > 0) spans_.push_back({begin, begin + storage->nbytes(), index});
  }

  bool is_parameter(size_t item) const { return !items_[item].name.empty(); }

  // The same memory through storages that do not know of each other (from_blob).
  void check_memory() {
    std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    for (size_t i = 1, reach = 0; i < spans_.size(); ++i) {
      const Span &a = spans_[reach], &b = spans_[i];
      if (b.begin < a.end && (is_parameter(a.item) || is_parameter(b.item))) {
        return is_parameter(a.item) ? refuse(items_[b.item], items_[a.item]) : refuse(items_[a.item], items_[b.item]);
      }
      if (b.end > a.end) reach = i;
    }
  }

  void refuse(const Item& item, const Item& parameter) {
    const bool both = !item.name.empty(), is_buffer = !item.buffer.empty();
    status_ = error(StatusCode::kUnimplemented, item.place,
                    absl::StrCat(is_buffer ? absl::StrCat("buffer '", item.buffer, "'") : "it",
                                 " shares its storage with parameter '", parameter.name, "'"),
                    both        ? "Give each its own memory (clone()), or register one and the same tensor under both names"
                    : is_buffer ? "Give the buffer its own memory (clone())"
                                : "Give it its own memory (clone())");
  }

  const Census& census_;
  const Where where_;
  std::vector<Item> items_;
  std::vector<Span> spans_;
  std::unordered_map<const c10::StorageImpl*, size_t> owners_;  // parameters, as indices into items_
  absl::Status status_;
};

absl::Status check_storages(const Census& census, const Where& where) { return StorageChecker(census, where).check(); }

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
  if (!is_dense(state)) return Refusal{absl::StrCat(what, "has ", strides_text(state)), remedy};
  return std::nullopt;
}

}  // namespace

absl::Status check_tensors(const Census& census, const Where& where) {
  for (const CensusParameter& parameter : census.parameters) {
    auto refusal = unsupported_tensor(parameter.tensor, /*foreign=*/false);
    if (!refusal) refusal = unsupported_gradient(parameter.tensor);
    if (!refusal) continue;
    Where here = where;
    here.parameter = parameter.names.front();
    return error(StatusCode::kUnimplemented, here, refusal->what, refusal->remedy);
  }
  for (const ForeignTensor& foreign : census.foreign) {
    auto refusal = unsupported_tensor(foreign.tensor, /*foreign=*/true);
    if (!refusal) refusal = unsupported_gradient(foreign.tensor);
    if (!refusal) continue;
    return error(StatusCode::kUnimplemented, place_of(census, foreign.holders.front(), where), refusal->what, refusal->remedy);
  }
  for (const auto check : {check_buffers, check_storages}) {
    if (absl::Status status = check(census, where); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status check_state(const Census& census, const Where& where) {
  const auto check = [&](const at::Tensor& tensor, const Holder& holder, Where here) {
    const auto o = static_cast<size_t>(holder.optimizer);
    const torch::optim::OptimizerParamState* state = state_of(*census.optimizers[o], tensor);
    if (state == nullptr) return absl::OkStatus();
    for (const auto& [key, part] : census.adapters[o]->take_apart(*state).tensors) {
      if (const auto refusal = unsupported_state(key, part, tensor)) {
        return error(StatusCode::kUnimplemented, here, refusal->what, refusal->remedy);
      }
    }
    return absl::OkStatus();
  };
  for (const CensusParameter& parameter : census.parameters) {
    for (const Holder& holder : parameter.holders) {
      Where here = place_of(census, holder, where);
      here.parameter = parameter.names.front();
      here.index = -1;
      if (absl::Status status = check(parameter.tensor, holder, here); !status.ok()) return status;
    }
  }
  for (const ForeignTensor& foreign : census.foreign) {
    for (const Holder& holder : foreign.holders) {
      if (absl::Status status = check(foreign.tensor, holder, place_of(census, holder, where)); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace rebind::plan
