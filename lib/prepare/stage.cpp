#include "lib/prepare/stage.h"

#include <ATen/Functions.h>
#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <string_view>

namespace rebind::prepare {
namespace {

using runtime::Parameter;
using runtime::Sharding;

// `tensor`'s values in the order of their indices, without copying where they lie so already.
at::Tensor plain(const at::Tensor& tensor) { return tensor.detach().resolve_conj().resolve_neg().contiguous(); }

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Rank 0's values of one tensor after another, or the proof that all ranks have the same.
class Synchronizer {
 public:
  Synchronizer(Sharding& sharding, bool from_rank0) : sharding_(sharding), from_rank0_(from_rank0) {}

  // A contiguous tensor with the values that all ranks start from. `tensor` itself where that is possible; never written to.
  absl::StatusOr<at::Tensor> operator()(const at::Tensor& tensor, const std::string& name) {
    at::Tensor values = plain(tensor);
    if (sharding_.world_size() == 1) return values;
    if (!from_rank0_) {
      names_.push_back(name);
      hashes_.push_back(std::hash<std::string_view>()(
          std::string_view(static_cast<const char*>(values.const_data_ptr()), values.nbytes())));
      return values;
    }
    if (sharding_.rank() != 0) values = at::empty_like(values);
    const comm::Identity identity{.kind = comm::Kind::kBroadcast, .unit = static_cast<uint32_t>(count_++), .epoch = 0, .name = name};
    if (absl::Status status = sharding_.communicator->broadcast(identity, values.data_ptr(), static_cast<int64_t>(values.nbytes()));
        !status.ok()) {
      return status;
    }
    return values;
  }

  // Without broadcasts: compares what was passed above.
  absl::Status compare() {
    if (hashes_.empty()) return absl::OkStatus();
    auto all = sharding_.communicator->exchange(
        {.kind = comm::Kind::kExchange, .unit = 0, .epoch = 0, .name = "the comparison of values before prepare"}, hashes_);
    if (!all.ok()) return all.status();
    for (size_t i = 0; i < names_.size(); ++i) {
      for (int r = 1; r < sharding_.world_size(); ++r) {
        if ((*all)[r][i] == (*all)[0][i]) continue;
        return error(absl::StatusCode::kInvalidArgument, {.call = "prepare_fsdp"},
                     absl::StrCat(names_[i], ": rank ", r, " has other values than rank 0, and sync_from_rank0 is off"),
                     "Start all ranks from the same values, or set options.sync_from_rank0");
      }
    }
    return absl::OkStatus();
  }

