// The handle: thin calls on the sharding.
#include "rebind/fsdp.h"

#include "lib/optim/adapters.h"
#include "lib/runtime/sharding.h"

namespace rebind {

absl::StatusOr<std::unique_ptr<Fsdp>> Fsdp::of(torch::nn::Module& model) {
  for (const at::Tensor& parameter : model.parameters()) {
    if (!parameter.defined()) continue;
    if (std::shared_ptr<runtime::Sharding> sharding = runtime::Sharding::of(parameter); sharding != nullptr && !sharding->restored) {
      return std::make_unique<Fsdp>(std::move(sharding));
    }
  }
  return error(absl::StatusCode::kNotFound, {.call = "Fsdp::of"}, "no parameter of the model is sharded", "Call prepare_fsdp first");
}

const FsdpPlan& Fsdp::plan() const { return sharding_->plan; }

absl::Status Fsdp::bind(torch::optim::Optimizer& optimizer) {
  return error(absl::StatusCode::kUnimplemented, sharding_->where("bind"),
               optim::type_name(optimizer) + ": binding an optimizer after prepare_fsdp is not built yet",
               "Call restore(), then prepare_fsdp with all optimizers");
}

absl::Status Fsdp::unbind(torch::optim::Optimizer& optimizer) {
  return error(absl::StatusCode::kUnimplemented, sharding_->where("unbind"),
               optim::type_name(optimizer) + ": unbinding one optimizer is not built yet", "Call restore(), which gives all back");
}

RuntimeStats Fsdp::stats() const { return sharding_->stats(); }
void Fsdp::reset_stats() { sharding_->reset_stats(); }

}  // namespace rebind
