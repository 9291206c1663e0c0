// Tensors of an optimizer that belong to no given model: whole on every rank, their gradients averaged at the end of backward.
//
// In: a leaf that some optimizer holds. Out: after each backward its .grad is the older sum plus the mean over the ranks, on every
// rank the same bits. Autograd adds in place to a .grad that is there, and then nobody can tell the older sum from this backward's
// part: so a hook before accumulation sets the older sum aside, and the one after it puts it back.
//
// Note: Interrupted. Such a tensor has no key, so a step that follows an exception in backward would not be seen. What was to be
// averaged is then dropped, and .grad becomes a tensor that throws at any use until it is cleared.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>
#include <optional>
#include <string>

namespace rebind::runtime {

class Sharding;

struct Replica {
  Replica(std::string name_, at::Tensor tensor_) : name(std::move(name_)), tensor(std::move(tensor_)) {}

  std::string name;  // "optimizers[0], group 1, params()[2]"
  at::Tensor tensor;
  at::Tensor older;              // its .grad, set aside while autograd accumulates
  bool is_aside = false;         // `older` is, if only an undefined one
  at::Tensor pending;            // this rank's gradient of the backward under way
  std::optional<unsigned> hook;  // before accumulation; none until it requires a gradient
};

// The hook before accumulation, which does nothing before Sharding::replicas_watched.
void add_replica_hook(const std::shared_ptr<Sharding>& sharding, Replica& replica);
// The one after it, made beforehand because the commit must not fail; for set_post_acc_grad_hooks.
std::unique_ptr<torch::autograd::PostAccumulateGradHook> make_replica_hook(const std::shared_ptr<Sharding>& sharding, Replica& replica);
void remove_replica_hooks(Replica& replica);

}  // namespace rebind::runtime
