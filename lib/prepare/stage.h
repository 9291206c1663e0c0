// Everything that the commit will put in place, made beside the original, which stays untouched.
//
// In: census and plan, a communicator. Out: a Staged, or an error and no trace. Collective: rank 0's values are broadcast through
// temporaries, or the ranks' values compared. All memory that the commit needs is allocated here.
#pragma once

#include <absl/status/status.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "lib/plan/census.h"
#include "lib/runtime/hook.h"
#include "lib/runtime/sharding.h"
#include "lib/runtime/slice_state.h"

namespace rebind::prepare {

using StateMap = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

struct StagedParameter {
  at::Tensor original;  // the model's tensor, as yet plain; dropped at the commit
  at::Tensor window;    // what it becomes
  at::Tensor facade;    // its gradient handle, or undefined
  at::Tensor gradient;  // this rank's part of its gradient, until that is on the slices
  std::unique_ptr<runtime::GradientHook> hook;
};

// What an optimizer will hold. A null state is moved over from the old map at the commit.
struct StagedOptimizer {
  torch::optim::Optimizer* optimizer;
  StateMap state;
  std::vector<std::vector<at::Tensor>> groups;
};

// Values of rank 0 for a tensor that stays where it is.
struct StagedCopy {
  at::Tensor target, value;
};

struct Staged {
  Staged() = default;
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;
  // Without a commit: takes off what had to be put on an original.
  ~Staged();

  std::shared_ptr<runtime::Sharding> sharding;
  std::vector<StagedParameter> parameters;
  std::vector<StagedOptimizer> optimizers;
  std::vector<StagedCopy> copies;
  std::vector<std::unique_ptr<torch::autograd::PostAccumulateGradHook>> replica_hooks;
};

absl::Status stage(const plan::Census& census, const FsdpOptions& options, Staged& staged);

// The point of no return: assignments and moves only.
void commit(Staged& staged) noexcept;
// An optimizer's part of it, also of restore.
void commit_optimizer(StagedOptimizer& staged) noexcept;

}  // namespace rebind::prepare
