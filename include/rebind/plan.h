// Says, before anything is touched, how a model will be cut.
//
//   auto plan = rebind::plan_fsdp(*model, {&adam}, /*rank=*/0, /*world_size=*/8);
//   if (!plan.ok()) return plan.status();
//   std::cout << plan->to_string();        // units, parameters, groups, memory
//
// A plan is a value: it holds no tensor, and is stale once the model or a group changes.
#pragma once

#include <absl/status/statusor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <vector>

#include "rebind/options.h"

namespace rebind {

// One of several models that are sharded together: a parameter's key is then "<name>.<parameter>".
struct NamedModule {
  std::string name;
  torch::nn::Module* module;
};
// Not owned. Each optimizer once; none may be null.
using Optimizers = std::vector<torch::optim::Optimizer*>;

struct Interval {  // half open, in elements
  int64_t begin = 0, end = 0;
  int64_t numel() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

struct Holder {  // one place in an optimizer that holds the parameter: optimizers[optimizer].param_groups()[group].params()[index]
  int optimizer = 0, group = 0, index = 0;
  bool operator==(const Holder&) const = default;
};

struct ParameterPlan {
  int model = 0;
  std::vector<std::string> names;  // all registered names of this tensor (ties); the first is its key
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = true;
  int unit = 0, buffer = 0;  // units[unit].buffers[buffer]
  int64_t offset = 0;        // of its first element in that buffer
  Interval shard;            // this rank's part, in the parameter's own flattened elements
  std::vector<Holder> holders;
  int64_t numel() const;
};

// The parameters of one unit that have one (dtype, requires_grad). Rank r owns elements [r * shard_numel, (r + 1) * shard_numel).
struct BufferPlan {
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = true;
  std::vector<int> parameters;  // indices into FsdpPlan::parameters, in the order of their offsets
  int64_t numel = 0;            // of the parameters alone
  int64_t padded_numel = 0;     // with gaps and tail: world_size * shard_numel
  int64_t shard_numel = 0;
};

struct UnitPlan {
  std::string name;
  std::vector<BufferPlan> buffers;
};

// Bytes on this rank, allocator rounding aside. A "buffer" is a BufferPlan, sizes are in the dtype of what is counted; tensors that
// belong to no given model are whole on every rank and count whole.
struct MemoryForecast {
  // Shards of the parameters: the sum of shard_numel over all buffers, padding included.
  int64_t parameter_bytes = 0;
  // Shards of the gradients, between backward and zero_grad: the same sum over the buffers that require gradients.
  int64_t gradient_bytes = 0;
  // State shaped like its parameter once every parameter that requires a gradient was stepped: this rank's elements of each
  // parameter, times what its state holds now and what its optimizer will add under its group's options. Per parameter: SGD 1 with
  // momentum, else 0; Adam and AdamW 2, 3 with amsgrad; Adagrad 1; RMSprop 1, 1 more with momentum, 1 more when centered.
  int64_t state_bytes = 0;
  // Gathered parameters during training: the sum of the 1 + prefetch_units largest padded_numel of a buffer, each of which is
  // gathered by itself; 0 at world size 1, where nothing is gathered.
  int64_t peak_gathered_bytes = 0;
  // During prepare_fsdp: parameters, gradients and state as they are, whole, and this rank's part of all that, and twice the
  // largest unit (all its buffers, padding included).
  int64_t prepare_peak_bytes = 0;
};

struct FsdpPlan {
  int rank = 0, world_size = 1;
  std::vector<UnitPlan> units;
  std::vector<ParameterPlan> parameters;  // in the order of registration
  MemoryForecast memory;
  std::vector<std::string> notes;   // what a user may want to know: a duplicate dropped, an option without effect
  std::vector<std::string> groups;  // one line an optimizer group: what it holds before and after

  std::string to_string() const;  // tables for people
  std::string to_json() const;    // everything, one JSON object
};

// The plan of `rank`, 0 <= rank < world_size. Local: sends nothing, reads names, shapes, dtypes, options, never an element.
//   InvalidArgument  rank out of range; null or repeated optimizer, or one that holds no parameter of a given model; no
//                    parameters; two groups of one optimizer that hold one tensor with different options; an impossible option
//   FailedPrecondition  a parameter, or a tensor of an optimizer, is sharded already
//   Unimplemented    an optimizer, option or kind of tensor that is not supported: the message names it
absl::StatusOr<FsdpPlan> plan_fsdp(torch::nn::Module& model, const Optimizers& optimizers, int rank, int world_size,
                                   const FsdpOptions& options = {});
absl::StatusOr<FsdpPlan> plan_fsdp(const std::vector<NamedModule>& models, const Optimizers& optimizers, int rank, int world_size,
                                   const FsdpOptions& options = {});

}  // namespace rebind
