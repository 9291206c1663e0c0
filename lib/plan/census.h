// Who is there: every parameter of the models, once, and every place in an optimizer that holds it.
//
// In: models and optimizers. Out: a Census, or the first thing that is refused, by name. Identity is the TensorImpl, never a name,
// a data pointer, a shape or a position. Nothing is changed and no element is read.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <absl/status/statusor.h>

#include "lib/base/error.h"
#include "lib/optim/adapters.h"
#include "rebind/plan.h"

namespace rebind::plan {

struct CensusParameter {
  at::Tensor tensor;
  int model = 0;
  std::vector<std::string> names;  // "<model>.<parameter>" if there are several models
  std::vector<Holder> holders;     // in the order (optimizer, group, index), without duplicates in one group
  int64_t step = 0;                // of its state, 0 without; holders that differ: the first holder's
};

// A tensor that an optimizer holds and no given model lists. It stays where it is, whole on every rank.
struct ForeignTensor {
  at::Tensor tensor;
  std::vector<Holder> holders;  // as in CensusParameter
};

// Pointers in it are the caller's; it is stale once a module or a group changes.
struct Census {
  std::vector<NamedModule> models;
  Optimizers optimizers;
  std::vector<const optim::Adapter*> adapters;  // of each optimizer
  std::vector<CensusParameter> parameters;      // in the order of registration
  std::vector<ForeignTensor> foreign;           // in the order of their first holders
  std::vector<std::string> notes;               // duplicates that will be dropped, state that belongs to nothing
};

// The state that the optimizer holds for that tensor, null if none. It may be of any type: see Adapter::knows.
const torch::optim::OptimizerParamState* state_of(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter);

// Every buffer of the models (those registered, undefined ones left out), "<model>.<buffer>" if there are several models. A buffer
// registered twice is met twice.
void for_each_buffer(const Census& census, const std::function<void(const std::string& name, const at::Tensor& buffer)>& visit);

// `where` gives call and rank for messages.
//   InvalidArgument     a null or repeated model or optimizer, a model without parameters, an optimizer with tensors of which
//                       none is a parameter, an undefined tensor, one tensor in two groups of one optimizer with different options
//   FailedPrecondition  a parameter or an optimizer's tensor is sharded already
//   Unimplemented       a type of optimizer, options or state
absl::StatusOr<Census> take_census(const std::vector<NamedModule>& models, const Optimizers& optimizers, const Where& where);

// The plan of one rank. Refuses options, kinds of parameters and shapes of state that are not supported, by name.
absl::StatusOr<FsdpPlan> make_plan(const Census& census, int rank, int world_size, const FsdpOptions& options, const Where& where);

// Everything that must be equal on all ranks, one fact a line, each line naming what it is about ("parameter 'a.weight': ...").
// Includes options, the kinds, shapes and scalars of optimizer state and which gradients are defined; buffers' names and shapes.
std::vector<std::string> agreement_lines(const Census& census, const FsdpPlan& plan, const FsdpOptions& options);
// The first line that differs, in order; "" if none does:
//   rank 1 has "parameter 'b.bias': float32 [3]", rank 0 has "parameter 'b.bias': float32 [4]"
std::string first_difference(const std::vector<std::string>& rank0, const std::vector<std::string>& other, int other_rank);

}  // namespace rebind::plan
