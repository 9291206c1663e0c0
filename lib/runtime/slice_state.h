// Optimizer state of slices: from and to that of whole parameters, and between the joined and the single slices of a run.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/optim/adapters.h"
#include "lib/runtime/slice.h"
#include "rebind/plan.h"

namespace rebind::runtime {

// This rank's part of a parameter's state: tensors are 1-D [elements of its part], those of one number 0-dim. None: it has none, on
// all ranks alike. May alias the state.
std::optional<optim::StateParts> state_of(const torch::optim::Optimizer& optimizer, const Parameter& parameter);

// The state of the active slices of a run from that of its members, in their order, each as above and of the same kind.
using SliceState = std::pair<Slice*, std::unique_ptr<torch::optim::OptimizerParamState>>;
std::vector<SliceState> state_for_slices(const Run& run, const std::vector<optim::StateParts>& members, const optim::Adapter& adapter);

// Moves a run's state from its joined slices to the single ones. Tensors stay where they are.
void split_state(Run& run, const Optimizers& optimizers);
// The other way. False, and nothing done, if the members' states are not of one kind and count.
bool join_state(Run& run, const Optimizers& optimizers);

}  // namespace rebind::runtime
