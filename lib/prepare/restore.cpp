// Fsdp::restore: the same transaction backwards. Gather everything, decide, put the plain tensors back.
#include <ATen/Functions.h>
#include <absl/container/flat_hash_set.h>
#include <absl/strings/str_cat.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "lib/optim/adapters.h"
#include "lib/prepare/decision.h"
#include "lib/prepare/stage.h"
#include "lib/runtime/slice_state.h"
#include "rebind/fsdp.h"

namespace rebind {
namespace {

using runtime::KeyedStorage;
using runtime::Parameter;
using runtime::Role;
using runtime::Sharding;

struct Whole {
  std::vector<at::Tensor> values, gradients;  // by parameter; undefined: no gradient
  std::vector<prepare::StagedOptimizer> optimizers;
};

// Optimizers are not owned. One that is gone has released its slices: then only we hold them.
bool is_alive(const Sharding& sharding, int optimizer) {
  for (const auto& unit : sharding.units) {
    for (const auto& run : unit->runs) {
      const bool holds = std::find(run->optimizers.begin(), run->optimizers.end(), optimizer) != run->optimizers.end();
      const auto& slices = run->joined.empty() ? run->single : run->joined;
      if (holds && slices.front()->tensor.use_count() > 1) return true;
    }
  }
  return false;
}

runtime::Slice* slice_of(const at::Tensor& entry, const Sharding& sharding) {
  const KeyedStorage* storage = KeyedStorage::of(entry);
  if (storage == nullptr || storage->role() != Role::kShard || storage->lock().get() != &sharding) return nullptr;
  return &storage->slice();
}

std::vector<at::Tensor> restored_group(const std::vector<at::Tensor>& params, const Sharding& sharding, const runtime::GroupRecord& record) {
  std::vector<const c10::TensorImpl*> now;
  std::vector<at::Tensor> result;
  absl::flat_hash_set<const Parameter*> there;
  for (const at::Tensor& entry : params) {
    now.push_back(entry.unsafeGetTensorImpl());
    const runtime::Slice* slice = slice_of(entry, sharding);
    if (slice == nullptr) {
      result.push_back(entry);
      continue;
    }
    for (const Parameter* member : slice->members) {
      if (there.insert(member).second) result.push_back(member->lock_window());
    }
  }
  if (now != record.placed) return result;  // the program changed the group: its order stays
  result.clear();                           // untouched: also the duplicates come back that were dropped
  for (const auto& [index, foreign] : record.original) {
    result.push_back(index < 0 ? foreign : sharding.parameters[index]->lock_window());
  }
  return result;
}

absl::Status gather_optimizer(Sharding& sharding, int index, prepare::StagedOptimizer& staged) {
  torch::optim::Optimizer& optimizer = *sharding.optimizers[index];
  staged.optimizer = &optimizer;
  const optim::Adapter& adapter = *optim::adapter_of(optimizer);
  absl::flat_hash_set<void*> carried;
  for (auto& parameter : sharding.parameters) {  // in this order on all ranks, not in that of the map
    std::optional<optim::StateParts> parts = runtime::state_of(optimizer, *parameter);
    if (!parts) continue;
    for (auto& [key, tensor] : parts->tensors) {
      if (tensor.dim() == 0) continue;
      auto whole = sharding.gather_whole(*parameter, tensor.contiguous(), absl::StrCat("state '", key, "'"));
      if (!whole.ok()) return whole.status();
      tensor = *std::move(whole);
    }
    staged.state[parameter->lock_window().unsafeGetTensorImpl()] = adapter.put_together(*parts);
    for (const runtime::Slice* slice : runtime::slices_of(*parameter)) carried.insert(slice->tensor.unsafeGetTensorImpl());
  }
  for (const auto& [key, state] : optimizer.state()) {
    if (!carried.contains(key)) staged.state[key] = nullptr;
  }
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    std::vector<at::Tensor>& params = optimizer.param_groups()[g].params();
    const bool known = g < sharding.groups[index].size();
    staged.groups.push_back(restored_group(params, sharding, known ? sharding.groups[index][g] : runtime::GroupRecord{{nullptr}, {}}));
    params.reserve(staged.groups.back().size());  // the commit must not allocate
  }
  return absl::OkStatus();
}

absl::Status gather_everything(Sharding& sharding, Whole& whole) {
  at::NoGradGuard no_grad;
  for (auto& parameter : sharding.parameters) sharding.settle(*parameter);
  whole.values = sharding.copy_whole(/*gradients=*/false);
  whole.gradients = sharding.copy_whole(/*gradients=*/true);
  for (size_t k = 0; k < sharding.optimizers.size(); ++k) {
    if (!is_alive(sharding, static_cast<int>(k))) continue;
    whole.optimizers.emplace_back();
    if (absl::Status status = gather_optimizer(sharding, static_cast<int>(k), whole.optimizers.back()); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void put_back(Sharding& sharding, Whole& whole) noexcept {
  runtime::ClosingScope on_purpose(sharding);
  for (prepare::StagedOptimizer& optimizer : whole.optimizers) prepare::commit_optimizer(optimizer);
  for (size_t i = 0; i < sharding.parameters.size(); ++i) {
    Parameter& parameter = *sharding.parameters[i];
    sharding.forget_gradient(parameter);
    const at::Tensor window = parameter.lock_window();
    if (!window.defined()) continue;
    window.set_data(whole.values[i]);
    window.mutable_grad() = whole.gradients[i];
    torch::autograd::impl::set_post_acc_grad_hooks(window, nullptr);
  }
  for (auto& replica : sharding.replicas) runtime::remove_replica_hooks(*replica);
  sharding.drop_unpinned();
  sharding.restored = true;
  for (auto& unit : sharding.units) {
    unit->flat_shard.reset();
    unit->gradient_memory.reset();
    for (auto& run : unit->runs) {
      for (auto& slice : run->joined) slice->tensor.reset();
      for (auto& slice : run->single) slice->tensor.reset();
    }
  }
}

absl::Status guarded(const Where& where, const std::function<absl::Status()>& body) {
  try {
    return body();
  } catch (const c10::Error& failure) {
    return error(absl::StatusCode::kFailedPrecondition, where, failure.what_without_backtrace(), "The model stays sharded");
  } catch (const std::exception& failure) {
    return error(absl::StatusCode::kInternal, where, failure.what(), "The model stays sharded");
  }
}

}  // namespace

absl::Status Fsdp::restore() {
  Sharding& sharding = *sharding_;
  std::lock_guard lock(sharding.mutex);
  const Where where = sharding.where("restore");
  if (sharding.restored) return error(absl::StatusCode::kFailedPrecondition, where, "the model is restored already", "");
  auto decision = prepare::Decision::begin(sharding.group, "restore", sharding.timeout);
  if (!decision.ok()) return decision.status();
  const absl::Status ready = guarded(where, [&] {
    if (sharding.whole_open) {
      return error(absl::StatusCode::kFailedPrecondition, where, "a full_parameters() scope is open", "Close it first");
    }
    sharding.check_windows();
    return sharding.communicator->broken();
  });
  if (absl::Status status = decision->agree(ready); !status.ok()) return status;
  Whole whole;
  const absl::Status gathered = guarded(where, [&] { return gather_everything(sharding, whole); });
  if (absl::Status status = decision->agree(gathered); !status.ok()) return status;
  put_back(sharding, whole);
  return absl::OkStatus();
}

}  // namespace rebind
