#include "lib/runtime/touch.h"

#include <ATen/Functions.h>
#include <absl/container/inlined_vector.h>
#include <absl/strings/str_cat.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/library.h>

#include <limits>

#include "lib/runtime/operator_info.h"
#include "lib/runtime/sharding.h"

namespace rebind::runtime {
namespace {

using torch::jit::Stack;

struct Touched {
  at::Tensor tensor;  // held: the operator takes its arguments off the stack
  KeyedStorage* storage;
  Sharding* sharding;
  std::shared_ptr<Sharding> keep;  // null where the storage keeps it
  size_t argument;
  bool written;
  bool pinned = false;

  Role role() const { return storage->role(); }
  Parameter& parameter() const { return storage->parameter(); }
};
using Touches = absl::InlinedVector<Touched, 4>;

void collect_tensor(const OperatorInfo& info, const at::Tensor& tensor, size_t argument, Touches& touches) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->key_set().has(kTouchKey)) return;
  KeyedStorage* storage = KeyedStorage::of(tensor);
  if (storage == nullptr) return;
  if (storage->role() == Role::kInterrupted) storage->throw_message();
  std::shared_ptr<Sharding> keep = storage->kept() == nullptr ? storage->lock() : nullptr;
  Sharding* sharding = keep == nullptr ? storage->kept() : keep.get();
  if (sharding == nullptr) {
    // The model is gone. What the optimizer still holds is ordinary memory; a gradient of the model's is not.
    if (storage->hidden()) throw_error({.call = info.name}, "a gradient was used after its sharded model was destroyed", "Clone it earlier");
    return;
  }
  // Other libraries' operators need not say what they write.
  const bool written = info.writes_argument(argument) || !info.is_aten;
  touches.push_back({tensor, storage, sharding, std::move(keep), argument, written});
}

Touches collect(const OperatorInfo& info, const Stack& stack) {
  Touches touches;
  const size_t first = stack.size() - info.arguments;
  for (size_t i = 0; i < info.arguments; ++i) {
    const c10::IValue& value = stack[first + i];
    if (value.isTensor()) {
      collect_tensor(info, value.toTensor(), i, touches);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) collect_tensor(info, tensor, i, touches);
    } else if (value.isList()) {  // optional tensors
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) collect_tensor(info, element.toTensor(), i, touches);
      }
    }
  }
  return touches;
}

void run(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, Stack* stack) {
  const c10::DispatchKeySet below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey);
  if (!info.is_aten) {  // its kernel may use a parameter that is no argument: that one must be touched too
    op.redispatchBoxed(below, stack);
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard untouched(kTouchKey);
  op.redispatchBoxed(below, stack);
}

// Two threads of a program would interleave their collectives in another order on each rank. The engine's own threads run parts of
// a backward that the program's thread waits for.
void check_thread(const OperatorInfo& info, const Touched& touched) {
  thread_local const char mark = 0;  // its address names the thread, until that ends
  Sharding& sharding = *touched.sharding;
  const void* user = sharding.user_thread.load(std::memory_order_relaxed);
  if (user == &mark || sharding.world_size() == 1 || torch::autograd::get_current_graph_task_id() != -1) return;
  if (user == nullptr && sharding.user_thread.compare_exchange_strong(user, &mark)) return;
  if (user == &mark) return;
  throw_error(sharding.where(absl::StrCat("operator ", info.name), &touched.parameter()),
              "a second thread of the program uses the sharded model; the ranks' collectives could meet in another order",
              "Run the model, its optimizers and reads of its parameters on one thread; give other threads copies (clone())");
}

bool is_live_facade(const Touched& touched) {
  return touched.role() == Role::kFacade && touched.parameter().facade == touched.storage;
}

