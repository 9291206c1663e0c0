// Fsdp::clip_grad_norm: the norm over all parameters of all ranks, from the shards alone.
#include <ATen/Functions.h>

#include <bit>
#include <cmath>
#include <limits>

#include "lib/runtime/sharding.h"

namespace rebind {
namespace {

using runtime::Parameter;
using runtime::Sharding;

at::Tensor plain_gradient(Parameter& parameter) {
  return at::from_blob(parameter.shard_gradient->mutable_data(), {parameter.shard_interval.numel()},
                       at::TensorOptions().dtype(parameter.dtype));
}

bool has_gradient(const Parameter& parameter) { return parameter.shard_gradient != nullptr && !parameter.shard_gradient->hidden(); }

}  // namespace

double Fsdp::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  Sharding& sharding = *sharding_;
  std::lock_guard lock(sharding.mutex);
  const Where where = sharding.where("clip_grad_norm");
  if (sharding.restored) throw_error(where, "the model was restored", "Use torch::nn::utils::clip_grad_norm_");
  if (!(norm_type > 0)) throw_error(where, "norm_type must be a number above 0 or infinity", "2.0 is the usual one");
  if (std::isnan(max_norm) || max_norm < 0) throw_error(where, "max_norm must not be negative", "Pass a number above 0");
  at::NoGradGuard no_grad;
  for (auto& parameter : sharding.parameters) sharding.settle(*parameter);

  const bool infinity = std::isinf(norm_type);
  // This rank's sum of |g|^p (or largest |g|), in double: W partial sums of any size add up without losing the small ones.
  double own = 0;
  for (auto& parameter : sharding.parameters) {
    if (!has_gradient(*parameter) || parameter->shard_interval.numel() == 0) continue;
    const at::Tensor gradient = plain_gradient(*parameter);
    const double norm = at::linalg_vector_norm(gradient, norm_type, {}, false, at::kDouble).item<double>();
    // std::max would drop a NaN.
    own = infinity ? (std::isnan(norm) || norm > own ? norm : own) : own + std::pow(norm, norm_type);
  }
  double total = own;
  if (sharding.world_size() > 1) {
    const uint64_t word = std::bit_cast<uint64_t>(own);
    auto all = sharding.communicator->exchange({.kind = comm::Kind::kExchange, .unit = 1, .epoch = 0, .name = "clip_grad_norm"},
                                               std::span(&word, 1));
    if (!all.ok()) throw c10::Error(std::string(all.status().message()), nullptr);
    ++sharding.counts.all_reduces;
    total = 0;
    for (const auto& words : *all) {
      const double part = std::bit_cast<double>(words[0]);
      total = infinity ? (std::isnan(part) || part > total ? part : total) : total + part;
      if (std::isnan(part)) total = part;
    }
  }
  const double norm = infinity ? total : std::pow(total, 1.0 / norm_type);
  if (error_if_nonfinite && !std::isfinite(norm)) {
    throw_error(where, "the norm of the gradients is not finite; no gradient was changed",
                "Skip the step on all ranks, or pass error_if_nonfinite = false");
  }
  // LibTorch's factor: computed in fp32, never above 1; a NaN goes into every gradient.
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return norm;
  for (auto& parameter : sharding.parameters) {
    if (!has_gradient(*parameter)) continue;
    plain_gradient(*parameter).mul_(factor);
    parameter->unit->gradients.stale[parameter->slot_in_unit] = true;
  }
  return norm;
}

}  // namespace rebind
