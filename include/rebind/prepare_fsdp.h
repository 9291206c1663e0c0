// The one call: shards a finished model and its optimizers in place.
//
//   auto fsdp = rebind::prepare_fsdp(*model, {&adam}, group);
//   if (!fsdp.ok()) { std::cerr << fsdp.status() << "\n"; return 2; }     // nothing was changed, on any rank
//   // the training loop goes on as it was
//
// What stays: the optimizer, its groups, options objects and params() vectors, the model's parameter tensors and names. What
// changes: a parameter's memory is gathered when it is used, the entries of params() are 1-D shards, state tensors are cut alike.
#pragma once

#include <absl/status/statusor.h>

#include <memory>
#include <utility>
#include <vector>

#include "rebind/fsdp.h"
#include "rebind/options.h"
#include "rebind/plan.h"

namespace rebind {

// Collective: every rank calls it at the same point, with equal models, optimizers and options. Blocks for at most about three
// times options.collective_timeout. The error is the same on all ranks, and then model and optimizers are bit for bit as before:
//   InvalidArgument     see plan_fsdp; models, optimizers or options that differ between the ranks
//   FailedPrecondition  the model is sharded already
//   Unimplemented       see plan_fsdp
//   DeadlineExceeded, Unavailable   a rank did not arrive, or the store or the group failed
absl::StatusOr<std::unique_ptr<Fsdp>> prepare_fsdp(torch::nn::Module& model, const Optimizers& optimizers,
                                                   c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                                   const FsdpOptions& options = {});
// Several models in one transaction.
absl::StatusOr<std::unique_ptr<Fsdp>> prepare_fsdp(const std::vector<NamedModule>& models, const Optimizers& optimizers,
                                                   c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                                   const FsdpOptions& options = {});

namespace detail {
// Null if there is no module: an empty ModuleHolder throws when it is asked, on that rank alone.
template <class Model>
torch::nn::Module* module_in(Model& model) {
  if constexpr (requires { model.is_empty(); }) {
    if (model.is_empty()) return nullptr;
  }
  if constexpr (requires { model.get(); }) {
    return model.get();
  } else {
    return model.operator->();
  }
}
}  // namespace detail

// For a shared_ptr or a ModuleHolder (model made by TORCH_MODULE), and for a single optimizer. An empty one is InvalidArgument, on
// all ranks.
template <class Model>
requires requires(Model& model) { *model.operator->(); }
absl::StatusOr<std::unique_ptr<Fsdp>> prepare_fsdp(Model& model, const Optimizers& optimizers,
                                                   c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                                   const FsdpOptions& options = {}) {
  return prepare_fsdp(std::vector<NamedModule>{{"", detail::module_in(model)}}, optimizers, std::move(process_group), options);
}
template <class Model>
absl::StatusOr<std::unique_ptr<Fsdp>> prepare_fsdp(Model& model, torch::optim::Optimizer& optimizer,
                                                   c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                                   const FsdpOptions& options = {}) {
  return prepare_fsdp(model, Optimizers{&optimizer}, std::move(process_group), options);
}

}  // namespace rebind
