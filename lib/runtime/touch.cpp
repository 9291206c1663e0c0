#include "lib/runtime/touch.h"

#include <absl/strings/str_cat.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "lib/runtime/sharding.h"
#include "lib/runtime/touched.h"

namespace rebind::runtime {

using torch::jit::Stack;

void run(const c10::OperatorHandle& op, const OperatorInfo& info, c10::DispatchKeySet keys, Stack* stack) {
  const c10::DispatchKeySet below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey);
  if (!info.is_aten) {  // its kernel may use a parameter that is no argument: that one must be touched too
    op.redispatchBoxed(below, stack);
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard untouched(kTouchKey);
  op.redispatchBoxed(below, stack);
}

namespace {

void collect_tensor(const OperatorInfo& info, const at::Tensor& tensor, size_t argument, Touches& touches) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->key_set().has(kTouchKey)) return;
  KeyedStorage* storage = KeyedStorage::of(tensor);
  if (storage == nullptr) return;
  if (storage->role() == Role::kInterrupted) storage->throw_message();
  std::shared_ptr<Sharding> keep = storage->kept() == nullptr ? storage->lock() : nullptr;
  Sharding* sharding = keep == nullptr ? storage->kept() : keep.get();
  if (sharding == nullptr) {
    // The model is gone. What the optimizer still holds is ordinary memory; a gradient of the model's is not.
    if (storage->hidden())
      throw_error({.call = info.name}, "a gradient was used after its sharded model was destroyed", "Clone it earlier");
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
          throw_error(sharding.where("use of a gradient", &parameter),
                      "it was cleared before it was reduced, and is kept by a handle",
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
          case Role::kShard: sharding.shard_written(touched.storage->slice(), touched.tensor); break;
          case Role::kShardGradient:
            for (const Parameter* member : touched.storage->slice().members)
              parameter.unit->gradients.stale[member->slot_in_unit] = true;
            break;
          case Role::kInterrupted: break;
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
  for (const Touched& touched : touches) refuse(info, touched);
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
    default: break;
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
  for (const char* name : {"_has_compatible_shallow_copy_type",
                           "is_same_size",
                           "alias",
                           "as_strided",
                           "detach",
                           "diagonal",
                           "expand",
                           "permute",
                           "select.int",
                           "slice.Tensor",
                           "split.Tensor",
                           "split_with_sizes",
                           "squeeze",
                           "squeeze.dim",
                           "squeeze.dims",
                           "t",
                           "transpose.int",
                           "unbind.int",
                           "unfold",
                           "unsqueeze",
                           "view",
                           "_reshape_alias"}) {
    library.impl(name, torch::CppFunction::makeFallthrough());
  }
}