 private:
  Sharding& sharding_;
  const bool from_rank0_;
  int64_t count_ = 0;
  std::vector<std::string> names_;
  std::vector<uint64_t> hashes_;
};

// This rank's part of a whole tensor in the parameter's order of memory.
at::Tensor cut(const at::Tensor& whole, const Parameter& parameter) {
  return whole.narrow(0, parameter.shard_interval.begin, parameter.shard_interval.numel()).clone();
}

absl::Status stage_parameter(const plan::CensusParameter& from, Parameter& parameter, Synchronizer& sync, Sharding& sharding,
                             StagedParameter& staged) {
  staged.original = from.tensor;
  auto values = sync(parameter.in_memory_order(from.tensor), absl::StrCat("parameter '", parameter.name, "'"));
  if (!values.ok()) return values.status();
  const int64_t numel = parameter.shard_interval.numel();
  if (numel > 0) {
    parameter.unit->flat_shard.narrow(0, parameter.shard_offset, numel)
        .copy_(values->narrow(0, parameter.shard_interval.begin, numel));
  }
  parameter.window = c10::weak_intrusive_ptr<c10::TensorImpl>(from.tensor.getIntrusivePtr());
  staged.window = sharding.make_window(parameter);
  if (at::isFloatingType(parameter.dtype)) {  // others never have a gradient
    staged.hook = std::make_unique<runtime::GradientHook>(sharding.shared_from_this(), parameter);
  }
  if (from.tensor.grad().defined()) {
    auto gradient = sync(parameter.in_memory_order(from.tensor.grad()), absl::StrCat("gradient of parameter '", parameter.name, "'"));
    if (!gradient.ok()) return gradient.status();
    staged.gradient = cut(*gradient, parameter);
  }
  return absl::OkStatus();
}

// Parameters with equal keys are stepped alike from here on: same places, state of one kind and count, a gradient or none.
std::string run_key(const plan::Census& census, const plan::CensusParameter& parameter) {
  std::string key = absl::StrCat(parameter.tensor.grad().defined() ? "gradient" : "none");
  for (const Holder& holder : parameter.holders) {
    absl::StrAppend(&key, ";", holder.optimizer, ",", holder.group);
    const auto* state = plan::state_of(*census.optimizers[holder.optimizer], parameter.tensor);
    if (state == nullptr) continue;
    const optim::StateParts parts = census.adapters[holder.optimizer]->take_apart(*state);
    for (const auto& [name, value] : parts.scalars) absl::StrAppend(&key, " ", name, "=", value);
    for (const auto& [name, tensor] : parts.tensors) {
      absl::StrAppend(&key, " ", name, ":", c10::toString(tensor.scalar_type()));
      // One number for a whole parameter cannot be shared with its neighbours.
      if (tensor.dim() == 0 && parameter.tensor.dim() > 0) absl::StrAppend(&key, "of ", parameter.names.front());
    }
  }
  return key;
}

// The gradients there are at prepare, on the slices; and facades for the windows.
void stage_gradients(Sharding& sharding, std::vector<StagedParameter>& staged) {
  for (auto& unit : sharding.units) {
    const auto has = [&](const Parameter& parameter) { return staged[parameter.index].gradient.defined(); };
    if (std::none_of(unit->parameters.begin(), unit->parameters.end(), [&](const Parameter* p) { return has(*p); })) continue;
    const at::Tensor flat = at::zeros({unit->shard_numel}, at::TensorOptions().dtype(unit->dtype));
    for (Parameter* parameter : unit->parameters) {
      if (!has(*parameter)) continue;
      flat.narrow(0, parameter->shard_offset, parameter->shard_interval.numel()).copy_(staged[parameter->index].gradient);
      staged[parameter->index].gradient.reset();
      staged[parameter->index].facade = sharding.make_facade(*parameter);
    }
    sharding.distribute(*unit, flat, [&](const Parameter& parameter) { return staged[parameter.index].facade.defined(); });
  }
}

using Indices = absl::flat_hash_map<const c10::TensorImpl*, int>;

absl::Status stage_optimizer(const plan::Census& census, const Indices& indices, int index, Synchronizer& sync, Sharding& sharding,
                             StagedOptimizer& staged) {
  torch::optim::Optimizer& optimizer = *census.optimizers[index];
  const optim::Adapter& adapter = *census.adapters[index];
  staged.optimizer = &optimizer;
  staged.groups.resize(optimizer.param_groups().size());
  absl::flat_hash_set<void*> carried;
  absl::flat_hash_map<int, optim::StateParts> parts_of_member;
  for (size_t i = 0; i < census.parameters.size(); ++i) {
    const plan::CensusParameter& from = census.parameters[i];
    Parameter& parameter = *sharding.parameters[i];
    bool held = false;
    for (const Holder& holder : from.holders) held = held || holder.optimizer == index;
    if (!held) continue;
    const auto state = optimizer.state().find(from.tensor.unsafeGetTensorImpl());
    if (state == optimizer.state().end()) continue;
    carried.insert(state->first);
    optim::StateParts parts = adapter.take_apart(*state->second);
    for (auto& [key, tensor] : parts.tensors) {
      const bool is_one_number = tensor.dim() == 0 && !parameter.sizes.empty();
      auto whole = sync(is_one_number ? tensor : parameter.in_memory_order(tensor), absl::StrCat("state '", key, "' of parameter '", parameter.name, "' in optimizers[", index, "]"));
      if (!whole.ok()) return whole.status();
      // One number for the whole parameter stays; of a parameter without dimensions it is its only element.
      tensor = is_one_number ? whole->clone() : cut(*whole, parameter);
    }
    parts_of_member[parameter.index] = std::move(parts);
  }
  for (const auto& unit : sharding.units) {
    for (const auto& run : unit->runs) {
      std::vector<optim::StateParts> members;
      for (const Parameter* member : run->members) {
        if (auto found = parts_of_member.find(member->index); found != parts_of_member.end()) members.push_back(std::move(found->second));
      }
      if (members.empty()) continue;  // all members have state or none has
      for (auto& [slice, state] : runtime::state_for_slices(*run, members, adapter)) {
        staged.state[slice->tensor.unsafeGetTensorImpl()] = std::move(state);
      }
    }
  }
  // State of tensors that are in no group any more is not ours to drop.
  for (const auto& [key, state] : optimizer.state()) {
    if (!carried.contains(key)) staged.state[key] = nullptr;
  }
  // Holders are without duplicates; their index gives the order inside a group.
  sharding.groups[index].resize(staged.groups.size());
  for (size_t g = 0; g < staged.groups.size(); ++g) {
    runtime::GroupRecord& record = sharding.groups[index][g];
    for (const at::Tensor& entry : optimizer.param_groups()[g].params()) {
      const int parameter = indices.at(entry.unsafeGetTensorImpl());
      record.original.push_back({parameter, parameter < 0 ? entry : at::Tensor()});
    }
    // Of each place the parameter, or the tensor of no model.
    std::map<int, std::pair<const Parameter*, at::Tensor>> members;
    const auto add = [&](const std::vector<Holder>& holders, const Parameter* parameter, const at::Tensor& tensor) {
      for (const Holder& holder : holders) {
        if (holder.optimizer == index && holder.group == static_cast<int>(g)) members[holder.index] = {parameter, tensor};
      }
    };
    for (const auto& parameter : sharding.parameters) add(parameter->holders, parameter.get(), {});
    for (const plan::ForeignTensor& foreign : census.foreign) add(foreign.holders, nullptr, foreign.tensor);
    const auto place = [&](const at::Tensor& tensor) {
      staged.groups[g].push_back(tensor);
      record.placed.push_back(tensor.unsafeGetTensorImpl());
    };
    absl::flat_hash_set<const runtime::Run*> placed;
    for (const auto& [position, member] : members) {
      const auto& [parameter, foreign] = member;
      if (parameter == nullptr) {
        place(foreign);
        continue;
      }
      if (!placed.insert(parameter->run).second) continue;  // in the place of its first member
      for (const auto* slices : {&parameter->run->joined, &parameter->run->single}) {
        for (const auto& slice : *slices) place(slice->tensor);
      }
    }
    optimizer.param_groups()[g].params().reserve(staged.groups[g].size());  // the commit must not allocate
  }
  return absl::OkStatus();
}

// Values of rank 0, by which `target` will be overwritten unless it has them.
absl::Status stage_copy(at::Tensor target, const std::string& name, Synchronizer& sync, Staged& staged) {
  auto values = sync(target, name);
  if (!values.ok()) return values.status();
  if (same_bytes(plain(target), *values)) return absl::OkStatus();  // nothing to write, so older graphs stay valid
  // Elements that share memory are written once: LibTorch refuses to write them together.
  for (int64_t d = 0; d < target.dim(); ++d) {
    if (target.stride(d) != 0 || target.size(d) < 2) continue;
    target = target.narrow(d, 0, 1);
    *values = values->narrow(d, 0, 1);
  }
  staged.copies.push_back({target, *std::move(values)});
  return absl::OkStatus();
}

absl::Status stage_buffers(const plan::Census& census, Synchronizer& sync, Staged& staged) {
  for (const NamedModule& model : census.models) {
    for (const auto& item : model.module->named_buffers()) {
      if (!item.value().defined()) continue;
      if (auto status = stage_copy(item.value(), absl::StrCat("buffer '", item.key(), "'"), sync, staged); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

// Tensors of no model stay where they are, with their state, and get rank 0's values.
absl::Status stage_foreign(const plan::Census& census, Synchronizer& sync, Staged& staged) {
  for (const plan::ForeignTensor& foreign : census.foreign) {
    const Holder& first = foreign.holders.front();
    const std::string name = absl::StrCat("optimizers[", first.optimizer, "], group ", first.group, ", params()[", first.index, "]");
    if (auto status = stage_copy(foreign.tensor.detach(), name, sync, staged); !status.ok()) return status;
    if (foreign.tensor.grad().defined()) {
      auto status = stage_copy(foreign.tensor.grad(), absl::StrCat("gradient of ", name), sync, staged);
      if (!status.ok()) return status;
    }
    for (size_t k = 0; k < census.optimizers.size(); ++k) {
      const bool held = std::any_of(foreign.holders.begin(), foreign.holders.end(),
                                    [&](const Holder& holder) { return holder.optimizer == static_cast<int>(k); });
      const auto* state = held ? plan::state_of(*census.optimizers[k], foreign.tensor) : nullptr;
      if (state == nullptr) continue;
      for (const auto& [key, tensor] : census.adapters[k]->take_apart(*state).tensors) {
        auto status = stage_copy(tensor, absl::StrCat("state '", key, "' of ", name), sync, staged);
        if (!status.ok()) return status;
      }
    }
    Sharding& sharding = *staged.sharding;
    sharding.replicas.push_back(std::make_unique<runtime::Replica>(name, foreign.tensor));
    if (sharding.world_size() == 1 && sharding.divide_factor == 1) continue;  // its gradient stays as autograd leaves it
    runtime::add_replica_hook(staged.sharding, *sharding.replicas.back());
    staged.replica_hooks.push_back(runtime::make_replica_hook(staged.sharding, *sharding.replicas.back()));
  }
  return absl::OkStatus();
}

}  // namespace

Staged::~Staged() {
  if (sharding == nullptr || sharding->replicas_watched) return;
  for (auto& replica : sharding->replicas) runtime::remove_replica_hooks(*replica);
}

absl::Status stage(const plan::Census& census, const FsdpOptions& options, Staged& staged) {
  at::NoGradGuard no_grad;
  Sharding& sharding = *staged.sharding;
  Synchronizer sync(sharding, options.sync_from_rank0);
  staged.parameters.resize(census.parameters.size());
  for (size_t i = 0; i < census.parameters.size(); ++i) {
    if (auto status = stage_parameter(census.parameters[i], *sharding.parameters[i], sync, sharding, staged.parameters[i]); !status.ok()) {
      return status;
    }
  }
  std::vector<std::string> keys;
  for (const plan::CensusParameter& parameter : census.parameters) keys.push_back(run_key(census, parameter));
  sharding.make_runs(keys, options.coalesce);
  stage_gradients(sharding, staged.parameters);
  sharding.groups.resize(census.optimizers.size());
  staged.optimizers.resize(census.optimizers.size());
  Indices indices;
  for (size_t i = 0; i < census.parameters.size(); ++i) indices[census.parameters[i].tensor.unsafeGetTensorImpl()] = static_cast<int>(i);
  for (size_t i = 0; i < census.foreign.size(); ++i) indices[census.foreign[i].tensor.unsafeGetTensorImpl()] = -1;
  for (size_t k = 0; k < census.optimizers.size(); ++k) {
    auto status = stage_optimizer(census, indices, static_cast<int>(k), sync, sharding, staged.optimizers[k]);
    if (!status.ok()) return status;
  }
  if (auto status = stage_foreign(census, sync, staged); !status.ok()) return status;
  if (auto status = stage_buffers(census, sync, staged); !status.ok()) return status;
  return sync.compare();
}

void commit_optimizer(StagedOptimizer& staged) noexcept {
  StateMap& state = staged.optimizer->state();
  for (auto& [key, value] : staged.state) {
    if (value == nullptr) value = std::move(state[key]);  // the key is there: nothing is inserted
  }
  state.swap(staged.state);
  std::vector<torch::optim::OptimizerParamGroup>& groups = staged.optimizer->param_groups();
  for (size_t g = 0; g < staged.groups.size(); ++g) {
    std::vector<at::Tensor>& params = groups[g].params();  // the vector that schedulers and references know
    params.clear();
    for (at::Tensor& tensor : staged.groups[g]) params.push_back(std::move(tensor));  // within what was reserved
  }
}

void commit(Staged& staged) noexcept {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < staged.parameters.size(); ++i) {
    StagedParameter& parameter = staged.parameters[i];
    parameter.original.set_data(parameter.window);
    parameter.original.mutable_grad() = std::move(parameter.facade);
    if (parameter.hook != nullptr) torch::autograd::impl::set_post_acc_grad_hooks(parameter.original, std::move(parameter.hook));
  }
  for (StagedOptimizer& optimizer : staged.optimizers) commit_optimizer(optimizer);
  Sharding& sharding = *staged.sharding;
  for (size_t i = 0; i < staged.replica_hooks.size(); ++i) {
    torch::autograd::impl::set_post_acc_grad_hooks(sharding.replicas[i]->tensor, std::move(staged.replica_hooks[i]));
  }
  sharding.replicas_watched = true;
  for (StagedCopy& copy : staged.copies) {
    c10::InferenceMode as_made(copy.target.is_inference());  // outside the mode such a buffer cannot be written
    copy.target.copy_(copy.value);
  }
  staged.parameters.clear();
}

}  // namespace rebind::prepare
