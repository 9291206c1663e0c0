#include "lib/plan/census.h"

#include <unordered_map>
#include <unordered_set>

#include <absl/strings/str_cat.h>
#include <c10/core/DispatchKey.h>

#include "lib/plan/text.h"
#include "lib/plan/walk.h"

namespace rebind::plan {
namespace {

using absl::StatusCode;
using TensorKey = const c10::TensorImpl*;

TensorKey key_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

// A window on a unit, or a shard: what prepare_fsdp makes of parameters and of an optimizer's entries.
bool is_sharded(const at::Tensor& tensor) { return key_of(tensor)->key_set().has(c10::DispatchKey::Fake); }

absl::Status check_models(const std::vector<NamedModule>& models, const Where& where) {
  if (models.empty()) return error(StatusCode::kInvalidArgument, where, "no model was given", "Pass at least one module");
  std::unordered_set<std::string> names;
  std::unordered_map<const torch::nn::Module*, size_t> seen;
  for (size_t m = 0; m < models.size(); ++m) {
    const auto& [name, module] = models[m];
    if (module == nullptr) {
      return error(StatusCode::kInvalidArgument, where, absl::StrCat("models[", m, "] '", name, "' is null"), "Pass a module");
    }
    const auto [at, is_new] = seen.emplace(module, m);
    if (!is_new) {
      return error(StatusCode::kInvalidArgument, where,
                   absl::StrCat("models[", m, "] '", name, "' is the same module as models[", at->second, "]"),
                   "Pass each model once");
    }
    if (models.size() == 1) continue;
    // Names are prefixes of parameter names, which must stay unique.
    if (name.empty() || name.find('.') != std::string::npos || !names.insert(name).second) {
      return error(StatusCode::kInvalidArgument, where,
                   absl::StrCat("models[", m, "] has the name '", name, "', which is empty, has a dot or was used before"),
                   "Give each of several models its own name without a dot");
    }
  }
  return absl::OkStatus();
}

absl::Status check_optimizers(const Optimizers& optimizers, const Where& where) {
  std::unordered_map<const torch::optim::Optimizer*, size_t> seen;
  for (size_t o = 0; o < optimizers.size(); ++o) {
    Where here = where;
    here.optimizer_index = static_cast<int>(o);
    if (optimizers[o] == nullptr) return error(StatusCode::kInvalidArgument, here, "the optimizer is null", "Pass an optimizer");
    const auto [at, is_new] = seen.emplace(optimizers[o], o);
    if (!is_new) {
      here.optimizer = optim::type_name(*optimizers[o]);
      return error(StatusCode::kInvalidArgument, here, absl::StrCat("it is the same optimizer as optimizers[", at->second, "]"),
                   "Pass each optimizer once");
    }
  }
  return absl::OkStatus();
}

class CensusTaker {
 public:
  CensusTaker(const std::vector<NamedModule>& models, const Optimizers& optimizers, const Where& where) : where_(where) {
    census_.models = models;
    census_.optimizers = optimizers;
  }

  absl::StatusOr<Census> take() {
    for (auto step : {&CensusTaker::find_parameters, &CensusTaker::find_adapters, &CensusTaker::find_holders,
                      &CensusTaker::check_shared_groups, &CensusTaker::find_state}) {
      if (absl::Status status = (this->*step)(); !status.ok()) return status;
    }
    return std::move(census_);
  }

 private:
  Where place(size_t optimizer, int group = -1, int index = -1) const {
    Where here = where_;
    const optim::Adapter* adapter = optimizer < census_.adapters.size() ? census_.adapters[optimizer] : nullptr;
    here.optimizer = adapter != nullptr ? adapter->name() : optim::type_name(*census_.optimizers[optimizer]);
    here.optimizer_index = static_cast<int>(optimizer);
    here.group = group;
    here.index = index;
    return here;
  }

  absl::Status find_parameters() {
    for (size_t m = 0; m < census_.models.size(); ++m) {
      const NamedModule& model = census_.models[m];
      const std::string prefix = census_.models.size() == 1 ? "" : model.name;
      const size_t before = names_;
      walk(*model.module, prefix, [&](const torch::nn::Module& module, const std::string& path) {
        for (const auto& item : module.named_parameters(/*recurse=*/false)) {
          add_parameter(item.value(), static_cast<int>(m), join_path(path, item.key()));
        }
      });
      if (names_ == before) {
        return error(StatusCode::kInvalidArgument, where_,
                     census_.models.size() == 1 ? std::string("the model has no parameters")
                                                : absl::StrCat("models[", m, "] '", model.name, "' has no parameters"),
                     "There is nothing to shard: leave it out");
      }
    }
    for (const CensusParameter& parameter : census_.parameters) {
      if (!is_sharded(parameter.tensor)) continue;
      Where here = where_;
      here.parameter = parameter.names.front();
      return error(StatusCode::kFailedPrecondition, here, "it is sharded already",
                   "Use Fsdp::of(model) to get its handle, or restore() before preparing it again");
    }
    return absl::OkStatus();
  }

