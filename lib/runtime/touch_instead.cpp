#include <ATen/Functions.h>
#include <absl/strings/str_cat.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "lib/runtime/sharding.h"
#include "lib/runtime/touched.h"

namespace rebind::runtime {
namespace {

using torch::jit::Stack;

// The AccumulateGrad node that is running, if it is the one of `touched`'s window.
bool is_accumulating(const Touched& touched) {
  if (torch::autograd::get_current_graph_task_id() == -1) return false;
  const std::shared_ptr<torch::autograd::Node> node = torch::autograd::get_current_node();
  const auto* accumulate = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  return accumulate != nullptr && accumulate->variable.is_same(touched.parameter().lock_window());
}

bool others_are_scalars(const OperatorInfo& info, const Stack& stack) {
  const size_t first = stack.size() - info.arguments;
  for (size_t i = 1; i < info.arguments; ++i) {
    const c10::IValue& value = stack[first + i];
    if (value.isTensor() && (value.toTensor().dim() != 0 || value.toTensor().unsafeGetTensorImpl()->key_set().has(kTouchKey)))
      return false;
  }
  return true;
}

// The p-norm of a slice over all ranks. A slice has a part of several parameters, so the ranks' sums meet instead of a gather.
at::Tensor norm_over_ranks(Sharding& sharding, Slice& slice, double p) {
  sharding.use_slice_gradient(slice);
  std::vector<at::Tensor> parts;
  for (const Parameter* member : slice.members) {
    for (const Part& part : parts_of(*member)) {
      if (part.slice == &slice) parts.push_back(slice.values.narrow(0, part.in_slice, part.numel));
    }
  }
  const double norm = sharding.norm_over_ranks(parts, p, "the norm of a gradient");
  return at::scalar_tensor(norm, slice.values.options());
}

}  // namespace

bool take_accumulated(const OperatorInfo& info, const Touches& touches, Stack* stack) {
  const Touched& facade = touches.front();
  if (facade.argument != 0 || facade.role() != Role::kFacade || !is_accumulating(facade)) return false;
  Sharding& sharding = *facade.sharding;
  Parameter& parameter = facade.parameter();
  if (info.special == Special::kAdd) {
    throw_error(sharding.where("backward(create_graph=true)", &parameter),
                "a gradient that has a graph cannot be kept in .grad of a shard",
                "Use torch::autograd::grad for gradients of gradients");
  }
  std::lock_guard lock(sharding.mutex);
  // zero_grad on the optimizer while the program kept a handle on a slice's gradient: the older sum is dropped.
  if (sharding.slices_cleared(parameter)) sharding.forget_gradient(parameter);
  sharding.take_gradient(parameter, (*stack)[stack->size() - info.arguments + 1].toTensor());
  torch::jit::drop(*stack, info.arguments);
  stack->emplace_back(facade.tensor);
  return true;
}

bool run_on_shard(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, const Touches& touches,
                  Stack* stack) {
  const Touched& facade = touches.front();
  Sharding& sharding = *facade.sharding;
  if (touches.size() != 1 || facade.argument != 0 || facade.role() != Role::kFacade || sharding.world_size() == 1) return false;
  Parameter& parameter = facade.parameter();
  const at::Tensor& tensor = facade.tensor;
  if (tensor.numel() != parameter.numel || tensor.scalar_type() != parameter.dtype || !tensor.is_non_overlapping_and_dense() ||
      !others_are_scalars(info, *stack)) {
    return false;
  }
  std::vector<at::Tensor> parts;
  {
    std::lock_guard lock(sharding.mutex);
    sharding.settle(parameter);
    if (!parameter.reduced) return false;
    parameter.unit->gradients.stale[parameter.slot_in_unit] = true;
    parts = gradient_parts(parameter);
  }
  for (at::Tensor& part : parts) {
    Stack call(stack->end() - static_cast<std::ptrdiff_t>(info.arguments), stack->end());
    call.front() = std::move(part);
    run(op, info, keys, &call);
  }
  torch::jit::drop(*stack, info.arguments);
  stack->emplace_back(tensor);
  return true;
}

bool answer_norm(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, const Touches& touches,
                 Stack* stack) {
  const Touched& part = touches.front();
  Sharding& sharding = *part.sharding;
  if (part.role() != Role::kShardGradient || sharding.world_size() == 1) return false;
  Parameter& parameter = part.parameter();
  Slice& slice = part.storage->slice();
  c10::IValue* arguments = &(*stack)[stack->size() - info.arguments];
  const bool by_dimension = info.arguments > 2 && !arguments[2].isNone();  // linalg_vector_norm(self, ord, dim, ...)
  if (touches.size() != 1 || part.tensor.numel() != slice.numel() || by_dimension) {
    throw_error(sharding.where(absl::StrCat("operator ", info.name), &parameter), "the norm of a piece of a shard",
                "Use model->parameters(), or fsdp->clip_grad_norm(max_norm, norm_type)");
  }
  if (slice.members.size() > 1 || slices_of(parameter).size() > 1) {
    std::lock_guard lock(sharding.mutex);
    const at::Tensor norm = norm_over_ranks(sharding, slice, arguments[1].toScalar().toDouble());
    torch::jit::drop(*stack, info.arguments);
    stack->emplace_back(norm);
    return true;
  }
  {
    std::lock_guard lock(sharding.mutex);
    sharding.pin_gradients(parameter);
    arguments[0] = at::from_blob(sharding.gradients_of(parameter), parameter.sizes, parameter.strides, part.tensor.options());
  }
  struct Unpin {
    Sharding& sharding;
    Space& space;
    ~Unpin() {
      std::lock_guard lock(sharding.mutex);
      sharding.unpin(space);
    }
  } unpin{sharding, parameter.unit->gradients};
  run(op, info, keys, stack);
  return true;
}

}  // namespace rebind::runtime
