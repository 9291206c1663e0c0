// What the runtime knows of one parameter: its window in the model, its shard in the optimizers, its gradient in between.
//
// Note: Gradient states. A parameter's gradient is in one of these states, and both sides agree on it:
//                     window.grad()    grad() of its slices         flags              pending
//   none              undefined        undefined                    -                  undefined
//   waiting           facade           hidden, or the older sum     waiting            this rank's whole gradient, or undefined
//                                                                                      once it is packed into a Reduction
//   reduced           facade           this rank's part             reduced            undefined
// (an older sum: reduced and waiting)
// zero_grad on either side drops one handle; its storage tells us (Sharding::storage_released) and the other side follows.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lib/runtime/keyed_storage.h"
#include "rebind/plan.h"

namespace rebind::runtime {

struct Unit;
struct Run;
struct Slice;

struct Parameter {
  int index = 0;  // in FsdpPlan::parameters
  std::string name;
  std::vector<int64_t> sizes, strides;  // dense and non-overlapping; its elements are numbered in the order of memory
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = true;  // at prepare
  int64_t item_bytes = 4;
  int64_t numel = 0;
  Interval shard_interval;     // this rank's part, in the parameter's elements
  int64_t offset = 0;          // of the parameter in its flat buffer
  int64_t shard_offset = 0;    // of this rank's part in its flat shard
  std::vector<Holder> holders;
  Unit* unit = nullptr;
  int slot_in_unit = 0;        // index into Unit::parameters

  // Not owned: the model owns the window, and the window (through its hook and storage) the sharding.
  c10::weak_intrusive_ptr<c10::TensorImpl> window{c10::intrusive_ptr<c10::TensorImpl>()};
  Run* run = nullptr;
  std::vector<Slice*> singles;  // its own slices, active unless the run is joined

  at::Tensor pending;
  bool waiting = false, reduced = false;
  bool arrived = false;                     // its hook has fired in the current backward
  bool cleared = false;                     // by the program, while its unit's Reduction was under way
  KeyedStorage* facade = nullptr;           // null: the window has no gradient of ours

  // To look at while no other thread can let go of the model; null if it is gone.
  const c10::TensorImpl* peek_window() const { return window.use_count() > 0 ? window._unsafe_get_target() : nullptr; }
  // Undefined if the model is gone.
  at::Tensor lock_window() const {
    c10::intrusive_ptr<c10::TensorImpl> impl = window.lock();
    return impl ? at::Tensor(std::move(impl)) : at::Tensor();
  }
  int64_t nbytes() const { return numel * item_bytes; }
  // `whole`, which has the parameter's sizes, as 1-D in the parameter's own order of memory. A view where it lies so already.
  at::Tensor in_memory_order(const at::Tensor& whole) const;
};

// Whether `gradient` is the handle that we put on the window, now or through a detached alias.
inline bool is_facade_of(const Parameter& parameter, const at::Tensor& gradient) {
  return parameter.facade != nullptr && KeyedStorage::of(gradient) == parameter.facade;
}

}  // namespace rebind::runtime
