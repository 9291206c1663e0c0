// One sharded model at run time: its units, what is gathered now, and the rules that keep window, shard and gradient in step.
//
// Built by lib/prepare, found by operators through KeyedStorage, by users through Fsdp. It lives as long as a window of it.
// Everything that communicates is collective and must happen in the same order on all ranks; identities are compared.
//
// Invariants, cited by tests:
//   I1  a window or facade has memory exactly while an operator runs on it
//   I2  an operator reads a parameter only from a Space that is not stale for it
//   I3  gathered Spaces fit into `gathered`, unless one operator needs more; none is left at the end of backward or after a step
//   I4  the shard holds every value that this rank owns; whatever was written to a window is in the shard when the operator returns
//   I5  window.grad() and the slices' grad() are both ours or both undefined (Note: Gradient states)
//   I6  each element of a shard is in one active slice (Note: Runs)
#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/error.h"
#include "lib/comm/communicator.h"
#include "lib/runtime/arena.h"
#include "lib/runtime/replicas.h"
#include "lib/runtime/schedule.h"
#include "lib/runtime/unit.h"
#include "rebind/fsdp.h"

namespace rebind::runtime {

// One optimizer group: the tensors that prepare put there, and the parameters that were there before (duplicates included).
struct GroupRecord {
  std::vector<const c10::TensorImpl*> placed;
  struct Original {
    int parameter;       // index, or -1
    at::Tensor foreign;  // the tensor, if it is of no given model
  };
  std::vector<Original> original;
};

class Sharding : public std::enable_shared_from_this<Sharding> {
 public:
  // Units, parameters and flat shards by the plan; the shards' values are the caller's to fill. Local.
  static std::shared_ptr<Sharding> make(const FsdpPlan& plan, const FsdpOptions& options, const Optimizers& optimizers,
                                        std::unique_ptr<comm::Communicator> communicator,
                                        c10::intrusive_ptr<c10d::ProcessGroup> group);
  // Of a window or of a parameter that was one (its hook stays), else null.
  static std::shared_ptr<Sharding> of(const at::Tensor& tensor);

  const FsdpPlan plan;
  const Optimizers optimizers;
  Arena gathered, reducing;  // what units hold of them is given back before they go
  std::vector<std::unique_ptr<Unit>> units;
  std::vector<std::unique_ptr<Parameter>> parameters;
  std::vector<std::vector<GroupRecord>> groups;  // [optimizer][group]
  std::vector<std::unique_ptr<Replica>> replicas;
  bool replicas_watched = false;  // from the commit on
  const std::unique_ptr<comm::Communicator> communicator;
  const c10::intrusive_ptr<c10d::ProcessGroup> group;
  const std::chrono::milliseconds timeout;
  const double divide_factor;
  std::atomic<const void*> user_thread = nullptr;  // the first that used a tensor of ours; null: none yet
  std::recursive_mutex mutex;  // guards everything below and in units; held while communicating, not while an operator runs
  RuntimeStats counts;
  bool whole_open = false;  // inside full_parameters
  bool restored = false;

  int rank() const { return plan.rank; }
  int world_size() const { return plan.world_size; }
  Where where(std::string_view call, const Parameter* parameter = nullptr) const;
  Parameter* find(const std::string& name);

  // --- windows (windows.cpp)
  at::Tensor make_window(Parameter& parameter);
  at::Tensor make_facade(Parameter& parameter);
  // Throws unless the model's parameters are still our windows; puts them back first, so that nothing is left half moved.
  void check_windows();
  void check_window(Parameter& parameter);
  // Throws if the program assigned a gradient of its own to the window: no operator and no storage tells of that.
  void check_gradient(Parameter& parameter);
  // A storage of ours has lost its last tensor. Called from destructors: never throws.
  void storage_released(KeyedStorage& storage) noexcept;

  // --- runs and slices (runs.cpp)
  // For prepare. Parameters that lie side by side and have equal keys may be one run; `coalesce` off: each is one by itself.
  void make_runs(const std::vector<std::string>& keys, bool coalesce);
  // Puts this rank's part of a unit's gradients in place on the slices: sets or adds it for each parameter that is `present`.
  void distribute(Unit& unit, const at::Tensor& mean, const std::function<bool(const Parameter&)>& present);
  void put_slice_handles(Parameter& parameter);
  void forget_on_slices(Parameter& parameter) noexcept;
  // The program cleared the gradient of a slice, by its handle.
  bool slices_cleared(const Parameter& parameter) const;

  // --- gathering (gather.cpp)
  // Makes `parameter` present and fresh in its unit's values or gradients, and pins that Space. Throws; collective.
  void pin_values(Parameter& parameter);
  void pin_gradients(Parameter& parameter);
  void unpin(Space& space);
  // Where `parameter` lies in a pinned Space.
  void* values_of(Parameter& parameter);
  void* gradients_of(Parameter& parameter);
  // What was written to a window or facade goes to this rank's shard (I4); the gathered copy is stale then.
  void write_through_values(Parameter& parameter);
  void write_through_gradients(Parameter& parameter);
  void drop_unpinned();
  // Every parameter (or its gradient; undefined where there is none) as a plain whole tensor, unit by unit. Throws; collective.
  std::vector<at::Tensor> copy_whole(bool gradients);
  // All ranks' pieces (1-D, this rank's part of the parameter, any dtype) as one whole tensor like the parameter. Collective.
  absl::StatusOr<at::Tensor> gather_whole(Parameter& parameter, const at::Tensor& piece, std::string_view what);

