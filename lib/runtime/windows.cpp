// Window parameters and their counterparts: made, checked, put back.
#include <absl/strings/str_cat.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "lib/runtime/sharding.h"

namespace rebind::runtime {
namespace {

constexpr char kRawAccess[] =
    " is sharded and its memory is not here: this read goes around LibTorch's operators (data_ptr, torch::save, printing). "
    "Open a scope `auto whole = fsdp->full_parameters();` around it, or copy the tensor first (clone()).";

bool is_our_window(const Parameter& parameter, const c10::TensorImpl& window) {
  const KeyedStorage* storage = KeyedStorage::of(window);
  return storage != nullptr && storage->role() == Role::kWindow && &storage->parameter() == &parameter &&
         window.sizes() == at::IntArrayRef(parameter.sizes) && window.strides() == at::IntArrayRef(parameter.strides) &&
         window.dtype() == c10::scalarTypeToTypeMeta(parameter.dtype) && window.storage_offset() == 0;
}

}  // namespace

at::Tensor Sharding::make_window(Parameter& parameter) {
  auto storage = c10::make_intrusive<KeyedStorage>(
      Role::kWindow, parameter, shared_from_this(), parameter.nbytes(),
      absl::StrCat("rank ", rank(), ": parameter '", parameter.name, "'", kRawAccess));
  return make_keyed_tensor(std::move(storage), parameter.dtype, parameter.sizes, parameter.strides);
}

at::Tensor Sharding::make_facade(Parameter& parameter) {
  auto storage = c10::make_intrusive<KeyedStorage>(
      Role::kFacade, parameter, shared_from_this(), parameter.nbytes(),
      absl::StrCat("rank ", rank(), ": the gradient of parameter '", parameter.name, "'", kRawAccess));
  parameter.facade = storage.get();
  return make_keyed_tensor(std::move(storage), parameter.dtype, parameter.sizes, parameter.strides);
}

void Sharding::put_handles(Parameter& parameter, const at::Tensor& window) {
  ClosingScope on_purpose(*this);  // what is replaced here is no zero_grad
  if (parameter.facade == nullptr) window.mutable_grad() = make_facade(parameter);
  put_slice_handles(parameter);
}

void Sharding::check_window(Parameter& parameter) {
  if (whole_open || restored) return;
  if (unhooked_ != nullptr) {
    throw_error(where("use of a sharded model", unhooked_),
                "the post-accumulate hook that takes its gradient was replaced by the program's own",
                "Use parameter.register_hook() instead; this sharding cannot go on: rebuild it from a checkpoint");
  }
  const c10::TensorImpl* window = parameter.peek_window();
  if (window == nullptr || is_our_window(parameter, *window)) return;
  check_windows();
}

void Sharding::check_windows() {
  moved_ = false;
  if (whole_open || restored) return;
  const Parameter* first = nullptr;
  for (auto& parameter : parameters) {
    at::Tensor window = parameter->lock_window();
    if (!window.defined() || is_our_window(*parameter, *window.unsafeGetTensorImpl())) continue;
    if (first == nullptr) first = parameter.get();
    // The shard still holds the truth: with the window back in place the model is whole again before anything is thrown.
    ClosingScope on_purpose(*this);
    window.set_data(make_window(*parameter));
  }
  if (first == nullptr) return;
  throw_error(where("use of a sharded model", first),
              "its data was replaced behind the sharding (Module::to, set_data, t_, torch::load, assigning to data); the replacement "
              "was undone and the sharded values kept",
              "Call fsdp->restore() first and prepare_fsdp afterwards, or write the values with parameter.copy_() under NoGrad");
}

void Sharding::check_gradient(Parameter& parameter) {
  const c10::TensorImpl* window = parameter.peek_window();
  if (window == nullptr || !window->grad().defined() || is_facade_of(parameter, window->grad())) return;
  // In a backward autograd itself puts a plain gradient there, an instant before our hook takes it.
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  throw_error(where("use of a sharded model", &parameter),
              "its gradient was assigned from outside; the optimizer, which holds the shard, would not see it",
              "Write into the gradient that is there (parameter.grad().copy_()), or clear it with parameter.mutable_grad().reset()");
}

void Sharding::storage_released(KeyedStorage& storage) noexcept {
  std::lock_guard lock(mutex);
  if (restored) return;
  Parameter& parameter = storage.parameter();
  switch (storage.role()) {
    case Role::kWindow:
      // Module::to and set_data release the storage they replace. The next touch looks whether a window is still in place.
      if (!closing_) moved_ = true;
      break;
    case Role::kFacade:
      // The window's gradient handle is being destroyed right now, so the window itself must not be looked at.
      if (parameter.facade != &storage) break;
      parameter.facade = nullptr;
      if (closing_) break;
      drop_pending(parameter);
      forget_on_slices(parameter);
      break;
    case Role::kShardGradient:
      if (storage.slice().gradient != &storage) break;
      storage.slice().gradient = nullptr;
      storage.slice().values.reset();
      if (closing_) break;
      for (Parameter* member : storage.slice().members) forget_gradient(*member);
      break;
    case Role::kShard:
    case Role::kInterrupted:
      break;
  }
}

void Sharding::drop_pending(Parameter& parameter) noexcept {
  parameter.pending.reset();
  parameter.waiting = false;
  if (parameter.unit->reduction) parameter.cleared = true;
}

void Sharding::forget_gradient(Parameter& parameter) noexcept {
  ClosingScope on_purpose(*this);
  drop_pending(parameter);
  if (parameter.facade != nullptr) {
    parameter.facade = nullptr;
    if (at::Tensor window = parameter.lock_window(); window.defined()) window.mutable_grad().reset();
  }
  forget_on_slices(parameter);
}

}  // namespace rebind::runtime