// What no parameter of a sharded model can mean, whatever the values.
void refuse(const OperatorInfo& info, const Touched& touched) {
  Sharding& sharding = *touched.sharding;
  const auto where = [&] { return sharding.where(absl::StrCat("operator ", info.name), &touched.parameter()); };
  const bool alone = sharding.world_size() == 1;
  if (sharding.restored && touched.storage->hidden()) {
    throw_error(where(), "the model was restored since this view, gradient or graph was made", "Take it from the plain parameter again");
  }
  if (info.collective) {
    throw_error(where(), "a collective of the program's own on a sharded tensor", "Clone the tensor and use the copy");
  }
  if (info.special == Special::kReplace && touched.written) {
    const bool is_handle = touched.role() != Role::kWindow || touched.parameter().lock_window().is_same(touched.tensor);
    if (is_handle) {
      throw_error(where(), "it would replace the memory or the shape of a sharded tensor (torch::load does that)",
                  "Load inside `auto whole = fsdp->full_parameters(/*write_back=*/true);`, or write the values with copy_()");
    }
  }
  if (info.special == Special::kRenorm && touched.role() == Role::kWindow && !alone) {
    throw_error(where(), "max_norm renormalises other rows on each rank", "Build the embedding without max_norm");
  }
  if (touched.role() == Role::kFacade && !is_live_facade(touched)) {
    throw_error(where(), "this gradient was cleared (zero_grad) and is kept by a handle of the program's own", "Clone a gradient to keep it");
  }
  const bool on_shard = touched.role() == Role::kShard || touched.role() == Role::kShardGradient;
  if (on_shard && !alone && (info.reduction || info.special == Special::kAbs) &&
      !(info.special == Special::kNorm && touched.role() == Role::kShardGradient)) {
    throw_error(where(), "an optimizer's list holds this rank's shard; its reduction is not the parameter's",
                "Use model->parameters(), or fsdp->clip_grad_norm(max_norm, norm_type)");
  }
  if (on_shard && touched.written && sharding.whole_open) {
    throw_error(where(), "an optimizer step inside full_parameters() would be lost", "Close the scope before training");
  }
}

// The AccumulateGrad node that is running, if it is the one of `touched`'s window.
bool is_accumulating(const Touched& touched) {
  if (torch::autograd::get_current_graph_task_id() == -1) return false;
  const std::shared_ptr<torch::autograd::Node> node = torch::autograd::get_current_node();
  const auto* accumulate = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  return accumulate != nullptr && accumulate->variable.is_same(touched.parameter().lock_window());
}

// Autograd adds this rank's whole gradient to the facade: kept aside until the unit is reduced.
bool take_accumulated(const OperatorInfo& info, const Touches& touches, Stack* stack) {
  const Touched& facade = touches.front();
  if (facade.argument != 0 || facade.role() != Role::kFacade || !is_accumulating(facade)) return false;
  Sharding& sharding = *facade.sharding;
  Parameter& parameter = facade.parameter();
  if (info.special == Special::kAdd) {
    throw_error(sharding.where("backward(create_graph=true)", &parameter),
                "a gradient that has a graph cannot be kept in .grad of a shard", "Use torch::autograd::grad for gradients of gradients");
  }
  std::lock_guard lock(sharding.mutex);
  // zero_grad on the optimizer while the program kept a handle on a slice's gradient: the older sum is dropped.
  if (sharding.slices_cleared(parameter)) sharding.forget_gradient(parameter);
  sharding.take_gradient(parameter, (*stack)[stack->size() - info.arguments + 1].toTensor());
  torch::jit::drop(*stack, info.arguments);
  stack->emplace_back(facade.tensor);
  return true;
}

bool others_are_scalars(const OperatorInfo& info, const Stack& stack) {
  const size_t first = stack.size() - info.arguments;
  for (size_t i = 1; i < info.arguments; ++i) {
    const c10::IValue& value = stack[first + i];
    if (value.isTensor() && (value.toTensor().dim() != 0 || value.toTensor().unsafeGetTensorImpl()->key_set().has(kTouchKey))) return false;
  }
  return true;
}