  // --- gradients (gradients.cpp)
  // Autograd has put this rank's whole gradient on the window (or added it to the facade).
  void take_gradient(Parameter& parameter, at::Tensor gradient);
  void hook_fired(Parameter& parameter, const at::Tensor& window);
  void hook_lost(Parameter& parameter) noexcept;
  // Begins to reduce what is pending in a unit, and finishes that; collective.
  void reduce(Unit& unit);
  void finish_reduction(Unit& unit);
  void finish_backward();
  // Also by an exception.
  void backward_ended() noexcept;
  // The gradient of `parameter` is about to be used: reduces its unit if it must.
  void settle(Parameter& parameter);
  // An operator is about to use a slice's gradient: settled, and refused if the window's side was cleared.
  void use_slice_gradient(Slice& slice);
  void forget_gradient(Parameter& parameter) noexcept;
  // --- tensors of no model (replicas.cpp)
  void replica_fired(Replica& replica, at::Tensor gradient);

  // The p-norm over all ranks' `parts` (plain tensors). Throws; collective.
  double norm_over_ranks(const std::vector<at::Tensor>& parts, double p, const std::string& name);

  // --- optimizer side
  // A slice was written through `tensor`: the gathered copy is stale, older graphs are outdated.
  void shard_written(Slice& slice, const at::Tensor& tensor);

  RuntimeStats stats();
  void reset_stats();

 private:
  Sharding(const FsdpPlan& plan, const FsdpOptions& options, const Optimizers& optimizers,
           std::unique_ptr<comm::Communicator> communicator, c10::intrusive_ptr<c10d::ProcessGroup> group);
  void add_unit(const BufferPlan& buffer, std::string name);
  void ensure(Parameter& parameter, Space& space, bool gradients);
  void note_use(Unit& unit);
  // Memory for a gathered copy whose next use is `next_use` changes of unit away, if need be that of copies needed later. May be
  // empty.
  Arena::Block make_room(int64_t bytes, int64_t next_use);
  // Memory for a copy that is needed now, in any case.
  void claim(Unit& unit, Space& space);
  // `service`: for a call of the program's, not for an operator (RuntimeStats).
  void post_gather(Unit& unit, Space& space, bool gradients, bool service);
  void gather(Unit& unit, Space& space, bool gradients, bool service);
  void await_gather(Space& space);
  void prefetch();
  void drop(Space& space);
  at::Tensor make_slice_tensor(Slice& slice, bool active);
  void put_handle(Slice& slice);
  void set_gradient(Slice& slice, at::Tensor values);
  void remove_handle(Slice& slice) noexcept;
  void make_joined(Run& run);
  void make_single(Run& run);
  void put_handles(Parameter& parameter, const at::Tensor& window);
  void drop_pending(Parameter& parameter) noexcept;
  void reduce_alone(Unit& unit);
  at::Tensor memory_for_gradient(Unit& unit, at::ScalarType dtype);
  // The reduced gradients of a unit have come: handles on both sides, values on the slices.
  void place(Unit& unit, const at::Tensor& mean, const std::vector<bool>& present);
  // Before a gradient of the current backward is taken: a new backward makes an end of what the last one left.
  void begin_task();
  void average(Replica& replica, int index);
  void interrupt(Replica& replica);
  void set_live_bytes(int64_t change);

  const int prefetch_units_;
  const bool coalesce_;
  Schedule schedule_;
  uint64_t uses_ = 0;            // of units, for the order of last uses
  std::deque<Unit*> reductions_; // under way, oldest first
  int64_t live_bytes_ = 0;
  uint64_t epoch_ = 0;           // finished backwards
  int graph_task_ = -1;          // the backward whose end finish_backward is queued for
  bool moved_ = false;           // a window's storage has gone: check_windows has something to do
  const Parameter* unhooked_ = nullptr;  // its gradients are not seen any more
  bool finishing_ = false;       // in finish_backward
  bool closing_ = false;         // storages are released on purpose
  double waited_at_reset_ = 0;

  friend class ClosingScope;
};

// While it lives, released storages are nobody's accident: restore, full_parameters and the runtime itself replace handles.
class ClosingScope {
 public:
  explicit ClosingScope(Sharding& sharding) : sharding_(sharding), before_(sharding.closing_) { sharding.closing_ = true; }
  ~ClosingScope() { sharding_.closing_ = before_; }

 private:
  Sharding& sharding_;
  const bool before_;
};

// Frees every gathered copy after every operator: correctness then depends on touch alone. For tests.
void set_strict_for_tests(bool strict);
bool strict_for_tests();

}  // namespace rebind::runtime
