// What rebind knows of each optimizer type: how its options read and what its state holds.
//
//   const optim::Adapter* adapter = optim::adapter_of(adam);          // null: an optimizer that is not supported
//   optim::StateParts parts = adapter->take_apart(state);             // exp_avg, exp_avg_sq, step
//   parts.tensors[0].second = shard;                                  // any tensor may be exchanged
//   auto cut = adapter->put_together(parts);
//
// An optimizer, its options and its states are recognised by their exact dynamic type; a class derived from a known one is unknown
// (it may override step, or hold more than it shows). To add an optimizer: write a file beside adam.cpp and list it in
// adapters.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace rebind::optim {

// The state of one parameter, taken apart. Tensors that are undefined are left out.
struct StateParts {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::vector<std::pair<std::string, int64_t>> scalars;
};

class Adapter {
 public:
  virtual ~Adapter() = default;
  virtual std::string name() const = 0;  // "AdamW"
  // Whether options or a state are of the type this optimizer reads; only then may they be given to the functions below.
  virtual bool knows(const torch::optim::OptimizerOptions& options) const = 0;
  virtual bool knows(const torch::optim::OptimizerParamState& state) const = 0;
  // All options, exact enough to compare: "lr=0.01 betas=(0.9, 0.999) eps=1e-08 weight_decay=0.1 amsgrad=1".
  virtual std::string options_text(const torch::optim::OptimizerOptions& options) const = 0;
  // State tensors shaped like the parameter that a stepped parameter will have under these options (for the memory forecast).
  virtual int state_tensors(const torch::optim::OptimizerOptions& options) const = 0;
  virtual StateParts take_apart(const torch::optim::OptimizerParamState& state) const = 0;
  // A state with the given parts. Parts must be those of take_apart, with other tensors in them; c10::Error for an unknown part.
  virtual std::unique_ptr<torch::optim::OptimizerParamState> put_together(const StateParts& parts) const = 0;
};

// Null if the type has none.
const Adapter* adapter_of(const torch::optim::Optimizer& optimizer);
// The demangled dynamic type, for messages about optimizers without an adapter: "torch::optim::LBFGS".
std::string type_name(const torch::optim::Optimizer& optimizer);

// One of each kind, made in the file of that optimizer.
const Adapter& sgd_adapter();
const Adapter& adam_adapter();
const Adapter& adamw_adapter();
const Adapter& adagrad_adapter();
const Adapter& rmsprop_adapter();

}  // namespace rebind::optim