// p.grad().mul_(c): each element for itself, so it runs on the shard's gradient and nothing is gathered.
bool run_on_shard(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, const Touches& touches, Stack* stack) {
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

// A p-norm of a whole shard gradient is a question about the parameter: LibTorch's clipping over an optimizer's list asks it.
bool answer_norm(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, const Touches& touches, Stack* stack) {
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

// Holds the mutex of one sharding after another.
class Locks {
 public:
  void hold(Sharding& sharding) {
    if (held_ == &sharding) return;
    if (held_ != nullptr) held_->mutex.unlock();
    held_ = &sharding;
    sharding.mutex.lock();
  }
  Locks() = default;
  ~Locks() {
    if (held_ != nullptr) held_->mutex.unlock();
  }
  Locks(const Locks&) = delete;
  Locks& operator=(const Locks&) = delete;

 private:
  Sharding* held_ = nullptr;
};

// Windows and facades have memory while this lives; what was written is carried on when it ends, also after an exception.
class Presence {
 public:
  explicit Presence(Touches& touches) : touches_(touches) {
    try {
      Locks locks;
      for (Touched& touched : touches_) {
        locks.hold(*touched.sharding);
        begin(touched);
      }
    } catch (...) {
      end();
      throw;
    }
  }
  ~Presence() { end(); }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

 private:
  static Space& space_of(const Touched& touched) {
    Unit& unit = *touched.parameter().unit;
    return touched.role() == Role::kWindow ? unit.values : unit.gradients;
  }

  void begin(Touched& touched) {
    Sharding& sharding = *touched.sharding;
    Parameter& parameter = touched.parameter();
    switch (touched.role()) {
      case Role::kWindow:
        sharding.pin_values(parameter);
        if (touched.storage->pins++ == 0) touched.storage->expose(sharding.values_of(parameter));
        break;
      case Role::kFacade:
        sharding.pin_gradients(parameter);
        if (touched.storage->pins++ == 0) touched.storage->expose(sharding.gradients_of(parameter));
        break;
      case Role::kShard:
        if (touched.written) {
          for (Parameter* member : touched.storage->slice().members) sharding.check_window(*member);
        }
        return;
      case Role::kShardGradient:
        if (touched.storage->slice().gradient == touched.storage) sharding.use_slice_gradient(touched.storage->slice());
        if (touched.storage->hidden()) {
          throw_error(sharding.where("use of a gradient", &parameter), "it was cleared before it was reduced, and is kept by a handle",
                      "Take it from the tensor again, and clone a gradient to keep it");
        }
        return;
      case Role::kInterrupted:  // never collected
        return;
    }
    touched.pinned = true;
  }

  void end() {
    Locks locks;
    for (Touched& touched : touches_) {
      Sharding& sharding = *touched.sharding;
      Parameter& parameter = touched.parameter();
      locks.hold(sharding);
      if (touched.written) {
        switch (touched.role()) {
          case Role::kWindow:
            if (touched.pinned) sharding.write_through_values(parameter);
            break;
          case Role::kFacade:
            if (touched.pinned) sharding.write_through_gradients(parameter);
            break;
          case Role::kShard:
            sharding.shard_written(touched.storage->slice(), touched.tensor);
            break;
          case Role::kShardGradient:
            for (const Parameter* member : touched.storage->slice().members) parameter.unit->gradients.stale[member->slot_in_unit] = true;
            break;
          case Role::kInterrupted:
            break;
        }
      }
      if (!touched.pinned) continue;
      if (--touched.storage->pins == 0) touched.storage->hide();
      sharding.unpin(space_of(touched));
    }
  }

  Touches& touches_;
};

void touch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const OperatorInfo& info = info_of(op);
  Touches touches = collect(info, *stack);
  if (touches.empty()) return run(op, info, keys, stack);
  for (const Touched& touched : touches) {
    check_thread(info, touched);
    refuse(info, touched);
  }
  switch (info.special) {
    case Special::kAccumulate:
    case Special::kAdd:
      if (take_accumulated(info, touches, stack)) return;
      break;
    case Special::kPointwiseScalar:
      if (run_on_shard(op, info, keys, touches, stack)) return;
      break;
    case Special::kNorm:
      if (answer_norm(op, info, keys, touches, stack)) return;
      break;
    default:
      break;
  }
  Presence presence(touches);
  run(op, info, keys, stack);
}

}  // namespace

void keep_touch_registered() {}

}  // namespace rebind::runtime

TORCH_LIBRARY_IMPL(_, Fake, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&rebind::runtime::touch>()); }

// Operators that only describe memory anew read none of it: they skip the fallback, and what they return carries the key on.
// So do those that only look at the description; set_data calls the first of them.
TORCH_LIBRARY_IMPL(aten, Fake, library) {
  for (const char* name : {"_has_compatible_shallow_copy_type", "is_same_size", "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select.int", "slice.Tensor", "split.Tensor",
                           "split_with_sizes", "squeeze", "squeeze.dim", "squeeze.dims", "t", "transpose.int", "unbind.int", "unfold",
                           "unsqueeze", "view", "_reshape_alias"}) {
    library.impl(name, torch::CppFunction::makeFallthrough());
  }
}
