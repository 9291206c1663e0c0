// Whole tensors for the program: full_parameter, full_gradient, full_state, and the full_parameters scope.
#include <ATen/Functions.h>
#include <absl/strings/str_cat.h>
#include <torch/csrc/autograd/variable.h>

#include "lib/optim/adapters.h"
#include "lib/runtime/sharding.h"
#include "lib/runtime/slice_state.h"

namespace rebind {

using runtime::Parameter;
using runtime::Sharding;

namespace {

absl::StatusOr<Parameter*> find(Sharding& sharding, const char* call, const std::string& name) {
  if (sharding.restored) {
    return error(absl::StatusCode::kFailedPrecondition, sharding.where(call), "the model was restored", "Read the plain tensor");
  }
  if (Parameter* parameter = sharding.find(name)) return parameter;
  return error(absl::StatusCode::kNotFound, sharding.where(call), absl::StrCat("no parameter is called '", name, "'"),
               "Names are those of named_parameters(); fsdp->plan() lists them");
}

absl::Status not_found(Sharding& sharding, const char* call, Parameter& parameter, std::string_view what) {
  return error(absl::StatusCode::kNotFound, sharding.where(call, &parameter), what, "");
}

at::Tensor shard_values(Parameter& parameter) {
  return parameter.unit->flat_shard.narrow(0, parameter.shard_offset, parameter.shard_interval.numel());
}

}  // namespace

absl::StatusOr<at::Tensor> Fsdp::full_parameter(const std::string& name) {
  std::lock_guard lock(sharding_->mutex);
  auto parameter = find(*sharding_, "full_parameter", name);
  if (!parameter.ok()) return parameter.status();
  return sharding_->gather_whole(**parameter, shard_values(**parameter), "values");
}

absl::StatusOr<at::Tensor> Fsdp::full_gradient(const std::string& name) {
  std::lock_guard lock(sharding_->mutex);
  auto found = find(*sharding_, "full_gradient", name);
  if (!found.ok()) return found.status();
  Parameter& parameter = **found;
  try {
    sharding_->settle(parameter);
  } catch (const c10::Error& failure) {
    return absl::UnavailableError(failure.what_without_backtrace());
  }
  if (!parameter.reduced) return not_found(*sharding_, "full_gradient", parameter, "it has no gradient");
  const std::vector<at::Tensor> parts = runtime::gradient_parts(parameter);
  const at::Tensor piece = parts.empty() ? at::empty({0}, at::TensorOptions().dtype(parameter.dtype)) : at::cat(parts);
  return sharding_->gather_whole(parameter, piece, "gradient");
}

absl::StatusOr<at::Tensor> Fsdp::full_state(const torch::optim::Optimizer& optimizer, const std::string& name, const std::string& key) {
  std::lock_guard lock(sharding_->mutex);
  auto found = find(*sharding_, "full_state", name);
  if (!found.ok()) return found.status();
  Parameter& parameter = **found;
  const std::optional<optim::StateParts> state = runtime::state_of(optimizer, parameter);
  if (!state) {
    return not_found(*sharding_, "full_state", parameter, absl::StrCat("the ", optim::type_name(optimizer), " has no state for it"));
  }
  for (const auto& [part, value] : state->scalars) {
    if (part == key) return at::scalar_tensor(value, at::TensorOptions().dtype(at::kLong));
  }
  for (const auto& [part, tensor] : state->tensors) {
    if (part != key) continue;
    if (tensor.dim() == 0) return tensor.clone();
    return sharding_->gather_whole(parameter, tensor.contiguous(), absl::StrCat("state '", key, "'"));
  }
  return not_found(*sharding_, "full_state", parameter, absl::StrCat("its state has no '", key, "'"));
}

struct FullParameters::State {
  std::shared_ptr<Sharding> sharding;
  bool write_back;
};

FullParameters::FullParameters(std::unique_ptr<State> state) : state_(std::move(state)) {}
FullParameters::FullParameters(FullParameters&&) noexcept = default;

FullParameters Fsdp::full_parameters(bool write_back) {
  Sharding& sharding = *sharding_;
  std::lock_guard lock(sharding.mutex);
  if (sharding.restored) throw_error(sharding.where("full_parameters"), "the model was restored", "Its parameters are whole already");
  if (sharding.whole_open) throw_error(sharding.where("full_parameters"), "a scope is open already", "Close it first");
  sharding.check_windows();
  const std::vector<at::Tensor> whole = sharding.copy_whole(/*gradients=*/false);
  auto state = std::make_unique<FullParameters::State>(FullParameters::State{sharding_, write_back});
  runtime::ClosingScope on_purpose(sharding);
  sharding.drop_unpinned();
  sharding.whole_open = true;
  for (size_t i = 0; i < whole.size(); ++i) {
    if (at::Tensor window = sharding.parameters[i]->lock_window(); window.defined()) window.set_data(whole[i]);
  }
  return FullParameters(std::move(state));
}

FullParameters::~FullParameters() { close().IgnoreError(); }

absl::Status FullParameters::close() {
  if (state_ == nullptr) return absl::OkStatus();
  const std::unique_ptr<State> state = std::move(state_);
  Sharding& sharding = *state->sharding;
  std::lock_guard lock(sharding.mutex);
  if (sharding.restored) return absl::OkStatus();
  at::NoGradGuard no_grad;
  absl::Status status;
  for (auto& parameter : sharding.parameters) {
    const at::Tensor window = parameter->lock_window();
    if (!state->write_back || !window.defined() || !status.ok()) continue;
    if (window.sizes() != at::IntArrayRef(parameter->sizes) || window.scalar_type() != parameter->dtype || !window.device().is_cpu()) {
      status = error(absl::StatusCode::kInvalidArgument, sharding.where("full_parameters", parameter.get()),
                     absl::StrCat("was replaced by a ", c10::toString(window.scalar_type()), " tensor of shape ",
                                  shape_text(window.sizes().vec()), " inside the scope; nothing was written back"),
                     "Write values of the parameter's own shape and dtype");
    }
  }
  runtime::ClosingScope on_purpose(sharding);
  for (auto& parameter : sharding.parameters) {
    const at::Tensor window = parameter->lock_window();
    if (!window.defined()) continue;
    if (state->write_back && status.ok()) {
      const Interval part = parameter->shard_interval;
      shard_values(*parameter).copy_(parameter->in_memory_order(window).narrow(0, part.begin, part.numel()));
    }
    window.set_data(sharding.make_window(*parameter));
  }
  sharding.whole_open = false;
  return status;
}

}  // namespace rebind
