// The handle of a sharded model.
//
//   auto fsdp = rebind::prepare_fsdp(*model, {&adam}, group).value();
//   ...train...
//   { auto whole = fsdp->full_parameters(); torch::save(model, "model.pt"); }      // on every rank; write on one
//   absl::Status status = fsdp->restore();                                         // plain model and optimizers again
//
// The sharding belongs to the model's parameters: dropping the handle changes nothing, Fsdp::of finds it again.
// Calls marked collective must be made by all ranks in the same order. A handle is used by one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "rebind/plan.h"

namespace rebind {

namespace runtime {
class Sharding;
}

// Counts since the last reset, this rank.
struct RuntimeStats {
  int64_t all_gathers = 0;      // of a unit's parameters, because an operator used one
  int64_t reduce_scatters = 0;  // of a unit's gradients
  int64_t all_reduces = 0;      // Fsdp::clip_grad_norm's
  int64_t service_gathers = 0;  // asked for by a call or by reading a gradient, not by the model
  int64_t prefetch_hits = 0;    // gathers that had been posted before their use
  int64_t gathered_bytes = 0;   // received by all_gathers and service_gathers, own part included
  int64_t reduced_bytes = 0;    // sent into reduce_scatters, own part included
  int64_t live_bytes = 0;       // gathered parameters and gradients now (not since a reset)
  int64_t peak_live_bytes = 0;
  double exposed_wait_seconds = 0;  // wall time in which the caller waited for communication
};

// While it lives, every parameter of the model is an ordinary whole tensor with the master values: it can be read raw, saved,
// loaded and cloned. Writes are dropped at the end unless it was opened with write_back; then each rank keeps what it wrote to
// its own shard (write the same on all ranks). Training inside the scope is refused.
class FullParameters {
 public:
  FullParameters(FullParameters&&) noexcept;
  FullParameters& operator=(FullParameters&&) = delete;
  ~FullParameters();  // closes; an error is then lost, or shows at the next use of the model
  // Local. Makes the parameters windows again.
  //   InvalidArgument  a parameter that was written back has another shape or dtype than before: nothing of it is kept
  absl::Status close();

 private:
  friend class Fsdp;
  struct State;
  explicit FullParameters(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class Fsdp {
 public:
  // The handle of a model that was prepared before. NotFound for a plain model.
  static absl::StatusOr<std::unique_ptr<Fsdp>> of(torch::nn::Module& model);

  explicit Fsdp(std::shared_ptr<runtime::Sharding> sharding) : sharding_(std::move(sharding)) {}

  const FsdpPlan& plan() const;

  // Collective. Scales all gradients by max_norm / (norm + 1e-6) if that is less than 1 and returns the norm over all parameters
  // of all ranks, computed from the shards without gathering (torch::nn::utils::clip_grad_norm_ on model->parameters() is right
  // too, and gathers every gradient). norm_type: any p > 0 or infinity. Throws c10::Error, on all ranks alike and with the
  // gradients unchanged, for a non-finite norm if error_if_nonfinite.
  double clip_grad_norm(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

  // Collective. Throws c10::Error if the gather fails.
  [[nodiscard]] FullParameters full_parameters(bool write_back = false);

  // Collective. Whole copies, shaped and laid out like the parameter; `name` is any of its registered names.
  //   NotFound  no such parameter, no gradient (on all ranks alike), no such state
  absl::StatusOr<at::Tensor> full_parameter(const std::string& name);
  absl::StatusOr<at::Tensor> full_gradient(const std::string& name);
  // `key`: the name of the state tensor, such as "exp_avg" or "momentum_buffer". A scalar ("step") comes as a 0-dim int64 tensor.
  absl::StatusOr<at::Tensor> full_state(const torch::optim::Optimizer& optimizer, const std::string& name, const std::string& key);

  // Unimplemented: an optimizer made after prepare_fsdp, and the way back. Use restore() and prepare_fsdp again.
  absl::Status bind(torch::optim::Optimizer& optimizer);
  absl::Status unbind(torch::optim::Optimizer& optimizer);

  // Collective. Gives the plain model and optimizers back, bitwise: parameters, gradients, groups and state, the same objects.
  // All or nothing: on an error everything stays sharded. The handle is of no use afterwards.
  absl::Status restore();

  RuntimeStats stats() const;
  void reset_stats();

 private:
  std::shared_ptr<runtime::Sharding> sharding_;
};

}  // namespace rebind
