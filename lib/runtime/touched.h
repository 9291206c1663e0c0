// Inside touch: the sharded tensors among one operator's arguments, what is refused of them, and what is done in its place.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <absl/container/inlined_vector.h>

#include <cstddef>
#include <memory>

#include "lib/runtime/keyed_storage.h"
#include "lib/runtime/operator_info.h"

namespace rebind::runtime {

class Sharding;
struct Parameter;

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

// Runs the operator itself, on the memory that its arguments have now.
void run(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// --- touch_refuse.cpp: throws for what no parameter of a sharded model can mean, whatever the values.
void refuse(const OperatorInfo& info, const Touched& touched);

// --- touch_instead.cpp: true if the operator was answered without running it on whole tensors; its result is on the stack then.
// Autograd adds this rank's whole gradient to the facade: kept aside until the unit is reduced.
bool take_accumulated(const OperatorInfo& info, const Touches& touches, torch::jit::Stack* stack);
// p.grad().mul_(c): each element for itself, so it runs on the shard's gradient and nothing is gathered.
bool run_on_shard(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, const Touches& touches,
                  torch::jit::Stack* stack);
// A p-norm of a whole shard gradient is a question about the parameter: LibTorch's clipping over an optimizer's list asks it.
bool answer_norm(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, const Touches& touches,
                 torch::jit::Stack* stack);

}  // namespace rebind::runtime