  void add_parameter(const at::Tensor& tensor, int model, std::string name) {
    ++names_;
    const auto [at, is_new] = index_.emplace(key_of(tensor), census_.parameters.size());
    if (is_new) {
      CensusParameter& parameter = census_.parameters.emplace_back();
      parameter.tensor = tensor;
      parameter.model = model;
    }
    census_.parameters[at->second].names.push_back(std::move(name));
  }

  absl::Status find_adapters() {
    for (size_t o = 0; o < census_.optimizers.size(); ++o) {
      const optim::Adapter* adapter = optim::adapter_of(*census_.optimizers[o]);
      if (adapter == nullptr) return refuse_type(o);
      census_.adapters.push_back(adapter);
      const auto& groups = census_.optimizers[o]->param_groups();
      for (size_t g = 0; g < groups.size(); ++g) {
        if (groups[g].has_options() && adapter->knows(groups[g].options())) continue;
        return error(StatusCode::kUnimplemented, place(o, static_cast<int>(g)),
                     absl::StrCat("the group's options are not ", adapter->name(), "'s own type"),
                     absl::StrCat("Give the group options of type torch::optim::", adapter->name(), "Options"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status refuse_type(size_t optimizer) const {
    const Where here = place(optimizer);
    if (here.optimizer == "torch::optim::LBFGS") {
      return error(StatusCode::kUnimplemented, here, "LBFGS looks across all parameters at once, so it cannot run on shards",
                   "Use SGD, Adam, AdamW, Adagrad or RMSprop, or train without sharding");
    }
    return error(StatusCode::kUnimplemented, here, "this type of optimizer is not supported yet",
                 "Use torch::optim::SGD, Adam, AdamW, Adagrad or RMSprop itself, not a class derived from it");
  }

  absl::Status find_holders() {
    for (size_t o = 0; o < census_.optimizers.size(); ++o) {
      const auto& groups = census_.optimizers[o]->param_groups();
      size_t tensors = 0, ours = 0;
      for (size_t g = 0; g < groups.size(); ++g) {
        std::unordered_map<TensorKey, int> times;
        std::vector<size_t> repeated;  // where each of them stands first
        std::unordered_map<TensorKey, size_t> first;
        const auto& params = groups[g].params();
        for (size_t i = 0; i < params.size(); ++i) {
          const Holder holder{static_cast<int>(o), static_cast<int>(g), static_cast<int>(i)};
          if (absl::Status status = check_entry(params[i], holder); !status.ok()) return status;
          const TensorKey key = key_of(params[i]);
          ours += index_.contains(key) ? 1 : 0;
          const int count = ++times[key];
          if (count == 1) {
            first.emplace(key, i);
            holders_of(params[i]).push_back(holder);
          }
          if (count == 2) repeated.push_back(first.at(key));
        }
        tensors += params.size();
        for (const size_t i : repeated)
          note_repeated(params[i], {static_cast<int>(o), static_cast<int>(g), static_cast<int>(i)}, times.at(key_of(params[i])));
      }
      if (tensors > 0 && ours == 0) {
        return error(StatusCode::kInvalidArgument, place(o), "no tensor in its groups is a parameter of a given model",
                     "Pass the optimizer that was built from this model's parameters, or leave this one out");
      }
    }
    return absl::OkStatus();
  }

  absl::Status check_entry(const at::Tensor& tensor, const Holder& holder) const {
    const Where here = place(static_cast<size_t>(holder.optimizer), holder.group, holder.index);
    if (!tensor.defined()) {
      return error(StatusCode::kInvalidArgument, here, "the tensor is undefined", "Take it out of the group");
    }
    if (is_sharded(tensor)) {
      return error(StatusCode::kFailedPrecondition, here, "the tensor is sharded already and belongs to another model",
                   "Call restore() on the sharding it belongs to first");
    }
    return absl::OkStatus();
  }

  std::vector<Holder>& holders_of(const at::Tensor& tensor) {
    if (const auto found = index_.find(key_of(tensor)); found != index_.end()) return census_.parameters[found->second].holders;
    const auto [at, is_new] = foreign_index_.emplace(key_of(tensor), census_.foreign.size());
    if (is_new) census_.foreign.push_back({tensor, {}});
    return census_.foreign[at->second].holders;
  }

  void note_repeated(const at::Tensor& tensor, const Holder& holder, int times) {
    const auto found = index_.find(key_of(tensor));
    census_.notes.push_back(absl::StrCat("optimizers[", holder.optimizer, "], group ", holder.group, " lists ",
                                         found == index_.end()
                                             ? absl::StrCat("its params()[", holder.index, "], which belongs to no given model,")
                                             : absl::StrCat("'", census_.parameters[found->second].names.front(), "'"),
                                         times == 2 ? " twice" : absl::StrCat(" ", times, " times"), ": it will be stepped once"));
  }

  // What to say of a parameter, or of a foreign tensor, in one of its places.
  Where about(const CensusParameter& parameter, const Holder& holder) const {
    Where here = place(static_cast<size_t>(holder.optimizer), holder.group);
    here.parameter = parameter.names.front();
    return here;
  }
  Where about(const ForeignTensor&, const Holder& holder) const {
    return place(static_cast<size_t>(holder.optimizer), holder.group, holder.index);
  }

  // One tensor in two groups of one optimizer is stepped twice with one state: which options hold must not be a question.
  absl::Status check_shared_groups() {
    for (const CensusParameter& parameter : census_.parameters) {
      if (absl::Status status = check_shared_groups_of(parameter); !status.ok()) return status;
    }
    for (const ForeignTensor& tensor : census_.foreign) {
      if (absl::Status status = check_shared_groups_of(tensor); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  template <class Held>
  absl::Status check_shared_groups_of(const Held& held) const {
    for (size_t h = 1; h < held.holders.size(); ++h) {
      const Holder& a = held.holders[h - 1];
      const Holder& b = held.holders[h];
      if (a.optimizer != b.optimizer) continue;
      const std::string first = options_of(a), second = options_of(b);
      if (first == second) continue;
      Where here = about(held, b);
      if (!here.parameter.empty()) here.group = -1;
      return error(
          StatusCode::kInvalidArgument, here,
          absl::StrCat("groups ", a.group, " and ", b.group, " both hold it with different options: ", first, " and ", second),
          "Keep it in one group");
    }
    return absl::OkStatus();
  }

  std::string options_of(const Holder& holder) const {
    const auto o = static_cast<size_t>(holder.optimizer), g = static_cast<size_t>(holder.group);
    return census_.adapters[o]->options_text(census_.optimizers[o]->param_groups()[g].options());
  }

  absl::Status find_state() {
    for (CensusParameter& parameter : census_.parameters) {
      if (absl::Status status = check_state_types(parameter); !status.ok()) return status;
      parameter.step = step_of(parameter);
    }
    for (const ForeignTensor& tensor : census_.foreign) {
      if (absl::Status status = check_state_types(tensor); !status.ok()) return status;
    }
    for (size_t o = 0; o < census_.optimizers.size(); ++o) note_stray_state(o);
    return absl::OkStatus();
  }

  template <class Held>
  absl::Status check_state_types(const Held& held) const {
    for (const Holder& holder : held.holders) {
      const auto o = static_cast<size_t>(holder.optimizer);
      const torch::optim::OptimizerParamState* state = state_of(*census_.optimizers[o], held.tensor);
      if (state == nullptr || census_.adapters[o]->knows(*state)) continue;
      return error(StatusCode::kUnimplemented, about(held, holder),
                   absl::StrCat("its state is not ", census_.adapters[o]->name(), "'s own type"),
                   "Erase that state, then call again");
    }
    return absl::OkStatus();
  }

  int64_t step_of(const CensusParameter& parameter) const {
    if (parameter.holders.empty()) return 0;
    const auto o = static_cast<size_t>(parameter.holders.front().optimizer);
    const torch::optim::OptimizerParamState* state = state_of(*census_.optimizers[o], parameter.tensor);
    if (state == nullptr) return 0;
    for (const auto& [name, value] : census_.adapters[o]->take_apart(*state).scalars) {
      if (name == "step") return value;
    }
    return 0;
  }

  void note_stray_state(size_t optimizer) {
    std::unordered_set<const void*> held;
    for (const auto& group : census_.optimizers[optimizer]->param_groups()) {
      for (const at::Tensor& tensor : group.params()) held.insert(key_of(tensor));
    }
    int64_t stray = 0;
    for (const auto& [key, state] : census_.optimizers[optimizer]->state()) stray += held.contains(key) ? 0 : 1;
    if (stray == 0) return;
    census_.notes.push_back(absl::StrCat("optimizers[", optimizer, "] has state for ", count_text(stray, "tensor"),
                                         " in none of its groups: it stays as it is"));
  }

  Census census_;
  const Where where_;
  std::unordered_map<TensorKey, size_t> index_, foreign_index_;
  size_t names_ = 0;  // of parameters, met so far
};

}  // namespace

const torch::optim::OptimizerParamState* state_of(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : found->second.get();
}

void for_each_buffer(const Census& census, const std::function<void(const std::string& name, const at::Tensor& buffer)>& visit) {
  for (const NamedModule& model : census.models) {
    const std::string prefix = census.models.size() == 1 ? "" : model.name;
    walk(*model.module, prefix, [&](const torch::nn::Module& module, const std::string& path) {
      for (const auto& item : module.named_buffers(/*recurse=*/false)) {
        visit(join_path(path, item.key()), item.value());
      }
    });
  }
}

absl::StatusOr<Census> take_census(const std::vector<NamedModule>& models, const Optimizers& optimizers, const Where& where) {
  if (absl::Status status = check_models(models, where); !status.ok()) return status;
  if (absl::Status status = check_optimizers(optimizers, where); !status.ok()) return status;
  return CensusTaker(models, optimizers, where).take();
}

}  // namespace rebind::plan
